"""Static addresses: tensors that graphs read where they were at capture.

Parameters, KV buffers and workspaces are not copied in; the graphs hold their addresses. One that
moves later (rebinding a parameter, growing a workspace) would leave the graphs reading old
memory, so recordings check on their first replay and whenever asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, MovedAddressError

StaticTensor = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or what returns the one that its owner uses now (an owner may rebind it when it grows)."""

StaticTensorMap = Mapping[str, StaticTensor]
"""Static tensors by name."""


class _Named(Mapping[str, Any]):
    """Tensors registered by hand, each as it is now."""

    def __init__(self, given: StaticTensorMap) -> None:
        self._given = given

    def __getitem__(self, name: str) -> Any:
        tensor = self._given[name]
        return tensor() if callable(tensor) and not isinstance(tensor, torch.Tensor) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


@dataclass(frozen=True)
class _Entry:
    """One tensor: where it is looked up again, and its address at capture."""

    name: str
    holder: Mapping[str, Any]
    key: str
    address: int

    def tensor_now(self) -> torch.Tensor | None:
        tensor = self.holder.get(self.key)
        return tensor if isinstance(tensor, torch.Tensor) else None

    def has_moved(self) -> bool:
        tensor = self.tensor_now()
        return tensor is None or tensor.data_ptr() != self.address


class StaticTensors:
    """Named tensors whose addresses must not change.

    Tensors are looked up again at every check where their module keeps them, so a parameter or
    submodule that was replaced is noticed; so is an entry of ``named`` that was replaced, or that is a
    callable and returns another tensor.

    Args:
        named: Tensors registered by hand, or callables that return them, by name; held, not copied.
        module: A module whose parameters and buffers are all registered, under their own names, and
            tensors that are plain attributes, if the captured forward does not bind them itself.

    Raises:
        ConfigError: ``named`` holds something that is not a tensor.
    """

    def __init__(
        self,
        named: StaticTensorMap | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        if named is not None and not isinstance(named, Mapping):
            raise ConfigError(
                f"static_tensors must map names to tensors, got {type(named).__name__}. The names are for errors."
            )
        self._named = _Named({} if named is None else named)
        self._module = module
        for name, tensor in self._named.items():
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"static_tensors[{name!r}] must be a tensor, or a callable that returns one, got "
                    f"{type(tensor).__name__}."
                )
        self._entries: list[_Entry] = []
        self._attributes: list[_Entry] = []
        self._submodules: list[tuple[str, Mapping[str, Any], str, Any]] = []
        self._storages: frozenset[int] | None = None

    def note_addresses(self) -> None:
        """Takes the present addresses as those that the graphs hold; later calls check them.

        Raises:
            MovedAddressError: Noted before, and a tensor moved since.
        """
        if self._storages is not None:
            self.forget_bound_attributes()
            self.check()
            return
        found: list[tuple[str, Mapping[str, Any], str, torch.Tensor]] = [
            ("", self._named, name, tensor) for name, tensor in self._named.items()
        ]
        if self._module is not None:
            found += list(_module_tensors(self._module))
            self._submodules = list(_submodules(self._module))
            self._attributes = [
                _Entry(name, holder, key, tensor.data_ptr())
                for name, holder, key, tensor in _attributes(self._module)
            ]
        self._entries = [
            _Entry(prefix + key, holder, key, tensor.data_ptr()) for prefix, holder, key, tensor in found
        ]
        self._storages = frozenset(tensor.untyped_storage().data_ptr() for _, _, _, tensor in found)

    def forget_bound_attributes(self) -> None:
        """Call after a capture: attributes that the forward binds itself need no address."""
        self._attributes = [entry for entry in self._attributes if not entry.has_moved()]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tells whether the tensor lies in a registered storage (as of ``note_addresses``)."""
        return bool(self._storages) and tensor.untyped_storage().data_ptr() in (self._storages or ())

    def check(self) -> None:
        """Compares addresses now with those noted.

        Raises:
            MovedAddressError: A tensor moved or is gone; names it.
        """
        for entry in (*self._entries, *self._attributes):
            if entry.has_moved():
                raise _moved(entry)
        for name, holder, key, child in self._submodules:
            if holder.get(key) is not child:
                raise MovedAddressError(
                    f"Submodule {name!r} was replaced after capture. The graphs still read the parameters of the "
                    "old one. Update parameters in place (`tensor.copy_(...)`), or capture again."
                )


def _moved(entry: _Entry) -> MovedAddressError:
    tensor = entry.tensor_now()
    if tensor is None:
        return MovedAddressError(
            f"Static tensor {entry.name!r} was at 0x{entry.address:x} at capture and is gone now. "
            "The graphs still read that memory; capture again after changing the module."
        )
    return MovedAddressError(
        f"Static tensor {entry.name!r} moved: captured at 0x{entry.address:x}, now at "
        f"0x{tensor.data_ptr():x}. The graphs still read the old memory. Update it in place "
        "(`tensor.copy_(...)`), or capture again."
    )


def _module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str, torch.Tensor]]:
    """Lists parameters and buffers as (prefix, holder, key, tensor)."""
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for holder in (owner._parameters, owner._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    yield prefix, holder, key, tensor


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str, torch.Tensor]]:
    """Lists tensors that are plain attributes as (name, holder, key, tensor)."""
    for path, owner in module.named_modules():
        for key, value in vars(owner).items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                yield (f"{path}.{key}" if path else key), vars(owner), key, value


def _submodules(module: torch.nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str, Any]]:
    """Lists submodules as (name, holder, key, child)."""
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for key, child in owner._modules.items():
            yield prefix + key, owner._modules, key, child
