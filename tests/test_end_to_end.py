"""End-to-end arms of a comparison: values before times, through the engine, on the emulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparison_arms import SmallModel, small_inputs

from sgl_piecewise.comparison import ComparisonReport, compare
from sgl_piecewise.comparison.end_to_end.arm import PlanArm
from sgl_piecewise.comparison.end_to_end.options import EndToEndOptions, end_to_end_options
from sgl_piecewise.comparison.end_to_end.plans import named_plan
from sgl_piecewise.comparison.end_to_end.report import PlanReport
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.attention.torch_paged import TorchAttention
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.context import ForwardContext
from sgl_piecewise.runtime.errors import ConfigError, PoolError
from sgl_piecewise.runtime.graph_backends.base import GraphKey
from sgl_piecewise.runtime.graph_backends.captured import FullGraphBackend

OPTIONS = EndToEndOptions(
    plans=("full+breakable",), prompt_lengths=(4, 8), batch_sizes=(1, 3), context_tokens=6
)


def tiny_model() -> Decoder:
    config = dataclasses.replace(
        named_shape("tiny"), hidden_size=32, intermediate_size=48, head_dim=16, vocab_size=64
    )
    return random_decoder(config, device="cpu", dtype=torch.float32, seed=1)


def compare_tiny(*plans: str, model: Any = None, **changes: Any) -> ComparisonReport:
    """Compares eager alone, and the plans end to end."""
    model = tiny_model() if model is None else model
    asked = dataclasses.replace(OPTIONS, **({"plans": plans} if plans else {}), **changes)
    inputs = [(torch.arange(4), torch.arange(4))]
    context = ForwardContext(attention=CausalAttention())
    return compare(model, inputs, ["eager"], num_rounds=2, context=context, end_to_end=asked)


def plan_of(report: ComparisonReport, name: str) -> PlanReport:
    return next(plan for plan in report.end_to_end.plans if plan.plan == name)


@pytest.fixture(scope="module")
def report() -> ComparisonReport:
    return compare_tiny("full+breakable", "full", "eager+breakable", "fx_piecewise")


def test_plans_are_equal_to_padded_eager_and_timed_at_every_size(report: ComparisonReport) -> None:
    assert [plan.plan for plan in report.end_to_end.plans] == [
        "eager",
        "full+breakable",
        "full",
        "eager+breakable",
        "fx_piecewise",
    ]
    assert [plan.status for plan in report.end_to_end.plans] == ["reference"] + ["equal"] * 4
    assert not report.has_failed
    for plan in report.end_to_end.plans:
        assert [times.num_tokens for times in plan.first_token.times] == [4, 8]
        assert [times.num_tokens for times in plan.decode.times] == [1, 3]
        assert [rate.batch_size for rate in plan.decode_rates] == [1, 3]
        assert all(len(times.samples_s) == 2 for phase in plan.phases for times in phase.times)
        rate, times = plan.decode_rates[1], plan.decode.times[1]
        assert rate.tokens_per_s.low == pytest.approx(3 / max(times.samples_s))
    assert plan_of(report, "eager").first_token.times[0].ratio_to_eager is None
    assert plan_of(report, "full").first_token.times[0].ratio_to_eager is not None


def test_sizes_between_those_of_the_graphs_are_checked_so_padding_is(report: ComparisonReport) -> None:
    values = plan_of(report, "full+breakable").first_token.values
    assert [(entry.num_tokens, entry.padded_size) for entry in values] == [(3, 4), (4, 4), (7, 8), (8, 8)]
    # Both inputs: a row for each token, and the last one's as the engine has it.
    assert [entry.num_rows for entry in values] == [4, 5, 8, 9]
    values = plan_of(report, "full+breakable").decode.values
    assert [(entry.num_tokens, entry.num_rows) for entry in values] == [(1, 4), (3, 12)]


def test_graphs_are_counted(report: ComparisonReport) -> None:
    build = plan_of(report, "full").build
    assert build is not None
    assert build.num_graphs == 4
    assert build.pool_bytes > 0
    eager = plan_of(report, "eager").build
    assert eager is not None
    assert eager.num_graphs == 0


def test_the_verdict_says_what_agrees_and_nothing_of_emulated_speed(report: ComparisonReport) -> None:
    assert (
        "Through the engine full+breakable, full, eager+breakable and fx_piecewise agree with padded eager"
        in (report.verdict)
    )
    assert "4 prompt lengths and 2 batch sizes" in report.verdict
    assert "fastest" not in report.verdict


def test_a_compiled_plan_is_judged_by_eagers_own_error() -> None:
    compiled = plan_of(compare_tiny("full+tc_piecewise"), "full+tc_piecewise")
    assert compiled.status == "close"
    for entry in (*compiled.first_token.values, *compiled.decode.values):
        assert entry.max_error is not None
        assert entry.eager_error is not None
        assert 0 < entry.max_error <= 4 * entry.eager_error + 1e-6
    assert compiled.first_token.times
    assert compiled.build is not None
    assert compiled.build.import_s >= 0


def faulty(
    monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[PlanArm, Any], Any], name: str = "full"
) -> None:
    """Makes one plan's arm give something else."""
    original = getattr(PlanArm, method)

    def changed(self: PlanArm, *arguments: Any) -> Any:
        result = original(self, *arguments)
        return change(self, result) if self.plan.name == name else result

    monkeypatch.setattr(PlanArm, method, changed)


@pytest.mark.parametrize("method", ["prompt_logits", "decode_logits"])
def test_a_plan_with_other_logits_is_wrong_and_gets_no_speed(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def last_bit(arm: PlanArm, logits: torch.Tensor) -> torch.Tensor:
        logits[1, 2] = torch.nextafter(logits[1, 2], torch.tensor(torch.inf))
        return logits

    faulty(monkeypatch, method, last_bit)
    report = compare_tiny("full", "full+breakable")
    wrong = plan_of(report, "full")
    assert wrong.status == "wrong"
    assert report.has_failed
    assert wrong.first_token.times == wrong.decode.times == ()
    assert wrong.decode_rates == ()
    found = (wrong.first_token if method == "prompt_logits" else wrong.decode).first_difference
    assert found is not None
    assert found.index == (1, 2)
    assert "full is WRONG end to end: at" in report.verdict
    assert plan_of(report, "full+breakable").status == "equal"


def test_a_timed_token_that_is_not_the_checked_one_makes_the_plan_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits may be right with given tokens, and the engine wrong: then its times are worth nothing."""
    faulty(monkeypatch, "first_token", lambda arm, token: (token + 1) % 64)
    wrong = plan_of(compare_tiny("full"), "full")
    assert wrong.status == "wrong"
    assert wrong.first_token.first_difference is not None
    assert "when it was timed" in wrong.first_token.first_difference.got
    assert wrong.decode.times == ()


def test_a_size_without_a_graph_is_a_problem_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward that fell back to eager is not taken for a replay."""
    build = FullGraphBackend.build

    def refuse(self: FullGraphBackend, key: GraphKey, forward: Any) -> None:
        if key.mode is ForwardMode.DECODE and key.num_requests == 3:
            self._note_failure(key, "out of graph memory")
            return
        build(self, key, forward)

    monkeypatch.setattr(FullGraphBackend, "build", refuse)
    partial = plan_of(compare_tiny("full+breakable"), "full+breakable")
    assert partial.status == "equal"
    assert [(problem.num_tokens, problem.reason) for problem in partial.decode.problems] == [
        (3, "ran eager: no_graph_for_size")
    ]
    assert [times.num_tokens for times in partial.decode.times] == [1]
    assert len(partial.first_token.times) == 2
    assert partial.build is not None
    assert list(partial.build.failures.values()) == ["out of graph memory"]


def test_a_plan_that_the_attention_backend_cannot_serve_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "full_capture_modes", frozenset({ForwardMode.DECODE}))
    report = compare_tiny("full", "full+breakable")
    left_out = plan_of(report, "full")
    assert left_out.status == "left_out"
    assert left_out.failure is not None
    assert "cannot be inside a graph in mode extend" in left_out.failure
    assert not report.has_failed
    assert "full was left out of the end-to-end arms" in report.verdict


def test_a_model_without_a_kv_pool_keeps_its_rows_and_the_report_says_why() -> None:
    report = compare(SmallModel(), small_inputs(4), ["full"], num_rounds=2, end_to_end=OPTIONS)
    assert report.strategies[1].status == "equal"
    assert report.end_to_end.plans == ()
    assert report.end_to_end.why_none is not None
    assert "SmallModel" in report.end_to_end.why_none
    assert "no KV pool" in report.end_to_end.why_none


def test_requests_longer_than_the_model_are_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlanArm, "build", None)
    with pytest.raises(ConfigError, match="longest request of the end-to-end arms has 9001 tokens"):
        compare_tiny(prompt_lengths=(4, 9000))


def test_pools_that_do_not_fit_leave_the_rest_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PlanArm, on_progress: Any) -> Any:
        raise PoolError("No KV cache fits.")

    monkeypatch.setattr(PlanArm, "build", refuse)
    report = compare_tiny()
    assert report.eager.times
    assert report.end_to_end.why_none == "eager could not be built: PoolError: No KV cache fits"


@pytest.mark.parametrize(
    ("plans", "word"),
    [
        (("fulll",), "did you mean 'full'"),
        (("full+full+full",), "3 cells"),
        (("full", "full+full"), "more than once"),
        ((), "No plan"),
    ],
)
def test_plans_that_are_none_are_refused(plans: Sequence[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        EndToEndOptions(plans=tuple(plans))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_lengths", ()),
        ("prompt_lengths", (8, 4)),
        ("batch_sizes", (0,)),
        ("context_tokens", 0),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(OPTIONS, **{field: value})


def test_eager_is_always_there_and_names_are_short() -> None:
    assert EndToEndOptions(plans=("full+full",)).plans == ("eager", "full")
    plan = named_plan("tc_full+tc_piecewise").execution_plan(batch_sizes=(1, 2), prompt_lengths=(16,))
    decode, extend = plan.of(ForwardMode.DECODE), plan.of(ForwardMode.EXTEND)
    assert (decode.strategy, decode.compile, decode.capture_sizes) == ("full", "inductor", (1, 2))
    assert (extend.strategy, extend.compile, extend.capture_sizes) == ("breakable", "inductor", (16,))


def test_default_prompts_are_no_longer_than_the_largest_capture_size() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert end_to_end_options(cpu, (16, 128)).prompt_lengths == (16, 32)
    assert end_to_end_options(cpu, (4, 8)).prompt_lengths == (8,)
    assert end_to_end_options(cuda, (4, 512)).prompt_lengths == (64, 256)
    assert end_to_end_options(cuda, (4, 512)).context_tokens == 512
