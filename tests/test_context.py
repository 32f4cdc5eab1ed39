"""The forward context: what a break body reads when it runs."""

from __future__ import annotations

import threading

import pytest
import torch

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.context import ForwardContext, forward_context, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError


class NamedAttention:
    def __init__(self, name: str) -> None:
        self.name = name

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        return q_THD.clone()


def context(name: str) -> ForwardContext:
    return ForwardContext(attention=NamedAttention(name))


def test_no_forward_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="use_forward_context"):
        forward_context()


def test_contexts_nest_and_come_back_also_after_an_error() -> None:
    outer, inner = context("outer"), context("inner")
    with use_forward_context(outer):
        with use_forward_context(inner):
            assert forward_context() is inner
        assert forward_context() is outer
        with pytest.raises(KeyError), use_forward_context(inner):
            raise KeyError
        assert forward_context() is outer
    with pytest.raises(ConfigError):
        forward_context()


def test_a_context_belongs_to_its_thread() -> None:
    seen: list[bool] = []

    def other() -> None:
        try:
            forward_context()
        except ConfigError:
            seen.append(True)

    with use_forward_context(context("main")):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [True]


def test_a_context_cannot_be_changed_in_place() -> None:
    """A frozen context is swapped whole, so a break body never sees half of the next batch."""
    with pytest.raises(AttributeError):
        context("a").attention = NamedAttention("b")  # type: ignore[misc]
