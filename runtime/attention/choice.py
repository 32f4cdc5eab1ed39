"""Attention backends by name: resolved before anything is built, so that a typo costs no pool.

Prefill and decode may use different ones over the same KV pool. This module must not know how any
of them computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import ConfigError, nearest
from ..kernels.flashinfer_library import has_flashinfer, import_flashinfer
from ..kernels.launching import has_triton, require_triton
from .base import AttentionSpec
from .paged import PagedAttention
from .plan import PlanLimits
from .torch_paged import TorchAttention


def resolve_attention_backend(
    name: str, device: torch.device, *, breaks_for: tuple[Sequence[AttentionSpec], torch.dtype] | None = None
) -> str:
    """Returns the name of the backend that a name means on a device, and checks that it can be built.

    Args:
        name: ``torch``, ``triton``, ``flashinfer``, or ``auto``: on CUDA Triton where it is installed, else torch;
            for prompts between breaks FlashInfer, where it is installed and takes the layers.
        device: Where the KV pool will be.
        breaks_for: Layers and dtype of prompts that run between breaks; None for anything inside graphs. Inside
            them Triton was the faster on an H200 at every size of a prompt and at small decode batches, and between
            breaks FlashInfer was (its kernels for Hopper cannot be captured; docs/lab-notes.md has both).

    Raises:
        ConfigError: No backend has that name.
        MissingExtraError: The package that it needs is not installed.
    """
    if name == "auto":
        if device.type == "cuda" and breaks_for is not None and has_flashinfer():
            layers, dtype = breaks_for
            if attention_backend_class("flashinfer").takes(layers, dtype):
                return "flashinfer"
        return "triton" if device.type == "cuda" and has_triton() else "torch"
    if name not in _CLASSES:
        raise ConfigError(f"Unknown attention backend {name!r}. {nearest(name, ['auto', *_CLASSES])}")
    if name == "triton":
        require_triton()
    if name == "flashinfer":
        import_flashinfer(purpose="compute attention with the backend 'flashinfer'")
    return name


def build_attention_backend(
    name: str, layers: Sequence[AttentionSpec], *, limits: PlanLimits
) -> PagedAttention:
    """Builds a backend; bind it to a KV pool before its first plan.

    Args:
        name: From `resolve_attention_backend`.
        layers: Constants of the model's attention layers.
        limits: The largest batch.
    """
    return attention_backend_class(name)(layers, limits=limits)


def available_attention_backends() -> tuple[str, ...]:
    """Returns the names of the backends whose packages are installed."""
    return ("torch", *(["triton"] if has_triton() else []), *(["flashinfer"] if has_flashinfer() else []))


def attention_backend_class(name: str) -> type[PagedAttention]:
    """Returns the class of a backend, which says what it can capture; builds nothing.

    Args:
        name: From `resolve_attention_backend`.
    """
    return _CLASSES[name]()


def _triton() -> type[PagedAttention]:
    from .triton_paged import TritonAttention

    return TritonAttention


def _flashinfer() -> type[PagedAttention]:
    from .flashinfer_paged import FlashInferAttention

    return FlashInferAttention


_CLASSES: dict[str, Callable[[], type[PagedAttention]]] = {
    "torch": lambda: TorchAttention,
    "triton": _triton,
    "flashinfer": _flashinfer,
}
