"""The forward context: per-batch state that layers and break bodies read at call time.

A graph bakes what captured code saw; a break body does not, so whatever changes from batch to
batch is read here when the body runs (`sglang#38943`: arguments frozen at capture went stale).
Contexts nest; an inner forward that opens none inherits the outer one.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .batch.real_tokens import RealTokens
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
        real_tokens: How many rows are real; None where all are.
    """

    attention: AttentionRunner
    real_tokens: RealTokens | None = None


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


def use_forward_context(context: ForwardContext) -> contextlib.AbstractContextManager[ForwardContext]:
    """Makes ``context`` current in this thread for the block."""
    return _Scope(context)


class _Scope:
    """A block in which a context is current; entered once. Every step opens one, so it is no generator."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> ForwardContext:
        self._token = _CONTEXT.set(self._context)
        return self._context

    def __exit__(self, *raised: object) -> None:
        _CONTEXT.reset(self._token)


def local_real_tokens(x_TE: torch.Tensor) -> torch.Tensor:
    """Returns how many of a forward's rows are real on this rank, derived anew in every forward.

    To a compiler it is one operator: what the context holds is read when the forward runs, and is
    no guard.

    Args:
        x_TE: Rows of the forward; real ones come first.

    Returns:
        LOCAL (int32[], on the device of the rows), fresh.
    """
    if torch.compiler.is_compiling():
        return _local_real_tokens_operator(x_TE)
    return _local_real_tokens(x_TE)


def _local_real_tokens(x_TE: torch.Tensor) -> torch.Tensor:
    real_tokens = forward_context().real_tokens
    if real_tokens is None:
        return torch.full((), x_TE.shape[0], dtype=torch.int32, device=x_TE.device)
    return real_tokens.local(x_TE.shape[0])


@torch.library.custom_op("sgl_piecewise::local_real_tokens", mutates_args=())
def _local_real_tokens_operator(x: torch.Tensor) -> torch.Tensor:
    return _local_real_tokens(x)


@_local_real_tokens_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int32, device=x.device)
