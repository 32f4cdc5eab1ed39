"""The backend: found by name, typed options, piece compilers, errors that name what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

from sgl_piecewise import eager_on_graph
from sgl_piecewise.compiler.options import CompileOptions, options_from
from sgl_piecewise.compiler.piece_compilers import piece_compiler_for
from sgl_piecewise.runtime.errors import CompileError, ConfigError, PieceCompilerUnavailable

from .support import compiled, noted_breaks

X = torch.arange(12.0).reshape(3, 4)


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def layered(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = marked(x.sin() + 1)
    return x.cos()


class Counting:
    """A piece compiler that counts what it compiles and runs it as it is."""

    def __init__(self) -> None:
        self.pieces: list[GraphModule] = []
        self.examples: list[list[Any]] = []

    def __call__(self, piece: GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.pieces.append(piece)
        self.examples.append(list(example_inputs))
        return piece


def test_found_by_name_in_a_fresh_interpreter() -> None:
    """Nothing of ours is imported first."""
    code = (
        "import torch\n"
        "f = torch.compile(lambda x: x.sin() + 1, backend='sgl_piecewise', options={'piece_compiler': 'fx'})\n"
        "x = torch.ones(3)\n"
        "assert torch.equal(f(x), x.sin() + 1)\n"
        "assert 'sgl_piecewise' in torch.compiler.list_backends()\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_mark_without_dynamo_imports_no_tracing() -> None:
    code = (
        "import sys, torch\n"
        "from sgl_piecewise.runtime.mark import eager_on_graph\n"
        "eager_on_graph(lambda x: x + 1)(torch.ones(2))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert 'sgl_piecewise.runtime.mark_tracing' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("piece_compiler", ["fx", "eager", "aot_eager", Counting()])
def test_piece_compilers_that_keep_every_bit(piece_compiler: Any) -> None:
    with noted_breaks() as expected_names:
        expected = layered(X)
    with noted_breaks() as names:
        torch.testing.assert_close(
            compiled(layered, piece_compiler=piece_compiler)(X), expected, rtol=0, atol=0
        )
    assert names == expected_names == ["marked"] * 4


def test_equal_pieces_compile_once() -> None:
    counting = Counting()
    compiled(layered, piece_compiler=counting)(X)
    assert len(counting.pieces) == 2


def test_piece_compilers_get_fake_inputs_with_symbolic_sizes() -> None:
    counting = Counting()
    x = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    fn = compiled(layered, piece_compiler=counting)
    for rows in (5, 9, 3):
        x = torch.ones(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(fn(x), layered(x), rtol=0, atol=0)
    assert len(counting.pieces) == 2
    tensors = [
        value for examples in counting.examples for value in examples if isinstance(value, torch.Tensor)
    ]
    assert all(isinstance(tensor.shape[0], torch.SymInt) for tensor in tensors)


def test_piece_that_writes_shared_memory_runs_as_fx(caplog: pytest.LogCaptureFixture) -> None:
    """Compilers take their inputs for distinct memory."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        top, whole = x[:1], x
        marked(x)
        top.mul_(2)
        return whole + top

    counting = Counting()
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        result = compiled(fn, piece_compiler=counting)(X)
    torch.testing.assert_close(result, fn(X), rtol=0, atol=0)
    assert len(counting.pieces) == 1
    assert "piece_1 writes an input that shares memory" in caplog.text
    torch.testing.assert_close(compiled(fn, piece_compiler="aot_eager")(X), fn(X), rtol=0, atol=0)


def test_inputs_changed_in_place_are_changed() -> None:
    def fn(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = marked(x * 2)
        cache.index_put_((slots,), y)
        return marked(y)

    for piece_compiler in ("fx", "aot_eager"):
        ours, eager = torch.zeros(5, 4), torch.zeros(5, 4)
        slots = torch.tensor([4, 0, 2])
        got = compiled(fn, piece_compiler=piece_compiler)(X, ours, slots)
        torch.testing.assert_close(got, fn(X, eager, slots), rtol=0, atol=0)
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


# Options -----------------------------------------------------------------------------------------


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'piece_compiler'"):
        options_from({"piece_compilr": "fx"})
    with pytest.raises(BackendCompilerFailed, match="did you mean 'piece_compiler'"):
        compiled(layered, piece_compilr="fx")(X)


def test_defaults() -> None:
    assert options_from(None) == CompileOptions(piece_compiler="inductor", inductor_config={})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"piece_compiler": 3}, "must be a name or a callable"),
        ({"capture": "breakble"}, "did you mean 'breakable'"),
        ({"outputs": "views"}, "did you mean 'view'"),
        ({"capture_after": 0}, "capture_after is 0; it must be an integer of at least 1"),
        ({"max_graphs": True}, "max_graphs is True"),
        ({"capture_sizes": [8, 4]}, "capture_sizes must ascend"),
        ({"capture": "none", "capture_sizes": [4]}, "capture_sizes is given, but capture is 'none'"),
        ({"capture": "none", "max_graphs": 4}, "max_graphs is given, but capture is 'none'"),
        ({"inductor_config": 3}, "must be a mapping"),
        ({"piece_compiler": "fx", "inductor_config": {"max_autotune": True}}, "leave one of them out"),
        ({"piece_compiler": "fx", "cache_folder": "somewhere"}, "only what Inductor compiled is kept"),
        ({"inductor_config": {"triton.cudagraphs": True}}, "Capture has one owner"),
        ({"fusions": [["join_linears"]]}, "Unknown fusion"),
        ({"dump_folder": ""}, "dump_folder must be a path, got ''"),
        ("fx", "must be a mapping of names to values"),
        (["piece_compiler"], "must be a mapping of names to values"),
    ],
)
def test_options_that_cannot_be_met(options: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        options_from(options)


def test_modes_are_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="has no modes"):
        torch.compile(layered, backend="sgl_piecewise", mode="reduce-overhead")(X)


@pytest.mark.parametrize(
    ("name", "error", "what"),
    [
        ("inducter", ConfigError, "did you mean 'inductor'"),
        ("sgl_piecewise", ConfigError, "itself"),
        ("FX", ConfigError, "did you mean 'fx'"),
        ("cudagraphs", ConfigError, "Capture has one owner"),
    ],
)
def test_piece_compiler_that_does_not_exist(name: str, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        piece_compiler_for(CompileOptions(piece_compiler=name))


@pytest.mark.parametrize(("name", "extra"), [("openvino", "openvino"), ("torch_tensorrt", "tensorrt")])
def test_absent_piece_compiler_names_its_extra(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PieceCompilerUnavailable, match=rf"sgl-piecewise\[{extra}\]"):
        piece_compiler_for(CompileOptions(piece_compiler=name))


def test_last_compile_before_dynamo_gives_up_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: torch.Tensor, label: str) -> torch.Tensor:
        return marked(x) + len(label)

    forward = torch.compile(fn, backend="sgl_piecewise", options={"piece_compiler": "fx"})
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        for number in range(7):
            forward(X, "x" * number)
        assert "recompile_limit" not in caplog.text
        forward(X, "x" * 7)
    assert "PyTorch will run any other call of it uncompiled" in caplog.text


# Errors ------------------------------------------------------------------------------------------


def test_piece_compiler_that_raises_is_named_with_the_piece_and_its_cause() -> None:
    def broken(piece: GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise KeyError("no such kernel")

    with pytest.raises(
        BackendCompilerFailed, match=r"failed on piece_0 \(KeyError: 'no such kernel'\)"
    ) as caught:
        compiled(layered, piece_compiler=broken)(X)
    inner = caught.value.inner_exception
    assert isinstance(inner, CompileError)
    assert isinstance(inner.__cause__, KeyError)
    assert "sin" in str(inner)


def test_piece_compiler_that_returns_no_callable() -> None:
    with pytest.raises(BackendCompilerFailed, match="returned a int for piece_0"):
        compiled(layered, piece_compiler=lambda piece, example_inputs: 3)(X)


def test_recording_autograd_is_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        model = torch.nn.Linear(4, 4)
        with pytest.raises(BackendCompilerFailed, match="compiles for inference"):
            compiled(model, piece_compiler="fx")(torch.ones(2, 4))
        torch.compiler.reset()
        with torch.no_grad():
            compiled(model, piece_compiler="fx")(torch.ones(2, 4))
