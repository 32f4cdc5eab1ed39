"""The kernel set ``triton``: its kernels as operators of PyTorch, and as the functions of the set.

As operators they are one node each to Dynamo, and a dispatched call to a recording. Imported
lazily: importing it imports Triton.

Shapes: `T` tokens, `H` query heads, `K` KV heads, `D` head size, `E` hidden, `M` feed-forward,
`S` slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .kernel_set import KernelSet
from .launching import launch, power_of_two
from .triton_kernels import (
    add_rms_norm_kernel,
    gate_mul_kernel,
    norm_rotate_kernel,
    rms_norm_kernel,
    write_kv_kernel,
)
from .triton_linear import MAX_ROWS, linear

_NAMESPACE = "sgl_piecewise_kernels"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_ELEMENTS = 2048  # of one program, where a row is shorter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norms over the last dimension; fresh and contiguous."""
    size = x.shape[-1]
    rows_THE = x.unsqueeze(1) if x.dim() == 2 else x.flatten(0, -3)
    num_tokens, num_heads = rows_THE.shape[:2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_e = power_of_two(size)
    block_r = max(_ELEMENTS // block_e, 1)
    launch(
        rms_norm_kernel,
        (-(-num_tokens * num_heads // block_r),),
        [rows_THE, weight, out],
        written=(2,),
        is_dependent=True,
        eps=eps,
        num_rows=num_tokens * num_heads,
        x_stride_t=rows_THE.stride(0),
        x_stride_h=rows_THE.stride(1),
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_R=block_r,
        BLOCK_E=block_e,
        num_warps=_num_warps(block_r * block_e),
    )
    return out


def add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Leaves the sum in ``residual`` and the normed sum in ``x``."""
    block_e = power_of_two(x.shape[1])
    launch(
        add_rms_norm_kernel,
        (x.shape[0],),
        [x, residual, weight],
        written=(0, 1),
        is_dependent=True,
        eps=eps,
        x_stride_t=x.stride(0),
        residual_stride_t=residual.stride(0),
        SIZE=x.shape[1],
        BLOCK_E=block_e,
        num_warps=_num_warps(block_e),
    )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second half; fresh."""
    return _gate_mul(gate_up, is_gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GELU (tanh form) of the first half times the second half; fresh."""
    return _gate_mul(gate_up, is_gelu=True)


def _gate_mul(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block_m = min(power_of_two(size), 1024)
    launch(
        gate_mul_kernel,
        (num_tokens, -(-size // block_m)),
        [gate_up, out],
        written=(1,),
        is_dependent=True,
        stride_t=gate_up.stride(0),
        SIZE=size,
        BLOCK_M=block_m,
        IS_GELU=is_gelu,
        num_warps=4,
    )
    return out


def norm_rotate_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Norms queries and keys if weights are given, and rotates them, in place."""
    num_tokens, num_heads, head_dim = q.shape
    block_half = power_of_two(head_dim // 2)
    block_h = max(min(_ELEMENTS // (2 * block_half), power_of_two(num_heads)), 1)
    launch(
        norm_rotate_kernel,
        (num_tokens, -(-num_heads // block_h) + -(-k.shape[1] // block_h)),
        [q, k, cos, sin, cos if q_weight is None else q_weight, cos if k_weight is None else k_weight],
        written=(0, 1),
        is_dependent=True,
        eps=eps,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        k_stride_t=k.stride(0),
        k_stride_h=k.stride(1),
        cos_stride_t=cos.stride(0),
        sin_stride_t=sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=k.shape[1],
        HALF=head_dim // 2,
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        HAS_NORM=q_weight is not None,
        num_warps=_num_warps(2 * block_h * block_half),
    )


def write_kv(
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    slots_T: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
) -> None:
    """Writes keys and values of tokens into rows of a pool."""
    row = k_SKD.shape[1] * k_SKD.shape[2]
    tensors = [tensor if _has_flat_rows(tensor) else tensor.contiguous() for tensor in (k_TKD, v_TKD)]
    launch(
        write_kv_kernel,
        (slots_T.shape[0],),
        [k_SKD, v_SKD, slots_T, *tensors],
        written=(0, 1),
        is_dependent=True,
        k_stride_s=k_SKD.stride(0),
        v_stride_s=v_SKD.stride(0),
        k_stride_t=tensors[0].stride(0),
        v_stride_t=tensors[1].stride(0),
        ROW=row,
        BLOCK=power_of_two(row),
        num_warps=_num_warps(power_of_two(row)),
    )


def _has_flat_rows(tensor: torch.Tensor) -> bool:
    return tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]


def _num_warps(elements: int) -> int:
    return min(max(elements // 512, 1), 8)


# As operators -------------------------------------------------------------------------------------


_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_LIBRARY.define("add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")
_LIBRARY.define("silu_mul(Tensor gate_up) -> Tensor")
_LIBRARY.define("gelu_tanh_mul(Tensor gate_up) -> Tensor")
_LIBRARY.define(
    "norm_rotate_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, "
    "float eps) -> ()"
)
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
for _function in (rms_norm, add_rms_norm_, silu_mul, gelu_tanh_mul, norm_rotate_, linear):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_function.__name__, _function, _key)


@torch.library.register_fake(f"{_NAMESPACE}::rms_norm")
def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake(f"{_NAMESPACE}::silu_mul")
@torch.library.register_fake(f"{_NAMESPACE}::gelu_tanh_mul")
def _fake_gate_mul(gate_up: torch.Tensor) -> torch.Tensor:
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


@torch.library.register_fake(f"{_NAMESPACE}::add_rms_norm_")
def _fake_add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    return None


@torch.library.register_fake(f"{_NAMESPACE}::norm_rotate_")
def _fake_norm_rotate_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    return None


@torch.library.register_fake(f"{_NAMESPACE}::linear")
def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


_OPERATORS = torch.ops.sgl_piecewise_kernels


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _OPERATORS.rms_norm(x, weight, eps)


def _add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _OPERATORS.add_rms_norm_(x_TE, residual_TE, weight_E, eps)
    return x_TE, residual_TE


def _silu_mul(gate_up_TM2: torch.Tensor) -> torch.Tensor:
    return _OPERATORS.silu_mul(gate_up_TM2)


def _gelu_tanh_mul(gate_up_TM2: torch.Tensor) -> torch.Tensor:
    return _OPERATORS.gelu_tanh_mul(gate_up_TM2)


def _norm_rotate(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    *,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _OPERATORS.norm_rotate_(q_THD, k_TKD, cos_T1D, sin_T1D, q_weight_D, k_weight_D, eps)
    return q_THD, k_TKD


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # Many rows need no operator of ours. A trace serves all sizes, so it must not ask.
    if not torch.compiler.is_compiling() and x.shape[0] > MAX_ROWS:
        return F.linear(x, weight, bias)
    return _OPERATORS.linear(x, weight, bias)


TRITON_KERNELS = KernelSet(
    name="triton",
    rms_norm=_rms_norm,
    add_rms_norm=_add_rms_norm,
    silu_mul=_silu_mul,
    gelu_tanh_mul=_gelu_tanh_mul,
    norm_rotate=_norm_rotate,
    write_kv=write_kv,
    linear=_linear,
)
