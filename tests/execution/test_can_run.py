"""Why a graph runner says no: mode, graph and size are told apart, counted, and explained."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.models.decoder import Decoder, LayerState
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.real_tokens import TokenLayout
from sgl_piecewise.runtime.batch.scheduling import release
from sgl_piecewise.runtime.model_runner.agreement import RankAgreement
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.runners.execution import Reason
from sgl_piecewise.runtime.runners.padding_policy import PaddingPolicy
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

from .support import OPTIONS, ROWS, extend_and_append, make_runner, plan, prompt, run, tiny_model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(plan("none", "none"))


def reason_of(runner: ModelRunner) -> Reason | None:
    fallback = runner.log.last[-1].fallback
    return None if fallback is None else fallback.reason


def test_more_tokens_than_the_largest_size_run_eager(runner: ModelRunner) -> None:
    reqs = [prompt("a", 9), prompt("b", 8)]
    extend_and_append(runner, reqs)
    assert reason_of(runner) is Reason.SIZE_OVER_LARGEST
    assert "17 tokens, the largest size is 16" in runner.explain(1)
    for req in reqs:
        release(req, runner.allocator, runner.req_to_token)


def test_another_number_of_rows_per_request_is_told(runner: ModelRunner) -> None:
    req = prompt("a", 5)
    extend_and_append(runner, [req])
    run(runner, ForwardMode.TARGET_VERIFY, [req], [ROWS - 1], [1, 2, 3])
    assert reason_of(runner) is Reason.ROWS_PER_REQUEST
    assert f"{ROWS - 1} tokens per request, graphs have {ROWS}" in runner.explain(1)
    release(req, runner.allocator, runner.req_to_token)


def test_counters_hold_mode_runner_size_and_reason(runner: ModelRunner) -> None:
    req = prompt("a", 5)
    before = runner.log.total(mode=ForwardMode.EXTEND, runner="extend")
    extend_and_append(runner, [req])
    assert runner.log.total(mode=ForwardMode.EXTEND, runner="extend") == before + 1
    key = next(key for key in runner.log.counts if key.runner == "extend")
    assert (key.strategy, key.size, key.fallback) == ("none", 8, None)
    assert "extend by extend none" in runner.log.summary()
    release(req, runner.allocator, runner.req_to_token)


def test_padding_over_the_policy_runs_eager() -> None:
    strict = ExecutionPlan(modes=plan("none", "none").modes, padding=PaddingPolicy(max_factor=1.5, floor=2))
    runner = make_runner(strict)
    extend_and_append(runner, [prompt("a", 5)])
    assert reason_of(runner) is Reason.PADDING_TOO_LARGE
    extend_and_append(runner, [prompt("b", 6)])
    assert reason_of(runner) is None


class Unsyncable(Decoder):
    """Waits for the device at one number of tokens, which no graph can hold."""

    def hidden_states(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        if input_ids_T.shape[0] == 2:
            input_ids_T.sum().item()
        return super().hidden_states(input_ids_T, positions_T)


def test_a_capture_that_fails_makes_that_size_fall_back_with_its_reason() -> None:
    plain = tiny_model()
    model = Unsyncable(plain.config, device="cpu", dtype=torch.float32)
    model.load_state_dict(plain.state_dict())
    runner = ModelRunner.ready(model, plan=plan("full", "none", has_verify=False), options=OPTIONS)
    assert runner.graph_build is not None
    assert list(runner.graph_build.failures) == ["decode 2 requests 2 tokens"]
    reqs = [prompt("a", 5), prompt("b", 3), prompt("c", 3)]
    extend_and_append(runner, reqs)
    run(runner, ForwardMode.DECODE, reqs[:2], [1, 1])
    assert reason_of(runner) is Reason.NO_GRAPH
    assert "CaptureForbiddenError" in runner.explain(1)
    for req in reqs[:2]:
        req.token_ids.append(4)
    run(runner, ForwardMode.DECODE, reqs, [1, 1, 1])
    assert runner.log.last[-1].strategy == "full"


class WaitsInItsLastLayer(Decoder):
    """Waits for the device behind two breaks, at one number of tokens."""

    def end_layers(self, state: LayerState) -> torch.Tensor:
        if state.delta.shape[0] == 8:
            state.delta.sum().item()
        return super().end_layers(state)


def test_a_breakable_capture_that_fails_half_way_takes_no_other_size_and_no_value_with_it() -> None:
    """Its closed segments were launched already; the pool and the smaller and larger sizes go on."""
    plain = tiny_model()
    model = WaitsInItsLastLayer(plain.config, device="cpu", dtype=torch.float32)
    model.load_state_dict(plain.state_dict())
    asked = ExecutionPlan(
        modes={
            ForwardMode.EXTEND: ModeStrategy(strategy="breakable", capture_sizes=(4, 8)),
            ForwardMode.DECODE: ModeStrategy(),
        }
    )
    runner = ModelRunner.ready(model, plan=asked, options=OPTIONS)
    assert runner.graph_build is not None
    assert list(runner.graph_build.failures) == ["extend any requests 8 tokens"]
    reference = make_runner(plan("eager", "eager", has_verify=False))
    for length, reason in ((7, Reason.NO_GRAPH), (3, None), (14, None), (8, Reason.NO_GRAPH)):
        found, wanted = (
            extend_and_append(one, [prompt(f"of {length}", length)]) for one in (runner, reference)
        )
        assert reason_of(runner) is reason
        assert found.logits is not None
        assert wanted.logits is not None
        torch.testing.assert_close(
            found.logits.next_token_logits, wanted.logits.next_token_logits, rtol=1e-5, atol=1e-5
        )


def test_a_whole_extend_graph_has_so_many_request_slots() -> None:
    asked = plan("eager", "full", has_verify=False)
    modes = dict(asked.modes)
    modes[ForwardMode.EXTEND] = ModeStrategy(strategy="full", capture_sizes=(16,), request_slots=2)
    runner = make_runner(ExecutionPlan(modes=modes), max_requests=8)
    extend_and_append(runner, [prompt("a", 3), prompt("b", 3)])
    assert runner.log.last[-1].extent.padded_requests == 2
    extend_and_append(runner, [prompt(name, 3) for name in "cd"] + [prompt("e", 1)])
    assert reason_of(runner) is Reason.TOO_MANY_REQUESTS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reads_requests": True}, Reason.REQUEST_READS),
        ({"token_layout": TokenLayout.RANK_LOCAL}, Reason.RANK_LOCAL),
    ],
)
def test_an_extend_graph_refuses_what_it_cannot_hold(options: dict[str, object], reason: Reason) -> None:
    runner = make_runner(plan("eager", "none", has_verify=False), **options)
    extend_and_append(runner, [prompt("a", 3)])
    assert reason_of(runner) is reason


class OtherRankCannot(RankAgreement):
    """Another rank that never has a graph; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def all_can(self, can: bool) -> bool:
        self.asked.append(can)
        return False


def test_all_ranks_take_the_same_decision() -> None:
    other = OtherRankCannot()
    runner = ModelRunner.ready(
        tiny_model(), plan=plan("none", "none", has_verify=False), options=OPTIONS, agreement=other
    )
    req = prompt("a", 3)
    extend_and_append(runner, [req])
    run(runner, ForwardMode.DECODE, [req], [1])
    assert other.asked == [False, True, True, False]  # decode, extend; every rank is asked alike
    assert {key.fallback for key in runner.log.counts} == {"another_rank_cannot"}
