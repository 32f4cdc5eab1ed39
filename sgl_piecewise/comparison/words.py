"""Numbers and lists as a reader wants them: times, bytes, ratios, enumerations."""

from __future__ import annotations

from collections.abc import Sequence


def in_words_s(seconds: float) -> str:
    """Returns a time with three digits and its unit, for example ``12.3 ms``."""
    scale, unit = time_scale(seconds)
    return f"{three_digits(seconds * scale)} {unit}"


def time_scale(seconds: float) -> tuple[float, str]:
    """Returns factor and unit that suit a time."""
    if seconds >= 1.0:
        return 1.0, "s"
    if seconds >= 1e-3:
        return 1e3, "ms"
    return 1e6, "us"


def three_digits(value: float) -> str:
    """Returns a number with about three significant digits, never in powers of ten."""
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def in_words_bytes(num_bytes: int) -> str:
    """Returns a size in powers of 1000, for example ``908 MB``."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} GB"


def enumerated(words: Sequence[str]) -> str:
    """Returns ``a``, ``a and b``, or ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def counted(number: int, noun: str) -> str:
    """Returns ``1 size`` or ``3 sizes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
