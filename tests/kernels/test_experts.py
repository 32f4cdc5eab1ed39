"""Mixture of experts: the definition against a loop over tokens, the grouped GEMM against the definition."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator

import pytest
import torch

from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.kernels.experts import ExpertsKernel, experts_kernel, route
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 40, 24
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value."""
has_triton = importlib.util.find_spec("triton") is not None


# The interpreter computes with numpy, which warns of overflow: entries of no expert are never written,
# and what their memory holds goes through the gate all the same.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(
    params=["torch", pytest.param("triton", marks=pytest.mark.skipif(not has_triton, reason="needs triton"))]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(name: str) -> torch.device:
    """The GPU where there is one: there Triton is compiled, elsewhere interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel(name: str) -> ExpertsKernel:
    return experts_kernel(name, kernel_set(name, torch.device("cpu")).silu_mul)


class Layer:
    """Random weights and rows of one layer."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype).to(device)

        self.x = random(num_tokens, HIDDEN) * HIDDEN**0.5
        # No two equal: of equals any may be chosen.
        self.logits = torch.rand(num_tokens, NUM_EXPERTS).argsort(-1).to(dtype).to(device) * 0.75
        self.gate_up = random(NUM_EXPERTS, 2 * INNER, HIDDEN)
        self.down = random(NUM_EXPERTS, HIDDEN, INNER)
        self.num_real = torch.tensor(num_tokens, dtype=torch.int32, device=device)

    def run(self, name: str, *, is_normalised: bool = True) -> torch.Tensor:
        return kernel(name)(
            self.x,
            self.logits,
            self.gate_up,
            self.down,
            self.num_real,
            top_k=TOP_K,
            is_normalised=is_normalised,
        )

    def expected(self, *, is_normalised: bool = True) -> torch.Tensor:
        """A loop over tokens and their experts, in float64."""
        rows = []
        for x, logits in zip(self.x.double(), self.logits.double(), strict=True):
            chances = logits.softmax(-1)
            chosen = chances.argsort(descending=True)[:TOP_K].tolist()
            total = sum(chances[expert] for expert in chosen) if is_normalised else 1.0
            row = torch.zeros_like(x)
            for expert in chosen:
                gate, up = (self.gate_up[expert].double() @ x).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                row += chances[expert] / total * (self.down[expert].double() @ inner)
            rows.append(row)
        return torch.stack(rows)


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 70])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_each_token_gets_its_experts_by_their_weights(
    name: str, device: torch.device, dtype: torch.dtype, num_tokens: int, is_normalised: bool
) -> None:
    layer = Layer(num_tokens, dtype, device)
    expected = layer.expected(is_normalised=is_normalised)
    difference = layer.run(name, is_normalised=is_normalised) - expected
    assert difference.abs().max() < TOLERANCE[dtype] * expected.abs().max()


def test_no_tokens_are_no_work(name: str, device: torch.device) -> None:
    assert Layer(0, torch.float32, device).run(name).shape == (0, HIDDEN)


def test_padded_rows_get_nothing_whatever_they_hold(name: str, device: torch.device) -> None:
    """Poison in padded rows, and in what they would be routed by, reaches no row."""
    layer = Layer(9, torch.float32, device)
    expected = layer.run(name)
    layer.num_real.fill_(5)
    layer.x[5:], layer.logits[5:] = torch.nan, torch.nan
    found = layer.run(name)
    assert torch.equal(found[:5], expected[:5])
    assert torch.equal(found[5:], torch.zeros(4, HIDDEN, device=device))


def test_padded_rows_touch_no_expert(device: torch.device) -> None:
    """They would cost time: each expert that is touched has its weights read."""
    logits = torch.randn(8, NUM_EXPERTS, device=device)
    count = torch.tensor(3, dtype=torch.int32, device=device)
    experts, weights = route(logits, count, top_k=TOP_K, is_normalised=True)
    assert (experts[:3] < NUM_EXPERTS).all()
    assert (experts[3:] == NUM_EXPERTS).all()
    assert (weights[3:] == 0).all()
    assert torch.allclose(weights[:3].sum(-1), torch.ones(3, device=device))


def test_a_row_does_not_depend_on_its_neighbours(name: str, device: torch.device) -> None:
    """Bit for bit, at one number of rows: other rows and another order change nothing."""
    layer = Layer(24, torch.float32, device)
    before = layer.run(name)
    order = torch.randperm(24, device=device)
    layer.x, layer.logits = layer.x[order], layer.logits[order]
    assert torch.equal(layer.run(name), before[order])
    layer.x[1:], layer.logits[1:] = torch.randn(23, HIDDEN), torch.randn(23, NUM_EXPERTS)
    assert torch.equal(layer.run(name)[0], before[order[0]])


def test_all_tokens_of_one_expert_and_experts_without_tokens(name: str, device: torch.device) -> None:
    layer = Layer(40, torch.float32, device)
    layer.logits[:, 2], layer.logits[:, 4] = 50.0, 40.0
    assert (layer.run(name) - layer.expected()).abs().max() < 1e-5


def test_a_captured_forward_follows_the_count_and_the_routes_of_each_batch(
    name: str, device: torch.device
) -> None:
    layer = Layer(9, torch.float32, device)
    run = kernel(name)

    def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return run(x, logits, layer.gate_up, layer.down, layer.num_real, top_k=TOP_K, is_normalised=True)

    captured = capture(forward, (layer.x, layer.logits), strategy="full")
    for count in (9, 4):
        layer.num_real.fill_(count)
        x, logits = torch.randn_like(layer.x), torch.randn_like(layer.logits)
        assert torch.equal(captured(x, logits), forward(x, logits))


def test_every_computation_takes_the_same_arguments(name: str) -> None:
    """They are chosen by name, where no type checker looks."""
    wanted = list(inspect.signature(ExpertsKernel.__call__).parameters.values())[1:]
    assert list(inspect.signature(kernel(name)).parameters.values()) == wanted


@pytest.mark.skipif(not has_triton, reason="needs triton")
@pytest.mark.parametrize("tile_rows", [1, 4, 16])
def test_tiles_hold_every_entry_once_and_one_expert_each(tile_rows: int) -> None:
    from sgl_piecewise.runtime.kernels.triton_experts import tiles_of_experts

    for _ in range(30):
        num_experts, num_tokens = int(torch.randint(1, 9, ())), int(torch.randint(0, 40, ()))
        experts = torch.randint(0, num_experts + 1, (num_tokens, 2))
        order, tiles = tiles_of_experts(experts, num_experts, tile_rows)
        seen = []
        for expert, first, end in tiles.tolist():
            if expert >= 0:
                entries = order[first:end]
                assert 0 < len(entries) <= tile_rows
                assert (experts.flatten()[entries] == expert).all()
                seen += entries.tolist()
        assert sorted(seen) == (experts.flatten() < num_experts).nonzero().flatten().tolist()
