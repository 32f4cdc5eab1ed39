"""The worker: a scheduling decision in, sampled tokens out."""
