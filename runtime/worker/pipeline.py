"""The place of a worker in a pipeline of ranks, and what ranks hand on.

One process is a pipeline of one rank. What passes between ranks has a type and a name here, so that
several can be added without another shape of results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPProxyTensors:
    """What a pipeline rank hands to the next in place of tokens.

    Attributes:
        tensors: By name; ``hidden_states`` is always there (dtype[T, E]).
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PipelinePlace:
    """Which of the pipeline's ranks this is.

    Attributes:
        rank: Counted from 0, which embeds tokens.
        num_ranks: The last one samples.

    Raises:
        ConfigError: The rank is not among them.
    """

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"Pipeline rank {self.rank} is not one of {self.num_ranks}, counted from 0.")

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self.rank == self.num_ranks - 1
