"""Fusions that change numerics, by the names that ask for them: all are off unless asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from .fuse_rms_norm import fuse_rms_norm
from .join_linears import join_linears

FUSIONS: dict[str, Callable[[GraphModule, Sequence[Any]], GraphModule]] = {
    "fuse_rms_norm": fuse_rms_norm,
    "join_linears": join_linears,
}
"""Name to pass; they run in this order, before the split."""
