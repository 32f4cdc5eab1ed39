"""Compiles what our launchers launch for a GPU that need not be there; a program with a process of its own.

Triton decides at import whether it compiles or interprets, and tests interpret. The launchers run as they
do on a GPU, on CPU tensors; what would be launched is compiled for the target instead, with the signature
that the launch has. So results hold nothing, and only what is compiled is looked at.

    python tests/kernels/cuda_compiling.py bfloat16
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from sgl_piecewise.runtime.attention.plan import PlanLimits
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.positions import StartLocEncoding
from sgl_piecewise.runtime.kernels import launching
from sgl_piecewise.runtime.kernels.experts import experts_kernel
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set

COMPUTE_CAPABILITY = 90
SHARED_MEMORY_BYTES = 227 * 1024
"""What one block may take on that target: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities"."""
CPU = torch.device("cpu")
WARM_UP = "torch_private_warm_up"
"""The module of a kernel that is compiled and never launched."""


class Compiled:
    """What was compiled, and what could not be."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.failures: list[str] = []
        self.num_variants = 0
        self._seen: set[int] = set()

    def run(self, kernel: Any, original: Any, case: dict[str, Any]) -> None:
        """Compiles one launch.

        Args:
            kernel: The ``triton.jit`` function.
            original: Its ``run``.
            case: Arguments of the launch.
        """
        args, keywords = case.pop("args"), {**case, "warmup": True}
        try:
            found = original(kernel, *args, **keywords)
        except Exception as err:  # noqa: BLE001 - whatever the compiler says is the finding
            dtypes = [str(arg.dtype) for arg in args if isinstance(arg, torch.Tensor)]
            self.failures.append(f"{kernel.__name__}({', '.join(dtypes)}, {keywords}): {err!r}"[:2000])
            return
        if id(found) in self._seen:
            return
        self._seen.add(id(found))
        self.num_variants += 1
        if not found.asm["cubin"]:
            self.failures.append(f"{kernel.__name__}: no cubin")
        has_overlap = "griddepcontrol.wait" in found.asm["ptx"]
        if has_overlap is not keywords.get("launch_pdl", False):
            self.failures.append(f"{kernel.__name__} {keywords}: waits for its predecessor: {has_overlap}")
        if found.metadata.shared > SHARED_MEMORY_BYTES:
            self.failures.append(
                f"{kernel.__name__} {keywords}: {found.metadata.shared} bytes of shared memory"
            )
        self.names |= {name_of(one) for one in with_callees(kernel)}


def name_of(kernel: Any) -> str:
    return f"{kernel.__module__}.{kernel.__name__}"


def with_callees(kernel: Any) -> Iterator[Any]:
    """Returns a kernel and those that it calls."""
    yield kernel
    for name in kernel.fn.__code__.co_names:
        callee = kernel.fn.__globals__.get(name)
        if isinstance(callee, type(kernel)):
            yield from with_callees(callee)


def compile_instead_of_launching(compiled: Compiled) -> None:
    """Puts a target in the GPU's place, and lets launches on CPU tensors reach it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class TargetOnly:
        """As much of a driver as compiling needs."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", COMPUTE_CAPABILITY, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(TargetOnly())
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        compiled.run(self, original, {"args": args, "grid": grid, **keywords})

    JITFunction.run = run
    launching.is_interpreted = lambda kernel: True
    launching.repair_interpreter = lambda: None


def set_overlap(value: bool) -> None:
    """Launches as for a device that has programmatic dependent launch, or has not."""
    launching.launches_dependents = lambda device: value


def run_kernel_set(dtype: torch.dtype, head_dim: int, index_dtype: torch.dtype) -> None:
    kernels = kernel_set("triton", CPU)
    num_tokens, num_heads, num_kv_heads, hidden = 5, 8, 2, 8 * head_dim
    x, weight = torch.ones(num_tokens, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.add_rms_norm(x, x.clone(), weight, 1e-6)
    kernels.silu_mul(torch.ones(num_tokens, 2 * 3072, dtype=dtype))
    qkv = torch.ones(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    per_head = torch.ones(head_dim, dtype=dtype)
    kernels.rms_norm(q, per_head, 1e-6)
    for norm, angles in itertools.product((per_head, None), {dtype, torch.float32}):
        cos = torch.ones(num_tokens, 1, head_dim, dtype=angles)
        kernels.norm_rotate(q, k, cos, cos, q_weight_D=norm, k_weight_D=norm, eps=1e-6)
    pool = torch.ones(64, num_kv_heads, head_dim, dtype=dtype)
    kernels.write_kv(pool, pool.clone(), torch.arange(num_tokens, dtype=index_dtype), k, v)


LINEAR = [
    *((1, columns, size) for columns, size in ((40, 4096), (16400, 4096), (40, 8192))),
    *((rows, 40, 4096) for rows in (3, 16, 32)),
    *((rows, 4104, 4096) for rows in (3, 32)),
]
"""Rows, columns and size of a product of every choice of blocks; the size fills the last step."""


def run_linear(dtype: torch.dtype, *, fills: Iterable[bool], biases: Iterable[bool]) -> None:
    """Every choice of blocks, with sizes that fill the last step or that do not."""
    for (num_rows, num_columns, full), is_full, has_bias in itertools.product(LINEAR, fills, biases):
        size = full if is_full else full - 8
        x, weight = (torch.ones(rows, size, dtype=dtype) for rows in (num_rows, num_columns))
        bias = torch.ones(num_columns, dtype=dtype) if has_bias else None
        kernel_set("triton", CPU).linear(x, weight, bias)


def run_experts(dtype: torch.dtype, num_tokens: int) -> None:
    run = experts_kernel("triton", kernel_set("triton", CPU).silu_mul)
    num_experts, hidden, inner = 4, 256, 128
    run(
        torch.ones(num_tokens, hidden, dtype=dtype),
        torch.randn(num_tokens, num_experts, dtype=dtype),
        torch.ones(num_experts, 2 * inner, hidden, dtype=dtype),
        torch.ones(num_experts, hidden, inner, dtype=dtype),
        torch.tensor(num_tokens, dtype=torch.int32),
        top_k=2,
        is_normalised=True,
    )


ATTENDED = {
    ForwardMode.EXTEND: [(3, 0, 30), (1, 20, 9)],
    ForwardMode.DECODE: [(3, 0, 1), (1, 30, 1)],
    ForwardMode.TARGET_VERIFY: [(3, 0, 3), (1, 30, 3)],
    ForwardMode.DLLM_EXTEND: [(3, 0, 3), (1, 30, 3)],
}
"""Row, prefix and new tokens of each request, by mode."""


def run_attention(
    dtype: torch.dtype,
    head_dim: int,
    *,
    modes: Iterable[ForwardMode] = ATTENDED,
    max_context: int = 256,
    **layer: Any,
) -> None:
    from attention.support import Request, World, spec

    limits = PlanLimits(max_requests=4, max_tokens=192, max_context=max_context)
    world = World(spec(head_dim=head_dim, **layer), backend="triton", device=CPU, dtype=dtype, limits=limits)
    for mode in modes:
        requests = [Request(*one) for one in ATTENDED[mode]]
        world.give_rows(requests)
        batch = world.batch(mode, requests)
        world.run(batch, world.new_tokens(batch, batch.num_tokens))


def run_positions(dtype: torch.dtype) -> None:
    from sgl_piecewise.runtime.batch.positions_triton import clamp_position_triton, compute_position_triton

    lens = torch.tensor([3, 1, 5], dtype=dtype)
    for num_tokens_per_req in (1, 4):
        clamp_position_triton(lens, num_tokens_per_req)
    for encoding in StartLocEncoding:
        compute_position_triton(lens, lens, 9, encoding)


def run_some() -> None:
    """Each kernel, with what a model uses most."""
    set_overlap(True)
    run_kernel_set(torch.bfloat16, 128, torch.int64)
    run_linear(torch.bfloat16, fills=(True,), biases=(False,))
    run_experts(torch.bfloat16, 8)
    run_attention(torch.bfloat16, 128)
    run_positions(torch.int32)


def run_all(dtype: torch.dtype) -> None:
    """Each kernel in a dtype, with every head size and special case that its launcher tells apart."""
    set_overlap(True)
    for index_dtype in (torch.int32, torch.int64):
        run_positions(index_dtype)
        run_kernel_set(dtype, 128, index_dtype)
    run_attention(dtype, 128)
    run_attention(dtype, 128, max_context=64)
    run_attention(dtype, 128, window=16, logit_soft_cap=30.0, num_kv_heads=1)
    for head_dim in (64, 80, 256):
        run_kernel_set(dtype, head_dim, torch.int64)
        run_attention(dtype, head_dim, modes=(ForwardMode.EXTEND, ForwardMode.DECODE))
    for num_tokens in (1, 64, 256):
        run_experts(dtype, num_tokens)
    # In float32 products are PyTorch's.
    half = torch.bfloat16 if dtype is torch.float32 else dtype
    run_linear(half, fills=(True, False), biases=(False, True))
    set_overlap(False)
    run_kernel_set(dtype, 128, torch.int64)
    run_attention(dtype, 128, modes=(ForwardMode.DECODE,))
    run_linear(half, fills=(True,), biases=(False,))


def defined_kernels() -> set[str]:
    """Returns the names of all ``triton.jit`` functions of the package that a launcher launches."""
    from triton.runtime.jit import JITFunction

    kernels = [
        value
        for name in modules_with_kernels()
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, JITFunction)
    ]
    return {name_of(kernel) for kernel in kernels}


def modules_with_kernels() -> Iterator[str]:
    """Returns the modules of the package whose source makes Triton kernels to be launched."""
    for folder in ("compiler", "models", "passes", "runtime"):
        package = importlib.import_module(f"sgl_piecewise.{folder}")
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            if "@triton.jit" in path.read_text(encoding="utf-8"):
                inner = path.relative_to(package.__path__[0]).with_suffix("")
                if inner.name != WARM_UP:
                    yield ".".join((package.__name__, *inner.parts))


def main(which: str) -> None:
    """Compiles, and writes what came of it as JSON."""
    compiled = Compiled()
    compile_instead_of_launching(compiled)
    with torch.no_grad():
        run_some() if which == "some" else run_all(getattr(torch, which))
    answer = {
        "compiled": sorted(compiled.names),
        "defined": sorted(defined_kernels()),
        "failures": compiled.failures,
        "num_variants": compiled.num_variants,
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
