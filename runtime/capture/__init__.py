"""The capture engine: one session, one segment list, two graph devices behind one interface."""
