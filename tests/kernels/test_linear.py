"""Linear layers of few rows: within float32's rounding of the exact product, and the same bits each time."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, kernel_set

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ACCUMULATED = 2.0**-24 * 64
"""Of the sum of magnitudes: float32's rounding in a sum of some thousand terms, taken in any order."""


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return kernel_set("triton", x.device).linear(x, weight, bias)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    found = linear(x, weight, bias)
    wide = [None if one is None else one.double() for one in (x, weight, bias)]
    wanted = F.linear(*wide)
    magnitude = F.linear(*[None if one is None else one.abs() for one in wide])
    assert found.dtype is x.dtype
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    # Triton's interpreter cuts bfloat16 off where the device rounds to nearest.
    is_cut_off = x.device.type == "cpu" and x.dtype is torch.bfloat16
    rounding = torch.finfo(x.dtype).eps * (1.0 if is_cut_off else 0.5)
    smallest = torch.finfo(x.dtype).smallest_normal
    allowed = 1.01 * rounding * wanted.abs() + ACCUMULATED * magnitude + smallest
    error = (found.double() - wanted).abs()
    assert (error <= allowed).all(), float((error / allowed).max())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16, 17, 32, 33])
@pytest.mark.parametrize(("num_columns", "size"), [(40, 576), (5, 64), (33, 1000), (64, 2304), (1, 7)])
def test_it_is_the_product(
    num_columns: int, size: int, num_rows: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (random(rows, size, dtype=dtype, device=device) for rows in (num_rows, num_columns))
    check(x, weight, random(num_columns, dtype=dtype, device=device) if has_bias else None)


@pytest.mark.parametrize("num_rows", [3, 9, 32])
def test_it_is_the_product_with_many_columns(num_rows: int, device: torch.device) -> None:
    x, weight = (random(rows, 200, dtype=torch.bfloat16, device=device) for rows in (num_rows, 4100))
    check(x, weight, random(4100, dtype=torch.bfloat16, device=device))


def test_it_is_the_product_of_a_long_row(device: torch.device) -> None:
    check(*(random(rows, 8200, dtype=torch.bfloat16, device=device) for rows in (1, 5)))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_tensors_may_be_views(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    size, num_columns = 192, 24
    x = random(num_rows, 2 * size, dtype=dtype, device=device)
    weight = random(num_columns, size, dtype=dtype, device=device)
    check(x[:, size:], weight)
    check(x[:, ::2], weight)
    check(x[:, 1 : size + 1], weight)
    transposed = random(size, num_columns, dtype=dtype, device=device).t()
    check(x[:, :size], transposed)


@pytest.mark.parametrize("num_rows", [1, 6, 12])
def test_the_same_bits_each_time(num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (random(rows, 1088, dtype=dtype, device=device) for rows in (num_rows, 40))
    first = linear(x, weight)
    assert all(torch.equal(linear(x, weight), first) for _ in range(3))


def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, device: torch.device) -> None:
    """Of one number of rows; NaN in another row stays there."""
    x, weight = (random(rows, 320, dtype=dtype, device=device) for rows in (5, 24))
    alone = linear(x, weight)[2].clone()
    x[[0, 1, 3, 4]] = float("nan")
    assert torch.equal(linear(x, weight)[2], alone)


def test_of_no_rows_and_of_many_dimensions(dtype: torch.dtype, device: torch.device) -> None:
    weight = random(24, 64, dtype=dtype, device=device)
    assert linear(random(0, 64, dtype=dtype, device=device), weight).shape == (0, 24)
    check(random(2, 3, 64, dtype=dtype, device=device), weight)


def test_float32_is_left_to_pytorch(device: torch.device) -> None:
    x, weight = (torch.randn(rows, 64, device=device) for rows in (3, 24))
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_plain_torch_is_pytorch_s_product() -> None:
    assert TORCH_KERNELS.linear is F.linear


def test_a_trace_of_it_is_one_node_for_every_number_of_rows(dtype: torch.dtype, device: torch.device) -> None:
    torch.compiler.reset()
    num_graphs, weight = 0, random(24, 64, dtype=dtype, device=device)

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal num_graphs
        num_graphs += 1
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert targets == ["sgl_piecewise_kernels.linear"]
        return graph

    compiled = torch.compile(linear, backend=backend, dynamic=True)
    for num_rows in (40, 3, 5, 64):
        x = random(num_rows, 64, dtype=dtype, device=device)
        assert torch.equal(compiled(x, weight), linear(x, weight))
    assert num_graphs == 1
    torch.compiler.reset()
