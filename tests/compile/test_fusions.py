"""Fusions that change numerics: off unless asked, within a tolerance of eager, and true to updated parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.compiler.options import options_from
from sgl_piecewise.passes.join_linears import side_by_side
from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.errors import ConfigError, MovedAddressError

from .support import compiled

HIDDEN = 32
BOTH = ["join_linears", "fuse_rms_norm"]


@eager_on_graph(fake=lambda q, k, v: torch.empty_like(v))
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q * k).sum(-1, keepdim=True).sigmoid() * v


class Norm(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN, dtype=dtype) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = Norm(dtype)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(3))
        self.gate, self.up = (nn.Linear(HIDDEN, 48, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(48, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + attend(self.q(h), self.k(h), self.v(h))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def model(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(dtype) for _ in range(2))).to(device).eval()
    return layers.requires_grad_(False)


def targets_after(fn: Any, *args: Any, fusions: list[str]) -> list[str]:
    """Returns what the graph calls after these fusions."""
    names: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        forward = gm.forward
        split = run_passes(gm, example_inputs, pipeline(fusions=fusions))
        for graph in [split, *(one for _, one in split.named_children())]:
            nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()
            names.extend(getattr(node.target, "__name__", str(node.target)) for node in nodes)
        return forward

    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return names


def test_off_unless_asked() -> None:
    x = torch.randn(4, HIDDEN)
    plain = targets_after(model(torch.device("cpu")), x, fusions=[])
    assert "side_by_side" not in plain
    assert "rms_norm" not in plain
    torch.compiler.reset()
    fused = targets_after(model(torch.device("cpu")), x, fusions=BOTH)
    assert fused.count("side_by_side") == 6, "weights and biases of q, k, v; gate and up; in two layers"
    assert fused.count("rms_norm") == 2, "two distinct pieces have it"
    assert "rsqrt" not in fused


@pytest.mark.parametrize(
    ("piece_compiler", "dtype", "fusions"),
    [
        ("fx", torch.float32, ["join_linears"]),
        ("fx", torch.bfloat16, ["join_linears"]),
        ("fx", torch.bfloat16, ["fuse_rms_norm"]),
        ("aot_eager", torch.bfloat16, BOTH),
    ],
)
def test_values_within_tolerance(piece_compiler: str, dtype: torch.dtype, fusions: list[str]) -> None:
    """The error against float64 may be twice eager's own."""
    ours = model(torch.device("cpu"), dtype)
    exact = model(torch.device("cpu"), dtype).double()
    x = torch.randn(8, HIDDEN, dtype=dtype)
    eager_error = (ours(x) - exact(x.double())).abs().max()
    fn = compiled(ours, piece_compiler=piece_compiler, fusions=fusions)
    error = (fn(x) - exact(x.double())).abs().max()
    assert error <= 2 * eager_error + torch.finfo(dtype).eps
    assert fn(x).stride() == ours(x).stride()


def test_parameters_updated_in_place_are_seen_and_replaced_ones_noticed(graph_device: GraphDevice) -> None:
    device = graph_device.torch_device
    ours = model(device)
    x = torch.randn(8, HIDDEN, device=device)
    fn = compiled(ours, piece_compiler="fx", fusions=BOTH)
    captured = capture(fn, (x,), device=graph_device)
    layer: Any = ours[1]
    for parameter in (layer.q.weight, layer.k.bias, layer.up.weight):
        parameter.mul_(1.5)
        for one in (fn, captured):
            torch.testing.assert_close(one(x), ours(x), rtol=1e-4, atol=1e-5)
    layer.v.weight.data = layer.v.weight.data * 2
    torch.testing.assert_close(fn(x), ours(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(MovedAddressError, match=r"1\.[qkv]\.weight"):
        captured.check_static_addresses()


def test_joined_weights_are_the_parameters_memory() -> None:
    one, two = (nn.Parameter(torch.randn(n, 4), requires_grad=False) for n in (3, 2))
    before = torch.cat([one, two])
    whole = side_by_side(one, two)
    torch.testing.assert_close(whole, before, rtol=0, atol=0)
    assert whole.data_ptr() == one.data_ptr() == side_by_side(one, two).data_ptr()
    two.zero_()
    assert not whole[3:].any()


def test_state_and_copies_of_a_module_stay_what_they_are() -> None:
    ours = model(torch.device("cpu"))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    x = torch.randn(8, HIDDEN)
    expected = ours(x)
    compiled(ours, piece_compiler="fx", fusions=BOTH)(x)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    other = copy.deepcopy(ours)
    other[0].q.weight.zero_()  # type: ignore[union-attr]
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b, x: F.linear(x, a) + F.linear(x + 1, b),
        lambda a, b, x: (F.linear(x, a), x.add_(1), F.linear(x, b))[2],
        lambda a, b, x: (F.linear(x, a), attend(x, x, x), F.linear(x, b))[2],
        lambda a, b, x: F.linear(x, a) + F.linear(x, a),
        lambda a, b, x: F.linear(x, a) + F.linear(x, x[:1] * 2),
    ],
    ids=[
        "other input",
        "input written between",
        "a mark between",
        "one weight twice",
        "weight that is computed",
    ],
)
def test_linears_stay_apart(fn: Any) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(5, 4)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            return fn(self.a, self.b, x)

    ours, x = Holder().requires_grad_(False), torch.randn(3, 4)
    assert "side_by_side" not in targets_after(ours, x.clone(), fusions=["join_linears"])


def test_views_that_need_adjacent_rows_keep_linears_apart(caplog: pytest.LogCaptureFixture) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).view(-1) + self.b(x).view(-1)

    ours, x = Flat().requires_grad_(False), torch.randn(3, 4)
    got = compiled(ours, piece_compiler="fx", fusions=["join_linears"])(x)
    torch.testing.assert_close(got, ours(x), rtol=0, atol=0)
    assert "No linear layers are joined" in caplog.text


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)),
        lambda w, x: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)),
        lambda w, x: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)),
        lambda w, x: w[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda w, x: w * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda w, x: w.double() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).double(),
    ],
    ids=["other dimension", "integer epsilon", "cube", "one weight", "other value", "other dtype"],
)
def test_what_is_not_quite_a_norm_stays(fn: Any) -> None:
    w, x = torch.rand(4), torch.randn(3, 4)
    assert "rms_norm" not in targets_after(fn, w, x, fusions=["fuse_rms_norm"])
    torch.testing.assert_close(
        compiled(fn, piece_compiler="fx", fusions=["fuse_rms_norm"])(w, x), fn(w, x), equal_nan=True
    )


def test_norm_whose_parts_are_used_elsewhere_keeps_them() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.pow(2).mean(-1, keepdim=True)
        return w * (x * torch.rsqrt(mean + 1e-6)), mean

    w, x = torch.rand(4), torch.randn(3, 4)
    got, expected = compiled(fn, piece_compiler="fx", fusions=["fuse_rms_norm"])(w, x), fn(w, x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("fusions", "what"),
    [
        (["join_linear"], "Unknown fusion 'join_linear'. did you mean 'join_linears'"),
        ("join_linears", "must be a list of names"),
        ([3], "Unknown fusion 3"),
    ],
)
def test_names_that_are_none(fusions: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        options_from({"fusions": fusions})


def test_fusions_are_part_of_the_key_of_equal_pieces() -> None:
    assert options_from({"fusions": BOTH}).key_text() != options_from({}).key_text()
