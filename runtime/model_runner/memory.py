"""What memory is left for pools, and what one forward needs besides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..attention.base import AttentionSpec
from ..capture.device import GraphDevice
from ..context import ForwardContext, use_forward_context
from ..errors import ConfigError
from ..kv.pool import SubPoolSpec
from ..kv.slots import FULL_POOL, WINDOW_POOL
from ..runners.served_model import ServedModel

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Returns the memory that is free on a device, the allocator's cached blocks included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _available_host_bytes()


def _available_host_bytes() -> int:
    """Returns what the host can give: free memory, and what its caches would give up."""
    # What sysconf calls available leaves the cached files out: after reading a checkpoint that is most memory.
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # Not Linux.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _NoAttention:
    """Stands in for attention where only the memory of a forward is of interest."""

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        return torch.zeros_like(q_THD)


def measure_forward_bytes(model: ServedModel, num_tokens: int, device: GraphDevice) -> int:
    """Returns what a forward of so many tokens allocates at its peak, attention left out.

    Graphs of all sizes share one pool, so together they take little more than the largest. Zero
    where the device's allocator does not say (the emulated device).
    """
    torch_device = device.torch_device
    if torch_device.type != "cuda":
        return 0
    input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=torch_device)
    positions = torch.arange(num_tokens, device=torch_device) % model.max_positions
    before = torch.cuda.memory_allocated(torch_device)
    torch.cuda.reset_peak_memory_stats(torch_device)
    with torch.no_grad(), use_forward_context(ForwardContext(attention=_NoAttention())):
        model.hidden_states(input_ids, positions)
    return torch.cuda.max_memory_allocated(torch_device) - before


def sub_pool_specs(layers: Sequence[AttentionSpec], dtype: torch.dtype) -> list[SubPoolSpec]:
    """Returns the sub-pools of a model: full attention, and sliding windows where it has them.

    Where every layer has a window, the full one has no layers and takes no memory: it only numbers
    the slots of requests.

    Raises:
        ConfigError: Layers of one kind differ in their sizes, or there are none.
    """
    if not layers:
        raise ConfigError("The model has no attention layers, so there is nothing to make a KV pool for.")
    specs = []
    for name, of_kind in (
        (FULL_POOL, [layer for layer in layers if layer.window is None]),
        (WINDOW_POOL, [layer for layer in layers if layer.window is not None]),
    ):
        if not of_kind:
            if name == FULL_POOL:
                specs.append(_numbers_only(layers[0], dtype))
            continue
        shapes = {(layer.num_kv_heads, layer.head_dim, layer.window) for layer in of_kind}
        if len(shapes) > 1:
            raise ConfigError(
                f"Layers of the sub-pool {name!r} differ in KV heads, head size or window: {sorted(shapes, key=str)}. "
                "One sub-pool holds layers of one kind."
            )
        specs.append(
            SubPoolSpec(
                name=name,
                layer_ids=tuple(layer.layer_index for layer in of_kind),
                num_kv_heads=of_kind[0].num_kv_heads,
                head_dim=of_kind[0].head_dim,
                dtype=dtype,
                window=of_kind[0].window,
            )
        )
    return specs


def _numbers_only(layer: AttentionSpec, dtype: torch.dtype) -> SubPoolSpec:
    return SubPoolSpec(
        name=FULL_POOL,
        layer_ids=(),
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        dtype=dtype,
    )
