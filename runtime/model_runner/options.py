"""What a model runner is built for: limits, memory, and who watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..batch.forward_mode import CaptureHiddenMode
from ..batch.real_tokens import TokenLayout
from ..errors import ConfigError
from ..kv.slots import PhysicalSlots

WriteHook = Callable[[int, PhysicalSlots, torch.Tensor, torch.Tensor], None]
"""Called before keys and values are written: layer, slots, keys, values."""


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Limits and switches of a model runner.

    Attributes:
        max_requests: Requests that run at once; the largest decode batch.
        max_context: Tokens of one request.
        max_extend_tokens: Tokens of one extend that get a graph; the largest capture size.
        max_eager_tokens: Tokens of one forward at all; over ``max_extend_tokens`` it runs eager. None
            for a whole request at once.
        max_total_tokens: Tokens in the KV pool; None for what memory allows, and no more than all
            requests can have.
        margin_bytes: Memory to leave free, beside the estimate for graphs.
        graph_bytes: Estimate of what graphs take; None to measure a forward of the largest size.
        window_fraction: Slots of a sliding-window sub-pool for each of the full-attention one; at least those of
            one request of ``max_context``.
        capture_hidden_mode: Hidden states that every batch hands out.
        is_draft_worker: Whether it runs a draft model.
        token_multiple: Tokens of every forward are padded to a multiple of this.
        token_layout: How rows are divided among ranks.
        reads_requests: Whether the model reads hidden states by request (pooling).
        kernels: Name of the kernel set that writes keys and values, as `kernel_set` takes it; who loads the model for
            this runner builds it with the same.
        write_hooks: Watchers of the pool.
        is_debug: Make every captured forward one break: same buffers and replay path, no graph.

    Raises:
        ConfigError: A limit under one, or negative memory.
    """

    max_requests: int = 32
    max_context: int = 2048
    max_extend_tokens: int = 512
    max_eager_tokens: int | None = None
    max_total_tokens: int | None = None
    margin_bytes: int = 1 << 29
    graph_bytes: int | None = None
    window_fraction: float = 0.8
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    is_draft_worker: bool = False
    token_multiple: int = 1
    token_layout: TokenLayout = TokenLayout.SHARDED
    reads_requests: bool = False
    kernels: str = "auto"
    write_hooks: tuple[WriteHook, ...] = ()
    is_debug: bool = False

    def __post_init__(self) -> None:
        for name in (
            "max_requests",
            "max_context",
            "max_extend_tokens",
            "max_eager_tokens",
            "max_total_tokens",
            "token_multiple",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
        for name in ("margin_bytes", "graph_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, got {value!r}.")

    @property
    def max_forward_tokens(self) -> int:
        """Tokens of the largest forward, with a graph or without."""
        most = max(self.max_extend_tokens, self.max_context)
        return most if self.max_eager_tokens is None else max(self.max_extend_tokens, self.max_eager_tokens)
