"""A decoder model as the execution layer wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.runtime.attention.base import AttentionSpec


class ServedDecoder:
    """Adapts `Decoder` to what a model runner asks for (`runtime.runners.served_model`).

    Args:
        decoder: Filled with weights.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.attention_layers: Sequence[AttentionSpec] = [
            module.spec for module in decoder.modules() if isinstance(getattr(module, "spec", None), AttentionSpec)
        ]

    @property
    def device(self) -> torch.device:
        """Where parameters live."""
        return self.decoder.norm.weight.device

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values: that of the activations."""
        return self.decoder.norm.weight.dtype

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.decoder.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was made for."""
        return self.decoder.config.max_positions

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.decoder.layers)

    def hidden_states(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Returns hidden states after the last norm (dtype[T, E])."""
        return self.decoder.hidden_states(input_ids_T, positions_T)

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Returns logits of some rows (dtype[N, V])."""
        return self.decoder.compute_logits(hidden_NE)

    def begin_layers(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> Any:
        """Returns what the first layer takes."""
        x_TE = self.decoder.embed_tokens(input_ids_T)
        return x_TE, *self.decoder.rotary(positions_T, x_TE.dtype)

    def run_layers(self, state: Any, layers: range) -> Any:
        """Runs some layers on a state; returns the next one."""
        x_TE, cos_T1D, sin_T1D = state
        for index in layers:
            x_TE = self.decoder.layers[index](x_TE, cos_T1D, sin_T1D)
        return x_TE, cos_T1D, sin_T1D

    def end_layers(self, state: Any) -> torch.Tensor:
        """Returns hidden states after the last norm (dtype[T, E])."""
        return self.decoder.norm(state[0])

    def static_tensors(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        """Returns parameters and buffers by name, each as it is now."""
        return {
            name: _getter(self.decoder, name)
            for name, _ in (*self.decoder.named_parameters(), *self.decoder.named_buffers())
        }


def _getter(decoder: Decoder, name: str) -> Callable[[], torch.Tensor]:
    path, _, attribute = name.rpartition(".")

    def current() -> torch.Tensor:
        found: torch.Tensor = getattr(decoder.get_submodule(path), attribute)
        return found

    return current
