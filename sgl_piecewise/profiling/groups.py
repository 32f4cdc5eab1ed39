"""Named work in the order and the groups in which a reader sees it."""

from __future__ import annotations

from collections.abc import Mapping

UNATTRIBUTED = "unattributed"

# Group to its phases, as build profiles name them. The order is that of a build.
_GROUPS: dict[str, tuple[str, ...]] = {
    "import": ("import",),
    "Dynamo": ("dynamo trace", "dynamo guards", "garbage collection"),
    "split and link": ("graph passes", "link pieces", "piece compiler"),
    "cache": ("cache check", "cache load", "cache write"),
    "AOTAutograd": ("aot autograd",),
    "Inductor": ("graph passes of inductor", "inductor lowering", "inductor code generation"),
    "kernels": ("host compiler probe", "kernel compile", "kernel load", "autotune"),
    "warm-up": ("static_inputs", "warm_up"),
    "capture": ("capture", "measure_memory", "learn_output_shapes", "wait_for_device"),
    "first replay": ("first_replay",),
}
_OTHER = "other"

GROUPS = (*_GROUPS, _OTHER, UNATTRIBUTED)
"""All groups in order."""


def group_of(phase: str | None) -> str:
    """Returns the group of a phase; None, no named work, is `UNATTRIBUTED`."""
    if phase is None:
        return UNATTRIBUTED
    return next((group for group, phases in _GROUPS.items() if phase in phases), _OTHER)


def ordered(phases: Mapping[str, float]) -> list[str]:
    """Returns the phases in the order of their groups, then as they came."""
    known = [phase for group in _GROUPS.values() for phase in group]
    first = [phase for phase in known if phase in phases]
    return first + [phase for phase in phases if phase not in first]


def in_words(phase: str) -> str:
    """Returns a phase's name for a reader."""
    return phase.replace("_", " ")
