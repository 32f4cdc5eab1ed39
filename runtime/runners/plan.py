"""The execution plan: for every mode a runner, how it is compiled and captured, and at which sizes. Built once.

A plan is what was asked for; `resolve` makes it what the attention backends can do, and says what
it changed. Graph sizes are bounded by the runner's limits, which are not the plan's matter.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..attention.backend import AttentionBackend
from ..batch.forward_mode import ForwardMode
from ..capture.sizes import validate_capture_sizes
from ..errors import ConfigError, nearest
from .padding_policy import PaddingPolicy

_logger = logging.getLogger(__name__)

EAGER = "eager"
STRATEGIES = (EAGER, "none", "full", "breakable")
"""``eager`` runs batches as they come; the others are graph backends, ``none`` being padded eager."""

NO_COMPILE = "none"

_CELL_COMPILERS = {"fx": "fx", "tc": "inductor"}
_CELL_CAPTURES = {"": "none", "full": "full", "piecewise": "breakable"}


def unknown_strategy(where: str, name: str) -> ConfigError:
    """Returns the error of a name that is no capture strategy; a cell of the grid is told as what it is here."""
    compiler, _, capture = name.partition("_")
    if compiler in _CELL_COMPILERS and capture in _CELL_CAPTURES:
        return ConfigError(
            f"{where}: {name!r} is a cell of the grid, which is two settings here: strategy "
            f'{_CELL_CAPTURES[capture]!r} with compile = "{_CELL_COMPILERS[compiler]}" in a plan (a TOML file).'
        )
    return ConfigError(f"{where}: no capture strategy {name!r}. {nearest(name, STRATEGIES)}")


RUNNER_OF_MODE: dict[ForwardMode, str] = {
    ForwardMode.EXTEND: "extend",
    ForwardMode.MIXED: "extend",
    ForwardMode.DECODE: "decode",
    ForwardMode.IDLE: "decode",
    ForwardMode.TARGET_VERIFY: "decode",
    ForwardMode.DRAFT_EXTEND_V2: "decode",
    ForwardMode.DLLM_EXTEND: "decode",
    ForwardMode.SPLIT_PREFILL: "split_prefill",
    ForwardMode.PREBUILT: "eager",
}
"""Who runs a mode where a graph runner is on; in the last two nothing but eager is possible."""

FOLLOWED = {ForwardMode.IDLE: ForwardMode.DECODE, ForwardMode.MIXED: ForwardMode.EXTEND}
"""Modes that share another's graphs: they may be eager, or be as the other is."""

_NEEDS_ROWS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND)


@dataclass(frozen=True, kw_only=True)
class ModeStrategy:
    """How forwards of one mode run.

    Attributes:
        strategy: The capture strategy: one of ``STRATEGIES``.
        compile: What compiles the forward's pieces before it is captured: ``none``, ``fx``, ``inductor``,
            any Dynamo backend. For graph runners; eager batches run uncompiled.
        capture_sizes: Requests (decode runner) or tokens (extend runner) that get a graph; None for
            a ladder up to the limit. The limit itself always gets one.
        num_tokens_per_req: Rows of every request, in TARGET_VERIFY, DRAFT_EXTEND_V2 and DLLM_EXTEND.
        request_slots: Requests of a whole extend graph; None for the limit.
    """

    strategy: str = EAGER
    compile: str = NO_COMPILE
    capture_sizes: tuple[int, ...] | None = None
    num_tokens_per_req: int | None = None
    request_slots: int | None = None

    def check(self, mode: ForwardMode) -> None:
        """Checks the strategy for a mode.

        Raises:
            ConfigError: A value is unknown, or means nothing in this mode; names it.
        """
        where = f"modes.{mode.value}"
        if self.strategy not in STRATEGIES:
            raise unknown_strategy(where, self.strategy)
        if self.compile != NO_COMPILE and (self.strategy == EAGER or mode in FOLLOWED):
            raise ConfigError(
                f"{where}: compile is {self.compile!r} and would not be used: it is for the strategies "
                f"{', '.join(STRATEGIES[1:])}, and modes that share another's graphs are compiled with it."
            )
        has_graphs = RUNNER_OF_MODE[mode] in ("decode", "extend")
        if not has_graphs and self.strategy != EAGER:
            raise ConfigError(
                f"{where}: strategy is {self.strategy!r}, and this mode runs eager only. Leave it out."
            )
        if self.capture_sizes is not None:
            if mode in FOLLOWED or self.strategy == EAGER:
                raise ConfigError(f"{where}: capture_sizes would not be used; leave it out.")
            validate_capture_sizes(self.capture_sizes)
        if self.num_tokens_per_req is not None and (mode not in _NEEDS_ROWS or self.num_tokens_per_req < 1):
            raise ConfigError(
                f"{where}: num_tokens_per_req is {self.num_tokens_per_req}; it is at least 1, and for "
                f"{', '.join(one.value for one in _NEEDS_ROWS)} only."
            )
        if mode in _NEEDS_ROWS and self.strategy != EAGER and self.num_tokens_per_req is None:
            raise ConfigError(
                f"{where}: strategy {self.strategy!r} needs num_tokens_per_req, the rows that every request has."
            )
        if self.request_slots is not None and (
            mode is not ForwardMode.EXTEND or self.strategy != "full" or self.request_slots < 1
        ):
            raise ConfigError(
                f"{where}: request_slots is {self.request_slots}; it is at least 1, and for extend captured full only."
            )


_DEFAULTS = {
    ForwardMode.DECODE: ModeStrategy(strategy="full"),
    ForwardMode.IDLE: ModeStrategy(strategy="full"),
    ForwardMode.EXTEND: ModeStrategy(strategy="breakable"),
    ForwardMode.MIXED: ModeStrategy(strategy="breakable"),
}


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """Something that the plan asked for and did not get.

    Attributes:
        mode: Whose strategy.
        asked: What the plan said.
        given: What will be done.
        why: The reason.
    """

    mode: ForwardMode
    asked: str
    given: str
    why: str

    def __str__(self) -> str:
        return f"{self.mode.value}: {self.given} in place of {self.asked}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """How a model runner runs every mode.

    Attributes:
        modes: Strategies of modes; a mode that is left out has its default.
        prefill_attention: Name of the attention backend of modes with several new tokens.
        decode_attention: That of DECODE and IDLE; as the other, ``auto`` or a name of
            `runtime.attention.choice`.
        padding: The bound on padding.

    Raises:
        ConfigError: A strategy is unknown or contradicts another; names mode and field.
    """

    modes: Mapping[ForwardMode, ModeStrategy] = field(default_factory=dict)
    prefill_attention: str = "auto"
    decode_attention: str = "auto"
    padding: PaddingPolicy = field(default_factory=PaddingPolicy)

    def __post_init__(self) -> None:
        for mode, strategy in self.modes.items():
            if not isinstance(mode, ForwardMode) or not isinstance(strategy, ModeStrategy):
                raise ConfigError(
                    f"modes maps {mode!r} to {strategy!r}; it maps a ForwardMode to a ModeStrategy. plan_from_settings "
                    "takes names, as a TOML file has them."
                )
            strategy.check(mode)
        for mode, followed in FOLLOWED.items():
            if mode in self.modes and self.modes[mode].strategy not in (EAGER, self.of(followed).strategy):
                raise ConfigError(
                    f"modes.{mode.value}: strategy is {self.modes[mode].strategy!r}, and it shares the graphs of "
                    f"{followed.value}, which is {self.of(followed).strategy!r}. Make it {EAGER!r} or the same."
                )

    def of(self, mode: ForwardMode) -> ModeStrategy:
        """Returns the strategy of a mode, its default where the plan does not name it."""
        if mode in self.modes:
            return self.modes[mode]
        if mode in FOLLOWED:
            followed = self.of(FOLLOWED[mode])
            return dataclasses.replace(followed, capture_sizes=None, request_slots=None, compile=NO_COMPILE)
        return _DEFAULTS.get(mode, ModeStrategy())

    def runner_of(self, mode: ForwardMode) -> str:
        """Returns the name of the runner that is asked first."""
        runner = RUNNER_OF_MODE[mode]
        return EAGER if runner in ("decode", "extend") and self.of(mode).strategy == EAGER else runner

    def table(self) -> str:
        """Returns the plan as text: one line per mode."""
        lines = []
        for mode in ForwardMode:
            strategy = self.of(mode)
            sizes = "" if strategy.capture_sizes is None else f" sizes {list(strategy.capture_sizes)}"
            compiled = "" if strategy.compile == NO_COMPILE else f" {strategy.compile}"
            lines.append(f"{mode.value:16} {self.runner_of(mode):14} {strategy.strategy}{compiled}{sizes}")
        return "\n".join(lines)

    def resolve(
        self, prefill: type[AttentionBackend], decode: type[AttentionBackend]
    ) -> tuple[ExecutionPlan, tuple[PlanChange, ...]]:
        """Returns the plan that these attention backends can serve, and what differs from this one.

        Args:
            prefill: Backend of modes with several new tokens.
            decode: Backend of DECODE and IDLE.
        """
        modes = {mode: self.of(mode) for mode in ForwardMode}
        changes = []
        for mode, strategy in modes.items():
            backend = decode if mode.is_decode_or_idle() else prefill
            captured_as = FOLLOWED.get(mode, mode)
            if strategy.strategy != "full" or captured_as in backend.full_capture_modes:
                continue
            why = f"attention backend {backend.name!r} cannot be inside a graph in mode {captured_as.value}"
            changes.append(PlanChange(mode=mode, asked="full", given="breakable", why=why))
            _logger.warning("plan: %s", changes[-1])
            modes[mode] = dataclasses.replace(strategy, strategy="breakable", request_slots=None)
        return dataclasses.replace(self, modes=modes), tuple(changes)
