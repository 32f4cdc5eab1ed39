"""Faults of systems like this one, each as a test that names its row of `docs/faults-covered.md`."""
