"""Batches: modes, building, padding and the cut back."""
