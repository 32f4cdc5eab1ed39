"""What the model tests share: a forward of ours, and transformers' classes beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context

TINY_SETTINGS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
TINY_EXPERTS: dict[str, Any] = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
TINY_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,  # not head_dim, so that a lost one shows
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}


def logits_of(model: Decoder, token_ids: list[int] | torch.Tensor) -> torch.Tensor:
    """Runs one sequence through our model (float32[T, V])."""
    input_ids = torch.as_tensor(token_ids)
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        return model(input_ids, torch.arange(input_ids.shape[0]))


def reference_model(model_type: str, **settings: Any) -> Any:
    """Returns transformers' model of this family with random weights in float32.

    Norm weights and biases are drawn too: left at ones and zeros they would hide a lost one.
    """
    import transformers

    config_class, model_class = _CLASSES[model_type]
    config = getattr(transformers, config_class)(**TINY_SETTINGS | settings)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    norm_mean = 0.0 if model_type == "gemma3_text" else 1.0  # Gemma's norms scale by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(norm_mean if "norm" in name else 0.0, 0.1)
    return model


def reference_logits(model: Any, token_ids: list[int] | torch.Tensor) -> torch.Tensor:
    """Runs one sequence through transformers' model (float32[T, V])."""
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(token_ids)[None]).logits[0]


def saved(model: Any, folder: Path, **how: Any) -> Path:
    """Saves transformers' model as a Hugging Face folder."""
    model.save_pretrained(folder, **how)
    return folder
