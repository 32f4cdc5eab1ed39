"""The interface of attention backends: plan outside the graph, run inside one or as a break.

A plan says where each request's keys and values lie and which query rows are whose. It is written
before the forward; layers then call `run`, which reads the plan when it runs. What a captured
graph reads of a plan stands at fixed addresses. A backend must not know of runners or models.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..batch.positions import StartLocEncoding
from ..errors import ConfigError
from ..kv.translator import KVIndexTranslator, KVRead
from .base import AttentionSpec

COMPUTING_MODES = frozenset(mode for mode in ForwardMode if not mode.is_prebuilt())
"""All modes in which attention computes something."""


class AttentionBackend(abc.ABC):
    """Computes attention of every layer of a model, for one batch after another.

    Attributes:
        name: Its name in plans and reports.
        start_loc_encoding: What it expects in ``extend_start_loc``.
        full_capture_modes: Modes in which a whole forward, attention included, may be one graph.
            As a break it serves every mode that it serves at all.
    """

    name: ClassVar[str]
    start_loc_encoding: ClassVar[StartLocEncoding] = StartLocEncoding.TOKEN_OFFSET
    full_capture_modes: ClassVar[frozenset[ForwardMode]]

    @abc.abstractmethod
    def bind_kv(self, translator: KVIndexTranslator) -> None:
        """Takes the buffers and tables that it will read, before the first plan.

        Raises:
            ConfigError: They do not fit the model's layers.
        """

    @abc.abstractmethod
    def kv_read(self, layer_id: int) -> KVRead:
        """Returns what it will index for a layer."""

    @abc.abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Makes a batch the current one, for a forward that is not captured whole.

        Args:
            batch: Owned by its forward; nothing of it is kept that a graph would read.

        Raises:
            ConfigError: The batch is over the sizes that the backend was built for.
        """

    @abc.abstractmethod
    def plan_for_capture(self, batch: ForwardBatch) -> None:
        """As `plan`, before a forward that is captured whole: memory and launches follow sizes only.

        Args:
            batch: Padded; its numbers of requests and tokens are those of the graph.

        Raises:
            ConfigError: The mode cannot be captured, or the batch is too large.
        """

    @abc.abstractmethod
    def plan_for_replay(self, batch: ForwardBatch) -> None:
        """As `plan`, before a replay: rewrites in place what `plan_for_capture` laid out.

        Args:
            batch: Padded to the sizes of a captured one.

        Raises:
            ConfigError: No batch of this mode and these sizes was planned for capture.
        """

    @abc.abstractmethod
    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        """Writes new keys and values into the pool and attends; for one layer of the planned batch.

        Args:
            q_THD: Queries, rotated (dtype[T, H, D]); padded rows may hold anything.
            k_TKD: Keys, rotated (dtype[T, K, D]).
            v_TKD: Values (dtype[T, K, D]).
            layer: The layer's constants.

        Returns:
            ``o_THD`` (dtype[T, H, D]), fresh and contiguous; zero in rows of no request.

        Raises:
            ConfigError: No batch was planned, or it has another number of tokens.
        """

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Returns every tensor that captured graphs read of this backend, by name."""
        return {}

    def require_full_capture(self, mode: ForwardMode) -> None:
        """Checks that forwards of a mode may be captured whole.

        Raises:
            ConfigError: They may not.
        """
        if mode not in self.full_capture_modes:
            known = ", ".join(sorted(one.value for one in self.full_capture_modes)) or "none"
            raise ConfigError(
                f"Attention backend {self.name!r} cannot be inside a graph in mode {mode.value!r} (it can in: "
                f"{known}). Capture that mode breakable, or choose another attention backend for it."
            )
