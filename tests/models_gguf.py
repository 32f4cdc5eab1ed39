"""Writes small GGUF files for tests, with the package's own writer and llama.cpp's row order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Returns a transformers tensor's name in GGUF."""
    layer, kind = name.rsplit(".", 1)
    if not layer.startswith("model.layers."):
        return f"{NAMES[layer]}.{kind}"
    index, part = layer.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{NAMES[part]}.{kind}"


def interleaved_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Returns which row of a Llama query or key comes where in GGUF.

    Source: llama.cpp ``convert_hf_to_gguf.py``, ``LlamaModel.permute``.
    """
    return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)


def metadata_of(config: Any) -> dict[str, Any]:
    """Returns GGUF metadata for one of transformers' configs."""
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return {f"{config.model_type}.{key}": value for key, value in own.items()}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """Writes a file; each tensor is given as stored, with its type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensors(
    model: Any, choose: Callable[[str, np.ndarray], gguf.GGMLQuantizationType]
) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """Returns transformers' weights as a GGUF file would hold them.

    Args:
        model: One of transformers' causal language models.
        choose: Picks the type of each tensor from its GGUF name and values.
    """
    config = model.config
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own_name, values = gguf_name(name), tensor.to(torch.float32).numpy()
        for part, num_heads in heads.items():
            if config.model_type == "llama" and f".{part}" in own_name:
                values = values[interleaved_order(values.shape[0], num_heads)]
        kind = choose(own_name, values)
        stored[own_name] = (gguf.quantize(np.ascontiguousarray(values), kind), kind)
    return stored
