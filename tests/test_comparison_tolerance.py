"""Values of strategies that round otherwise: judged by eager's own error against a wider model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison_arms import FaultyArm, SmallModel, small_inputs

from sgl_piecewise.comparison import compare
from sgl_piecewise.comparison.arms import STRATEGIES, ArmSetup
from sgl_piecewise.comparison.tolerance import ERROR_FACTOR, closeness, wide_dtype, wide_model
from sgl_piecewise.runtime.errors import ConfigError

WIDE = torch.tensor([[1.0, 2.0, 0.0], [3.0, 3.0002, 0.0]], dtype=torch.float64)
EAGER = (WIDE + torch.tensor([[1e-4, 0.0, 0.0], [0.0, -1e-4, 0.0]], dtype=torch.float64)).float()


def test_as_far_off_as_eager_is_close() -> None:
    got = (WIDE - 1e-4).float()
    found = closeness(WIDE, EAGER, got)
    assert found.first_wrong is None
    assert found.max_error == pytest.approx(1e-4, rel=1e-2)
    assert found.eager_error == pytest.approx(1e-4, rel=1e-2)


def test_farther_off_is_wrong_and_the_worst_place_is_named() -> None:
    got = EAGER.clone()
    got[1, 2] += 2 * ERROR_FACTOR * 1e-4
    assert closeness(WIDE, EAGER, got).first_wrong == (1, 2)


def test_a_tie_may_change_the_next_token_and_nothing_else_may() -> None:
    tied = EAGER.clone()
    tied[1, 0] += 2e-4
    found = closeness(WIDE, EAGER + torch.tensor([[0.0], [0.0]]), tied)
    assert (found.first_wrong, found.num_excused) == (None, 1)
    clear = torch.tensor([[1.0, 1.0004, 0.0]], dtype=torch.float64)
    eager = clear.float() + torch.tensor([[1e-4, 0.0, 0.0]])
    got = clear.float() + torch.tensor([[3.9e-4, -2e-5, 0.0]])
    found = closeness(clear, eager, got)
    assert (found.first_wrong, found.num_excused) == ((0, 0), 0)


def test_what_is_not_finite_is_wrong_unless_eager_is_too() -> None:
    got = EAGER.clone()
    got[0, 1] = float("nan")
    assert closeness(WIDE, EAGER, got).first_wrong == (0, 1)
    assert closeness(WIDE, got, EAGER).first_wrong is None
    assert closeness(WIDE, got, got).first_wrong is None


def test_beside_what_is_not_finite_in_eager_the_rest_is_judged() -> None:
    eager = EAGER.clone()
    eager[0, 1] = float("inf")
    got = eager.clone()
    got[1, 2] += 2 * ERROR_FACTOR * 1e-4
    assert closeness(WIDE, eager, got).first_wrong == (1, 2)


def test_exact_eager_still_allows_a_rounding() -> None:
    whole = WIDE.round()
    got = whole.float() * (1 + torch.finfo(torch.float32).eps)
    assert closeness(whole, whole.float(), got).first_wrong is None


def test_wide_model_is_a_copy_in_a_wider_dtype() -> None:
    model = SmallModel()
    ids = torch.arange(4)
    wide = wide_model(model)
    method = wide_model(model.forward)
    assert wide is not None
    assert method is not None
    assert wide(ids).dtype == method(ids).dtype == torch.float64
    assert model.table.dtype == torch.float32
    assert wide_model(lambda x: x) is None
    assert wide_dtype(torch.bfloat16) == torch.float32


# Strategies ----------------------------------------------------------------------------------------

COMPILED = ("fx", "fx_full", "fx_piecewise", "tc", "tc_full", "tc_piecewise")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_every_compiled_cell_is_compared_and_timed() -> None:
    report = compare(SmallModel(), small_inputs(3, 4, 8), COMPILED, capture_sizes=(4, 8), num_rounds=2)
    assert [strategy.failure for strategy in report.strategies] == [None] * 7
    status = {strategy.strategy: strategy.status for strategy in report.strategies[1:]}
    assert status == {name: "close" if name.startswith("tc") else "equal" for name in COMPILED}
    for strategy in report.strategies[1:]:
        assert len(strategy.times) == 3
        assert len(strategy.break_names) == (0 if strategy.strategy.endswith("full") else 1)
        build = strategy.build
        assert build is not None
        assert build.strategy == strategy.strategy
        assert {"trace", "compile_pieces"} <= set(build.phases_s)
        assert 0 < build.compile_share < 1
        padded = [4, 4, 8] if strategy.memory is not None else [3, 4, 8]
        assert [entry.padded_size for entry in strategy.values] == padded
        ratio = None if strategy.memory is None else strategy.memory.estimate_ratio
        assert (ratio is not None) == strategy.strategy.endswith("_piecewise")
        assert ratio is None or 0.95 <= ratio <= 1.05, "exact where pieces are as they were traced"
    assert "times as far from the model in a wider dtype as padded eager is" in report.verdict


class _Rounding(FaultyArm):
    """Stands in for a compiler that rounds otherwise."""

    keeps_bits = False


def compare_rounding(monkeypatch: pytest.MonkeyPatch, fault: Any, model: Any = None) -> Any:
    def make(setup: ArmSetup) -> FaultyArm:
        return _Rounding(setup, fault)

    monkeypatch.setitem(STRATEGIES, "rounding", make)
    inputs = small_inputs(3, 4, num_inputs=1)
    return compare(model or SmallModel(), inputs, ["rounding"], num_rounds=1).strategies[1]


def test_a_wrong_value_is_seen_and_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        output[1, 5] += 1e-3
        return output

    strategy = compare_rounding(monkeypatch, off)
    assert strategy.status == "wrong"
    assert strategy.times == ()
    assert strategy.first_difference.index == (1, 5)


def test_a_last_bit_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(output, torch.zeros_like(output))

    assert compare_rounding(monkeypatch, rounded).status == "close"


def test_too_many_excused_ties_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(SmallModel):
        """The two largest logits differ by less than the rounding error."""

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = super().forward(input_ids)
            top = logits.amax(dim=-1, keepdim=True) * 2
            return torch.cat([top, top * (1 - 1e-7), logits], dim=-1)

    def swapped(arm: FaultyArm, count: int, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, 1:2], output[:, 0:1], output[:, 2:]], dim=-1)

    strategy = compare_rounding(monkeypatch, swapped, Tied())
    assert strategy.status == "failed"
    assert "rows have another next token than padded eager" in strategy.failure


def test_a_plain_function_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SmallModel()
    with pytest.raises(ConfigError, match="Give the module, or a method of it"):
        compare_rounding(monkeypatch, None, lambda ids: model(ids) + 0)
