"""End-to-end arms of a comparison: one model under several execution plans, from prompt to tokens."""
