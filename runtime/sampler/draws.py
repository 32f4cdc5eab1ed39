"""One uniform number per request: from its seed and its length, whoever shares the batch.

A counter-based generator: the number is a hash, so it does not depend on the order of draws, on
other requests, or on the device. The hash mixes as SplitMix64 does
(Steele, Lea, Flood, 2014), in 64-bit integers that wrap.
"""

from __future__ import annotations

import torch

_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform_draws(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Returns one number in [0, 1) for each row.

    Args:
        seeds: Of each request (int64[B]).
        counters: What changes from draw to draw (int64[B]).

    Returns:
        Float32[B], fresh.
    """
    mixed = _mix(_mix(seeds * _STEP) + (counters + 1) * _STEP)
    return (_shift_right(mixed, 40)).to(torch.float32) * 2.0**-24


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts as unsigned: integers of PyTorch are signed, and would drag the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
