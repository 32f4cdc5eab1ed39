"""End-to-end arms from beginning to end: every plan built, checked, then timed in turn with the others.

This module must not print.
"""

from __future__ import annotations

import contextlib
import gc

import torch

from sgl_piecewise.runtime.attention.choice import resolve_attention_backend
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.errors import ConfigError, PoolError
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.served_model import ServedModel
from sgl_piecewise.runtime.stopwatch import stopwatch_for

from ..inputs import windows_of_tokens
from ..options import CompareOptions, token_counts_for
from ..progress import prefixed
from .arm import PlanArm, ServedSubject
from .candidate import PlanCandidate
from .checking import CheckedCase, check_plans
from .options import NUM_CHECKED_STEPS, EndToEndOptions
from .plans import NamedPlan, named_plan
from .report import EndToEndReport
from .timing import PlanTimer


def check_end_to_end(
    subject: ServedSubject, options: EndToEndOptions, compare_options: CompareOptions
) -> None:
    """Checks options against the model, before any long work.

    Raises:
        ConfigError: The model was made for shorter requests, or the attention backend is unknown.
        MissingExtraError: The attention backend's package is not installed.
    """
    resolve_attention_backend(options.attention, subject.model.device)
    longest = options.longest_request(compare_options.num_timed_samples)
    if longest > subject.model.max_positions:
        raise ConfigError(
            f"The longest request of the end-to-end arms has {longest} tokens, and the model was made for "
            f"{subject.model.max_positions}. Give shorter prompts or fewer rounds, or switch the arms off."
        )


def run_end_to_end(
    subject: ServedSubject,
    options: EndToEndOptions,
    compare_options: CompareOptions,
    on_progress: ProgressCallback,
) -> EndToEndReport:
    """Builds, checks and times the model under every plan.

    Args:
        subject: The model, its tokenizer, and tokens to cut prompts from.
        options: Plans, prompt lengths, batch sizes.
        compare_options: Rounds, warm-ups, inputs and seed.
        on_progress: Called with a phase's name, steps done and steps in all.

    Raises:
        ConfigError: See `check_end_to_end`.
    """
    check_end_to_end(subject, options, compare_options)
    device = subject.model.device
    limits = _limits(subject.model, options, options.longest_request(compare_options.num_timed_samples))
    prompts, batches = _cases(subject, options, compare_options.num_inputs)
    with contextlib.ExitStack() as cleanup:

        def arm_of(plan: NamedPlan) -> PlanArm:
            execution_plan = plan.execution_plan(
                batch_sizes=options.batch_sizes,
                prompt_lengths=options.prompt_lengths,
                attention=options.attention,
            )
            arm = PlanArm(subject, plan, execution_plan, limits)
            cleanup.callback(arm.close)
            return arm

        candidates = []
        for name in options.plans:
            plan = named_plan(name)
            arm = arm_of(plan)
            candidate = PlanCandidate(plan=plan, arm=arm, left_out=arm.why_other_plan)
            if candidate.left_out is None:
                candidate.build_arm(prefixed(on_progress, f"end to end: {name}"))
            candidates.append(candidate)
        if candidates[0].failure is not None:
            return EndToEndReport(why_none=f"eager could not be built: {candidates[0].failure.rstrip('.')}")
        references: dict[str, PlanArm] = {}
        for candidate in candidates[1:]:
            reference = candidate.plan.padded_eager
            if candidate.takes_part and reference.name not in references:
                arm = arm_of(reference)
                try:
                    arm.build(prefixed(on_progress, f"end to end: {reference.name}"))
                except (PoolError, torch.OutOfMemoryError) as err:
                    candidate.failure = f"what it is compared with could not be built: {err}"
                else:
                    references[reference.name] = arm
        check_plans(
            candidates,
            references,
            subject.model,
            prompts=prompts,
            batches=batches,
            context_tokens=options.context_tokens,
            on_progress=on_progress,
        )
        for arm in references.values():
            arm.close()
        timer = PlanTimer(
            candidates,
            stopwatch_for(device),
            num_rounds=compare_options.num_rounds,
            num_warm_ups=compare_options.num_warm_ups,
            seed=compare_options.seed,
        )
        prompts = [case for case in prompts if case.size in options.prompt_lengths]
        timer.time_first_tokens(prompts, on_progress)
        batches = [case for case in batches if case.size in options.batch_sizes]
        timer.time_decoding(
            batches, options.context_tokens, on_progress, steps_per_sample=options.steps_per_sample
        )
        report = EndToEndReport(
            why_none=None,
            prompt_lengths=options.prompt_lengths,
            batch_sizes=options.batch_sizes,
            context_tokens=options.context_tokens,
            plans=tuple(candidate.report() for candidate in candidates),
        )
    gc.collect()
    return report


def _limits(model: ServedModel, options: EndToEndOptions, longest: int) -> RunnerOptions:
    """Returns the limits of every arm: room for the longest prompt, or for the largest batch."""
    most_requests = options.batch_sizes[-1]
    return RunnerOptions(
        max_requests=most_requests,
        # A forward may be traced with a few more tokens than the largest graph has: room for them as one request.
        max_context=min(2 * longest, model.max_positions),
        max_extend_tokens=options.prompt_lengths[-1],
        max_total_tokens=most_requests * longest,
        # Nothing else grows on a CPU meanwhile, and its pools are small.
        margin_bytes=RunnerOptions.margin_bytes if model.device.type == "cuda" else 1 << 26,
        window_fraction=1.0,
    )


def _cases(
    subject: ServedSubject, options: EndToEndOptions, num_inputs: int
) -> tuple[list[CheckedCase], list[CheckedCase]]:
    """Cuts prompts and the requests of batches out of the tokens; also of sizes between those of the graphs."""
    ids, host = list(subject.ids), torch.device("cpu")
    sets, _ = windows_of_tokens(ids, token_counts_for(options.prompt_lengths), num_inputs, host)
    prompts = []
    for one in sets:
        # Only what is timed is rotated through; lengths in between are there for their padding.
        windows = one.inputs if one.num_tokens in options.prompt_lengths else one.inputs[:1]
        groups = tuple((_ids_of(window),) for window, _ in windows)
        prompts.append(CheckedCase(size=one.num_tokens, groups=groups))
    length = options.context_tokens + NUM_CHECKED_STEPS
    batches = []
    for batch_size in token_counts_for(options.batch_sizes):
        (requests,), _ = windows_of_tokens(ids, (length,), batch_size, host)
        group = tuple(_ids_of(window) for window, _ in requests.inputs)
        batches.append(CheckedCase(size=batch_size, groups=(group,)))
    return prompts, batches


def _ids_of(tokens_T: torch.Tensor) -> tuple[int, ...]:
    return tuple(tokens_T.tolist())
