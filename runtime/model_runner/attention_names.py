"""Attention backends by name; importing one is what choosing it costs."""

from __future__ import annotations

import importlib

from ..attention.paged import PagedAttention
from ..errors import ConfigError, nearest

_CLASSES = {
    "torch": ("torch_paged", "TorchAttention"),
    "triton": ("triton_paged", "TritonAttention"),
}

ATTENTION_BACKENDS = tuple(_CLASSES)
"""Names that a plan may use."""


def attention_class(name: str) -> type[PagedAttention]:
    """Returns the class of an attention backend.

    Raises:
        ConfigError: None has this name.
        MissingExtraError: A package that it needs is not installed.
    """
    if name not in _CLASSES:
        raise ConfigError(f"No attention backend is named {name!r}. {nearest(name, _CLASSES)}")
    module, cls = _CLASSES[name]
    found: type[PagedAttention] = getattr(
        importlib.import_module(f"...attention.{module}", __name__), cls
    )
    return found
