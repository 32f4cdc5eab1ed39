"""The decoder model: embedding, equal layers, final norm, output layer.

Plain PyTorch for one flat batch of tokens. Whoever runs the model opens a forward context, which
says what attention is: without a KV cache, or over KV pools. Parts of a forward can be run apart,
layer by layer, and logits are computed for the rows that are asked for.

Shapes: `T` tokens, `D` head size, `E` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import skip_init

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.context import local_real_tokens
from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet

from .config import DecoderConfig
from .layers import Attention, Building, DecoderLayer, Linear, OutputNormedLayer, RMSNorm
from .rope import RotaryEmbedding


class LayerState(NamedTuple):
    """What stands between two layers; made by `Decoder.begin_layers`, consumed by `Decoder.run_layers`.

    Attributes:
        delta: What is still to be added to the residual stream (dtype[T, E]).
        residual: The residual stream without it (dtype[T, E]).
        angles: Cosine and sine of every token (dtype[T, 1, D] each), one pair for each kind of layer.
        num_real_tokens: Rows that are real (int32[]); None in a model without experts.
    """

    delta: torch.Tensor
    residual: torch.Tensor
    angles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    num_real_tokens: torch.Tensor | None


class Decoder(nn.Module):
    """A decoder-only language model, for inference.

    Its parameters are **not initialised** when it is built: a loader of ``models.weights`` fills
    all of them, or raises. They do not require gradients.

    Args:
        config: Sizes and variations.
        device: Where parameters live.
        dtype: Of parameters and activations.
        kernels: Fused kernels; plain torch suits every device, and a compiler that fuses by itself.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        kernels: KernelSet = TORCH_KERNELS,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        building = Building(device=device, dtype=dtype, kernels=kernels)
        self.config = config
        embedding = skip_init(nn.Embedding, config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        assert isinstance(embedding, nn.Embedding)
        self.embed_tokens = embedding
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.rotaries = [self.rotary]
        if config.window is not None:
            self.window_rotary = RotaryEmbedding(config.window.rope, config.head_dim, device)
            self.rotaries.append(self.window_rotary)
        self._angles_of_layer = [
            0 if config.window_of(index) is None else 1 for index in range(config.num_layers)
        ]
        # Rounded as the published models were trained with it.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        layer_class = OutputNormedLayer if config.has_output_norms else DecoderLayer
        self.layers = nn.ModuleList(
            layer_class(config, index, building) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, building)
        is_tied = config.has_tied_embeddings
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            building=replace(building, device=torch.device("meta")) if is_tied else building,
        )
        if is_tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where parameters live."""
        return self.norm.weight.device

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.norm.weight.dtype

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model was made for."""
        return self.config.max_positions

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_layers

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """The constants of every attention layer, in order, with its window where it has one."""
        return tuple(part.spec for part in self.modules() if isinstance(part, Attention))

    def static_tensors(self) -> Mapping[str, Callable[[], torch.Tensor]]:
        """Returns what graphs read in place, by name: each entry gives the tensor that is in use."""
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        return {name: partial(_tensor_named, self, name) for name in names}

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Runs the model on one flat batch of tokens, inside a forward context.

        Args:
            input_ids_T: Token ids (int64[T]).
            positions_T: Position of each token in its sequence (int64[T]).

        Returns:
            ``logits_TV`` (dtype[T, V]), fresh.
        """
        return self.compute_logits(self.hidden_states(input_ids_T, positions_T))

    def hidden_states(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Runs everything but the output layer; arguments as in `forward`.

        Returns:
            ``hidden_TE`` after the final norm (dtype[T, E]), fresh.
        """
        state = self.begin_layers(input_ids_T, positions_T)
        return self.end_layers(self.run_layers(state, range(self.config.num_layers)))

    def begin_layers(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> LayerState:
        """Runs what comes before the layers; arguments as in `forward`.

        Returns:
            The state that the first layer takes, fresh.
        """
        x_TE = self.embed_tokens(input_ids_T)
        if self._embedding_scale != 1.0:
            x_TE = x_TE * self._embedding_scale
        angles = tuple(rotary(positions_T, x_TE.dtype) for rotary in self.rotaries)
        num_real_tokens = None if self.config.experts is None else local_real_tokens(x_TE)
        # The first layer adds nothing, so that every layer is the same.
        return LayerState(torch.zeros_like(x_TE), x_TE, angles, num_real_tokens)

    def run_layers(self, state: LayerState, layers: range) -> LayerState:
        """Runs some layers on the state that the layer before them left.

        Args:
            state: Consumed.
            layers: Their indices.

        Returns:
            The state that the next layer takes, or `end_layers`.
        """
        delta_TE, residual_TE, angles, num_real_tokens = state
        every_layer = list(self.layers)  # Dynamo takes milliseconds for each index into a ModuleList.
        for index in layers:
            cos_T1D, sin_T1D = angles[self._angles_of_layer[index]]
            delta_TE, residual_TE = every_layer[index](
                delta_TE, residual_TE, cos_T1D, sin_T1D, num_real_tokens
            )
        return LayerState(delta_TE, residual_TE, angles, num_real_tokens)

    def end_layers(self, state: LayerState) -> torch.Tensor:
        """Norms the state that the last layer left, and consumes it.

        Returns:
            ``hidden_TE`` (dtype[T, E]), fresh.
        """
        return self.norm.add(state.delta, state.residual)[0]

    def compute_logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Applies the output layer to all rows, or to those that the caller picked.

        Args:
            hidden_TE: From `hidden_states` (dtype[T, E]).

        Returns:
            ``logits_TV`` (dtype[T, V]), fresh.
        """
        logits_TV = self.lm_head(hidden_TE)
        cap = self.config.final_logit_cap
        return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)


def _tensor_named(model: nn.Module, name: str) -> torch.Tensor:
    parent, _, own_name = name.rpartition(".")
    tensor = getattr(model.get_submodule(parent), own_name)
    assert isinstance(tensor, torch.Tensor)
    return tensor
