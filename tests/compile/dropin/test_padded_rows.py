"""Padded rows reach nothing: what the trace shows to keep rows apart is padded, and nothing else ever is.

Every function is called at sizes between capture sizes and compared with eager: results, written inputs, buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sgl_piecewise import eager_on_graph

from .support import drop_in, failures, total, without_graph

SIZES = (5, 5, 6, 3, 4)


class Host(nn.Module):
    """Layers and buffers for the functions below, each of which becomes a forward."""

    def __init__(self, fn: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.batch_norm = nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.embedding, self.conv = nn.Embedding(20, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.register_buffer("table", torch.arange(240.0).view(40, 6) % 7)
        self.register_buffer("memory", torch.zeros(16, 6))
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(self, x)


def writes_rows_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.mul_(2).add_(x)
    y[:, 0] = 1
    y[0] = 0
    x.add_(1)
    return y


def attends_causally(m: Any, x: torch.Tensor) -> torch.Tensor:
    q = m.linear(x).view(1, -1, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(-1, 6)


APART: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "layers": lambda m, x: F.gelu(m.norm(m.linear(x))) + x,
    "batch norm of an eval model": lambda m, x: m.batch_norm(x),
    "positions from a table": lambda m, x: x + m.table[: x.shape[0]],
    "numbered rows": lambda m, x: x * torch.arange(x.shape[0])[:, None],
    "prefix sums": lambda m, x: (x.cumsum(0), x.cummax(0)[0]),
    "along features": lambda m, x: (x.softmax(-1), x.sum(1), x.sort(1)[0], x.flip(1), x.chunk(2, 1)[1] * 1),
    "first rows": lambda m, x: (x[0] * 1, x[:2] * 1, x * 2),
    "heads": lambda m, x: x.view(x.shape[0], 2, 3).transpose(1, 2).reshape(-1, 6),
    "convolution of each row": lambda m, x: m.conv(x[:, :, None].repeat(1, 1, 5)).relu(),
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.linear.weight),
    "embedding": lambda m, x: m.embedding(x.argmax(1)),
    "products of rows, lower half": lambda m, x: torch.tril(x @ x.t())[:, :1] * x,
    "causal attention": attends_causally,
    "written rows": writes_rows_in_place,
}


def writes_memory(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.memory[: x.shape[0]] = x
    return x * 2


def shifts(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[1:] = x[:-1]
    return y


def writes_columns_by_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, x.argmax(1)] = 5.0
    return y


@eager_on_graph(fake=torch.empty_like)
def clips_to_the_largest(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=x.mean().item())


MIXED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mean": lambda m, x: m.linear(x) - m.linear(x).mean(0),
    "mean alone": lambda m, x: m.linear(x).mean(0),
    "sum": lambda m, x: m.linear(x).sum(0),
    "sum over the number of rows": lambda m, x: x.sum(0) / x.shape[0],
    "scaled by the number of rows": lambda m, x: x / x.shape[0],
    "filled with the number of rows": lambda m, x: x + torch.full((1,), float(x.shape[0])),
    "largest": lambda m, x: -m.linear(x).abs().max() * x,
    "softmax": lambda m, x: torch.softmax(m.linear(x), 0),
    "norm": lambda m, x: F.normalize(m.linear(x), dim=0),
    "deviation": lambda m, x: x.std(0),
    "any": lambda m, x: x * (x > 1.5).any(),
    "last row": lambda m, x: m.linear(x)[-1],
    "last rows": lambda m, x: x[-2:] * 1,
    "flip": lambda m, x: m.linear(x).flip(0),
    "roll": lambda m, x: x.roll(1, 0),
    "sort": lambda m, x: torch.sort(m.linear(x), 0)[0],
    "numbered from the end": lambda m, x: torch.arange(x.shape[0] - 1, -1, -1)[:, None] * x,
    "suffix sums": lambda m, x: m.linear(x).flip(0).cumsum(0),
    "gram": lambda m, x: x.t() @ (x + 1),
    "einsum over rows": lambda m, x: torch.einsum("bi,bo->io", x + 1, x + 1),
    "attention": lambda m, x: m.attention(x[None], x[None], x[None])[0][0],
    "attention of the library": lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "convolution over rows": lambda m, x: m.conv(x.t()[None])[0].t(),
    "reshaped across rows": lambda m, x: (x + 1).t().reshape(x.shape[0], 6),
    "rows by index": lambda m, x: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "counts": lambda m, x: torch.zeros(6).scatter_add_(0, x.argmax(1), torch.ones(x.shape[0])),
    "added by index": lambda m, x: torch.zeros(6, 6).index_add_(0, x.argmax(1), x + 1),
    "columns written by rows": writes_columns_by_rows,
    "rows written to a buffer": writes_memory,
    "shifted": shifts,
    "marked": lambda m, x: clips_to_the_largest(x) * 2,
}


def run(fn: Callable[[Any, torch.Tensor], Any], *, is_training: bool = False) -> None:
    torch.manual_seed(0)
    model = Host(fn).train(is_training)
    plain = Host(fn).train(is_training)
    plain.load_state_dict(model.state_dict())
    compiled = drop_in(model, dynamic=True, dynamic_dims={"x": 0}, capture_sizes=[4, 8])
    for number, size in enumerate(SIZES):
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(number))
        ours = x.clone()
        actual, expected = compiled(ours), plain(x)
        pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
        for one, other in pairs:
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(ours, x)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_are_padded(name: str) -> None:
    run(APART[name])
    assert not failures()
    assert total("num_padded") >= 1


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run(MIXED[name])
    assert total("num_padded") == 0
    assert without_graph()["padded_rows_may_reach_others"] >= 2
    assert __file__ in caplog.text, "the warning names the line"
    assert "padded_rows='trusted'" in caplog.text


def test_batch_norm_that_trains_is_not_padded() -> None:
    run(lambda m, x: m.batch_norm(x), is_training=True)
    assert total("num_padded") == 0


def test_a_number_that_a_module_holds_is_no_host_read_and_is_still_looked_at() -> None:
    """With ``dynamic=True`` Dynamo makes eps an input whose value the graph reads, which no capture can hold."""
    norm = nn.LayerNorm(6)
    compiled = drop_in(norm, dynamic=True)
    x = torch.randn(4, 6)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), norm(x))
    assert total("num_replays") == 1
    norm.eps = 10.0
    for _ in range(3):
        torch.testing.assert_close(compiled(x), norm(x))
    assert not failures()
