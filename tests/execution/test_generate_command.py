"""The command generate: text on stdout, what ran on stderr, exit codes."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from sgl_piecewise import cli
from sgl_piecewise.console import EXIT_INTERRUPTED, EXIT_REQUEST, errors_as_messages
from sgl_piecewise.generation.engine import OfflineEngine
from sgl_piecewise.generation.printing import TokenPrinter
from sgl_piecewise.generation.requests import FinishReason, TokenEvent
from sgl_piecewise.models.tokenizer import Tokenizer
from sgl_piecewise.models.weights.random import random_decoder

from .support import ctrl_c_raises

SMALL = ("--device", "cpu", "--max-context", "48", "--max-extend-tokens", "8", "--max-requests", "2")
QUICK = ("tiny", *SMALL, "--layers", "1", "--max-new-tokens", "4")
GRAPHS_OFF = ("--decode", "none", "--extend", "none")


def invoke(*arguments: str) -> Result:
    """Runs ``sgl-piecewise generate`` in this process."""
    return CliRunner().invoke(cli.app, ["generate", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def message_of(result: Result) -> str:
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_tokens_are_the_same_with_graphs_and_without_and_the_closing_line_says_what_ran() -> None:
    prompts = ("--prompt-ids", "1,2,3", "--prompt-ids", "4,5,6,7,8,9,10")
    with_graphs, without = invoke(*QUICK, *prompts), invoke(*QUICK, *GRAPHS_OFF, *prompts)
    assert with_graphs.exit_code == 0, with_graphs.stderr
    assert with_graphs.stdout == without.stdout
    assert re.search(r"prompt 1 \(length\): (\d+ ){4}\nprompt 2", with_graphs.stdout)
    assert "emulated: times say nothing about a GPU" in with_graphs.stderr
    assert "by decode full" in with_graphs.stderr
    assert "by extend breakable" in with_graphs.stderr
    assert "mixed by extend none" in without.stderr


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_generated_text_is_written_as_it_is(num_prompts: int, is_terminal: bool) -> None:
    """Textualize/rich#3672, blacklanternsecurity/bbot#3258: tabs became spaces; terminals obeyed control characters."""
    file = io.StringIO(newline="")
    console = Console(file=file, force_terminal=is_terminal, color_system=None, width=20)
    printer = TokenPrinter(console, num_prompts=num_prompts, tokenizer=Tokenizer(backend=None))
    for text, reason in (
        ("if x:\n\ty = [b]1[/b]\r\n\x1b[2J\rover", None),
        (" " + "long " * 9, FinishReason.LENGTH),
    ):
        printer(TokenEvent(request_id="one", token_id=1, text=text, finish_reason=reason))
    printer.close()
    escape = "\\x1b[2J\\x0dover" if is_terminal else "\x1b[2J\rover"
    text = f"if x:\n\ty = [b]1[/b]\r\n{escape} " + "long " * 9 + "\n"
    assert file.getvalue() == text if num_prompts == 1 else file.getvalue().endswith(f"(length): {text}")


def test_what_a_terminal_has_no_character_for_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """abhiksark/pythonlings#73: where stdout was ASCII, the first other character ended the command."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    with errors_as_messages(False):
        printer = TokenPrinter(Console(), num_prompts=1, tokenizer=Tokenizer(backend=None))
        printer(
            TokenEvent(request_id="one", token_id=1, text="né\N{SNOWMAN}", finish_reason=FinishReason.LENGTH)
        )
    assert written.getvalue() == b"n\\xe9\\u2603\n"


def test_without_overlap_the_output_is_the_same() -> None:
    prompts = ("--prompt-ids", "1,2,3", "--prompt-ids", "4,5,6,7,8,9,10", "--prompt-ids", "7")
    found = [invoke(*QUICK, *GRAPHS_OFF, *prompts, switch) for switch in ("--overlap", "--no-overlap")]
    assert found[0].exit_code == 0, found[0].stderr
    assert found[0].stdout == found[1].stdout


@pytest.mark.parametrize("ids", ["", "1,999999", ",".join(["1"] * 60)])
def test_a_refused_prompt_is_told_alone(ids: str) -> None:
    result = invoke(*QUICK, "--prompt-ids", ids)
    assert result.exit_code == EXIT_REQUEST
    assert message_of(result).startswith("Error: Request 'prompt 1'")


def test_a_plan_file_is_followed_and_the_command_line_is_on_top(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[modes.decode]\nstrategy = "eager"\n[modes.extend]\nstrategy = "none"\n')
    result = invoke(*QUICK, "--prompt-ids", "1,2", "--plan", str(path), "--extend", "eager", "--explain")
    assert result.exit_code == 0, result.stderr
    assert "3 decode by eager; 1 extend by eager" in result.stderr
    assert "not decode: switched_off" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "There is no prompt"),
        (("--prompt", "Hello"), "has no tokenizer"),
        (("--prompt-ids", "1,x"), "whole numbers"),
        (("--prompt-ids", ""), "empty"),
        (("--prompt-ids", "1", "--kernels", "tritn"), "did you mean 'triton'"),
        (("--prompt-ids", "256"), "ids are 0 to 255"),
        (("--prompt-ids", ",".join(["1"] * 48)), "over max_context"),
        (("--prompt-ids", "1", "--decode", "ful"), "did you mean 'full'"),
        (("--prompt-ids", "1", "--decode-attention", "tritn"), "did you mean 'triton'"),
        (("--prompt-ids", "1", "--prefill-attention", ""), "attention backend ''"),
        (
            ("--prompt-ids", "1", "--decode", "tc_piecewise"),
            "'breakable' with compile = \"inductor\" in a plan",
        ),
        (("--prompt-ids", "1", "--temperature", "-1"), "temperature"),
        (("--prompt-ids", "1", "--max-requests", "0"), "max_requests"),
        (("--prompt-ids", "1", "--max-context", "99999"), "4096 positions"),
        (("--prompt-ids", "1", "--plan", "missing.toml"), "cannot be read"),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "max_new_tokens"),
        (("--prompt-ids", "1,2", "--prompt-logprobs", "2"), "prompt 1 has 2 tokens"),
        (("--prompt-ids", "1,2", "--prompt-logprobs", "-1"), "start_len must not be negative"),
        (("--prompt-ids", "1,2", "--top-logprobs", "-1"), "top_num must not be negative"),
        (("--prompt-ids", "1,2", "--top-logprobs", "300"), "the model knows 256"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_message_and_exit_code_2(
    arguments: tuple[str, ...], words: str
) -> None:
    result = invoke(*QUICK, *GRAPHS_OFF, *arguments)
    assert result.exit_code == EXIT_REQUEST
    assert words in message_of(result)


def test_logprobs_are_printed_below_each_prompt() -> None:
    prompts = ("--prompt-ids", "1,2,3", "--prompt-ids", "4,5")
    result = invoke(*QUICK, *GRAPHS_OFF, *prompts, "--top-logprobs", "2", "--prompt-logprobs", "1")
    assert result.exit_code == 0, result.stderr
    entry = r"-\d+\.\d{4}  \d+  of \d+ -\d+\.\d{4}, \d+ -\d+\.\d{4}\n"
    first = rf"prompt 1 \(length\): (\d+ ){{4}}\n(  prompt +{entry}){{1}}(  new +{entry}){{4}}"
    assert re.search(rf"{first}prompt 2 \(length\): (\d+ ){{4}}\n(  new +{entry}){{4}}$", result.stdout)
    plain = invoke(*QUICK, *GRAPHS_OFF, *prompts[:2], "--logprobs")
    assert re.search(r"^(\d+ ){4}\n(  new +-\d+\.\d{4}  \d+\n){4}$", plain.stdout)


def test_nan_logits_make_the_exit_code_1_and_name_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        model = random_decoder(*args, **kwargs)
        model.embed_tokens.weight[7] = float("nan")
        return model

    monkeypatch.setattr("sgl_piecewise.models.loading.random_decoder", broken)
    result = invoke(*QUICK, *GRAPHS_OFF, "--prompt-ids", "1,2", "--prompt-ids", "1,7")
    assert result.exit_code == cli.EXIT_WRONG
    assert "prompt 2 (error)" in result.stdout
    assert "The logits of request 'prompt 2' hold NaN" in message_of(result)


def test_ctrl_c_shows_what_came_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    step = OfflineEngine._step
    steps = 0

    def interrupted(self: OfflineEngine) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(OfflineEngine, "_step", interrupted)
    with ctrl_c_raises():
        result = invoke(*QUICK, *GRAPHS_OFF, "--prompt-ids", "1,2", "--prompt-ids", "3")
    assert result.exit_code == EXIT_INTERRUPTED
    assert re.search(r"prompt 1 \(interrupted\): (\d+ ){2}\n", result.stdout)
    assert "4 tokens" in result.stderr
