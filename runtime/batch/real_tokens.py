"""Counts of real tokens at two scopes, whose meaning never changes.

GLOBAL: real tokens of the batch before it is divided among ranks; an int32 scalar on the device,
part of the batch. LOCAL: this rank's share of them, derived again from GLOBAL at every forward.
Deriving it is device work, so that a captured forward does it at every replay.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from ..errors import ConfigError


class TokenLayout(enum.Enum):
    """How a rank's rows lie in the batch."""

    SHARDED = "sharded"
    """Equal, contiguous shares of the padded rows."""
    RANK_LOCAL = "rank_local"
    """The rows, and GLOBAL itself, are this rank's already (zigzag context parallel)."""


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """Which share of the rows is this rank's.

    Attributes:
        rank: Among those that share the rows.
        num_ranks: How many do.
        layout: How their rows lie.

    Raises:
        ConfigError: The rank is not among them.
    """

    rank: int = 0
    num_ranks: int = 1
    layout: TokenLayout = TokenLayout.SHARDED

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank {self.rank} is not one of {self.num_ranks} ranks, counted from 0.")

    def num_local_rows(self, num_padded_rows: int) -> int:
        """Returns how many rows this rank holds, padded ones included.

        Args:
            num_padded_rows: Rows of the padded batch, as GLOBAL counts them.

        Raises:
            ConfigError: They do not divide into equal shares.
        """
        if self.layout is TokenLayout.RANK_LOCAL:
            return num_padded_rows
        if num_padded_rows % self.num_ranks:
            raise ConfigError(
                f"{num_padded_rows} rows do not divide among {self.num_ranks} ranks; pad them to a multiple."
            )
        return num_padded_rows // self.num_ranks

    def local_real_tokens(self, num_real_tokens: torch.Tensor, num_padded_rows: int) -> torch.Tensor:
        """Derives LOCAL from GLOBAL.

        Args:
            num_real_tokens: GLOBAL (int32[], on the device).
            num_padded_rows: Rows of the padded batch.

        Returns:
            LOCAL (int32[], on the device), fresh.
        """
        if self.layout is TokenLayout.RANK_LOCAL:
            return num_real_tokens.clone()
        num_rows = self.num_local_rows(num_padded_rows)
        return (num_real_tokens - self.rank * num_rows).clamp(0, num_rows)

    def local_real_tokens_cpu(self, num_real_tokens: int, num_padded_rows: int) -> int:
        """`local_real_tokens` for a count on the host."""
        if self.layout is TokenLayout.RANK_LOCAL:
            return num_real_tokens
        num_rows = self.num_local_rows(num_padded_rows)
        return min(max(num_real_tokens - self.rank * num_rows, 0), num_rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class RealTokens:
    """GLOBAL and this rank's share, as the forward context carries them.

    Attributes:
        num_real_tokens: GLOBAL (int32[], on the device), at a fixed address where graphs read it.
        shard: Which share of the rows is this rank's.
    """

    num_real_tokens: torch.Tensor
    shard: TokenShard = TokenShard()

    def local(self, num_rows: int) -> torch.Tensor:
        """Derives LOCAL (int32[], on the device, fresh).

        Args:
            num_rows: Rows that this rank holds, padded ones included.
        """
        num_ranks = 1 if self.shard.layout is TokenLayout.RANK_LOCAL else self.shard.num_ranks
        return self.shard.local_real_tokens(self.num_real_tokens, num_rows * num_ranks)
