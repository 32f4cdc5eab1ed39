"""The command: exit codes, messages without tracebacks, and the file it writes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_arms import FaultyArm
from typer.testing import CliRunner, Result

from sgl_piecewise import cli
from sgl_piecewise.comparison import report_from_json
from sgl_piecewise.comparison.arms import STRATEGIES
from sgl_piecewise.comparison.options import parse_names
from sgl_piecewise.runtime.errors import SglPiecewiseError

QUICK = ("tiny", "--device", "cpu", "--capture-sizes", "4,8", "--rounds", "2")


def invoke(*arguments: str) -> Result:
    """Runs ``sgl-piecewise compare`` in this process."""
    return CliRunner().invoke(cli.app, ["compare", *arguments], env={"COLUMNS": "100", "TERM": "dumb"})


def message_of(result: Result) -> str:
    """What went to stderr, on one line."""
    assert "Traceback" not in result.stderr
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr).split())


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a model is loaded: what is refused early must not cost minutes."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded before the request was checked")

    monkeypatch.setattr("sgl_piecewise.comparison.language_model.load_model", refuse)


def test_compare_prints_the_table_and_writes_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = invoke(*QUICK, "--strategies", "eager,full,breakable", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "emulated: times say nothing about a GPU" in result.stdout
    assert "bit-equal" in result.stdout
    report = report_from_json(path.read_text())
    assert [strategy.strategy for strategy in report.strategies] == ["eager", "full", "breakable"]
    assert [case.num_tokens for case in report.cases] == [3, 4, 7, 8]
    assert report.options["num_rounds"] == 2
    assert report.command is not None
    assert report.inputs.is_random
    assert len(report.strategies[2].break_names) == 2


def test_compiled_rows_are_compared_unless_others_are_asked_for() -> None:
    default = inspect.signature(cli.compare).parameters["strategies"].default
    assert parse_names(default) == ("eager", "full", "breakable", "fx_piecewise", "tc_piecewise")


def test_a_wrong_strategy_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(
        STRATEGIES, "full", lambda setup: FaultyArm(setup, lambda arm, count, output: output + 1)
    )
    path = tmp_path / "report.json"
    result = invoke(*QUICK, "--strategies", "full", "--json", str(path))
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert report_from_json(path.read_text()).has_failed


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--strategies", "eager,ful"], "did you mean 'full'"),
        (["--strategies", ""], "No strategy"),
        (["--capture-sizes", "0,4"], "at least 1"),
        (["--capture-sizes", "8,4"], "ascend"),
        (["--capture-sizes", "4,4"], "more than once"),
        (["--capture-sizes", ""], "capture sizes"),
        (["--token-counts", "9"], "no graph holds it"),
        (["--rounds", "0"], "num_rounds"),
        (["--dtype", "float8"], "Unknown dtype"),
        (["--device", "tpu"], "Unknown device"),
        (["--text", "/no/such/file"], "No such file"),
        (["--json", "/no/such/folder/report.json"], "Make it first"),
        (["--roundz", "3"], "No such option"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_any_work(arguments: list[str], word: str) -> None:
    result = invoke(*QUICK, *arguments)
    assert result.exit_code == 2, result.output
    assert word in message_of(result)
    assert result.stdout == ""


@pytest.mark.usefixtures("no_model")
def test_cuda_where_there_is_none_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("tiny", "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cpu" in message_of(result)


@pytest.mark.parametrize(
    ("model", "word"),
    [("tini", "did you mean 'tiny'"), ("/no/such/model.gguf", "/no/such/model.gguf")],
)
def test_a_model_that_is_not_there_is_a_message(model: str, word: str) -> None:
    result = invoke(model, *QUICK[1:])
    assert result.exit_code == 2
    assert word in message_of(result)


def test_sizes_over_the_models_positions_are_refused() -> None:
    result = invoke("tiny", "--device", "cpu", "--capture-sizes", "8192")
    assert result.exit_code == 2
    assert "4096 positions" in message_of(result)


def test_traceback_is_shown_on_request() -> None:
    result = invoke("tini", *QUICK[1:], "--traceback")
    assert isinstance(result.exception, SglPiecewiseError)


def test_interrupt_exits_130_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setitem(STRATEGIES, "full", lambda setup: FaultyArm(setup, interrupt))
    result = invoke(*QUICK, "--strategies", "full", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 130
    assert "nothing was written" in message_of(result)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_off_where_stderr_is_no_terminal() -> None:
    assert invoke(*QUICK, "--strategies", "eager").stderr == ""


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sgl_piecewise", "compare", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "--capture-sizes" in done.stdout
