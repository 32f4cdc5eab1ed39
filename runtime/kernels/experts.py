"""Mixture of experts: top-k routing that leaves padded rows out, and the experts' computation.

Shapes never depend on what the router chose, so it can be captured, and no row's result depends on
the others'. This module holds the definition in plain torch and chooses among the kernels.

Shapes: `T` tokens, `X` experts, `P` experts of one token, `E` hidden, `M` width inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from .kernel_set import TORCH_KERNELS
from .launching import import_triton_module


class ExpertsKernel(Protocol):
    """Routes tokens and runs their experts."""

    def __call__(
        self,
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        gate_up_X2ME: torch.Tensor,
        down_XEM: torch.Tensor,
        num_real_tokens: torch.Tensor,
        *,
        top_k: int,
        is_normalised: bool,
    ) -> torch.Tensor:
        """Returns the weighted sum of each token's experts.

        Args:
            x_TE: Rows, real ones first (dtype[T, E]); padded rows may hold anything.
            router_logits_TX: Router output (dtype[T, X]).
            gate_up_X2ME: Gate above up projection of every expert (dtype[X, 2 M, E]).
            down_XEM: Down projection of every expert (dtype[X, E, M]).
            num_real_tokens: Rows that are real (int32[], on the device).
            top_k: Experts of one token (`P`).
            is_normalised: The chosen experts' weights are divided by their sum.

        Returns:
            ``out_TE`` (dtype[T, E]), fresh; zero in padded rows.
        """


def real_rows(num_real_tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns which rows are real (bool[T, 1], fresh)."""
    return (torch.arange(num_tokens, device=num_real_tokens.device) < num_real_tokens).unsqueeze(1)


def route(
    router_logits_TX: torch.Tensor, num_real_tokens: torch.Tensor, *, top_k: int, is_normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for every row.

    Args:
        router_logits_TX: Router output (dtype[T, X]).
        num_real_tokens: Rows that are real (int32[], on the device).
        top_k: Experts of one token (`P`).
        is_normalised: The chosen experts' weights are divided by their sum.

    Returns:
        ``expert_TP`` (int64[T, P]), `X` in padded rows, which is no expert; and ``weight_TP``
        (dtype[T, P]), zero there. Fresh.
    """
    num_tokens, num_experts = router_logits_TX.shape
    chance_TX = router_logits_TX.softmax(-1, dtype=torch.float32)
    weight_TP, expert_TP = chance_TX.topk(top_k, dim=-1)
    if is_normalised:
        weight_TP = weight_TP / weight_TP.sum(-1, keepdim=True)
    is_real_T1 = real_rows(num_real_tokens, num_tokens)
    expert_TP = torch.where(is_real_T1, expert_TP, num_experts)
    return expert_TP, torch.where(is_real_T1, weight_TP, 0.0).to(router_logits_TX.dtype)


def torch_experts(gate_mul: Callable[[torch.Tensor], torch.Tensor]) -> ExpertsKernel:
    """Returns the definition in plain torch: every expert computes every row, most of it for nothing.

    So a row's arithmetic is the same whatever the other rows chose.

    Args:
        gate_mul: Joins gate and up projection.
    """

    def run(
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        gate_up_X2ME: torch.Tensor,
        down_XEM: torch.Tensor,
        num_real_tokens: torch.Tensor,
        *,
        top_k: int,
        is_normalised: bool,
    ) -> torch.Tensor:
        expert_TP, weight_TP = route(
            router_logits_TX, num_real_tokens, top_k=top_k, is_normalised=is_normalised
        )
        out_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        for expert, (gate_up_2ME, down_EM) in enumerate(zip(gate_up_X2ME, down_XEM, strict=True)):
            is_chosen_TP = expert_TP == expert
            weight_T1 = torch.where(is_chosen_TP, weight_TP, 0.0).sum(-1, keepdim=True)
            own_TE = F.linear(gate_mul(F.linear(x_TE, gate_up_2ME)), down_EM) * weight_T1
            # Not the product alone: what another expert's row overflowed to, times zero, is NaN.
            out_TE = out_TE + torch.where(is_chosen_TP.any(-1, keepdim=True), own_TE, 0.0)
        return out_TE.to(x_TE.dtype)

    return run


def experts_kernel(kernels: str, gate_mul: Callable[[torch.Tensor], torch.Tensor]) -> ExpertsKernel:
    """Returns the computation that goes with a kernel set.

    Args:
        kernels: The set's name.
        gate_mul: Joins gate and up projection; of the same set.
    """
    if kernels == TORCH_KERNELS.name:
        return torch_experts(gate_mul)
    # FlashInfer's set is Triton's with other kernels in some places; it has none for experts here.
    run = import_triton_module("triton_experts", __package__ or "").triton_experts(gate_mul)
    assert callable(run)
    return run
