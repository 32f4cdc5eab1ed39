"""Compile-time profiles for readers: one build of a model profiled, and shown as table, page and trace.

Stands above the comparison, whose model loading and words it uses; only the command line imports it.
"""
