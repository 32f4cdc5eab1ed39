"""Batches: from a scheduling decision to the tensors of one forward."""
