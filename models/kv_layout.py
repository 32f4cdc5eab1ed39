"""Which KV sub-pool holds each layer's keys and values."""

from __future__ import annotations

import torch

from sgl_piecewise.runtime.kv.pool import SubPoolSpec
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL

from .config import DecoderConfig


def sub_pool_specs(config: DecoderConfig, dtype: torch.dtype) -> tuple[SubPoolSpec, ...]:
    """Returns the sub-pools of a model, ``full`` first.

    Layers with a sliding window have a smaller sub-pool of their own. Where no layer sees
    everything, they stand in ``full``, which every model has.

    Args:
        config: The model.
        dtype: Of keys and values.
    """
    full = tuple(i for i in range(config.num_layers) if config.window_of(i) is None)
    windowed = tuple(i for i in range(config.num_layers) if config.window_of(i) is not None)
    kinds = ((FULL_POOL, full or windowed, None), (WINDOW_POOL, windowed if full else (), config.window))
    return tuple(
        SubPoolSpec(
            name=name,
            layer_ids=layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            window=None if window is None else window.size,
        )
        for name, layers, window in kinds
        if layers
    )
