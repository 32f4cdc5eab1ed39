"""The kernel set ``flashinfer``: FlashInfer's norms and activations, Triton for the rest.

FlashInfer's RoPE wants a table of all positions and its KV write a plan of its own, so those stay
Triton's. For forwards that are not compiled.

Shapes: `T` tokens, `E` hidden, `M` feed-forward.
Source: flashinfer-python 0.6.6, ``norm.py`` and ``activation.py``.
"""

from __future__ import annotations

import dataclasses

import torch

from .flashinfer_library import import_flashinfer
from .kernel_set import KernelSet


def flashinfer_kernels(others: KernelSet) -> KernelSet:
    """Returns FlashInfer's set.

    Args:
        others: Where the kernels that FlashInfer does not give come from.

    Raises:
        MissingExtraError: FlashInfer is not installed.
    """
    flashinfer = import_flashinfer(purpose="run the kernel set 'flashinfer'")

    # FlashInfer launches an empty grid for no tokens, which CUDA refuses.

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return flashinfer.rmsnorm(x, weight, eps) if x.numel() else others.rms_norm(x, weight, eps)

    def add_rms_norm(
        x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x_TE.numel():
            flashinfer.fused_add_rmsnorm(x_TE, residual_TE, weight_E, eps)
        return x_TE, residual_TE

    def silu_mul(gate_up_TM2: torch.Tensor) -> torch.Tensor:
        return flashinfer.silu_and_mul(gate_up_TM2) if gate_up_TM2.numel() else others.silu_mul(gate_up_TM2)

    def gelu_tanh_mul(gate_up_TM2: torch.Tensor) -> torch.Tensor:
        if not gate_up_TM2.numel():
            return others.gelu_tanh_mul(gate_up_TM2)
        return flashinfer.gelu_tanh_and_mul(gate_up_TM2)

    return dataclasses.replace(
        others,
        name="flashinfer",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gelu_tanh_mul=gelu_tanh_mul,
    )
