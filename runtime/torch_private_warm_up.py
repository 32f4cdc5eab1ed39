"""Private PyTorch APIs of Inductor in a compile worker: one small kernel loads what each worker loads for its first.

Compiling needs no GPU, and which one it is for does not matter. Imported by processes that compile for others only.
Relies on Inductor's kernels importing these two modules and setting Triton's driver; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch._inductor.runtime import (
    triton_helpers,
    triton_heuristics,  # noqa: F401 - a worker would import it with its first kernel
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_SIGNATURE = {"source_ptr": "*fp16", "target_ptr": "*fp16", "count": "i32", "BLOCK": "constexpr"}
_TARGET = GPUTarget("cuda", 80, 32)
_compiled: list[str] = []


@triton.jit
def _norm_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Has what most generated kernels have: masked loads, a reduction, and a function of the math library."""
    at = tl.arange(0, BLOCK)
    values = tl.load(source_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    values *= tl.math.rsqrt(tl.sum(values * values, axis=0) / count + 1e-6)
    tl.store(target_ptr + at, (values * tl.sigmoid(values)).to(tl.float16), mask=at < count)


def compile_one() -> None:
    """Compiles a kernel, also where Triton's cache has it, after loading the GPU's driver as Inductor's workers do."""
    if torch.cuda.is_available():
        triton_helpers.set_driver_to_gpu()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        kernel = triton.compile(ASTSource(_norm_kernel, _SIGNATURE, {"BLOCK": 256}), target=_TARGET)
    _compiled.append(kernel.name)


def num_compiled() -> int:
    """Returns how many kernels this process has compiled."""
    return len(_compiled)
