"""Private PyTorch APIs of compiling: what a backend needs to hand parts of a trace to other compilers.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13. Importing Dynamo takes seconds: only what runs while something is compiled
imports this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import exc
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, detect_fake_mode, tracing

from .errors import CompileError
from .torch_private import storage_key, with_lazy_bits_of


def registered_backend(name: str) -> Callable[..., Any] | None:
    """Returns the Dynamo backend of a name, or None."""
    try:
        backend: Callable[..., Any] = lookup_backend(name)
    except exc.InvalidBackend:
        return None
    return backend


def _current_fake_mode() -> Any:
    """Returns the mode that compilers called now make their fake tensors in."""
    mode = detect_fake_mode()
    if mode is None:
        raise CompileError("There is no trace in progress: a backend is called by torch.compile only.")
    return mode


@contextlib.contextmanager
def on_current_fake_mode() -> Iterator[None]:
    """Runs the block on the fake tensors that compilers called now work with."""
    with _current_fake_mode():
        yield


@contextlib.contextmanager
def separate_compile() -> Iterator[None]:
    """Lets a compiler run inside the block without touching what the trace around it keeps for its own."""
    with tracing(TracingContext(_current_fake_mode())):
        yield


def example_inputs(values: Sequence[Any]) -> list[Any]:
    """Returns inputs for a compiler that are like the trace's values, in the mode that compilers now work in.

    Sizes stay symbolic, and tensors that share memory in the trace share it again. Anything but tensors is
    passed on.
    """
    mode = _current_fake_mode()
    bases: dict[int, torch.UntypedStorage] = {}
    examples = []
    with mode, torch.inference_mode(False), torch.no_grad():
        for value in values:
            if not isinstance(value, torch.Tensor):
                examples.append(value)
            elif value.layout is not torch.strided:
                examples.append(mode.from_tensor(value))
            else:
                examples.append(_like(value, bases))
    return examples


def _like(value: torch.Tensor, bases: dict[int, Any]) -> torch.Tensor:
    """Makes a tensor with the metadata of another, in the memory that its storage has in ``bases``."""
    key = storage_key(value)
    if key not in bases:
        num_elements = value.untyped_storage().nbytes() // value.element_size()
        bases[key] = torch.empty(num_elements, dtype=value.dtype, device=value.device)
    base = bases[key]
    if base.dtype != value.dtype:
        base = base.view(value.dtype)
    example = base.as_strided(value.shape, value.stride(), value.storage_offset())
    return with_lazy_bits_of(value, example)


def share_memory(values: Sequence[Any]) -> bool:
    """Tells whether two of the tensors have one storage."""
    keys = [storage_key(v) for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    return len(set(keys)) < len(keys)
