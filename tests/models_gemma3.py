"""Gemma 3 270M as transformers has it, and a text for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from models_gguf import GEMMA_NAMES, gguf_name, read_tensors

TEXT = """\
A CUDA graph records a sequence of kernels once and launches them again with one call. On a model
that runs many small kernels this removes most of the time that the host spends on launching them.
What cannot be recorded has to run between two graphs: here that is attention, whose work depends
on how long each sequence is.
"""


def reference_gemma3(path: Path) -> Any:
    """transformers' class, filled from the file; the file's norms have one added."""
    import transformers

    # As published in google/gemma-3-270m, config.json.
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
        sliding_window=512,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    stored = read_tensors(path)
    for name, parameter in model.named_parameters():
        values = torch.from_numpy(np.array(stored[gguf_name(name, GEMMA_NAMES)]))
        with torch.no_grad():
            parameter.copy_(values - 1.0 if name.endswith("norm.weight") else values)
    return model
