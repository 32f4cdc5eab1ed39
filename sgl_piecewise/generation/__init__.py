"""Offline generation: prompts in, tokens out, with continuous batching on a model runner."""
