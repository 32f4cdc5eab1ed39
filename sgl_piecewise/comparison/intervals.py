"""Medians with distribution-free confidence intervals.

The interval of a median runs from one order statistic to another: whatever the distribution, the
true median lies outside with a binomial probability. No resampling, no normality, no seed. It
must not know what the samples are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""What an interval aims at; with fewer than six samples the whole range covers less, and says so."""


@dataclass(frozen=True, kw_only=True)
class Median:
    """A median, how sure it is, and how much single samples vary.

    Attributes:
        value: The sample median.
        low: Lower end of the median's confidence interval.
        high: Upper end.
        confidence: Probability that the interval covers the true median; at least `CONFIDENCE`
            unless there are too few samples for that.
        spread: Half the distance between the quartiles of the samples.
        num_samples: How many samples there were.
    """

    value: float
    low: float
    high: float
    confidence: float
    spread: float
    num_samples: int


def median_of(samples: Sequence[float]) -> Median:
    """Returns the median of ``samples`` with the narrowest symmetric interval that is sure enough.

    Args:
        samples: At least one number.
    """
    ordered = sorted(samples)
    count = len(ordered)
    assert count > 0, "a median needs a sample"
    rank = _interval_rank(count)
    return Median(
        value=_quantile(ordered, 0.5),
        low=ordered[rank],
        high=ordered[count - 1 - rank],
        confidence=1.0 - 2.0 * _binomial_tail(count, rank),
        spread=(_quantile(ordered, 0.75) - _quantile(ordered, 0.25)) / 2,
        num_samples=count,
    )


def _interval_rank(count: int) -> int:
    """How many samples may be left out at each end while the interval stays sure enough."""
    rank = 0
    while 2 * (rank + 1) < count and 1.0 - 2.0 * _binomial_tail(count, rank + 1) >= CONFIDENCE:
        rank += 1
    return rank


def _binomial_tail(count: int, rank: int) -> float:
    """Probability that at most ``rank`` of ``count`` samples fall below the true median."""
    return sum(math.comb(count, k) for k in range(rank + 1)) / 2.0**count


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
