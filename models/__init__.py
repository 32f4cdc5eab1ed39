"""Decoder models and their weights: Llama, Qwen2, Qwen3, Qwen3-MoE, Gemma 3 and SmolLM2.

Model code here is plain PyTorch. It never asks whether it is being captured or compiled, or where it
runs. Of the runtime it knows the marked call ``attend``, the kernels that it is built with, and how
many rows of a forward are real.
"""
