"""Decoder models and their weights: Llama, Qwen2, Qwen3 and SmolLM2.

Model code here is plain PyTorch. It never asks whether it is being captured or compiled, and it
knows one thing of the runtime only: attention is reached through the marked call ``attend``.
"""
