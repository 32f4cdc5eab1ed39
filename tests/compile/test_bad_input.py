"""What cannot be compiled says so with its cause, its source line, and what to do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.compiler.options import CompileOptions, options_from
from sgl_piecewise.compiler.piece_compilers import piece_compiler_for
from sgl_piecewise.compiler.tracing_errors import explained_tracing_errors
from sgl_piecewise.passes.dump import new_dump_folder
from sgl_piecewise.runtime import torch_private_compiling
from sgl_piecewise.runtime.errors import CompileError, ConfigError, MarkResultError
from sgl_piecewise.runtime.mark_tracing import trace_marked_call

from .support import compiled

X = torch.arange(12.0).reshape(3, 4)


@eager_on_graph(fake=torch.empty_like)
def marked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def layered(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = marked(x.sin() * 2)
    return x.cos()


def broken(piece: GraphModule, example_inputs: Sequence[Any]) -> Any:
    piece.graph.erase_node(piece.graph.output_node())  # A compiler may spoil the piece before it fails.
    raise KeyError("no such kernel")


# Pieces and dumps --------------------------------------------------------------------------------


def test_piece_compiler_that_raises_keeps_its_cause_and_dumps_the_piece(tmp_path: Path) -> None:
    failed = r"failed on piece_0 \(KeyError: 'no such kernel'\)"
    with pytest.raises(CompileError, match=failed) as caught, explained_tracing_errors():
        compiled(layered, piece_compiler=broken, dump_folder=tmp_path)(X)
    assert isinstance(caught.value.__cause__, KeyError)
    folder = tmp_path / "trace_0" / "pieces"
    assert str(folder) in str(caught.value)
    assert "return" in str(caught.value)
    text = (folder / "piece_0.py").read_text()
    assert "sin" in text
    assert "x = marked(x.sin() * 2)" in text, "the user's line stands above the code that it gave"


def test_piece_compiler_that_raises_says_how_to_get_a_dump() -> None:
    with pytest.raises(CompileError, match=r"(?s)dump_folder.*placeholder"), explained_tracing_errors():
        compiled(layered, piece_compiler=broken)(X)


def test_dump_holds_the_graph_before_and_after_each_pass(tmp_path: Path) -> None:
    fn = compiled(layered, piece_compiler="fx", fusions=["join_linears"], dump_folder=str(tmp_path / "new"))
    fn(X)
    fn(X.double())
    assert sorted(os.listdir(tmp_path / "new")) == ["trace_0", "trace_1"]
    trace = tmp_path / "new" / "trace_0"
    assert sorted(os.listdir(trace)) == [
        "0_traced.py",
        "1_drop_shape_only.py",
        "2_join_linears.py",
        "3_split_at_marks.py",
        "4_deduplicate.py",
        "5_validate.py",
        "6_estimate_memory.py",
        "memory.txt",
        "pieces",
    ]
    assert "empty_like" in (trace / "0_traced.py").read_text()
    assert "empty_like" not in (trace / "1_drop_shape_only.py").read_text()
    assert "class piece_1" in (trace / "3_split_at_marks.py").read_text()
    assert "class piece_1" not in (trace / "4_deduplicate.py").read_text()
    assert "f32[3, 4]" in (trace / "pieces" / "piece_0.py").read_text()
    assert "break marked x2: results 512" in (trace / "memory.txt").read_text()


def test_findings_are_dumped(tmp_path: Path) -> None:
    compiled(lambda x: x * x.sum().item(), piece_compiler="fx", dump_folder=str(tmp_path))(X)
    assert "_local_scalar_dense" in (tmp_path / "trace_0" / "findings.txt").read_text()


def test_dump_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        new_dump_folder(str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="dump_folder must be a path, got 3"):
        options_from({"dump_folder": 3})


# Tracing -----------------------------------------------------------------------------------------


def printing(x: torch.Tensor) -> torch.Tensor:
    y = marked(x * 2)
    print(y)  # noqa: T201
    return y + 1


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return marked(x)
    return x


@pytest.mark.parametrize(("fn", "line"), [(printing, 2), (branching, 1)])
def test_dynamo_that_cannot_trace_is_told_with_line_and_remedy(fn: Any, line: int) -> None:
    with pytest.raises(CompileError) as caught, explained_tracing_errors():
        compiled(fn, piece_compiler="fx")(X)
    message = str(caught.value)
    assert f"{__file__}:{fn.__code__.co_firstlineno + line}" in message
    assert f"in {fn.__name__}" in message
    assert "@eager_on_graph" in message
    assert caught.value.__cause__ is not None


def test_trace_that_stops_early_is_told(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    """Without fullgraph Dynamo goes on in silence with what it has."""
    fn = torch.compile(printing, backend="sgl_piecewise", options={"piece_compiler": "fx"})
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        torch.testing.assert_close(fn(X), X * 2 + 2)
    assert (
        f"{__file__}:{printing.__code__.co_firstlineno + 2} (print(y)  # noqa: T201) in printing"
        in caplog.text
    )
    assert "@eager_on_graph" in caplog.text


def test_whole_traces_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise.compiler"):
        compiled(layered, piece_compiler="fx")(X)
    assert "stopped a trace" not in caplog.text


def test_own_errors_pass_as_they_are() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fusions'"), explained_tracing_errors():
        compiled(layered, fusion=[])(X)
    with pytest.raises(ValueError, match="mine"), explained_tracing_errors():
        raise ValueError("mine")


def test_a_fusion_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'join_linears' more than once"):
        options_from({"fusions": ["join_linears", "fuse_rms_norm", "join_linears"]})


def test_recording_autograd_is_refused_whole() -> None:
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        pytest.raises(CompileError, match="compiles for inference"),
        explained_tracing_errors(),
    ):
        compiled(torch.nn.Linear(4, 4), piece_compiler="fx")(torch.ones(2, 4))


# Marks -------------------------------------------------------------------------------------------


@eager_on_graph
def reads_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(x.numpy().tobytes()), dtype=x.dtype).view(x.shape)


def test_body_that_cannot_run_on_fake_tensors_shows_two_lines_that_help() -> None:
    """And what it shows does help: the lines are tried."""
    with pytest.raises(CompileError) as caught, explained_tracing_errors():
        compiled(lambda x: reads_memory(x) + 1, piece_compiler="fx")(X)
    message = str(caught.value)
    assert "Mark 'reads_memory'" in message
    lines = message.splitlines()
    start = next(index for index, text in enumerate(lines) if "@eager_on_graph(fake=" in text)
    decorator, definition = lines[start : start + 2]
    assert definition.strip() == "def reads_memory(...):"
    namespace: dict[str, Any] = {"torch": torch, "eager_on_graph": eager_on_graph}
    body = definition.strip().replace("(...)", "(x)") + "\n    return x + 2"
    exec(f"{decorator.strip()}\n{body}", namespace)  # noqa: S102
    torch.compiler.reset()
    fn = compiled(lambda x: namespace["reads_memory"](x) + 1, piece_compiler="fx")
    torch.testing.assert_close(fn(X), X + 3)


def test_fake_of_another_shape_is_told_with_both_sides() -> None:
    @eager_on_graph(fake=lambda x: x.new_empty(x.shape[0]))
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True)

    fn = compiled(lambda x: total(x) * 2, piece_compiler="fx")
    with pytest.raises(MarkResultError, match=r"total.*result: traced \(\(3,\).*now \(\(3, 1\)"):
        fn(X)


def _prints(x: torch.Tensor) -> torch.Tensor:
    print("fake")  # noqa: T201
    return torch.empty_like(x)


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("boom")


@pytest.mark.parametrize("is_whole", [True, False], ids=["fullgraph", "parts"])
@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (_prints, "print"),
        (_raises, "KeyError"),
        (lambda: None, "Argument mismatch"),
        (lambda x: x.sum().item(), "item|data-dependent"),
    ],
    ids=["prints", "raises", "signature", "value"],
)
def test_fake_that_cannot_be_traced_is_named(fake: Callable[..., Any], reason: str, is_whole: bool) -> None:
    """Without fullgraph a call whose trace Dynamo gave up in its middle went round until the stack was full."""
    mark = eager_on_graph(fake=fake)(lambda x: x + float(x.max()))
    fn = torch.compile(
        lambda x: mark(x * 2), backend="sgl_piecewise", options={"piece_compiler": "fx"}, fullgraph=is_whole
    )
    with pytest.raises(CompileError, match=rf"Mark '.*<lambda>': its fake cannot be traced.*({reason})"):
        fn(X)


def test_marked_call_whose_trace_is_given_up_in_its_middle_runs_its_body_once_untraced() -> None:
    calls = []

    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    torch.testing.assert_close(trace_marked_call(eager_on_graph(body), (X,), {}), X + 1)
    assert calls == [False]


# Piece compilers of others -----------------------------------------------------------------------


def test_tensorrt_gets_the_option_that_makes_its_failures_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be installed where there is no GPU: a stand-in registered under its name takes the call."""
    seen: list[dict[str, Any]] = []

    def stand_in(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        seen.append(kwargs)
        return gm.forward

    found = {"torch_tensorrt": stand_in}
    monkeypatch.setattr(torch_private_compiling, "registered_backend", found.get)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", lambda name: None)
    compile_piece = piece_compiler_for(options_from({"piece_compiler": "torch_tensorrt"}))
    compile_piece(torch.fx.symbolic_trace(lambda x: (x + 1,)), [X])
    assert seen == [{"options": {"pass_through_build_failures": True}}]


def test_unwrapped_by_plain_torch_compile_the_error_is_the_inner_one() -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(layered, piece_compiler=broken)(X)
    assert isinstance(caught.value.inner_exception, CompileError)


def test_unknown_setting_of_inductor_is_named_before_anything_compiles() -> None:
    for name, message in (("max_autotun", "did you mean 'max_autotune'"), ("zzz", "list_options")):
        with pytest.raises(ConfigError, match=f"inductor_config names '{name}'.*{message}"):
            piece_compiler_for(CompileOptions(inductor_config={name: True}))


def test_unknown_piece_compiler_lists_what_a_user_would_choose() -> None:
    with pytest.raises(ConfigError, match="did you mean 'inductor'") as caught:
        piece_compiler_for(CompileOptions(piece_compiler="inducter"))
    assert "TESTING_ONLY" not in str(caught.value)
    assert "fx" in str(caught.value)
    assert callable(piece_compiler_for(CompileOptions(piece_compiler="aot_eager")))


def test_compile_none_is_the_grids_first_row() -> None:
    x = torch.randn(4, 8)
    with torch.inference_mode():
        captured = capture(torch.sin, (x,), compile="none")
        assert torch.equal(captured(x), torch.sin(x))
        with pytest.raises(ConfigError, match="nothing is compiled"):
            capture(torch.sin, (x,), compile="none", compile_options={"fusions": []})
