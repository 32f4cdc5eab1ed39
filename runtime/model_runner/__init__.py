"""The model runner: a model with its pools, attention backends and graphs, and the dispatch of batches."""
