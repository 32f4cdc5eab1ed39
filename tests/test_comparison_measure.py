"""The comparison on the emulated device: right strategies get times, faulty ones are caught."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison_arms import FaultyArm, SmallModel, small_inputs

from sgl_piecewise.comparison import ComparisonReport, compare
from sgl_piecewise.comparison.arms import STRATEGIES
from sgl_piecewise.runtime.errors import CaptureError, ConfigError


def compare_small(*strategies: str, **options: Any) -> ComparisonReport:
    """Compares on the small model with few rounds."""
    inputs = options.pop("inputs", small_inputs(3, 4, 7, 8))
    return compare(
        options.pop("model", SmallModel()),
        inputs,
        strategies,
        **{"capture_sizes": (4, 8), "num_rounds": 2, **options},
    )


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a strategy ``faulty`` with the fault given."""

    def add(fault: Any = None, **options: Any) -> None:
        make = functools.partial(FaultyArm, fault=fault, **options)
        monkeypatch.setitem(STRATEGIES, "faulty", make)

    return add


def test_captured_strategies_are_bit_equal_and_timed() -> None:
    report = compare_small("full", "breakable")
    assert [strategy.status for strategy in report.strategies] == ["reference", "equal", "equal"]
    assert not report.has_failed
    full, breakable = report.strategies[1:]
    assert full.break_names == ()
    assert [name.split(".")[-1] for name in breakable.break_names] == ["halve"]
    for strategy in (full, breakable):
        assert [(entry.num_tokens, entry.padded_size) for entry in strategy.times] == [
            (3, 4),
            (4, 4),
            (7, 8),
            (8, 8),
        ]
        assert all(entry.max_diff_to_padded_eager == 0.0 for entry in strategy.values)
        assert all(len(entry.samples_s) == 2 for entry in strategy.times)
        assert strategy.build is not None
        assert [size.size for size in strategy.build.sizes] == [8, 4]
        assert strategy.memory is not None
        assert strategy.memory.allocator_bytes > 0
        assert strategy.memory.driver_bytes is None
    assert all(entry.ratio_to_eager is None for entry in report.eager.times)
    assert report.environment.is_emulated
    assert "nothing about a GPU" in report.verdict


def test_capture_sizes_default_to_the_token_counts() -> None:
    report = compare_small("full", capture_sizes=None, inputs=small_inputs(2, 5, num_inputs=1))
    assert report.capture_sizes == (2, 5)


def test_progress_names_every_phase() -> None:
    phases: list[str] = []
    compare_small("full", on_progress=lambda phase, done, total: phases.append(phase))
    seen = list(dict.fromkeys(phases))
    assert seen == ["eager, loading kernels", "eager", "full: capture", "checking values", "timing"]


def test_a_model_with_nan_is_told_before_anything_is_called_equal() -> None:
    model = SmallModel()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    report = compare_small("full", model=model)
    assert report.strategies[1].status == "equal"
    assert report.verdict.startswith(
        "Eager's own output has NaN or infinity at 4 of 4 token counts (first at 3 tokens): nothing is shown there."
    )


def test_a_wrong_strategy_gets_no_speed_and_is_told_where(faulty: Callable[..., None]) -> None:
    def wrong_at_seven(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        if count == 7:
            output = output.clone()
            output[5, 11] += 1.0
        return output

    faulty(wrong_at_seven)
    report = compare_small("faulty", "full")
    wrong, full = report.strategies[1:]
    assert wrong.status == "wrong"
    assert report.has_failed
    assert wrong.times == ()
    assert wrong.first_difference is not None
    assert (wrong.first_difference.num_tokens, wrong.first_difference.padded_size) == (7, 8)
    assert wrong.first_difference.index == (5, 11)
    assert float(wrong.first_difference.got) == pytest.approx(float(wrong.first_difference.expected) + 1.0)
    assert "faulty is WRONG: at 7 tokens (padded to 8), input 0, row 5, column 11" in report.verdict
    assert full.status == "equal"
    assert full.times


def test_the_last_bit_counts(faulty: Callable[..., None]) -> None:
    faulty(lambda arm, count, output: torch.nextafter(output, torch.tensor(torch.inf)))
    assert compare_small("faulty").strategies[1].status == "wrong"


def test_memory_shared_between_sizes_is_seen(faulty: Callable[..., None]) -> None:
    """The output is right until the strategy runs at another size: looked at once, it would pass."""

    def overwritten_by_the_next(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        if arm.last is not None:
            arm.last[0] = 0.0
        arm.last = output.clone()
        return arm.last

    faulty(overwritten_by_the_next)
    assert compare_small("faulty").strategies[1].status == "wrong"


def test_poison_is_reported_as_text_and_as_no_number(faulty: Callable[..., None]) -> None:
    faulty(lambda arm, count, output: output * float("nan"))
    wrong = compare_small("faulty").strategies[1]
    assert wrong.first_difference is not None
    assert wrong.first_difference.got == "nan"
    assert wrong.values[0].max_diff_to_padded_eager is None


def test_another_shape_or_dtype_is_wrong(faulty: Callable[..., None]) -> None:
    faulty(lambda arm, count, output: output.double())
    wrong = compare_small("faulty").strategies[1]
    assert wrong.first_difference is not None
    assert "float64" in wrong.first_difference.got
    faulty(lambda arm, count, output: output[:-1])
    wrong = compare_small("faulty").strategies[1]
    assert wrong.first_difference is not None
    assert wrong.first_difference.index == ()


def test_a_strategy_that_cannot_be_built_fails_and_the_others_go_on(
    faulty: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FaultyArm, on_progress: Any) -> Any:
        raise CaptureError("a host sync inside capture")

    faulty()
    monkeypatch.setattr(FaultyArm, "build", refuse)
    failed, full = compare_small("faulty", "full").strategies[1:]
    assert failed.status == "failed"
    assert failed.failure is not None
    assert "a host sync inside capture" in failed.failure
    assert full.status == "equal"


def test_a_size_out_of_memory_is_reported_and_the_rest_is_measured(faulty: Callable[..., None]) -> None:
    faulty(sizes_without_graph=(8,))
    partial = compare_small("faulty").strategies[1]
    assert partial.status == "equal"
    assert [(entry.num_tokens, entry.reason.split(":")[0]) for entry in partial.problems] == [
        (7, "out of memory"),
        (8, "out of memory"),
    ]
    assert [entry.num_tokens for entry in partial.times] == [3, 4]


def test_out_of_memory_in_a_run_is_a_problem_of_that_token_count(faulty: Callable[..., None]) -> None:
    def too_large(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        if count == 8:
            raise torch.OutOfMemoryError("tried to allocate")
        return output

    faulty(too_large)
    partial = compare_small("faulty").strategies[1]
    assert [entry.num_tokens for entry in partial.problems] == [8]
    assert [entry.num_tokens for entry in partial.times] == [3, 4, 7]


def test_a_run_that_fell_back_to_eager_is_not_taken_for_a_replay(faulty: Callable[..., None]) -> None:
    def falls_back(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        if count == 4:
            arm.counted["size_zero"] = arm.counted.get("size_zero", 0) + 1
        return output

    faulty(falls_back)
    partial = compare_small("faulty").strategies[1]
    assert [(entry.num_tokens, entry.reason) for entry in partial.problems] == [(4, "ran eager: size_zero")]
    assert 4 not in [entry.num_tokens for entry in partial.times]


def test_arms_are_closed_also_when_interrupted(
    faulty: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FaultyArm] = []

    def interrupt(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        made.append(arm)
        raise KeyboardInterrupt

    faulty(interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare_small("faulty")
    assert made[0].is_closed


def test_a_model_that_differs_from_itself_is_not_blamed_on_a_strategy() -> None:
    model = torch.nn.Sequential(SmallModel(), torch.nn.Dropout(0.5)).train()
    with pytest.raises(ConfigError, match="differs from itself"):
        compare_small("full", model=model)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda ids: ids.sum(), r"shape \(\)"),
        (lambda ids: {"logits": ids}, "dict"),
        (lambda ids: ids[:2], "shape"),
    ],
)
def test_a_model_without_a_row_for_each_token_is_refused(model: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        compare_small("eager", model=model)


def test_an_input_over_the_largest_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 tokens"):
        compare_small("full", inputs=small_inputs(9))


def test_eager_alone_is_a_report_too() -> None:
    report = compare_small("eager")
    assert [strategy.strategy for strategy in report.strategies] == ["eager"]
    assert report.eager.times


def test_the_order_follows_the_seed() -> None:
    first, again = compare_small("full", seed=5), compare_small("full", seed=5)
    assert dataclasses.replace(first.strategies[1], times=(), build=None) == dataclasses.replace(
        again.strategies[1], times=(), build=None
    )
