"""What a comparison can be asked for, checked before any long work.

Frozen options, and the readers that turn a command line's words into them. Everything that can
be refused is refused here, with the nearest valid word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sgl_piecewise.runtime.capture.sizes import default_capture_sizes, validate_capture_sizes
from sgl_piecewise.runtime.errors import ConfigError, DeviceUnavailableError, nearest

from .arms import STRATEGIES

REFERENCE = "eager"
DEFAULT_STRATEGIES = ("eager", "full", "breakable")
# The command's model is a module, so that rows which round otherwise can be judged too.
COMMAND_STRATEGIES = (*DEFAULT_STRATEGIES, "fx_piecewise", "tc_piecewise")
DEFAULT_CPU_SIZES = (16, 32, 64, 128)
DEFAULT_CUDA_LARGEST = 4096
DEFAULT_CPU_ROUNDS = 7
DEFAULT_CUDA_ROUNDS = 20
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of one comparison.

    Attributes:
        strategies: Names, eager first.
        capture_sizes: Ascending.
        num_rounds: Timed rounds at each token count.
        num_inputs: Different inputs per token count, rotated through.
        num_warm_ups: Untimed calls of each strategy before the rounds of a token count.
        launch_segments: Whether closed segments run while capturing; None is capture's default.
        seed: Of the order of strategies in a round and of token counts in the value check.
    """

    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    capture_sizes: tuple[int, ...] = DEFAULT_CPU_SIZES
    num_rounds: int = DEFAULT_CPU_ROUNDS
    num_inputs: int = 2
    num_warm_ups: int = 1
    launch_segments: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what no comparison can do."""
        object.__setattr__(self, "strategies", checked_strategies(self.strategies))
        object.__setattr__(self, "capture_sizes", validate_capture_sizes(self.capture_sizes))
        for name, least in (("num_rounds", 1), ("num_inputs", 1), ("num_warm_ups", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer from 0 to 2**63 - 1, got {self.seed!r}.")

    @property
    def num_timed_samples(self) -> int:
        """Calls of each strategy at one token count, warm-ups included."""
        return self.num_warm_ups + self.num_rounds


def checked_strategies(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names with the reference first, adding it where it is left out.

    Raises:
        ConfigError: None at all, one that is not known (names the nearest), or one twice.
    """
    if isinstance(names, str):
        names = [names]
    given = list(names)
    if not given:
        raise ConfigError(f"No strategy to compare. {nearest('', STRATEGIES)}")
    for name in given:
        if name not in STRATEGIES:
            raise ConfigError(f"Unknown strategy {name!r}: {nearest(name, STRATEGIES)}")
        if given.count(name) > 1:
            raise ConfigError(f"Strategy {name!r} is named more than once; name it once.")
    return (REFERENCE, *(name for name in given if name != REFERENCE))


def parse_names(text: str) -> tuple[str, ...]:
    """Splits ``"eager,full"`` into names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_sizes(text: str, what: str = "capture sizes") -> tuple[int, ...]:
    """Reads ``"16,32,64"`` or ``"4..4096"``, or a mix; a range is the default ladder between its ends.

    Args:
        text: What was given.
        what: The option's meaning, for errors.

    Raises:
        ConfigError: Not of that form, or sizes that are empty, not positive, unsorted or repeated.
    """
    sizes: list[int] = []
    for part in text.split(","):
        low_text, dots, high_text = part.strip().partition("..")
        try:
            low = int(low_text)
            high = int(high_text) if dots else low
        except ValueError as err:
            raise ConfigError(
                f"Cannot read {part.strip()!r} in the {what} {text!r}: "
                "write sizes as 16,32,64 or a range of the default ladder as 4..4096."
            ) from err
        if not dots:
            sizes.append(low)
            continue
        if not 1 <= low <= high:
            raise ConfigError(
                f"The range {part.strip()!r} in the {what} must go up from at least 1, as 4..64 does."
            )
        sizes.extend(size for size in default_capture_sizes(high) if size >= low)
    return validate_capture_sizes(sizes, what.replace(" ", "_"))


def default_sizes(device: torch.device) -> tuple[int, ...]:
    """Returns the capture sizes of a device: 42 up to 4096 on CUDA, four up to 128 on a CPU."""
    if device.type == "cuda":
        return tuple(default_capture_sizes(DEFAULT_CUDA_LARGEST))
    return DEFAULT_CPU_SIZES


def default_num_rounds(device: torch.device) -> int:
    """Returns the timed rounds of a device: 20 on CUDA, 7 on a CPU."""
    return DEFAULT_CUDA_ROUNDS if device.type == "cuda" else DEFAULT_CPU_ROUNDS


def token_counts_for(capture_sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns every capture size and an odd count between each and the next smaller one.

    Odd counts, because what only works on multiples of something would pass on the middle.
    """
    counts: set[int] = set(capture_sizes)
    for below, size in zip((0, *capture_sizes), capture_sizes, strict=False):
        between = (below + size) // 2 | 1
        if below < between < size:
            counts.add(between)
    return tuple(sorted(counts))


def resolve_device(name: str) -> torch.device:
    """Returns the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: Another word.
        DeviceUnavailableError: CUDA where there is none, or a number that there is not.
    """
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
        raise ConfigError(f"Unknown device {name!r}: {nearest(name, ('auto', 'cpu', 'cuda', 'cuda:0'))}")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"Device {name!r} was asked for, but PyTorch {torch.__version__} sees no CUDA device here. "
            "Use --device cpu for the emulated device, or install a CUDA build of PyTorch on a machine "
            "with an NVIDIA GPU."
        )
    number = int(index) if index else torch.cuda.current_device()
    if number >= torch.cuda.device_count():
        raise DeviceUnavailableError(
            f"Device {name!r} was asked for, but there are only {torch.cuda.device_count()} CUDA devices "
            "here; they count from cuda:0."
        )
    return torch.device("cuda", number)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype for a name; ``auto`` is bfloat16 on CUDA and float32 on a CPU.

    Raises:
        ConfigError: Another word.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"Unknown dtype {name!r}: {nearest(name, ('auto', *_DTYPES))}")
    return _DTYPES[name]
