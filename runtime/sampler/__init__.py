"""The sampler: next tokens from logits, and log-probabilities."""
