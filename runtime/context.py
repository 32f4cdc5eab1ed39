"""The forward context: per-batch state that layers and break bodies read at call time.

A graph bakes what captured code saw; a break body does not, so whatever changes from batch to
batch is read here when the body runs (`sglang#38943`: arguments frozen at capture went stale).
Contexts nest; an inner forward that opens none inherits the outer one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .errors import ConfigError


class AttentionRunner(Protocol):
    """The part of an attention backend that a layer reaches through the context."""

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: Any) -> torch.Tensor:
        """Returns attention output ``o_THD`` for one layer, freshly allocated."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """State of one forward.

    Attributes:
        attention: What computes attention in this forward.
    """

    attention: AttentionRunner


_CONTEXT: ContextVar[ForwardContext | None] = ContextVar("sgl_piecewise_forward_context", default=None)


def forward_context() -> ForwardContext:
    """Returns the context of the forward that is running.

    Raises:
        ConfigError: No forward is running in this thread.
    """
    context = _CONTEXT.get()
    if context is None:
        raise ConfigError(
            "No forward context: a layer asked for per-batch state outside a forward. "
            "Wrap the call in `with use_forward_context(ForwardContext(...)):`."
        )
    return context


@contextlib.contextmanager
def use_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes ``context`` current in this thread for the block."""
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        _CONTEXT.reset(token)
