"""A request's result is its own: whoever shares the batch, whatever stands in padding, whatever ran before.

Bit for bit, at equal padded size, on the torch attention backend. Before every forward the scratch
slots hold NaN and the static buffers of both graph runners hold indices of nowhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.scheduling import release
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

from .support import OPTIONS, make_runner, prompt, run

NOWHERE = -(2**30)


@dataclass(frozen=True)
class Case:
    """A target of some length, others beside it, its place among them, and a last, mixed prefill."""

    target: int
    others: tuple[int, ...]
    place: int
    late: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    target = draw(st.integers(1, 6))
    others = draw(st.lists(st.integers(1, 5), max_size=2).map(tuple))
    return Case(
        target=target,
        others=others,
        place=draw(st.integers(0, len(others))),
        late=draw(st.integers(1, 10)),
    )


@functools.cache
def runner_of(decode: str, extend: str) -> ModelRunner:
    """One padded size for every batch: four requests to decode, sixteen tokens to extend."""
    slots = OPTIONS.max_requests if extend == "full" else None
    plan = ExecutionPlan(
        modes={
            ForwardMode.DECODE: ModeStrategy(strategy=decode, capture_sizes=(OPTIONS.max_requests,)),
            ForwardMode.EXTEND: ModeStrategy(
                strategy=extend, capture_sizes=(OPTIONS.max_extend_tokens,), request_slots=slots
            ),
        }
    )
    return make_runner(plan)


def poisoned(
    runner: ModelRunner, mode: ForwardMode, reqs: list[Req], num_new: list[int], target: Req
) -> torch.Tensor:
    """Runs one forward on poisoned scratch and tails; returns the target's logits."""
    runner.pool.poison_scratch()
    for graph_runner in (runner._decode, runner._extend):
        assert graph_runner is not None
        for buffer in graph_runner.buffers.static_tensors().values():
            buffer.fill_(NOWHERE)
    output = run(runner, mode, reqs, num_new)
    assert output.execution.fallback is None, str(output.execution)
    assert output.logits is not None
    return output.logits.next_token_logits[reqs.index(target)].clone()


def play(runner: ModelRunner, case: Case, *, is_alone: bool) -> list[torch.Tensor]:
    target = prompt("target", case.target)
    reqs = [] if is_alone else [prompt(f"other {index}", length) for index, length in enumerate(case.others)]
    reqs.insert(0 if is_alone else case.place, target)
    found = [poisoned(runner, ForwardMode.EXTEND, reqs, [len(req.token_ids) for req in reqs], target)]
    for req in reqs:
        req.token_ids.append(3)
    late = [] if is_alone else [prompt("late", case.late)]
    members = [*reqs, *late]
    found.append(
        poisoned(
            runner, ForwardMode.MIXED, members, [1] * len(reqs) + [len(req.token_ids) for req in late], target
        )
    )
    for token in (5, 9):
        for req in members:
            req.token_ids.append(token)
        members.reverse()
        found.append(poisoned(runner, ForwardMode.DECODE, members, [1] * len(members), target))
    for req in members:
        release(req, runner.allocator, runner.req_to_token)
    return found


@pytest.mark.parametrize(
    ("decode", "extend"), [("none", "none"), ("full", "breakable"), ("breakable", "full")]
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(case=cases())
def test_a_result_is_independent_of_company_padding_order_and_history(
    decode: str, extend: str, case: Case
) -> None:
    runner = runner_of(decode, extend)
    reference = runner_of("none", "none")
    together = play(runner, case, is_alone=False)
    alone = play(reference, case, is_alone=True)
    for step, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
        assert theirs.isfinite().all()
        assert torch.equal(ours, theirs), f"step {step}"
