"""The marked attention call, and what an attention layer tells its backend.

Shapes: `T` tokens, `H` query heads, `K` KV heads, `D` head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..context import forward_context
from ..errors import ConfigError
from ..mark import eager_on_graph


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's constants, fixed at construction.

    Attributes:
        layer_index: Position of the layer in the model.
        num_heads: Query heads (`H`).
        num_kv_heads: KV heads (`K`); `H` is a multiple of it.
        head_dim: Head size (`D`).
        scale: Factor on the scores, usually ``head_dim ** -0.5``.
        window: Tokens that a token sees, itself included; None for all before it.
        logit_soft_cap: Scores become ``cap * tanh(score / cap)``, after ``scale``; None for as they are.

    Raises:
        ConfigError: A size under one, or heads that do not divide.
    """

    layer_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        where = f"Attention layer {self.layer_index}"
        for name in ("num_heads", "num_kv_heads", "head_dim", "window"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{where}: {name} must be at least 1, got {size}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{where}: {self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly."
            )
        if self.logit_soft_cap is not None and not self.logit_soft_cap > 0:
            raise ConfigError(f"{where}: logit_soft_cap must be over 0, got {self.logit_soft_cap}.")


def _like_query(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Shape of ``attend``'s result, contents undefined."""
    return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)


@eager_on_graph(fake=_like_query, capture_stub=_like_query)
def attend(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of one layer through the backend of the running forward.

    Args:
        q_THD: Queries, rotated (dtype[T, H, D]).
        k_TKD: Keys, rotated (dtype[T, K, D]).
        v_TKD: Values (dtype[T, K, D]).
        spec: The layer's constants.

    Returns:
        ``o_THD`` (dtype[T, H, D]), contiguous and fresh.
    """
    return forward_context().attention.run(q_THD, k_TKD, v_TKD, spec)
