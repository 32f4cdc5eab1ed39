"""Every mode reaches its own runner, and every strategy gives what padded eager gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.kv.slots import FULL_POOL, SCRATCH_SLOT
from sgl_piecewise.runtime.model_runner.hooks import WriteCanary
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.runners.execution import Reason

from .support import OPTIONS, ROWS, Walk, decide, extend_and_append, live_kv, make_runner, plan, prompt, run


@pytest.fixture
def device(graph_device: GraphDevice) -> torch.device:
    return graph_device.torch_device


def expected_executions(decode: str, extend: str) -> list[str]:
    return [
        f"extend extend {extend}",
        f"mixed extend {extend}",
        f"mixed extend {extend}",
        f"decode decode {decode}",
        f"idle decode {decode}",
        f"target_verify decode {decode}",
        f"target_verify decode {decode}",
        f"dllm_extend decode {decode}",
        f"dllm_extend decode {decode}",
        f"draft_extend_v2 decode {decode}",
        "prebuilt eager eager",
        "split_prefill split_prefill eager",
        f"decode decode {decode}",
    ]


@pytest.mark.parametrize(("decode", "extend"), [("full", "breakable"), ("breakable", "full")])
def test_every_mode_reaches_its_runner_and_gives_what_padded_eager_gives(
    decode: str, extend: str, device: torch.device
) -> None:
    reference = Walk(make_runner(plan("none", "none"), device=device)).play()
    assert reference.executions == expected_executions("none", "none")
    walk = Walk(make_runner(plan(decode, extend), device=device))
    walk.play()
    assert walk.executions == expected_executions(decode, extend)
    assert_same_walk(walk, reference)
    for ours, theirs in zip(live_kv(walk.runner), live_kv(reference.runner), strict=True):
        assert torch.equal(ours, theirs)


def assert_same_walk(walk: Walk, reference: Walk) -> None:
    for step, ours, theirs in zip(walk.executions, walk.logits, reference.logits, strict=True):
        if theirs is None:
            assert ours is None, step
        else:
            assert ours is not None, step
            assert torch.equal(ours, theirs), step


def test_debug_makes_every_forward_one_break_and_changes_no_value(device: torch.device) -> None:
    reference = Walk(make_runner(plan("none", "none"), device=device)).play()
    runner = make_runner(plan("full", "breakable"), device=device, is_debug=True)
    assert_same_walk(Walk(runner).play(), reference)
    assert runner.graph_build is not None
    assert {len(backend_breaks) for backend_breaks in break_names(runner)} == {1}


def break_names(runner: ModelRunner) -> list[tuple[str, ...]]:
    found = []
    for graph_runner in (runner._decode, runner._extend):
        assert graph_runner is not None
        for backend in graph_runner.backends:
            for captured in backend.graphs.values():  # type: ignore[attr-defined]
                found += [recording.break_names for recording in captured.recordings.values()]
    return found


def test_a_plan_of_eager_runs_everything_eager_and_counts_no_fallback(device: torch.device) -> None:
    runner = make_runner(plan("eager", "eager", has_verify=False), device=device)
    walk = Walk(runner).play()
    assert {execution.split()[1] for execution in walk.executions} == {"eager", "split_prefill"}
    assert runner.log.total(runner="eager") == len(walk.executions) - 1
    assert all(key.fallback is None for key in runner.log.counts)
    assert "switched_off" in runner.explain()


def test_split_prefill_by_layers_gives_what_all_layers_at_once_give(device: torch.device) -> None:
    """Another forward runs between the two halves, with another plan of the same attention backend."""
    whole = make_runner(plan("none", "none"), device=device)
    expected = run(whole, ForwardMode.SPLIT_PREFILL, [prompt("d", 9)], [9])
    runner = make_runner(plan("full", "breakable"), device=device)
    batch = ForwardBatch.init_new(decide(runner, ForwardMode.SPLIT_PREFILL, [prompt("d", 9)], [9]), runner)
    first = runner.forward(batch, num_layers=1)
    assert first.logits is None
    assert first.unfinished.next_layer == 1
    extend_and_append(runner, [prompt("other", 5), prompt("another", 4)])
    second = runner.forward(batch, num_layers=1, progress=first.unfinished)
    assert second.unfinished is None
    assert second.logits is not None
    assert expected.logits is not None
    assert torch.equal(second.logits.next_token_logits, expected.logits.next_token_logits)


def test_the_result_carries_the_executed_runner_and_extent(device: torch.device) -> None:
    runner = make_runner(plan("full", "breakable"), device=device)
    output = extend_and_append(runner, [prompt("a", 5), prompt("b", 4)])
    extent = output.execution.extent
    assert (output.execution.runner, output.execution.strategy) == ("extend", "breakable")
    assert (extent.num_tokens, extent.padded_tokens, extent.num_requests, extent.padded_requests) == (
        9,
        16,
        2,
        2,
    )


def test_deferred_copies_run_once_before_the_next_forward_that_is_no_decode_graph() -> None:
    runner = make_runner(plan("full", "breakable"))
    req = prompt("a", 5)
    extend_and_append(runner, [req])
    copies: list[str] = []
    runner.defer_state_copy(lambda: copies.append("copied"))
    run(runner, ForwardMode.DECODE, [req], [1])
    assert copies == []
    extend_and_append(runner, [prompt("b", 5)])
    extend_and_append(runner, [prompt("c", 5)])
    assert copies == ["copied"]


def test_time_is_booked_by_category() -> None:
    runner = Walk(make_runner(plan("none", "none"))).play().runner
    assert set(runner.clock.phases_s) == {"extend", "verify", "decode"}


def test_tokens_are_padded_to_a_multiple_where_asked() -> None:
    """Graph sizes too; ROWS tokens a request are a multiple already."""
    runner = make_runner(plan("none", "none"), token_multiple=4)
    walk = Walk(runner).play()
    for execution in runner.log.last:
        assert execution.extent.padded_tokens % 4 == 0 or execution.runner == "split_prefill", str(execution)
    reference = Walk(make_runner(plan("none", "none"))).play()
    for ours, theirs in zip(walk.logits, reference.logits, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert ROWS == 4
    assert Reason.SIZE_OVER_LARGEST not in {key.fallback for key in runner.log.counts}


@pytest.mark.parametrize("decode", ["none", "full"])
def test_hooks_of_the_pool_see_every_write_of_a_replay_and_no_slot_but_those_of_the_batch(
    decode: str,
) -> None:
    num_slots = OPTIONS.max_requests * OPTIONS.max_context
    canary = WriteCanary(FULL_POOL, num_slots, torch.device("cpu"))
    runner = make_runner(plan(decode, "none", has_verify=False), write_hooks=(canary,))
    assert canary.counts[1:].sum() == 0  # Building graphs wrote to scratch alone.
    reqs = [prompt("a", 5), prompt("b", 4), prompt("c", 3)]
    extend_and_append(runner, reqs)
    canary.counts.zero_()
    run(runner, ForwardMode.DECODE, reqs, [1, 1, 1])
    written = canary.counts.nonzero().flatten().tolist()
    expected = [int(runner.req_to_token.slots(req.req_pool_index or 0).ids[-1]) for req in reqs]
    assert written == sorted([SCRATCH_SLOT, *expected])
    assert canary.counts[written].tolist() == [2] * len(written)  # One write for each layer.
