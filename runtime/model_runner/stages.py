"""The order in which a model runner comes to be; anything else would leave graphs with wrong addresses."""

from __future__ import annotations

import enum

from ..errors import ConfigError


class Stage(enum.IntEnum):
    """How far a model runner is built; each needs the one before."""

    WEIGHTS = 0
    """Weights are where they stay: what memory is left is known."""
    POOLS = 1
    """KV pools have their size and addresses."""
    HOOKS = 2
    """Pool methods are what they will be: graphs record what is hooked."""
    ATTENTION = 3
    """Attention backends and the translator agree on the pools."""
    GRAPHS = 4
    """Graphs are built; batches can run."""


_CALLS = {
    Stage.POOLS: "build_pools",
    Stage.HOOKS: "install_hooks",
    Stage.ATTENTION: "build_attention",
    Stage.GRAPHS: "build_graphs",
}


class StageTracker:
    """Lets stages pass in their order.

    Attributes:
        stage: The last one that is done.
    """

    def __init__(self) -> None:
        self.stage = Stage.WEIGHTS

    def begin(self, stage: Stage) -> None:
        """Call first in what builds a stage.

        Raises:
            ConfigError: It is not the next one.
        """
        if stage != self.stage + 1:
            following = _CALLS.get(Stage(self.stage + 1)) if self.stage < Stage.GRAPHS else None
            todo = "everything is built" if following is None else f"{following} comes next"
            raise ConfigError(
                f"{_CALLS[stage]} was called after stage {self.stage.name}, and {todo}. The order is fixed: "
                f"{', '.join(_CALLS.values())}."
            )

    def end(self, stage: Stage) -> None:
        """Call last in what builds a stage."""
        self.stage = stage

    def require(self, stage: Stage, what: str) -> None:
        """Checks that a stage is done.

        Raises:
            ConfigError: It is not.
        """
        if self.stage < stage:
            raise ConfigError(
                f"{what} needs stage {stage.name}, and only {self.stage.name} is done: call "
                f"{_CALLS[Stage(self.stage + 1)]} first."
            )
