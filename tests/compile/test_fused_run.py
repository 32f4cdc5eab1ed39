"""What a compiler that fuses keeps of a piece's values: predicted, and held against what was measured on a GPU."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.compiler.memory import memory_estimate
from sgl_piecewise.models.loading import load_model
from sgl_piecewise.passes.fused_run import Operation, Step, becomes_loop, fused_steps
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.cuda_pool_model import CudaPoolModel
from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice
from sgl_piecewise.runtime.capture.sizes import default_capture_sizes
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context


def loop(reads: tuple[int, ...], *makes: int) -> Operation:
    return Operation(reads, makes, is_loop=True)


def call(reads: tuple[int, ...], *makes: int) -> Operation:
    return Operation(reads, makes, is_loop=False)


def steps(operations: list[Operation], outputs: list[int], sizes: list[int]) -> list[Step]:
    return list(fused_steps(operations, outputs, sizes))


def test_values_inside_fused_loops_have_no_memory() -> None:
    found = steps([loop((), 0), loop((0,), 1), loop((1, 0), 2)], [2], [8, 8, 8])
    assert found == [Step(2)]


def test_what_a_library_call_reads_has_memory_until_it_was_read() -> None:
    found = steps([loop((), 0), loop((0,), 1), call((1,), 2), loop((2,), 3)], [3], [8, 8, 4, 6])
    assert found == [Step(1), Step(2), Step(1, is_free=True), Step(3), Step(2, is_free=True)]


def test_a_result_takes_the_place_of_a_value_of_its_size_that_is_read_for_the_last_time() -> None:
    found = steps([call((), 0), loop((0,), 1)], [1], [8, 8])
    assert found == [Step(0), Step(1, takes=0)]
    kept = steps([call((), 0), loop((0,), 1), call((0,), 2)], [1, 2], [8, 8, 4])
    assert kept == [Step(0), Step(1), Step(2), Step(0, is_free=True)]


def test_loops_with_a_library_call_between_them_are_two_kernels() -> None:
    found = steps([loop((), 0), call((0,), 1), loop((0, 1), 2)], [2], [8, 4, 6])
    assert found == [Step(0), Step(1), Step(2), Step(0, is_free=True), Step(1, is_free=True)]


def test_loops_that_a_later_one_joins_are_one_kernel() -> None:
    found = steps([loop((), 0), loop((), 1), loop((0, 1), 2), call((0,), 3)], [2, 3], [8, 8, 8, 8])
    assert found == [Step(0), Step(2), Step(3), Step(0, is_free=True)]


def test_loops_run_when_the_first_library_call_needs_them() -> None:
    found = steps([loop((), 0), call((0,), 1), loop((0,), 2)], [1, 2], [8, 4, 6])
    assert found == [Step(0), Step(2), Step(1), Step(0, is_free=True)]


def test_a_result_that_nobody_reads_is_freed_at_once() -> None:
    assert steps([call((), 0, 1), loop((0,), 2)], [2], [8, 4, 2]) == [
        Step(0),
        Step(1),
        Step(1, is_free=True),
        Step(2),
        Step(0, is_free=True),
    ]


def test_which_operators_become_loops() -> None:
    aten = torch.ops.aten
    loops = (aten.mul.Tensor, aten.silu.default, aten.mean.dim, aten.embedding.default, aten._to_copy.default)
    others = (
        aten.mm.default,
        aten.add_.Tensor,
        aten.sort.default,
        aten._scaled_dot_product_flash_attention.default,
    )
    assert [becomes_loop(one) for one in (*loops, *others)] == [True] * len(loops) + [False] * len(others)


class _Cuda:
    """As much of a CUDA device as an estimate asks for."""

    def new_pool_model(self) -> CudaPoolModel:
        return CudaPoolModel(edits_graphs=True)


# 42 sizes up to 4096, and 4096 alone; bf16, on an H200: docs/results/2026-11-30-h200-compile-*.json, pool_bytes of
# tc_piecewise.
@pytest.mark.parametrize(
    ("model", "num_layers", "measured", "measured_alone"),
    [
        ("tiny", 8, 27_262_976, 27_262_976),
        pytest.param("qwen3-0.6b", 5, 226_492_416, 178_257_920, marks=pytest.mark.slow),
        pytest.param("qwen3-8b", 3, 583_008_256, 576_716_800, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_what_a_gpu_reserved_for_inductor(
    model: str, num_layers: int, measured: int, measured_alone: int
) -> None:
    """Fewer layers than were measured: from some on, the next ones take the memory of those before."""
    loaded = load_model(model, device=torch.device("cpu"), dtype=torch.bfloat16, num_layers=num_layers)
    ids, positions = torch.zeros(61, dtype=torch.int64), torch.arange(61)
    with torch.no_grad(), use_forward_context(ForwardContext(attention=CausalAttention())):
        estimate = memory_estimate(loaded.model.hidden_states, (ids, positions))
    sizes = default_capture_sizes(4096)
    fused = estimate.reserved_bytes(sizes, _Cuda(), pieces_run="fused")  # type: ignore[arg-type]
    assert fused == measured
    assert estimate.reserved_bytes(sizes[-1:], _Cuda(), pieces_run="fused") == measured_alone  # type: ignore[arg-type]
    assert fused <= estimate.reserved_bytes(sizes, _Cuda(), pieces_run="fx")  # type: ignore[arg-type]
    of_emulated = estimate.reserved_bytes(sizes[:2], EmulatedDevice(), pieces_run="fused")
    assert of_emulated <= estimate.reserved_bytes(sizes[:2], EmulatedDevice(), pieces_run="fx")
