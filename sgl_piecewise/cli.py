"""The command ``sgl-piecewise``: words in, a report out, an exit code that says how it went.

Exit codes: 0 done and right; 1 a strategy is wrong or could not be built; 2 a request that cannot
be met; 130 interrupted. Errors of ours are one message without a traceback.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sgl_piecewise.models.loading import DEFAULT_MODEL

from . import cli_generate, cli_profile
from .comparison.end_to_end.options import end_to_end_options
from .comparison.end_to_end.plans import DEFAULT_PLANS
from .comparison.inputs import read_text
from .comparison.language_model import ModelRequest, compare_language_model
from .comparison.options import (
    COMMAND_STRATEGIES,
    DEFAULT_CPU_ROUNDS,
    DEFAULT_CUDA_ROUNDS,
    CompareOptions,
    default_num_rounds,
    default_sizes,
    parse_names,
    parse_sizes,
    resolve_device,
    resolve_dtype,
    token_counts_for,
)
from .comparison.report import check_can_write, write_report
from .comparison.table import print_report
from .console import (
    EXIT_WRONG,
    Depth,
    DeviceName,
    DtypeName,
    MayDownload,
    ModelName,
    ShowsTraceback,
    errors_as_messages,
    progress_bar,
)

app = typer.Typer(
    name="sgl-piecewise",
    help="CUDA graphs for PyTorch models that cannot be captured whole.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(importlib.metadata.version("sgl-piecewise"))
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Keeps commands named, however few there are."""


@app.command()
def compare(
    model: ModelName = DEFAULT_MODEL,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    strategies: Annotated[
        str, typer.Option(help="Cells of compile x capture, comma-separated; eager is always among them.")
    ] = ",".join(COMMAND_STRATEGIES),
    capture_sizes: Annotated[
        str | None,
        typer.Option(
            help="As 16,32,64 or a range of the default ladder as 4..4096. "
            "Default: 4..4096 on CUDA, 16,32,64,128 on a CPU."
        ),
    ] = None,
    token_counts: Annotated[
        str | None,
        typer.Option(help="Token counts to run. Default: every capture size and one between each two."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text to run on. Default: one that ships.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the whole report to this file.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Also write the profile of the builds to this file.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help=f"Timed rounds. Default: {DEFAULT_CUDA_ROUNDS} on CUDA, {DEFAULT_CPU_ROUNDS} on a CPU."
        ),
    ] = None,
    inputs: Annotated[int, typer.Option(help="Different inputs at each token count.")] = 2,
    warm_ups: Annotated[int, typer.Option(help="Untimed calls before the rounds of a token count.")] = 1,
    layers: Depth = None,
    launch_segments: Annotated[
        bool | None,
        typer.Option(
            "--launch-segments/--no-launch-segments",
            help="Whether segments run while capturing. Default: capture's.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights, random tokens and orders.")] = 0,
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end/--no-end-to-end",
            help="Also serve the model under execution plans: time to first token, decode tokens/s.",
        ),
    ] = True,
    plans: Annotated[
        str, typer.Option(help="Comma-separated DECODE+EXTEND, each a strategy; one alone is both.")
    ] = ",".join(DEFAULT_PLANS),
    prompt_lengths: Annotated[
        str | None,
        typer.Option(help="Prompts to time. Default: 64,256,1024,2048 on CUDA, 16,32 on a CPU."),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Requests that decode together. Default: 1,8,32 on CUDA, 1,2 on a CPU."),
    ] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of each before it decodes. Default: 1024 on CUDA, 16 on a CPU."),
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Attention backend of these plans: auto, torch, triton, flashinfer.")
    ] = "auto",
    download: MayDownload = True,
    traceback: ShowsTraceback = False,
) -> None:
    """Compare strategies on a model: values against eager first, then times, builds and memory."""
    with errors_as_messages(traceback):
        torch_device = resolve_device(device)
        sizes = default_sizes(torch_device) if capture_sizes is None else parse_sizes(capture_sizes)
        options = CompareOptions(
            strategies=parse_names(strategies),
            capture_sizes=sizes,
            num_rounds=default_num_rounds(torch_device) if rounds is None else rounds,
            num_inputs=inputs,
            num_warm_ups=warm_ups,
            launch_segments=launch_segments,
            seed=seed,
        )
        served_as = None
        if end_to_end:
            served_as = end_to_end_options(
                torch_device,
                sizes,
                plans=parse_names(plans),
                prompt_lengths=_sizes_or_none(prompt_lengths, "prompt lengths"),
                batch_sizes=_sizes_or_none(batch_sizes, "batch sizes"),
                context_tokens=context_tokens,
                attention=attention,
            )
        for path in (json, profile):
            if path is not None:
                check_can_write(path)
        request = ModelRequest(
            name=model,
            device=torch_device,
            dtype=resolve_dtype(dtype, torch_device),
            text=read_text(text),
            token_counts=token_counts_for(sizes)
            if token_counts is None
            else parse_sizes(token_counts, "token counts"),
            num_layers=layers,
            may_download=download,
            command=("sgl-piecewise", *sys.argv[1:]),
        )
        with progress_bar() as on_progress:
            report = compare_language_model(request, options, on_progress, profile, served_as)
        if json is not None:
            write_report(report, json)
            Console(stderr=True).print(Text(f"Wrote {json}"))
        print_report(report, Console())
    if report.has_failed:
        raise typer.Exit(EXIT_WRONG)


def _sizes_or_none(text: str | None, what: str) -> tuple[int, ...] | None:
    return None if text is None else parse_sizes(text, what)


app.command()(cli_generate.generate)
app.command()(cli_profile.profile)
app.command()(cli_profile.cache)


def main() -> None:
    """Runs the command; the entry point of the package."""
    app()
