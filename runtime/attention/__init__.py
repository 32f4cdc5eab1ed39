"""Attention backends and the marked call through which layers reach them."""
