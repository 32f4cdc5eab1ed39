"""Runners: which graph a batch gets, whether any ever does, and that every mode has its own."""

from __future__ import annotations

import pytest
from execution.support import OPTIONS, ROWS, Walk, extend_and_append, make_runner, plan, prompt, run

from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.scheduling import release
from sgl_piecewise.runtime.capture.sizes import padded_size
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.runner_factory import capture_sizes
from sgl_piecewise.runtime.runners.padding_policy import PaddingPolicy
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(plan("full", "breakable"))


def test_row_028_an_off_stride_maximum_gets_a_graph_whatever_sizes_are_given() -> None:
    """vllm#40734: the configured maximum was not in the ladder, and peak load fell off the graphs."""
    modes = {
        ForwardMode.DECODE: ModeStrategy(strategy="full", capture_sizes=(1, 2)),
        ForwardMode.EXTEND: ModeStrategy(strategy="full", capture_sizes=(8,)),
    }
    sizes = capture_sizes(ExecutionPlan(modes=modes), OPTIONS)
    assert sizes.requests[ForwardMode.DECODE] == (1, 2, OPTIONS.max_requests)
    assert sizes.tokens == (8, OPTIONS.max_extend_tokens)


def test_row_030_without_padding_only_exact_sizes_replay_and_nothing_crashes() -> None:
    """tokenspeed#936: a flag that turned padding off changed what was matched, and not what was captured."""
    strict = ExecutionPlan(
        modes=plan("eager", "none", has_verify=False).modes, padding=PaddingPolicy(max_factor=1.0, floor=0)
    )
    runner = make_runner(strict)
    assert extend_and_append(runner, [prompt("a", 8)]).execution.runner == "extend"
    assert extend_and_append(runner, [prompt("b", 7)]).execution.runner == "eager"


def test_row_032_every_decode_batch_of_every_mode_has_a_size() -> None:
    """vllm#53407: the query length did not divide the ladder, and half of the batches fell back."""
    modes = {
        ForwardMode.DECODE: ModeStrategy(strategy="full"),
        ForwardMode.TARGET_VERIFY: ModeStrategy(strategy="full", num_tokens_per_req=3),
        ForwardMode.DLLM_EXTEND: ModeStrategy(strategy="full", num_tokens_per_req=5),
    }
    for multiple in (1, 2, 8):
        options = type(OPTIONS)(
            max_requests=13, max_context=48, max_extend_tokens=16, token_multiple=multiple
        )
        for mode, sizes in capture_sizes(ExecutionPlan(modes=modes), options).requests.items():
            rows = modes[mode].num_tokens_per_req or 1
            for batch_size in range(1, options.max_requests + 1):
                size = padded_size(batch_size, sizes)
                assert size is not None, (mode, batch_size)
                assert size * rows % multiple == 0


def test_row_036_a_batch_is_compared_with_its_own_ranks_largest_size(runner: ModelRunner) -> None:
    """sglang#5527: a sum over ranks was compared with one rank's maximum; here requests with requests."""
    reqs = [prompt(f"r{index}", 3) for index in range(OPTIONS.max_requests)]
    extend_and_append(runner, reqs)
    output = run(runner, ForwardMode.DECODE, reqs, [1] * len(reqs))
    assert output.execution.extent.padded_requests == OPTIONS.max_requests
    assert output.execution.has_graph
    for req in reqs:
        release(req, runner.allocator, runner.req_to_token)


def test_row_037_the_result_names_the_runner_whose_extent_it_has() -> None:
    """sglang#30712: after a prefill replay the padded extent was read from the decode runner."""
    runner = make_runner(plan("none", "none"))
    req = prompt("a", 5)
    extended = extend_and_append(runner, [req]).execution
    decoded = run(runner, ForwardMode.DECODE, [req], [1]).execution
    assert (extended.runner, extended.extent.padded_tokens) == ("extend", 8)
    assert (decoded.runner, decoded.extent.padded_tokens) == ("decode", 2)


def test_row_038_an_extend_graph_may_be_larger_than_one_request(runner: ModelRunner) -> None:
    """sglang#30206: the dummy batch had one request, and legal sizes could not be captured."""
    small = make_runner(
        ExecutionPlan(
            modes={
                ForwardMode.DECODE: ModeStrategy(),
                ForwardMode.EXTEND: ModeStrategy(strategy="full", capture_sizes=(24,)),
            }
        ),
        max_context=9,
        max_extend_tokens=24,
    )
    output = extend_and_append(small, [prompt(name, 8) for name in "abc"])
    assert output.execution.has_graph


def test_row_068_every_graph_runner_replays_after_a_warm_request(runner: ModelRunner) -> None:
    """sglang#37192: captured and never replayed, because a set of coordinated backends lacked it."""
    walk = Walk(runner).play()
    assert walk.executions
    for mode, name in (
        (ForwardMode.EXTEND, "extend"),
        (ForwardMode.MIXED, "extend"),
        (ForwardMode.DECODE, "decode"),
        (ForwardMode.IDLE, "decode"),
        (ForwardMode.TARGET_VERIFY, "decode"),
        (ForwardMode.DLLM_EXTEND, "decode"),
    ):
        assert runner.log.total(mode=mode, runner=name) > 0, mode
        assert runner.log.total(mode=mode) == runner.log.total(mode=mode, runner=name), mode


def test_row_075_each_mode_reaches_its_own_graph_backend() -> None:
    """vllm#54127: a wrapper took every mode, and full graphs were never built with breakable ones on."""
    runner = make_runner(plan("full", "breakable"))
    assert runner._decode is not None
    assert runner._extend is not None
    names = {"decode": {backend.name for backend in runner._decode.backends}}
    names["extend"] = {backend.name for backend in runner._extend.backends}
    assert names == {"decode": {"full"}, "extend": {"breakable"}}
    for backend in (*runner._decode.backends, *runner._extend.backends):
        assert backend.log.records, backend.name
        assert not backend.log.failures
    keys = {(key.mode, key.num_tokens) for backend in runner._decode.backends for key in backend.log.records}
    assert (ForwardMode.TARGET_VERIFY, 2 * ROWS) in keys
