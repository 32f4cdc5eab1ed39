"""A mixture of experts in the place of a feed-forward: router and expert weights.

Rows beyond the real tokens go to no expert; how many are real comes from the forward context, by
way of the decoder. The computation is one function of `runtime/kernels`, chosen when it is built.

Shapes: `T` tokens, `X` experts, `E` hidden, `M` width inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import skip_init

from sgl_piecewise.runtime.kernels.experts import experts_kernel
from sgl_piecewise.runtime.kernels.kernel_set import KernelSet

from .config import ExpertsConfig


class Experts(nn.Module):
    """The weights of all experts of a layer, each kind in one parameter.

    Args:
        config: Their number and width.
        hidden_size: `E`.
        device: Where they live.
        dtype: Theirs.
    """

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        num, inner = config.num_experts, config.intermediate_size
        gate_up = torch.empty((num, 2 * inner, hidden_size), device=device, dtype=dtype)
        down = torch.empty((num, hidden_size, inner), device=device, dtype=dtype)
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)


class SparseMLP(nn.Module):
    """A router, and experts of which each token gets a few.

    Args:
        config: Experts and routing.
        hidden_size: `E`.
        gate_mul: Joins gate and up projection.
        kernels: The set that the model is built with; its name chooses the experts' kernel.
        device: Where parameters live.
        dtype: Of parameters and activations.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        hidden_size: int,
        *,
        gate_mul: Callable[[torch.Tensor], torch.Tensor],
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.is_normalised = config.is_normalised
        gate = skip_init(nn.Linear, hidden_size, config.num_experts, bias=False, device=device, dtype=dtype)
        assert isinstance(gate, nn.Linear)
        self.gate = gate
        self.experts = Experts(config, hidden_size, device=device, dtype=dtype)
        self._run_experts = experts_kernel(kernels.name, gate_mul)

    def forward(self, x_TE: torch.Tensor, num_real_tokens: torch.Tensor) -> torch.Tensor:
        """Returns what the experts add to the residual stream (dtype[T, E]), fresh; zero in padded rows.

        Args:
            x_TE: Normed residual stream.
            num_real_tokens: Rows that are real (int32[], on the device).
        """
        return self._run_experts(
            x_TE,
            self.gate(x_TE),
            self.experts.gate_up_proj,
            self.experts.down_proj,
            num_real_tokens,
            top_k=self.top_k,
            is_normalised=self.is_normalised,
        )
