"""Static addresses: tensors that graphs read where they were at capture.

Parameters, KV buffers and workspaces are not copied in; the graphs hold their addresses. One that
moves later (rebinding a parameter, growing a workspace) would leave the graphs reading old
memory, so recordings check on their first replay and whenever asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ..errors import ConfigError, MovedAddressError


class StaticTensors:
    """Named tensors whose addresses must not change.

    A source is asked again at every check, so a parameter that was rebound is noticed.

    Args:
        named: Tensors registered by hand, by name.
        module: A module whose parameters and buffers are all registered, under their own names.
    """

    def __init__(
        self, named: Mapping[str, torch.Tensor] | None = None, module: torch.nn.Module | None = None
    ) -> None:
        self._sources: list[Callable[[], Iterator[tuple[str, torch.Tensor]]]] = []
        if named:
            frozen = dict(named)
            for name, tensor in frozen.items():
                if not isinstance(tensor, torch.Tensor):
                    raise ConfigError(
                        f"static_tensors[{name!r}] must be a tensor, got {type(tensor).__name__}."
                    )
            self._sources.append(lambda: iter(frozen.items()))
        if module is not None:
            self._sources.append(lambda: _module_tensors(module))
        self._captured: dict[str, int] = {}
        self._captured_storages: frozenset[int] = frozenset()

    def note_addresses(self) -> None:
        """Takes the present addresses as those that the graphs hold."""
        tensors = dict(self._named())
        self._captured = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self._captured_storages = frozenset(
            tensor.untyped_storage().data_ptr() for tensor in tensors.values()
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tells whether the tensor lies in a registered storage (as of ``note_addresses``)."""
        return tensor.untyped_storage().data_ptr() in self._captured_storages

    def check(self) -> None:
        """Compares addresses now with those noted.

        Raises:
            MovedAddressError: A tensor moved or is gone; names it.
        """
        now = dict(self._named())
        for name, captured in self._captured.items():
            tensor = now.get(name)
            if tensor is None:
                raise MovedAddressError(
                    f"Static tensor {name!r} was at 0x{captured:x} at capture and is gone now. "
                    "The graphs still read that memory; capture again after changing the module."
                )
            if tensor.data_ptr() != captured:
                raise MovedAddressError(
                    f"Static tensor {name!r} moved: captured at 0x{captured:x}, now at "
                    f"0x{tensor.data_ptr():x}. The graphs still read the old memory. Update it in place "
                    "(`tensor.copy_(...)`), or capture again."
                )

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for source in self._sources:
            yield from source()


def _module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
