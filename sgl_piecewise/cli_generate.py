"""The command ``sgl-piecewise generate``: prompts in, text out, and how every forward ran."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from sgl_piecewise.models.loading import DEFAULT_MODEL
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.sampling import NO_TOP_K, SamplingParams
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.records import PhaseClock

from .comparison.options import resolve_device, resolve_dtype
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
from .generation.engine import EngineOptions, OfflineEngine
from .generation.printing import TokenPrinter, closing_line
from .generation.requests import GenerationRequest
from .generation.setup import EngineSetup, LogprobOptions, build_engine, load_for, plan_of, requests_of


def generate(
    model: ModelName = DEFAULT_MODEL,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be repeated.")] = None,
    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="Token ids as 1,2,3 in place of a text; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only so many most likely tokens; -1 for all.")] = NO_TOP_K,
    top_p: Annotated[float, typer.Option(help="Only the most likely tokens of this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of random draws and of random weights.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a prompt's output.")] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Print the log-probability of every new token.")
    ] = False,
    top_logprobs: Annotated[
        int, typer.Option(help="Also print so many most likely tokens in each place; implies --logprobs.")
    ] = 0,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(help="Also print those of the prompt's tokens after this one; implies --logprobs."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A TOML file: how to compile and capture every forward mode.")
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(help="Capture strategy of decoding: eager, none (padded eager), full, breakable."),
    ] = None,
    extend: Annotated[str | None, typer.Option(help="Capture strategy of prompts, likewise.")] = None,
    prefill_attention: Annotated[str | None, typer.Option(help="Attention backend of prompts.")] = None,
    decode_attention: Annotated[str | None, typer.Option(help="Attention backend of decoding.")] = None,
    kernels: Annotated[
        str, typer.Option(help="Fused kernels: torch, triton, flashinfer; auto takes Triton's on CUDA.")
    ] = "auto",
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    max_requests: Annotated[int, typer.Option(help="Prompts that run at once.")] = 8,
    max_context: Annotated[int, typer.Option(help="Tokens of one prompt and its output.")] = 1024,
    max_extend_tokens: Annotated[int, typer.Option(help="New tokens of prompts in one forward.")] = 256,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Tokens in the KV pool. Default: what fits and can be used.")
    ] = None,
    layers: Depth = None,
    overlap: Annotated[
        bool,
        typer.Option(
            help="Launch each forward before the tokens of the one before it are read; same tokens."
        ),
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why the last forwards ran as they did.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Make every captured forward one break: no graph, same path.")
    ] = False,
    download: MayDownload = True,
    traceback: ShowsTraceback = False,
) -> None:
    """Generate text: continuous batching on graphs, and which forward ran how."""
    with errors_as_messages(traceback):
        if not prompt and not prompt_ids:
            raise ConfigError("There is no prompt. Give one with --prompt TEXT, or with --prompt-ids 1,2,3.")
        torch_device = resolve_device(device)
        setup = EngineSetup(
            model=model,
            device=torch_device,
            dtype=resolve_dtype(dtype, torch_device),
            plan=plan_of(
                plan,
                {ForwardMode.DECODE: decode, ForwardMode.EXTEND: extend},
                prefill_attention,
                decode_attention,
            ),
            runner=RunnerOptions(
                max_requests=max_requests,
                max_context=max_context,
                max_extend_tokens=max_extend_tokens,
                max_total_tokens=max_total_tokens,
                kernels=kernels,
                is_debug=debug,
            ),
            engine=EngineOptions(has_overlap=overlap),
            num_layers=layers,
            seed=seed,
            may_download=download,
        )
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        with progress_bar() as on_progress:
            loaded = load_for(setup)
            requests = requests_of(
                prompt or [],
                prompt_ids or [],
                loaded,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop_texts=tuple(stop or ()),
                logprobs=LogprobOptions(prompt_start=prompt_logprobs, top_num=top_logprobs)
                if logprobs or top_logprobs or prompt_logprobs is not None
                else None,
            )
            engine = build_engine(setup, loaded, on_progress)
        printer = TokenPrinter(Console(), num_prompts=len(requests), tokenizer=loaded.tokenizer)
        errors = Console(stderr=True, soft_wrap=True)
        _generate_and_tell(engine, requests, printer, errors, explains=explain)
    for message in printer.errors:
        errors.print(Text.assemble(("Error: ", "bold red"), message))
    if printer.errors:
        raise typer.Exit(EXIT_WRONG)


def _generate_and_tell(
    engine: OfflineEngine,
    requests: list[GenerationRequest],
    printer: TokenPrinter,
    errors: Console,
    *,
    explains: bool,
) -> None:
    """Generates, and says how the forwards ran, also where it was interrupted."""
    clock = PhaseClock()
    try:
        with clock.phase("generate"):
            engine.generate(requests, on_event=printer)
    finally:
        printer.close()
        for change in engine.runner.plan_changes:
            errors.print(Text(f"Plan: {change}"))
        if explains:
            errors.print(Text(engine.runner.explain()))
        if engine.runner.log.counts:  # A refused prompt is told alone.
            errors.print(Text(closing_line(engine, printer.num_tokens, clock)))
