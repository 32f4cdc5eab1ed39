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
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
"""GGUF's name of a family where it is not that of transformers."""


def gguf_name(name: str, names: Mapping[str, str] = NAMES) -> str:
    """Returns a transformers tensor's name in GGUF."""
    if ".experts." in name:  # transformers' modules have no ``.weight`` there
        name += ".weight"
    layer, kind = name.rsplit(".", 1)
    if not layer.startswith("model.layers."):
        return f"{names[layer]}.{kind}"
    index, part = layer.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{names[part]}.{kind}"


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by GGUF's names, dequantised by the package."""
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}


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
    }
    rope = config.rope_parameters
    own["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if config.model_type == "gemma3_text":
        own["attention.sliding_window"] = config.sliding_window
    if config.model_type == "qwen3_moe":
        own |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    return {f"{architecture}.{key}": value for key, value in own.items()}


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
        is_gemma = config.model_type == "gemma3_text"
        own_name = gguf_name(name, GEMMA_NAMES if is_gemma else NAMES)
        values = tensor.to(torch.float32).numpy()
        if is_gemma and name.endswith("norm.weight"):
            values = values + 1.0  # llama.cpp stores what the norm scales by
        for part, num_heads in heads.items():
            if config.model_type == "llama" and f".{part}" in own_name:
                values = values[interleaved_order(values.shape[0], num_heads)]
        parts = {own_name: values}
        if "ffn_gate_up_exps" in own_name:
            halves = np.split(values, 2, axis=1)
            parts = {
                own_name.replace("gate_up", part): half
                for part, half in zip(("gate", "up"), halves, strict=True)
            }
        for part_name, part_values in parts.items():
            kind = choose(part_name, part_values)
            stored[part_name] = (gguf.quantize(np.ascontiguousarray(part_values), kind), kind)
    return stored
