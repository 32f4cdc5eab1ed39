"""What the execution layer needs of a model.

A model that has these runs here; it need not know that it does. Attention goes through the marked
`attend` call and the forward context.

Shapes: `T` tokens, `N` rows, `E` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from ..attention.base import AttentionSpec


@runtime_checkable
class ServedModel(Protocol):
    """A decoder model with its weights in place."""

    @property
    def device(self) -> torch.device:
        """Where parameters live."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values in the pool."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was made for."""

    @property
    def attention_layers(self) -> Sequence[AttentionSpec]:
        """Constants of every attention layer, with its window where it has one."""

    @property
    def num_layers(self) -> int:
        """Layers that a split prefill may divide."""

    def hidden_states(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Returns hidden states after the last norm (dtype[T, E]), inside a forward context."""

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Returns logits of some rows (dtype[N, V])."""

    def begin_layers(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> Any:
        """Returns what the first layer takes: the state that `run_layers` passes on."""

    def run_layers(self, state: Any, layers: range) -> Any:
        """Runs some layers on a state; returns the next one."""

    def end_layers(self, state: Any) -> torch.Tensor:
        """Returns what `hidden_states` would, from the state after the last layer."""

    def static_tensors(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        """Returns what graphs read in place, by name: each entry gives the tensor that is in use."""
