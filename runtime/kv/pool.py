"""KV pools: one sub-pool per kind of layer, one buffer per layer, at addresses that never change.

Slots run along `S`; slot 0 is scratch. Who writes must bring slots of the layer's own sub-pool.

Shapes: `S` slots (scratch included), `T` tokens, `K` KV heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..errors import ConfigError, MovedAddressError, PoolError, nearest
from ..kernels.kernel_set import TORCH_KERNELS, KernelSet
from .slots import FULL_POOL, SCRATCH_SLOT, PhysicalSlots


@dataclass(frozen=True, kw_only=True)
class SubPoolSpec:
    """What one sub-pool holds.

    Attributes:
        name: For example ``full`` or ``window``.
        layer_ids: The layers that it serves; none in the sub-pool ``full`` of a model whose every layer
            has a window: it numbers the slots of requests, and takes no memory.
        num_kv_heads: `K`.
        head_dim: `D`, of keys and of values.
        dtype: Of the buffers.
        window: Tokens that its layers look back, the token itself included; None for all.

    Raises:
        ConfigError: No layers in another sub-pool than ``full``, a repeated layer, or a size under one.
    """

    name: str
    layer_ids: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None

    def __post_init__(self) -> None:
        is_empty = not self.layer_ids and self.name != FULL_POOL
        if is_empty or len(set(self.layer_ids)) != len(self.layer_ids):
            raise ConfigError(
                f"Sub-pool {self.name!r} needs layers, each once; layer_ids is {self.layer_ids}."
            )
        sizes = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "window": self.window}
        for field, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"Sub-pool {self.name!r}: {field} must be at least 1, got {size}.")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all of the sub-pool's layers."""
        return 2 * len(self.layer_ids) * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVSubPool:
    """Buffers of the layers of one kind.

    Args:
        spec: What it holds.
        num_slots: Slots that requests can own; the scratch slot comes on top.
        device: Where the buffers live.
    """

    def __init__(self, spec: SubPoolSpec, *, num_slots: int, device: torch.device) -> None:
        if num_slots < 1:
            raise ConfigError(f"Sub-pool {spec.name!r} needs at least one slot, got num_slots={num_slots}.")
        self.spec = spec
        self.num_slots = num_slots
        self.device = device
        shape = (num_slots + 1, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: an unwritten NaN in the scratch slot would reach padded rows.
        self._buffers = {
            layer_id: (
                torch.zeros(shape, dtype=spec.dtype, device=device),
                torch.zeros(shape, dtype=spec.dtype, device=device),
            )
            for layer_id in spec.layer_ids
        }

    def buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(k_buffer, v_buffer)`` of a layer (dtype[S, K, D] each), never to be replaced."""
        return self._buffers[layer_id]


class KVPool:
    """All sub-pools of a model, found by layer.

    Args:
        sub_pools: One per kind of layer; no layer in two of them.
        kernels: What writes new keys and values.

    Raises:
        ConfigError: Two sub-pools share a name or a layer.
    """

    def __init__(self, sub_pools: Iterable[KVSubPool], *, kernels: KernelSet = TORCH_KERNELS) -> None:
        self._write_kv = kernels.write_kv
        self._by_name: dict[str, KVSubPool] = {}
        self._by_layer: dict[int, KVSubPool] = {}
        for sub_pool in sub_pools:
            if sub_pool.spec.name in self._by_name:
                raise ConfigError(f"Two sub-pools are named {sub_pool.spec.name!r}; name each once.")
            self._by_name[sub_pool.spec.name] = sub_pool
            for layer_id in sub_pool.spec.layer_ids:
                if layer_id in self._by_layer:
                    other = self._by_layer[layer_id].spec.name
                    raise ConfigError(
                        f"Layer {layer_id} stands in sub-pools {other!r} and {sub_pool.spec.name!r}."
                    )
                self._by_layer[layer_id] = sub_pool
        if not self._by_name:
            raise ConfigError("A KV pool needs at least one sub-pool.")
        self._addresses = {name: tensor.data_ptr() for name, tensor in self.static_tensors().items()}

    @property
    def sub_pools(self) -> Mapping[str, KVSubPool]:
        """Sub-pools by name."""
        return self._by_name

    def of_layer(self, layer_id: int) -> KVSubPool:
        """Returns the sub-pool that serves a layer.

        Raises:
            PoolError: No sub-pool does.
        """
        sub_pool = self._by_layer.get(layer_id)
        if sub_pool is None:
            raise PoolError(
                f"No sub-pool serves layer {layer_id}. "
                f"{nearest(layer_id, (str(known) for known in self._by_layer))}"
            )
        return sub_pool

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        """Returns the keys of a layer (dtype[S, K, D]), a fixed address."""
        return self.of_layer(layer_id).buffers(layer_id)[0]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        """Returns the values of a layer (dtype[S, K, D]), a fixed address."""
        return self.of_layer(layer_id).buffers(layer_id)[1]

    def set_kv(self, layer_id: int, slots: PhysicalSlots, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Writes keys and values of new tokens into a layer's buffers.

        Args:
            layer_id: The layer.
            slots: Where; slots of the layer's own sub-pool, as many as there are rows.
            k_TKD: Keys (dtype[T, K, D]).
            v_TKD: Values (dtype[T, K, D]).

        Raises:
            PoolError: The slots are of another sub-pool, or their number is not that of the rows.
        """
        sub_pool = self.of_layer(layer_id)
        if slots.pool != sub_pool.spec.name:
            raise PoolError(
                f"Layer {layer_id} lies in sub-pool {sub_pool.spec.name!r}, and the slots are of "
                f"{slots.pool!r}: they would hit other requests' tokens. Use the batch's "
                f"write_slots[{sub_pool.spec.name!r}]."
            )
        num_slots, num_keys, num_values = len(slots), k_TKD.shape[0], v_TKD.shape[0]
        if not num_slots == num_keys == num_values:
            raise PoolError(
                f"Layer {layer_id}: {num_slots} slots for {num_keys} keys and {num_values} values; "
                "one slot belongs to each token, padded ones included."
            )
        k_buffer, v_buffer = sub_pool.buffers(layer_id)
        self._write_kv(k_buffer, v_buffer, slots.ids, k_TKD, v_TKD)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Returns every buffer by name, for who must know that it never moves."""
        return {
            f"{sub_pool.spec.name}.layer{layer_id}.{kind}": buffer
            for sub_pool in self._by_name.values()
            for layer_id in sub_pool.spec.layer_ids
            for kind, buffer in zip("kv", sub_pool.buffers(layer_id), strict=True)
        }

    def check_addresses(self) -> None:
        """Checks that every buffer is where it was when the pool was built.

        Raises:
            MovedAddressError: One moved; graphs that were captured would read the old address.
        """
        for name, tensor in self.static_tensors().items():
            if tensor.data_ptr() != self._addresses[name]:
                raise MovedAddressError(
                    f"KV buffer {name} moved from {self._addresses[name]:#x} to {tensor.data_ptr():#x}: "
                    "graphs would read the old address. Write into the pool, never replace its buffers."
                )

    def poison_scratch(self) -> None:
        """Fills the scratch slots with NaN: what reads them then shows in its results."""
        for tensor in self.static_tensors().values():
            tensor[SCRATCH_SLOT].fill_(torch.nan)
