"""Logits of every plan against eager's, with tokens given: values before times, by the comparison's own rule.

Prompts give a row for each of their tokens (and the last one's again), decoding a row for each step and request.
Lengths and batch sizes between those of the graphs are checked too, so padding is. A row's reference is padded eager:
a model runner with the same sizes and no graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.runners.served_model import ServedModel

from ..judging import Outputs, differences, judge, worst
from ..records import CaseValues
from ..tolerance import widened
from .arm import PlanArm
from .candidate import Phase, PlanCandidate


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedCase:
    """Sequences that one forward, or some decode steps of one batch, compute.

    Attributes:
        size: The prompt's length, or the batch size.
        groups: What is run one after the other: a prompt alone, or the requests of a batch. Token ids.
    """

    size: int
    groups: tuple[tuple[tuple[int, ...], ...], ...]


def check_plans(
    candidates: Sequence[PlanCandidate],
    references: Mapping[str, PlanArm],
    model: ServedModel,
    *,
    prompts: Sequence[CheckedCase],
    batches: Sequence[CheckedCase],
    context_tokens: int,
    on_progress: ProgressCallback,
) -> None:
    """Compares logits of all plans, and notes the first tokens that they give.

    Args:
        candidates: Built; eager first.
        references: Eager with the padding of each plan, by the name of `NamedPlan.padded_eager`; built.
        model: What all serve.
        prompts: Single prompts, by length.
        batches: Requests that decode together, by number; their first ``context_tokens`` are prompts.
        context_tokens: See there.
        on_progress: Told after every case.

    Raises:
        ConfigError: A plan is to be judged by a tolerance, and the model cannot be widened.
    """
    wide = None
    if any(one.takes_part and not (one.plan.is_reference or one.keeps_bits) for one in candidates):
        wide = _wide_logits(model)
    cases = [(case, True) for case in prompts] + [(case, False) for case in batches]
    for done, (case, is_prompt) in enumerate(cases):
        on_progress("end to end: checking values", done, len(cases))
        check = _CaseCheck(candidates, references, wide, case, None if is_prompt else context_tokens)
        check.run()
    for candidate in candidates:
        candidate.judge_excused()
    on_progress("end to end: checking values", len(cases), len(cases))


class _CaseCheck:
    """The check of one prompt length or batch size; ``context_tokens`` is None for prompts."""

    def __init__(
        self,
        candidates: Sequence[PlanCandidate],
        references: Mapping[str, PlanArm],
        wide: Callable[[Sequence[int]], torch.Tensor] | None,
        case: CheckedCase,
        context_tokens: int | None,
    ) -> None:
        self._candidates = candidates
        self._references = references
        self._wide = wide
        self._case = case
        self._context = context_tokens

    def run(self) -> None:
        """Checks every group and adds one entry to each candidate that ran."""
        found: dict[str, list[CaseValues]] = {candidate.name: [] for candidate in self._candidates}
        for index, group in enumerate(self._case.groups):
            try:
                eager = self._logits(self._candidates[0].arm, group)
                padded = {name: self._logits(arm, group) for name, arm in self._references.items()}
            except torch.OutOfMemoryError as err:
                for candidate in self._candidates:
                    self._phase(candidate).problems[self._case.size] = f"eager is out of memory: {err}"
                return
            wide: torch.Tensor | None = None
            for candidate in self._candidates:
                if not candidate.takes_part:
                    continue
                phase = self._phase(candidate)
                if candidate.plan.is_reference:
                    # Eager itself is compared with eager padded as the first other plan pads.
                    first = next(iter(padded.values()), eager)
                    size = candidate.arm.padded_tokens()
                    entry = differences(first, eager, eager, self._case.size, size)
                    found[candidate.name].append(entry)
                    self._note_token(phase, index, eager)
                    continue
                got = self._run(candidate, phase, group)
                if got is None:
                    continue
                if not candidate.keeps_bits and wide is None:
                    wide = self._wide_rows(group)
                outputs = Outputs(
                    reference=padded[candidate.plan.padded_eager.name],
                    eager=eager,
                    got=got,
                    wide=None if candidate.keeps_bits else wide,
                )
                judgement = judge(
                    outputs,
                    num_tokens=self._case.size,
                    padded_size=candidate.arm.padded_tokens(),
                    input_index=index,
                )
                if judgement.first_difference is not None:
                    phase.first_difference = judgement.first_difference
                if judgement.values is not None:
                    found[candidate.name].append(judgement.values)
                self._note_token(phase, index, got)
        for candidate in self._candidates:
            if found[candidate.name]:
                self._phase(candidate).values.append(worst(found[candidate.name]))

    def _phase(self, candidate: PlanCandidate) -> Phase:
        return candidate.first_token if self._context is None else candidate.decode

    def _run(
        self, candidate: PlanCandidate, phase: Phase, group: tuple[tuple[int, ...], ...]
    ) -> torch.Tensor | None:
        return candidate.run(phase, self._case.size, lambda: self._logits(candidate.arm, group))

    def _logits(self, arm: PlanArm, group: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        if self._context is None:
            return arm.prompt_logits(group[0])
        return arm.decode_logits(group, self._context)

    def _wide_rows(self, group: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        assert self._wide is not None, "made before the check"
        if self._context is None:
            rows_TV = self._wide(group[0])
            return torch.cat([rows_TV, rows_TV[-1:]])
        # A batch's rows come step by step, request by request.
        rows_BSV = torch.stack([self._wide(sequence)[self._context :] for sequence in group])
        return rows_BSV.transpose(0, 1).flatten(0, 1)

    def _note_token(self, phase: Phase, index: int, logits_TV: torch.Tensor) -> None:
        if self._context is None:
            phase.tokens[self._case.size, index] = int(logits_TV[-1].argmax())


def _wide_logits(model: ServedModel) -> Callable[[Sequence[int]], torch.Tensor]:
    """Returns what computes a sequence's logits in a wider dtype, without a cache."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            "A plan that rounds otherwise than eager is judged by eager's own error against the model in a wider "
            f"dtype, and {type(model).__name__} is no module that can be copied. Name only plans without inductor."
        )
    copied, _ = widened(model)
    wide: Any = copied
    device = model.device

    def logits(ids: Sequence[int]) -> torch.Tensor:
        tokens_T = torch.tensor(ids, dtype=torch.int64, device=device)
        with use_forward_context(ForwardContext(attention=CausalAttention())):
            hidden_TE = wide.hidden_states(tokens_T, torch.arange(len(ids), device=device))
            found: torch.Tensor = wide.compute_logits(hidden_TE)
        return found

    return logits
