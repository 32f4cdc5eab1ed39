"""What no graph can hold is found in pieces before a capture records anything, and only a capture minds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.passes.validate import FINDINGS, Finding
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.user_code import traced_user_line
from sgl_piecewise.runtime.errors import CaptureForbiddenError

from .support import compiled

X = torch.arange(12.0).reshape(3, 4) + 1


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum().item())  # Inside a mark anything goes.


def findings_of(fn: Callable[..., Any], *args: Any) -> tuple[Finding, ...]:
    found: list[Finding] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        split = run_passes(gm, example_inputs, pipeline())
        found.extend(split.meta[FINDINGS])
        return gm.forward

    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return tuple(found)


def read(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def read_list(x: torch.Tensor) -> torch.Tensor:
    return x * x[0].long().tolist()[0]


def mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 2] + 1


def nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero().float() + 1


def host_list(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


def to_host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu() + 1


def to_host_by_name(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu") + 1


def error_check(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x[:, :3] + torch.eye(3))


def repeat(x: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, x[:, 0].long(), 0)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (read, "_local_scalar_dense"),
        (read_list, "_local_scalar_dense"),
        (mask, "Indexing with a mask"),
        (nonzero, "nonzero"),
        (host_list, r"torch.tensor\(\[...\]\)"),
        (to_host, r"Tensor.cpu\(\)"),
        (to_host_by_name, r'Tensor.to\("cpu"\)'),
        (error_check, "_linalg_check_errors"),
        (repeat, "repeat_interleave"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("is_between_marks", [False, True], ids=["alone", "between marks"])
def test_finding_names_operator_and_line(fn: Callable[..., Any], what: str, is_between_marks: bool) -> None:
    """Between marks the value may be read in a piece, or between two (faults 48, 62)."""
    (found,) = findings_of((lambda x: marked(fn(marked(x)))) if is_between_marks else fn, X)
    line = fn.__code__.co_firstlineno + 1
    assert found.line.place == f"{__file__}:{line}"
    assert found.line.function == fn.__name__
    assert found.line.code.startswith("return")
    assert re.search(what, found.what)
    assert "marked" in found.remedy


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.masked_fill(x > 2, 0.0) + torch.where(x > 1, x, 0.0),
        lambda x: x.clone().index_put_((x > 2,), torch.tensor(0.0)),
        lambda x: x[torch.arange(2)] + x[0],
        lambda x: x + torch.tensor(1.0),
        lambda x: x.to(x.device).to(torch.float64),
        lambda x: torch.repeat_interleave(x, 2, 0),
        lambda x: x.view(x.shape[0] * 2, -1) + x.shape[0],
        lambda x: torch.topk(x, 2)[0] + x.sort()[0][:, :2],
        lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x),
        marked,
    ],
)
def test_no_false_alarm(fn: Callable[..., Any]) -> None:
    assert findings_of(fn, X) == ()


def test_symbolic_sizes_are_no_host_reads() -> None:
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    assert findings_of(lambda x: marked(x + x.shape[0]).reshape(x.shape[0] * 4) / x.shape[0], x) == ()


def test_equal_pieces_are_checked_once_and_all_findings_told() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = marked(x * x.sum().item())
        return x[x > 1] + 1

    assert [one.what.split(" (")[0] for one in findings_of(fn, X)] == [
        "aten._local_scalar_dense.default",
        "Indexing with a mask",
    ]


def reads_after_mark(x: torch.Tensor) -> torch.Tensor:
    return marked(x) * x.sum().item()


@pytest.mark.parametrize("piece_compiler", ["fx", "aot_eager"])
@pytest.mark.parametrize("writes_shared_input", [False, True])
def test_a_value_read_in_a_piece_is_no_business_of_its_compiler(
    piece_compiler: str, writes_shared_input: bool
) -> None:
    """Looking for written inputs runs pieces on fake tensors, and may leave no symbol of the read value behind."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if writes_shared_input:
            y.add_(1)
        return reads_after_mark(x) + y

    base = X.clone()
    forward = compiled(fn, piece_compiler=piece_compiler, capture="breakable")
    actual = forward(base[:2], base[1:])
    torch.testing.assert_close(actual, fn((other := X.clone())[:2], other[1:]))


@pytest.mark.parametrize("piece_compiler", ["fx", "aot_eager"])
@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_capture_is_refused_before_it_records(
    graph_device: GraphDevice, piece_compiler: str, strategy: str
) -> None:
    calls: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return fn(x)

    x = X.to(graph_device.torch_device)
    fn = compiled(reads_after_mark, piece_compiler=piece_compiler)
    torch.testing.assert_close(fn(x), reads_after_mark(x))
    with pytest.raises(CaptureForbiddenError) as caught:
        capture(noted, (x,), strategy=strategy, device=graph_device)
    line = reads_after_mark.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} (return marked(x) * x.sum().item())" in str(caught.value)
    assert "@eager_on_graph" in str(caught.value)
    assert len(calls) == 1, "the first warm-up forward told"
    torch.testing.assert_close(fn(x), reads_after_mark(x))


def test_what_runs_outside_graphs_may_read(graph_device: GraphDevice) -> None:
    """In debug mode, and inside a mark, a compiled forward is eager code."""
    x = X.to(graph_device.torch_device)
    fn = compiled(reads_after_mark, piece_compiler="fx")
    inside = eager_on_graph(fn, fake=torch.empty_like)
    for captured in (
        capture(fn, (x,), debug=True, device=graph_device),
        capture(lambda x: inside(x) + 1, (x,), device=graph_device),
    ):
        assert captured(x).shape == x.shape


def test_copies_between_host_and_device_are_found_by_the_device() -> None:
    """On an accelerator a host tensor is told from a device tensor; traced here on fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sgl_piecewise.passes.validate import validate

    graph = torch.fx.Graph()
    x, host = graph.placeholder("x"), graph.placeholder("host")
    copy = torch.ops.aten._to_copy.default  # What `to` comes to.
    moved = graph.call_function(copy, (host,), {"device": torch.device("cuda")})
    summed = graph.call_function(torch.add, (x, moved))
    back = graph.call_function(copy, (summed,), {"device": torch.device("cpu")})
    graph.output((back,))
    piece = torch.fx.GraphModule(torch.nn.Module(), graph)
    outer = torch.fx.Graph()
    inputs = [outer.placeholder("x"), outer.placeholder("host")]
    call = outer.call_module("piece_0", tuple(inputs))
    outer.output(call)
    root = torch.nn.Module()
    root.piece_0 = piece
    split = torch.fx.GraphModule(root, outer)
    with FakeTensorMode() as mode:
        inputs[0].meta["example_value"] = torch.empty(2, device="cuda")
        inputs[1].meta["example_value"] = torch.empty(2)
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        whats = [str(one.why) for one in validate(split, ()).meta[FINDINGS]]
    assert len(whats) == 2
    assert "pageable host memory" in whats[0]
    assert "from the device to the host" in whats[1]


def test_user_line_of_a_stack_skips_what_is_not_the_users() -> None:
    stack = (
        '  File "/somewhere/model.py", line 7, in forward\n    return self.linear(x)\n'
        f'  File "{torch.__file__.replace("__init__", "nn/modules/linear")}", line 125, in forward\n    return F()\n'
    )
    line = traced_user_line(stack)
    assert (line.place, line.function, line.code) == (
        "/somewhere/model.py:7",
        "forward",
        "return self.linear(x)",
    )
    assert traced_user_line(None).place == "an unknown line"


def test_numbers_that_inductor_bakes_into_its_kernels_are_no_findings() -> None:
    """Falcon indexes with a list: as FX that is a copy from the host, in a kernel it is a constant."""

    def pick(x: torch.Tensor) -> torch.Tensor:
        return x[:, [-2]] * 2 + torch.tensor([1.0])

    for compiler in ("fx", "inductor"):
        forward = compiled(pick, piece_compiler=compiler)
        if compiler == "inductor":
            assert torch.equal(capture(forward, (X,))(X), pick(X))
        else:
            with pytest.raises(CaptureForbiddenError, match="made from host data"):
                capture(forward, (X,))


def test_an_operator_that_takes_symbolic_sizes_in_python_alone_is_looked_at_all_the_same() -> None:
    """A cut by ``F.pad`` with symbolic sizes ended the whole compile."""
    fn = torch.compile(
        lambda x: torch.nn.functional.pad(x, (0, 0, 1, -1)) + 1,
        backend="sgl_piecewise",
        dynamic=True,
        fullgraph=True,
        options={"piece_compiler": "fx"},
    )
    with torch.inference_mode():
        for size in (5, 4):
            x = torch.randn(size, 6)
            torch.testing.assert_close(fn(x), torch.nn.functional.pad(x, (0, 0, 1, -1)) + 1)
