"""Placeholder docstring, replaced by the first module that lands here."""
