"""The fused kernels that models and KV pools call, as one set that is chosen when they are built.

So a model has no branch on the device. Every set gives the same results within rounding; the torch
set defines them. Inputs that a function *consumes* must not be used again: its results may lie in
their memory.

Shapes: `T` tokens, `H` query heads, `K` KV heads, `D` head size, `E` hidden, `M` feed-forward,
`S` slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ..errors import ConfigError, nearest
from .flashinfer_library import has_flashinfer
from .launching import has_triton, import_triton_module
from .torch_kernels import add_rms_norm, gelu_tanh_mul, norm_rotate, rms_norm, silu_mul, write_kv


class NormRotate(Protocol):
    """Norms queries and keys per head, if weights are given, and rotates them."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        *,
        q_weight_D: torch.Tensor | None,
        k_weight_D: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotated queries and keys.

        Args:
            q_THD: Queries (dtype[T, H, D]); consumed.
            k_TKD: Keys (dtype[T, K, D]); consumed.
            cos_T1D: Cosine of each token's angles (dtype[T, 1, D]); dimension ``i`` is paired with
                ``i + D / 2``.
            sin_T1D: Sine, likewise.
            q_weight_D: Weight of the queries' norm (dtype[D]); None for no norm.
            k_weight_D: Weight of the keys' norm; None as well if the queries' is.
            eps: Added to the norms' mean squares.
        """


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """Fused kernels of one kind.

    Attributes:
        name: For plans and reports.
        rms_norm: ``(x, weight, eps)`` to the normed ``x`` over its last dimension, fresh.
        add_rms_norm: ``(x_TE, residual_TE, weight_E, eps)`` to the normed sum and the sum; consumes
            both.
        silu_mul: ``gate_up_TM2`` (dtype[T, 2 M]) to SiLU of its first half times its second, fresh.
        gelu_tanh_mul: Likewise with GELU in its tanh form.
        norm_rotate: See `NormRotate`.
        write_kv: ``(k_SKD, v_SKD, slots_T, k_TKD, v_TKD)`` writes keys and values of tokens into the
            rows ``slots_T`` (int64[T]) of a pool.
        linear: ``(x, weight, bias)`` to ``x`` times the transposed weight, plus the bias if it is not
            None, fresh. Its rounding may depend on the number of rows.
    """

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_mul: Callable[[torch.Tensor], torch.Tensor]
    norm_rotate: NormRotate
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


TORCH_KERNELS = KernelSet(
    name="torch",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    norm_rotate=norm_rotate,
    write_kv=write_kv,
    linear=F.linear,
)
"""Plain torch: the definition, what the CPU runs, and what a compiler fuses by itself."""


def kernel_set(name: str, device: torch.device) -> KernelSet:
    """Returns a set by its name.

    Args:
        name: ``torch``, ``triton``, ``flashinfer``, or ``auto``: Triton on CUDA where it is
            installed, else torch. To a compiler a fused kernel is one node that it does not look into.
        device: Where it will run; decides ``auto`` only.

    Raises:
        ConfigError: No set has that name.
        MissingExtraError: The package that it needs is not installed.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and has_triton() else "torch"
    if name not in _SETS:
        raise ConfigError(f"Unknown kernel set {name!r}. {nearest(name, ['auto', *_SETS])}")
    return _SETS[name]()


def available_kernel_sets() -> tuple[str, ...]:
    """Returns the names of the sets whose packages are installed."""
    has_all = has_triton() and has_flashinfer()
    return ("torch", *(["triton"] if has_triton() else []), *(["flashinfer"] if has_all else []))


def _triton_set() -> KernelSet:
    found = import_triton_module("triton_kernel_set", __package__ or "").TRITON_KERNELS
    assert isinstance(found, KernelSet)
    return found


def _flashinfer_set() -> KernelSet:
    from .flashinfer_kernels import flashinfer_kernels

    return flashinfer_kernels(_triton_set())


_SETS: dict[str, Callable[[], KernelSet]] = {
    "torch": lambda: TORCH_KERNELS,
    "triton": _triton_set,
    "flashinfer": _flashinfer_set,
}
