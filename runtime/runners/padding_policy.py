"""How much padding a batch may get to reach a graph."""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.sizes import default_capture_sizes, validate_capture_sizes
from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PaddingPolicy:
    """The bound on padding: a factor, and a size under which padding never matters.

    Attributes:
        max_factor: Padded rows for each real one, at least 1.
        floor: Sizes up to this are always taken: a launch costs more than a few rows.

    Raises:
        ConfigError: A value is out of its range.
    """

    max_factor: float = 2.0
    floor: int = 32

    def __post_init__(self) -> None:
        if not self.max_factor >= 1:
            raise ConfigError(f"padding.max_factor must be at least 1, got {self.max_factor!r}.")
        if self.floor < 0:
            raise ConfigError(f"padding.floor must not be negative, got {self.floor!r}.")

    def allows(self, num_real: int, num_padded: int) -> bool:
        """Whether so few real rows may be padded to so many."""
        return num_padded <= max(self.floor, self.max_factor * num_real)


def sizes_up_to(maximum: int, given: tuple[int, ...] | None, *, begins_at_one: bool) -> tuple[int, ...]:
    """Returns capture sizes that end in the configured maximum, whatever was given.

    Args:
        maximum: The largest size that the configuration allows.
        given: Sizes asked for; None for the default ladder.
        begins_at_one: Whether the default ladder has 1 and 2, as decoding wants.

    Raises:
        ConfigError: A size is not one, or is over the maximum.
    """
    if given is None:
        ladder = default_capture_sizes(maximum)
        return tuple(sorted({*ladder, *(size for size in (1, 2) if begins_at_one and size <= maximum)}))
    sizes = validate_capture_sizes(given)
    if sizes[-1] > maximum:
        raise ConfigError(
            f"capture_sizes goes to {sizes[-1]}, and no batch is larger than {maximum}. Leave out larger sizes, or "
            "raise the limit."
        )
    return sizes if sizes[-1] == maximum else (*sizes, maximum)
