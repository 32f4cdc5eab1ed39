"""The comparison itself: build every strategy, check values, then time what is right.

The order is the method: eager forwards and a first capture load what a process loads once, before
any build is timed; values come before times; all strategies live in one process. This module must
not print.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime.build_profile import profiled
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.devices import graph_device_for
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.runners.served_model import ServedModel
from sgl_piecewise.runtime.stopwatch import Stopwatch, stopwatch_for
from sgl_piecewise.runtime.time_line import CONTAINER, span

from .arms import STRATEGIES, ArmSetup
from .candidate import Candidate
from .checking import Model, check_values
from .end_to_end.arm import ServedSubject
from .end_to_end.measure import check_end_to_end, run_end_to_end
from .end_to_end.options import EndToEndOptions
from .end_to_end.report import EndToEndReport
from .environment import seen_clocks, seen_environment
from .inputs import InputSet, cut_to, group_by_tokens, padded_to, random_tokens
from .options import DEFAULT_STRATEGIES, CompareOptions, default_num_rounds
from .plain import to_plain
from .progress import no_progress, prefixed
from .records import Case
from .report import ComparisonReport, EagerSweep, InputFacts, ModelFacts
from .timing import measure_times
from .verdict import verdict_of

NUM_RANDOM_TOKENS = 8192
"""Tokens in a row that prompts are cut from where the caller gave a model and no text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is compared, on what, and where.

    Attributes:
        model: Takes the positional arguments of an input; returns one row a token.
        input_sets: Ascending by token count.
        device: Captures graphs.
        context: The forward context of every run; None keeps the caller's.
        model_facts: For the report.
        input_facts: For the report.
        served: What the engine serves, for end-to-end arms; or why it cannot serve the model.
        command: The command line, if there was one.
    """

    model: Model
    input_sets: tuple[InputSet, ...]
    device: GraphDevice
    context: ForwardContext | None
    model_facts: ModelFacts
    input_facts: InputFacts
    served: ServedSubject | str
    command: tuple[str, ...] | None = None


def compare(
    model: Model,
    inputs: Sequence[Any],
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    *,
    capture_sizes: Sequence[int] | None = None,
    context: ForwardContext | None = None,
    num_rounds: int | None = None,
    num_warm_ups: int = 1,
    launch_segments: bool | None = None,
    seed: int = 0,
    end_to_end: EndToEndOptions | None = None,
    on_progress: ProgressCallback | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> ComparisonReport:
    """Compares strategies on one model: values against padded eager, then times, build and memory.

    Args:
        model: A module or function that returns one tensor with a row for each token (dim 0).
        inputs: Tuples of the model's positional arguments (or single tensors). Tensors whose dim 0
            is the token count (dim 0 of the first tensor) are padded with zeros; inputs of one
            token count are rotated through.
        strategies: Names from the grid; eager is always the first.
        capture_sizes: Ascending; by default the token counts of the inputs.
        context: The forward context of every run; by default the one that is open.
        num_rounds: Timed rounds at each token count; by default 20 on CUDA and 7 elsewhere.
        num_warm_ups: Untimed calls of each strategy before them.
        launch_segments: Whether closed segments run while capturing; None is capture's default.
        seed: Of the order of strategies in a round and of token counts in the value check.
        end_to_end: Also run the model under execution plans, on random tokens; None for no such arms. A model
            that the execution layer cannot serve has none, and the report says why.
        on_progress: Called with a phase's name, steps done and steps in all.
        profile: File for the profile of the builds as JSON.

    Returns:
        The report. A strategy whose values differ is ``wrong`` in it and has no times.

    Raises:
        ConfigError: An option, strategy or input that cannot be used, or a model that differs from
            itself.
    """
    input_sets = group_by_tokens(inputs)
    torch_device = _device_of(input_sets)
    options = CompareOptions(
        strategies=tuple(strategies),
        capture_sizes=tuple(capture_sizes)
        if capture_sizes is not None
        else tuple(inputs_of.num_tokens for inputs_of in input_sets),
        num_rounds=default_num_rounds(torch_device) if num_rounds is None else num_rounds,
        num_inputs=max(len(inputs_of.inputs) for inputs_of in input_sets),
        num_warm_ups=num_warm_ups,
        launch_segments=launch_segments,
        seed=seed,
    )
    subject = Subject(
        model=model,
        input_sets=input_sets,
        device=graph_device_for(torch_device),
        context=context,
        model_facts=_facts_of(model),
        input_facts=InputFacts(
            source="given by the caller", num_tokens=None, is_repeated=False, is_random=False
        ),
        served=_served(model, seed),
    )
    return run_comparison(subject, options, on_progress, profile, end_to_end)


def run_comparison(
    subject: Subject,
    options: CompareOptions,
    on_progress: ProgressCallback | None = None,
    profile: str | os.PathLike[str] | None = None,
    end_to_end: EndToEndOptions | None = None,
) -> ComparisonReport:
    """Runs a comparison whose subject is ready; see `compare`.

    Raises:
        ConfigError: The longest input does not fit the largest capture size, or see `compare`.
    """
    progress: ProgressCallback = on_progress if on_progress is not None else no_progress
    largest, longest = options.capture_sizes[-1], subject.input_sets[-1].num_tokens
    if longest > largest:
        raise ConfigError(
            f"An input has {longest} tokens, but the largest capture size is {largest}. Add a size of at "
            f"least {longest}, or leave the input out."
        )
    if end_to_end is not None and not isinstance(subject.served, str):
        check_end_to_end(subject.served, end_to_end, options)
    stopwatch = stopwatch_for(subject.device.torch_device)
    clocks = seen_clocks(subject.device.torch_device, "before")
    with _forwards(subject.context), contextlib.ExitStack() as cleanup:
        example = padded_to(subject.input_sets[-1].inputs[0], largest)
        sweep = _sweep_eager(subject.model, example, options.capture_sizes, stopwatch, progress)
        first_capture_s = _first_capture_s(subject.device, stopwatch)
        facts = {"strategy": ", ".join(options.strategies), "device": subject.device.name}
        with profiled(profile, "builds", **facts, emulated=str(subject.device.is_emulated)):
            candidates = _build_candidates(subject, options, example, cleanup, progress)
        _estimate_memory(candidates, subject, options, example)
        check_values(subject.model, candidates, subject.input_sets, seed=options.seed, on_progress=progress)
        measure_times(
            candidates,
            subject.input_sets,
            stopwatch,
            num_rounds=options.num_rounds,
            num_warm_ups=options.num_warm_ups,
            seed=options.seed,
            on_progress=progress,
        )
    # The graphs above are freed: the arms below have the memory to themselves.
    plans = _end_to_end(subject, end_to_end, options, progress)
    clocks += seen_clocks(subject.device.torch_device, "after")
    report = ComparisonReport(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=subject.command,
        options=to_plain(options) | {"end_to_end": to_plain(end_to_end)},
        environment=seen_environment(subject.device, clocks),
        model=subject.model_facts,
        inputs=subject.input_facts,
        capture_sizes=options.capture_sizes,
        cases=_cases(subject.input_sets, options.capture_sizes),
        eager_sweep=sweep,
        first_capture_s=first_capture_s,
        strategies=tuple(candidate.report() for candidate in candidates),
        end_to_end=plans,
        verdict="",
    )
    return dataclasses.replace(report, verdict=verdict_of(report))


def _end_to_end(
    subject: Subject, asked: EndToEndOptions | None, options: CompareOptions, progress: ProgressCallback
) -> EndToEndReport:
    if asked is None:
        return EndToEndReport(why_none="they were not asked for")
    if isinstance(subject.served, str):
        return EndToEndReport(why_none=subject.served)
    with torch.inference_mode():
        return run_end_to_end(subject.served, asked, options, progress)


def _build_candidates(
    subject: Subject,
    options: CompareOptions,
    example: tuple[Any, ...],
    cleanup: contextlib.ExitStack,
    progress: ProgressCallback,
) -> list[Candidate]:
    """Builds every strategy; each is freed by ``cleanup``."""
    setup = ArmSetup(
        model=subject.model,
        example=example,
        capture_sizes=options.capture_sizes,
        device=subject.device,
        launch_segments=options.launch_segments,
    )
    candidates = []
    for strategy in options.strategies:
        arm = STRATEGIES[strategy](setup)
        cleanup.callback(arm.close)
        candidate = Candidate(strategy=strategy, arm=arm)
        with span(f"build {strategy}", CONTAINER):
            candidate.build_arm(prefixed(progress, strategy))
        candidates.append(candidate)
    return candidates


def _estimate_memory(
    candidates: Sequence[Candidate], subject: Subject, options: CompareOptions, example: Any
) -> None:
    """Notes what was to be expected of the pools of piecewise strategies, by one trace that no build holds."""
    compiled = [(one, one.arm.piece_compiler) for one in candidates if one.memory and one.arm.piece_compiler]
    if not compiled:
        return
    from sgl_piecewise.compiler.memory import pool_estimates  # Dynamo takes seconds to import.

    estimates = pool_estimates(
        subject.model,
        example,
        compilers=[compiler for _, compiler in compiled],
        capture_sizes=options.capture_sizes,
        device=subject.device,
    )
    for (candidate, _), estimate in zip(compiled, estimates, strict=True):
        assert candidate.memory is not None, "chosen above"
        candidate.memory = dataclasses.replace(candidate.memory, estimate=estimate)


def _sweep_eager(
    model: Callable[..., Any],
    example: tuple[Any, ...],
    capture_sizes: Sequence[int],
    stopwatch: Stopwatch,
    progress: ProgressCallback,
) -> EagerSweep:
    """Runs eager twice at each capture size, largest first; sizes that do not fit are left out."""
    totals_s = []
    num_forwards = 0
    for name in ("eager, loading kernels", "eager"):
        total_s, num_forwards = 0.0, 0
        for done, size in enumerate(reversed(capture_sizes)):
            progress(name, done, len(capture_sizes))
            arguments = cut_to(example, size)
            try:
                sample = stopwatch.measure(functools.partial(model, *arguments))
            except torch.OutOfMemoryError:
                continue
            total_s += sample.latency_s
            num_forwards += 1
        progress(name, len(capture_sizes), len(capture_sizes))
        totals_s.append(total_s)
    return EagerSweep(first_s=totals_s[0], warm_s=totals_s[1], num_forwards=num_forwards)


def _first_capture_s(device: GraphDevice, stopwatch: Stopwatch) -> float:
    """Captures next to nothing, so that no build pays for what a process loads at its first capture."""
    example = torch.zeros(1, device=device.torch_device)
    return stopwatch.measure(lambda: capture(torch.neg, (example,), device=device).reset()).host_s


@contextlib.contextmanager
def _forwards(context: ForwardContext | None) -> Iterator[None]:
    """Every run of a comparison: in inference mode, as servers run, and under one forward context."""
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        if context is not None:
            stack.enter_context(use_forward_context(context))
        yield


def _cases(input_sets: Sequence[InputSet], capture_sizes: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            num_tokens=inputs.num_tokens,
            capture_size=next(size for size in capture_sizes if size >= inputs.num_tokens),
            num_inputs=len(inputs.inputs),
        )
        for inputs in input_sets
    )


def _device_of(input_sets: Sequence[InputSet]) -> torch.device:
    arguments = input_sets[0].inputs[0]
    return next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))


def _served(model: Model, seed: int) -> ServedSubject | str:
    """Returns the model as the engine serves it, with random tokens; or why it cannot."""
    if not isinstance(model, ServedModel):
        return (
            f"{type(model).__name__} is no model that the execution layer serves: it says nothing of attention layers, "
            "so it has no KV pool"
        )
    ids, _ = random_tokens(NUM_RANDOM_TOKENS, model.vocab_size, seed)
    return ServedSubject(model=model, tokenizer=None, ids=tuple(ids))


def _facts_of(model: Model) -> ModelFacts:
    """Facts of a model that came as an object."""
    name = getattr(model, "__qualname__", type(model).__qualname__)
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    return ModelFacts(
        name=name,
        description=name,
        dtype=str(parameters[0].dtype).removeprefix("torch.") if parameters else "unknown",
        num_parameters=count_parameters(model) if isinstance(model, torch.nn.Module) else None,
        load_s=None,
    )


def count_parameters(module: torch.nn.Module) -> int:
    """Returns the elements of a module's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
