"""Random programs, run eager and captured: see ``test_programs``."""
