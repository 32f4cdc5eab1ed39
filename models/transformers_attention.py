"""Attention of transformers' own models as a marked call: ``attn_implementation="sgl_eager"``.

Call `register_sgl_eager` once, then give the name to a model of the package transformers. Its attention then
stays outside graphs, whatever else is captured, and is computed as with ``"sdpa"``.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.mark import eager_on_graph

from .extras import import_extra

NAME = "sgl_eager"


def _like_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Form of the result: (batch, queries, heads, head size of the values), contents undefined."""
    batch, heads, queries, _ = query.shape
    return torch.empty((batch, queries, heads, value.shape[-1]), dtype=query.dtype, device=query.device)


@eager_on_graph(fake=_like_output, capture_stub=_like_output)
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    module: torch.nn.Module,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
) -> torch.Tensor:
    """Attention of one layer, as transformers' ``sdpa`` computes it.

    Args:
        query: (batch, heads, queries, head size).
        key: (batch, KV heads, keys, head size).
        value: (batch, KV heads, keys, head size of the values).
        attention_mask: What may be attended to, or None.
        position_bias: Added to the scores, or None.
        module: The attention layer.
        dropout: Probability; 0 in evaluation.
        scaling: Factor on the scores.
        is_causal: Overrides the layer's own.

    Returns:
        Fresh, contiguous (batch, queries, heads, head size of the values).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: torch.Tensor = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **({} if position_bias is None else {"position_bias": position_bias}),
    )[0]
    return result


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention functions."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} asks for attention with {name}, which {NAME!r} does not compute (nor does "
                "transformers' 'sdpa'). Use attn_implementation='eager' for this model."
            )
    return attend(query, key, value, attention_mask, position_bias, module, dropout, scaling, is_causal), None


def register_sgl_eager() -> None:
    """Makes ``attn_implementation="sgl_eager"`` known to transformers. Idempotent.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    purpose = f"register attn_implementation={NAME!r}"
    transformers = import_extra("transformers", purpose=purpose)
    masks = import_extra("transformers.masking_utils", purpose=purpose)
    transformers.AttentionInterface.register(NAME, _forward)
    masks.AttentionMaskInterface.register(NAME, masks.sdpa_mask)
