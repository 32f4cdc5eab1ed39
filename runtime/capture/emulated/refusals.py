"""Refuses what reaches the host without dispatching an operator: ``tolist``, ``numpy``, seeding.

In place only while a graph is being recorded, for the recording thread. The watcher of these
patches is the `Recording`. This module must not know how operators are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ... import torch_private
from .patching import Patch, ThreadPatches
from .recording import Recording
from .rules import forbidden

_HOST = "it hands values to the host, which would have to wait for work that is only written down"
_SEED = "CUDA refuses to read or set a generator's state during capture: the seed belongs to the replay"
_ARRAY = "it brings host memory into the graph, which a replay would not see change"


def _refuse_tensor_method(why: str) -> Callable[..., Any]:
    """Returns a replacement for a method of Tensor."""

    def replacement(recording: Recording, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_private.is_fake_type(type(self)) or torch_private.is_compiling_now():
            return original(self, *args, **kwargs)
        raise recording.invalidate(forbidden(f"Tensor.{original.__name__}()", why))

    return replacement


def _refuse_function(why: str) -> Callable[..., Any]:
    """Returns a replacement for a function of torch; PyTorch's own calls, and ours, go through."""

    def replacement(recording: Recording, original: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.startswith(("torch.", __package__)) or torch_private.is_compiling_now():
            return original(*args, **kwargs)
        raise recording.invalidate(forbidden(f"torch.{original.__name__}()", why))

    return replacement


def _to(recording: Recording, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # A torch.device may be the device that the tensor is on, which costs nothing on CUDA either;
    # the word "cpu" means the host.
    target = kwargs.get("device", args[0] if args else None)
    is_host = isinstance(target, str) and target.partition(":")[0] == "cpu"
    if is_host and not torch_private.is_fake_type(type(self)) and not torch_private.is_compiling_now():
        raise recording.invalidate(
            forbidden(
                'Tensor.to("cpu")',
                _HOST,
                "Mark the function with @eager_on_graph; a torch.device is accepted.",
            )
        )
    return original(self, *args, **kwargs)


def _one_hot(
    recording: Recording, original: Any, tensor: torch.Tensor, num_classes: int = -1
) -> torch.Tensor:
    # The CPU looks at the values to check them; CUDA does not once the number of classes is given.
    if num_classes < 0 or torch_private.is_compiling_now():
        return original(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


_TENSOR_METHODS = (
    "tolist",
    "numpy",
    "cpu",
    "pin_memory",
    "__array__",
    "__dlpack__",
    "__repr__",
    "__reduce_ex__",
)
_SEEDING = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")

REFUSALS = ThreadPatches(
    (
        *(
            Patch(owner=torch.Tensor, name=name, replacement=_refuse_tensor_method(_HOST))
            for name in _TENSOR_METHODS
        ),
        Patch(owner=torch.Tensor, name="to", replacement=_to),
        *(
            Patch(owner=owner, name=name, replacement=_refuse_function(_SEED))
            for owner in (torch, torch.random)
            for name in _SEEDING
        ),
        *(
            Patch(owner=torch, name=name, replacement=_refuse_function(_ARRAY))
            for name in ("from_numpy", "frombuffer", "from_dlpack", "as_tensor", "asarray")
        ),
        Patch(owner=torch.nn.functional, name="one_hot", replacement=_one_hot),
    )
)
"""What a thread that records a graph must not do; the watcher is its Recording."""
