"""Golden text of graphs before and after the passes: `tests/golden/passes/NAME.txt`, one section a stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sgl_piecewise import break_graph, eager_on_graph
from sgl_piecewise.passes.deduplicate import deduplicate
from sgl_piecewise.passes.drop_shape_only import drop_shape_only
from sgl_piecewise.passes.fuse_rms_norm import fuse_rms_norm
from sgl_piecewise.passes.join_linears import join_linears
from sgl_piecewise.passes.split_at_marks import split_at_marks

from .support import Traces, graph_text

GOLDEN = Path(__file__).parents[1] / "golden" / "passes"
X = torch.arange(12.0).reshape(3, 4)


@eager_on_graph(fake=torch.empty_like)
def faked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@eager_on_graph
def nested(x: torch.Tensor, extra: Any) -> Any:
    return {"a": (x + 1, [x * 2]), "b": None}


@eager_on_graph
def add_one_(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x


@eager_on_graph
def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 2


def nested_containers(x: torch.Tensor) -> torch.Tensor:
    found = nested(x.sin(), {"k": [x, 2]})
    return found["a"][0] + found["a"][1][0]


def own_argument(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = add_one_(y)
    return y + z


def several_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = both(x.relu())
    x.add_(1)  # Kept, and where it was: between the mark and what follows.
    return left.sin() + right, x


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = faked(x.sin())
    return x


def back_to_back(x: torch.Tensor) -> torch.Tensor:
    return faked(faked(x + 1)) + 1


def first_and_last(x: torch.Tensor) -> torch.Tensor:
    return faked(faked(x).cos())


def no_mark(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def nothing_between(x: torch.Tensor) -> torch.Tensor:
    break_graph()
    break_graph()
    return x + 1


class Norm(torch.nn.Module):
    """RMSNorm as it is usually written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class GateAndUp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def trace(fn: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    traces = Traces()
    torch.compile(fn, backend=traces, fullgraph=True)(*args)
    (gm,) = traces.graphs
    return gm


def assert_golden(name: str, stages: dict[str, str]) -> None:
    text = "".join(f"--- {stage}\n{graph}\n" for stage, graph in stages.items())
    assert text == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    "fn",
    [
        nested_containers,
        own_argument,
        several_outputs,
        in_a_loop,
        back_to_back,
        first_and_last,
        no_mark,
        nothing_between,
    ],
    ids=lambda fn: fn.__name__,
)
def test_split_and_deduplicate(fn: Callable[[torch.Tensor], Any]) -> None:
    gm = trace(fn, X.clone())
    stages = {"traced": graph_text(gm)}
    for one in (drop_shape_only, split_at_marks, deduplicate):
        gm = one(gm, ())
        stages[one.__name__] = graph_text(gm)
    assert_golden(fn.__name__, stages)


@pytest.mark.parametrize(
    ("fusion", "model", "dtype"),
    [(fuse_rms_norm, Norm, torch.bfloat16), (join_linears, GateAndUp, torch.float32)],
    ids=["fuse_rms_norm", "join_linears"],
)
def test_fusions(fusion: Callable[..., Any], model: type[torch.nn.Module], dtype: torch.dtype) -> None:
    seen: list[dict[str, str]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        before = graph_text(gm)
        gm = fusion(gm, example_inputs)
        seen.append({"traced": before, fusion.__name__: graph_text(gm)})
        return gm.forward

    torch.compile(model(), backend=backend, fullgraph=True)(X.to(dtype))
    assert_golden(fusion.__name__, seen[0])
