"""Tiny models of transformers' own classes, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .support import CPU

VOCABULARY = 32
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DECODER),
    "qwen3": ("Qwen3Config", {**_DECODER, "head_dim": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_DECODER, **_EXPERTS, "num_experts": 4, "head_dim": 4}),
    "mistral": ("MistralConfig", {**_DECODER, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("Gemma3TextConfig", {**_DECODER, "head_dim": 4, "sliding_window": 8}),
    "phi3": ("Phi3Config", _DECODER),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "opt": (
        "OPTConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "falcon": (
        "FalconConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
}


def tiny_model(family: str, attention: str) -> Any:
    """Returns a causal language model of a family with seeded weights, in evaluation mode."""
    import transformers

    name, settings = CONFIGS[family]
    config = getattr(transformers, name)(**settings)
    torch.manual_seed(0)
    # Weights made in inference mode could not be written by users outside.
    with torch.inference_mode(False), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if family in ("qwen3_moe", "mixtral"):
        # The default reads token counts on the host where there is no kernel for it.
        model.set_experts_implementation("batched_mm")
    return model.eval()


def generate(
    forward: Callable[..., Any],
    model: Any,
    *,
    num_prompts: int,
    num_steps: int,
    max_len: int = 16,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Runs prefill and decode steps with a static cache; returns all logits and the caches at the end."""
    from transformers import StaticCache

    results: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_prompts):
        cache = StaticCache(config=model.config, max_cache_len=max_len)
        ids = torch.randint(3, VOCABULARY, (2, 5), generator=generator).to(device)
        position = 0
        for _ in range(num_steps + 1):
            positions = torch.arange(position, position + ids.shape[1], device=device)
            output = forward(
                input_ids=ids,
                past_key_values=cache,
                position_ids=positions.expand(2, -1),
                use_cache=True,
            )
            results.append(output.logits)
            position += ids.shape[1]
            ids = output.logits[:, -1:].argmax(-1)
        results += [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return results
