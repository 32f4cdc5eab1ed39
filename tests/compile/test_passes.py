"""Golden text before and after each pass, and the invariants of splitting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from sgl_piecewise import break_graph, eager_on_graph
from sgl_piecewise.passes.deduplicate import deduplicate, piece_text
from sgl_piecewise.passes.drop_shape_only import drop_shape_only
from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.passes.split_at_marks import pieces_of, split_at_marks
from sgl_piecewise.runtime.errors import CompileError
from sgl_piecewise.runtime.mark_operator import is_marked_call

from .support import Traces, graph_text


@eager_on_graph
def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 2


@eager_on_graph
def write(x: torch.Tensor) -> None:
    x.add_(1)


@eager_on_graph(fake=lambda x: x.new_empty(x.shape))
def faked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


X = torch.arange(12.0).reshape(3, 4)


def trace(fn: Callable[..., Any], *args: Any) -> GraphModule:
    """Returns what Dynamo hands to a backend."""
    traces = Traces()
    torch.compile(fn, backend=traces, fullgraph=True)(*args)
    (gm,) = traces.graphs
    return gm


def split(fn: Callable[..., Any], *args: Any) -> GraphModule:
    return split_at_marks(trace(fn, *args), args)


def test_drop_shape_only_takes_out_what_a_fake_left_and_nothing_else() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x.new_empty(3)
        return faked(x) + 1

    gm = trace(fn, X.clone())
    assert graph_text(gm) == (
        "v0 = input\n"
        "v1 = input\n"
        "v2 = add_(v0, 1)\n"
        "v3 = new_empty(v0, 3)\n"
        "v4 = new_empty(v0, (3, 4))\n"
        "v5 = marked_call_1([v0], [v1], [], 'faked(tensor0) -> float32[3, 4; 4, 1; cpu]')\n"
        "v6 = add(v5, 1)\n"
        "return (v6,)"
    )
    assert graph_text(drop_shape_only(gm, ())) == (
        "v0 = input\n"
        "v1 = input\n"
        "v2 = add_(v0, 1)\n"
        "v3 = new_empty(v0, 3)\n"
        "v4 = marked_call_1([v0], [v1], [], 'faked(tensor0) -> float32[3, 4; 4, 1; cpu]')\n"
        "v5 = add(v4, 1)\n"
        "return (v5,)"
    )


def test_split_keeps_order_and_results_taken_apart_with_their_mark() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.relu()
        left, right = both(x)
        return left.sin() + right, x

    assert graph_text(split(fn, X)) == (
        "v0 = input\n"
        "v1 = input\n"
        "v2 = piece_0(v0)\n"
        "v3 = getitem(v2, 0)\n"
        "v4 = marked_call_2([v3], [v1], [], "
        "'both(tensor0) -> (float32[3, 4; 4, 1; cpu], float32[3, 4; 4, 1; cpu])')\n"
        "v5 = getitem(v4, 0)\n"
        "v6 = getitem(v4, 1)\n"
        "v7 = piece_1(v5, v6)\n"
        "v8 = getitem(v7, 0)\n"
        "return (v8, v3)\n"
        "piece_0:\n"
        "  v0 = input\n"
        "  v1 = relu(v0)\n"
        "  return (v1,)\n"
        "piece_1:\n"
        "  v0 = input\n"
        "  v1 = input\n"
        "  v2 = sin(v0)\n"
        "  v3 = add(v2, v1)\n"
        "  return (v3,)"
    )


def test_deduplicate_calls_the_first_of_equal_pieces() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = faked(x.sin() + 1)
        return x

    gm = drop_shape_only(trace(fn, X), ())
    gm = split_at_marks(gm, ())
    template = (
        "v0 = input\n"
        "v1 = input\n"
        "v2 = piece_0(v0)\n"
        "v3 = getitem(v2, 0)\n"
        "v4 = marked_call_1([v3], [v1], [], 'faked(tensor0) -> float32[3, 4; 4, 1; cpu]')\n"
        "v5 = PIECE(v4)\n"
        "v6 = getitem(v5, 0)\n"
        "v7 = marked_call_1([v6], [v1], [], 'faked(tensor0) -> float32[3, 4; 4, 1; cpu]')\n"
        "return (v7,)"
    )
    before, after = template.replace("PIECE", "piece_1"), template.replace("PIECE", "piece_0")
    piece = "  v0 = input\n  v1 = sin(v0)\n  v2 = add(v1, 1)\n  return (v2,)"
    assert graph_text(gm) == f"{before}\npiece_0:\n{piece}\npiece_1:\n{piece}"
    assert graph_text(deduplicate(gm, ())) == f"{after}\npiece_0:\n{piece}"


def first(x: torch.Tensor) -> torch.Tensor:
    return faked(x) + 1


def last(x: torch.Tensor) -> torch.Tensor:
    return faked(x + 1)


def back_to_back(x: torch.Tensor) -> torch.Tensor:
    return faked(faked(x + 1)) + 1


def nothing_between(x: torch.Tensor) -> torch.Tensor:
    break_graph()
    break_graph()
    return x + 1


def only_marks(x: torch.Tensor) -> torch.Tensor:
    return faked(faked(x))


def no_marks(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def only_effects(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x.mul_(2)
    write(x)
    x.mul_(3)
    write(x)
    return x


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for index in range(4):
        x = both(x * index)[index % 2] + 1
    return x


@pytest.mark.parametrize(
    ("fn", "num_pieces", "num_distinct"),
    [
        (first, 1, 1),
        (last, 1, 1),
        (back_to_back, 2, 1),
        (nothing_between, 1, 1),
        (only_marks, 0, 0),
        (no_marks, 1, 1),
        (only_effects, 2, 2),
        (in_a_loop, 5, 5),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_pipeline_keeps_values_and_marks(
    fn: Callable[[torch.Tensor], torch.Tensor], num_pieces: int, num_distinct: int
) -> None:
    traced = trace(fn, X)
    inputs = traces_inputs(fn)
    marks = [node.args[3] for node in traced.graph.nodes if is_marked_call(node.target)]
    gm = run_passes(traced, (), pipeline())
    assert [node.args[3] for node in gm.graph.nodes if is_marked_call(node.target)] == marks
    assert sum(node.op == "call_module" for node in gm.graph.nodes) == num_pieces
    assert len(pieces_of(gm)) == num_distinct
    for piece in pieces_of(gm).values():
        piece.graph.lint()
    torch.testing.assert_close(gm(*inputs)[0], fn(X), rtol=0, atol=0)


def traces_inputs(fn: Callable[..., Any]) -> list[Any]:
    """Returns the real inputs of the trace, handles among them."""
    found: list[Any] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found[:] = args
            return gm.forward(*args)

        return run

    torch.compile(fn, backend=backend, fullgraph=True)(X)
    return found


def test_sizes_stay_outside_pieces() -> None:
    """A piece that returned one would hand a number from compiled code to the host."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * 2
        y = faked(x + rows)
        return y * rows

    x = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    gm = run_passes(trace(fn, x), (), pipeline())
    for piece in pieces_of(gm).values():
        outputs = piece.graph.output_node().args[0]
        assert all(isinstance(value.meta["example_value"], torch.Tensor) for value in outputs)


def test_context_open_across_a_mark_is_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x @ x
            x = faked(x)
            return x @ x

    with pytest.raises(CompileError, match="used on both sides of a marked call"):
        split(fn, torch.ones(4, 4))


def one_piece(fn: Callable[..., Any], *args: Any) -> str:
    (piece,) = pieces_of(split(fn, *args)).values()
    return piece_text(piece)


@pytest.mark.parametrize(
    "other",
    [
        (lambda x, y: x + y, (torch.ones(3, 5), torch.ones(3, 5))),
        (lambda x, y: x + y, (X.to(torch.float64), X)),
        (lambda x, y: x + y, (torch.ones(4, 3).t(), X)),
        (lambda x, y: x - y, (X, X.clone())),
        (lambda x, y: x + y + 1, (X, X.clone())),
        (lambda x, y: torch.add(x, y, alpha=2), (X, X.clone())),
    ],
    ids=["shape", "dtype", "strides", "operator", "one more", "constant"],
)
def test_key_tells_pieces_apart_by(other: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    fn, args = other
    ours = one_piece(lambda x, y: x + y, X, X.clone())
    torch.compiler.reset()
    assert one_piece(fn, *args) != ours


def test_key_tells_constants_of_different_type_apart() -> None:
    """1, 1.0 and True are equal to Python."""
    found = set()
    for constant in (1, 1.0, True):
        torch.compiler.reset()
        found.add(one_piece(lambda x, c=constant: torch.full_like(x, c), X))
    assert len(found) == 3


def test_key_tells_inputs_that_share_memory_apart() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = [x[0], x[1].clone(), x[1]]
        faked(x)
        a = rows[0] + rows[1]
        faked(x)
        b = rows[0] + rows[2]
        faked(x)
        return a + b

    gm = split_at_marks(drop_shape_only(trace(fn, X), ()), ())
    _, distinct, shared, sum_of_both = map(piece_text, pieces_of(gm).values())
    assert distinct == sum_of_both
    assert distinct != shared


def test_key_holds_the_options() -> None:
    (piece,) = pieces_of(split(no_marks, X)).values()
    assert piece_text(piece, "a") != piece_text(piece, "b")
