"""How outputs are compared, and how sure a median is."""

from __future__ import annotations

import random

import pytest
import torch

from sgl_piecewise.comparison.intervals import median_of
from sgl_piecewise.comparison.values import first_difference, max_abs_difference, next_token_agreement


def test_equality_is_of_bits() -> None:
    nan = torch.tensor([[1.0, float("nan")]])
    assert first_difference(nan, nan.clone()) is None
    assert first_difference(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, -0.0]])) == (0, 1)


def test_first_difference_is_the_first_in_row_order_whatever_the_strides() -> None:
    expected = torch.arange(12.0).reshape(4, 3).t()
    got = expected.clone(memory_format=torch.contiguous_format)
    got[1, 3] = got[2, 0] = -1.0
    assert first_difference(expected, got) == (1, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_first_difference_finds_the_element_in_any_dtype(dtype: torch.dtype) -> None:
    expected = torch.zeros(5, 7, dtype=dtype)
    got = expected.clone()
    got[3, 6] = 1
    assert first_difference(expected, got) == (3, 6)


def test_a_difference_that_is_not_finite_is_not_hidden_by_a_large_one() -> None:
    expected = torch.zeros(3, 2)
    got = torch.tensor([[1e9, 0.0], [float("nan"), 0.0], [0.0, 0.0]])
    assert max_abs_difference(expected, got) is None
    assert max_abs_difference(expected, got.nan_to_num()) == 1e9


def test_difference_of_half_precision_is_taken_in_float32() -> None:
    expected, got = torch.tensor([[60000.0]]).half(), torch.tensor([[-60000.0]]).half()
    assert max_abs_difference(expected, got) == 120000.0


def test_next_token_agreement_is_a_part_of_the_rows() -> None:
    expected_TV = torch.eye(4)
    got_TV = expected_TV.clone()
    got_TV[1] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert next_token_agreement(expected_TV, got_TV) == 0.75
    assert next_token_agreement(torch.zeros(3), torch.zeros(3)) is None


def test_few_samples_give_the_whole_range_and_say_how_little_that_covers() -> None:
    median = median_of([3.0, 1.0, 2.0])
    assert (median.value, median.low, median.high) == (2.0, 1.0, 3.0)
    assert median.confidence == 0.75
    assert median_of([5.0]).confidence == 0.0


def test_interval_of_twenty_samples_is_the_textbook_one() -> None:
    """The 6th and the 15th of 20 cover the median with 95.9 % (binomial table)."""
    median = median_of([float(value) for value in range(1, 21)])
    assert (median.low, median.high) == (6.0, 15.0)
    assert median.confidence == pytest.approx(0.9586, abs=1e-4)
    assert median.spread == pytest.approx(4.75)


def test_interval_covers_the_median_of_a_skewed_distribution_as_often_as_it_says() -> None:
    source = random.Random(0)
    true_median = 2.0**0.5  # of the Pareto distribution with exponent 2
    hits = 0
    for _ in range(2000):
        median = median_of([source.paretovariate(2.0) for _ in range(15)])
        hits += median.low <= true_median <= median.high
    assert hits / 2000 == pytest.approx(median.confidence, abs=0.015)
