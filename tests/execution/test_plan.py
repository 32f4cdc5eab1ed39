"""Execution plans: defaults, files, settings on top, what is refused, what attention cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_piecewise.runtime.attention.torch_paged import TorchAttention
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.runners.padding_policy import PaddingPolicy, sizes_up_to
from sgl_piecewise.runtime.runners.plan import RUNNER_OF_MODE, ExecutionPlan, ModeStrategy
from sgl_piecewise.runtime.runners.plan_file import plan_from_settings, read_plan, with_strategies

from .support import OPTIONS, tiny_model


class NoCapture(TorchAttention):
    """Attention that cannot be inside a graph when it decodes."""

    name = "no_capture"
    full_capture_modes = TorchAttention.full_capture_modes - {ForwardMode.DECODE, ForwardMode.EXTEND}


def test_defaults_are_decode_full_and_extend_breakable() -> None:
    plan = ExecutionPlan()
    found = {mode: (plan.runner_of(mode), plan.of(mode).strategy) for mode in ForwardMode}
    assert found == {
        ForwardMode.EXTEND: ("extend", "breakable"),
        ForwardMode.MIXED: ("extend", "breakable"),
        ForwardMode.DECODE: ("decode", "full"),
        ForwardMode.IDLE: ("decode", "full"),
        ForwardMode.TARGET_VERIFY: ("eager", "eager"),
        ForwardMode.DRAFT_EXTEND_V2: ("eager", "eager"),
        ForwardMode.PREBUILT: ("eager", "eager"),
        ForwardMode.SPLIT_PREFILL: ("split_prefill", "eager"),
        ForwardMode.DLLM_EXTEND: ("eager", "eager"),
    }


def test_every_mode_has_a_runner() -> None:
    assert RUNNER_OF_MODE.keys() == set(ForwardMode)
    assert len(ExecutionPlan().table().splitlines()) == len(ForwardMode)


def test_a_file_gives_strategies_sizes_attention_and_padding(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        '[attention]\nprefill = "triton"\n[padding]\nmax_factor = 1.5\nfloor = 8\n'
        '[modes.decode]\nstrategy = "breakable"\ncapture_sizes = [1, 4]\n'
        '[modes.target_verify]\nstrategy = "full"\nnum_tokens_per_req = 4\n'
        '[modes.extend]\nstrategy = "full"\nrequest_slots = 6\n'
    )
    plan = read_plan(path)
    assert (plan.prefill_attention, plan.decode_attention) == ("triton", "auto")
    assert plan.padding == PaddingPolicy(max_factor=1.5, floor=8)
    assert plan.of(ForwardMode.DECODE) == ModeStrategy(strategy="breakable", capture_sizes=(1, 4))
    assert plan.of(ForwardMode.IDLE).strategy == "breakable"
    assert plan.of(ForwardMode.TARGET_VERIFY).num_tokens_per_req == 4
    assert plan.of(ForwardMode.EXTEND).request_slots == 6
    assert plan.of(ForwardMode.MIXED).strategy == "full"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": {}}, ["the plan names 'mode'", "did you mean 'modes'"]),
        ({"modes": {"decod": {}}}, ["'decod'", "did you mean 'decode'"]),
        ({"modes": {"decode": {"strategy": "ful"}}}, ["modes.decode", "did you mean 'full'"]),
        ({"modes": {"decode": {"strateg": "full"}}}, ["modes.decode", "did you mean 'strategy'"]),
        ({"modes": {"decode": {"compile": "fx", "strategy": "eager"}}}, ["modes.decode", "'fx'"]),
        ({"modes": {"mixed": {"compile": "fx"}}}, ["modes.mixed", "'fx'"]),
        ({"modes": {"decode": {"capture_sizes": [0]}}}, ["at least 1"]),
        ({"modes": {"decode": {"capture_sizes": 4}}}, ["must be a list"]),
        ({"modes": {"decode": 4}}, ["must be a table"]),
        ({"modes": {"idle": {"strategy": "breakable"}}}, ["shares the graphs of decode"]),
        ({"modes": {"mixed": {"capture_sizes": [4]}}}, ["capture_sizes would not be used"]),
        ({"modes": {"prebuilt": {"strategy": "full"}}}, ["eager only"]),
        ({"modes": {"target_verify": {"strategy": "full"}}}, ["num_tokens_per_req"]),
        ({"modes": {"decode": {"num_tokens_per_req": 2}}}, ["num_tokens_per_req"]),
        ({"modes": {"extend": {"request_slots": 2}}}, ["request_slots"]),
        ({"attention": {"prefil": "torch"}}, ["did you mean 'prefill'"]),
        ({"attention": {"prefill": 3}}, ["attention.prefill"]),
        ({"padding": {"max_factor": 0.5}}, ["padding.max_factor"]),
        ({"padding": {"floor": 1.5}}, ["padding.floor"]),
    ],
)
def test_what_a_plan_cannot_say_is_named_with_the_nearest(
    settings: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_settings(settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", ["[modes", "\xff"])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"plan\.toml"):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "missing.toml")


def test_settings_of_the_command_line_replace_a_files_and_followers_follow() -> None:
    plan = plan_from_settings({"modes": {"extend": {"capture_sizes": [8]}, "mixed": {"strategy": "eager"}}})
    changed = with_strategies(plan, {ForwardMode.EXTEND: "eager", ForwardMode.DECODE: "none"})
    assert changed.of(ForwardMode.EXTEND) == ModeStrategy()
    assert changed.of(ForwardMode.MIXED).strategy == "eager"
    assert changed.of(ForwardMode.IDLE).strategy == "none"
    # What was not named stays as the file has it.
    assert with_strategies(plan, {ForwardMode.DECODE: "none"}).of(ForwardMode.MIXED).strategy == "eager"


def test_what_attention_cannot_hold_is_captured_breakable_and_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = ExecutionPlan(modes={ForwardMode.EXTEND: ModeStrategy(strategy="full", request_slots=2)})
    plan, changes = asked.resolve(NoCapture, NoCapture)
    assert {change.mode for change in changes} == {
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
        ForwardMode.DECODE,
        ForwardMode.IDLE,
    }
    assert {plan.of(change.mode).strategy for change in changes} == {"breakable"}
    assert plan.of(ForwardMode.EXTEND).request_slots is None
    assert all("no_capture" in str(change) for change in changes)
    assert "decode: breakable in place of full" in caplog.text
    assert asked.resolve(TorchAttention, TorchAttention)[1] == ()


def test_an_attention_backend_that_does_not_exist_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        ModelRunner(tiny_model(), plan=ExecutionPlan(prefill_attention="tritn"), options=OPTIONS)


@pytest.mark.parametrize("maximum", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("given", [None, (1,)])
def test_the_configured_maximum_is_always_a_size(maximum: int, given: tuple[int, ...] | None) -> None:
    sizes = sizes_up_to(maximum, given, begins_at_one=True)
    assert sizes[-1] == maximum
    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))


def test_sizes_over_the_maximum_are_refused() -> None:
    with pytest.raises(ConfigError, match="goes to 8, and no batch is larger than 4"):
        sizes_up_to(4, (2, 8), begins_at_one=True)


def calls_of(runner: ModelRunner) -> list[Callable[[], None]]:
    return [runner.build_pools, runner.install_hooks, runner.build_attention, runner.build_graphs]


@pytest.mark.parametrize("skipped", range(3))
def test_construction_out_of_order_raises(skipped: int) -> None:
    runner = ModelRunner(tiny_model(), plan=ExecutionPlan(), options=OPTIONS)
    calls = calls_of(runner)
    for call in calls[:skipped]:
        call()
    with pytest.raises(ConfigError, match=f"{calls[skipped].__name__} comes next"):
        calls[skipped + 1]()


def test_no_stage_is_built_twice_and_none_is_used_before_it_is_built() -> None:
    runner = ModelRunner(tiny_model(), plan=ExecutionPlan(), options=OPTIONS)
    with pytest.raises(ConfigError, match="needs stage ATTENTION"):
        _ = runner.start_loc_encoding
    runner.build_pools()
    with pytest.raises(ConfigError, match="install_hooks comes next"):
        runner.build_pools()


def test_a_context_longer_than_the_model_is_refused() -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError, match="4096 positions"):
        ModelRunner(tiny_model(), options=replace(OPTIONS, max_context=5000))


def test_names_are_for_files_and_objects_for_code() -> None:
    with pytest.raises(ConfigError, match=r"maps 'decode' to .*plan_from_settings"):
        ExecutionPlan(modes={"decode": ModeStrategy(strategy="full")})  # type: ignore[dict-item]
