"""An execution plan from a TOML file, with settings of the command line on top.

```toml
[attention]
prefill = "torch"
decode = "torch"

[padding]
max_factor = 2.0
floor = 32

[modes.decode]
strategy = "full"
capture_sizes = [1, 2, 4, 8]
```
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..batch.forward_mode import ForwardMode
from ..errors import ConfigError, nearest
from .padding_policy import PaddingPolicy
from .plan import EAGER, FOLLOWED, NO_COMPILE, STRATEGIES, ExecutionPlan, ModeStrategy, unknown_strategy

_ATTENTION_KEYS = ("prefill", "decode")
_FIELDS = {field.name: field for field in dataclasses.fields(ModeStrategy)}


def read_plan(path: Path) -> ExecutionPlan:
    """Reads a plan.

    Raises:
        ConfigError: The file is missing or no TOML, or names something unknown; with the nearest
            known name.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"The plan {path} cannot be read: {err.strerror}.") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"The plan {path} is no TOML file: {err}.") from err
    try:
        return plan_from_settings(content)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err


def plan_from_settings(settings: Mapping[str, Any]) -> ExecutionPlan:
    """Makes a plan of nested settings, as a TOML file has them.

    Raises:
        ConfigError: A table, key, mode or strategy is unknown, or a value has a wrong type.
    """
    _check_keys("the plan", settings, ("attention", "padding", "modes"))
    attention = _table(settings, "attention")
    _check_keys("attention", attention, _ATTENTION_KEYS)
    for key, value in attention.items():
        if not isinstance(value, str):
            raise ConfigError(f"attention.{key} must be a backend's name, got {value!r}.")
    padding = _table(settings, "padding")
    _check_keys("padding", padding, ("max_factor", "floor"))
    for key, value in padding.items():
        if isinstance(value, bool) or not isinstance(value, int if key == "floor" else int | float):
            raise ConfigError(f"padding.{key} must be a number, got {value!r}.")
    modes = {
        parse_mode(name): _mode_strategy(name, table) for name, table in _table(settings, "modes").items()
    }
    return ExecutionPlan(
        modes=modes,
        prefill_attention=attention.get("prefill", "auto"),
        decode_attention=attention.get("decode", "auto"),
        padding=PaddingPolicy(**padding),
    )


def with_strategies(plan: ExecutionPlan, strategies: Mapping[ForwardMode, str]) -> ExecutionPlan:
    """Returns a plan with other strategies for some modes; IDLE and MIXED follow DECODE and EXTEND.

    Raises:
        ConfigError: A strategy is unknown; names the nearest.
    """
    modes = dict(plan.modes)
    for mode, strategy in strategies.items():
        if strategy not in STRATEGIES:
            raise unknown_strategy(mode.value, strategy)
        old = plan.of(mode)
        modes[mode] = dataclasses.replace(
            old,
            strategy=strategy,
            capture_sizes=None if strategy == EAGER else old.capture_sizes,
            compile=NO_COMPILE if strategy == EAGER else old.compile,
            request_slots=old.request_slots if strategy == "full" else None,
        )
        for follower in (one for one, followed in FOLLOWED.items() if followed is mode):
            modes.pop(follower, None)
    return dataclasses.replace(plan, modes=modes)


def parse_mode(name: str) -> ForwardMode:
    """Returns the mode of a name.

    Raises:
        ConfigError: No mode has it; names the nearest.
    """
    known = {mode.value: mode for mode in ForwardMode}
    if name.lower() not in known:
        raise ConfigError(f"No forward mode is named {name!r}. {nearest(name.lower(), known)}")
    return known[name.lower()]


def _mode_strategy(name: str, table: Any) -> ModeStrategy:
    if not isinstance(table, Mapping):
        raise ConfigError(f"modes.{name} must be a table, got {table!r}.")
    _check_keys(f"modes.{name}", table, _FIELDS)
    values = dict(table)
    for key in ("strategy", "compile"):
        if key in values and not isinstance(values[key], str):
            raise ConfigError(f"modes.{name}.{key} must be a word, got {values[key]!r}.")
    for key in ("num_tokens_per_req", "request_slots"):
        if key in values and type(values[key]) is not int:
            raise ConfigError(f"modes.{name}.{key} must be a whole number, got {values[key]!r}.")
    if "capture_sizes" in values:
        if not isinstance(values["capture_sizes"], list):
            raise ConfigError(f"modes.{name}.capture_sizes must be a list, got {values['capture_sizes']!r}.")
        values["capture_sizes"] = tuple(values["capture_sizes"])
    default = ExecutionPlan().of(parse_mode(name))
    return dataclasses.replace(default, **values)


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} must be a table, got {table!r}.")
    return table


def _check_keys(where: str, table: Mapping[str, Any], known: Any) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where} names {key!r}. {nearest(key, known)}")
