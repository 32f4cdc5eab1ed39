"""Fused kernels behind one small set: plain torch, Triton, FlashInfer; chosen when a model is built."""
