"""Every kernel set gives what plain torch gives, on strided views and odd sizes, and inside a graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import ConfigError, MissingExtraError
from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet, kernel_set

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS = 5, 6, 2


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(
    params=[
        pytest.param("triton", marks=pytest.mark.skipif(is_missing("triton"), reason="needs triton")),
        pytest.param(
            "flashinfer",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(is_missing("flashinfer"), reason="needs flashinfer"),
                pytest.mark.timeout(900),
            ],
        ),
    ]
)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return kernel_set(request.param, torch.device("cpu"))


@pytest.fixture
def device(kernels: KernelSet) -> torch.device:
    """The GPU where there is one: there Triton is compiled, elsewhere interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest, kernels: KernelSet) -> torch.dtype:
    if kernels.name == "flashinfer" and request.param is torch.float32:
        pytest.skip("FlashInfer has no float32 kernels")
    return request.param


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == wanted.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def split_heads(
    head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one projection, as a layer makes them."""
    qkv = random(NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, dtype=dtype, device=device)
    q, k, v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    return q, k, v


@pytest.mark.parametrize("size", [64, 576, 1000])
def test_rms_norm(size: int, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random(7, size, dtype=dtype, device=device), random(size, dtype=dtype, device=device)
    close(kernels.rms_norm(x, weight, EPS), TORCH_KERNELS.rms_norm(x, weight, EPS))


def test_rms_norm_of_heads(kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
    q, _, _ = split_heads(64, dtype, device)
    weight = random(64, dtype=dtype, device=device)
    close(kernels.rms_norm(q, weight, EPS), TORCH_KERNELS.rms_norm(q, weight, EPS))


@pytest.mark.parametrize("size", [64, 576])
def test_add_rms_norm(size: int, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (random(7, size, dtype=dtype, device=device) for _ in range(2))
    weight = random(size, dtype=dtype, device=device)
    wanted = TORCH_KERNELS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    for one, other in zip(kernels.add_rms_norm(x, residual, weight, EPS), wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize("gate", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("size", [64, 1536])
def test_gate_mul(size: int, gate: str, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
    """On values of both signs, those included at which a gate is flat."""
    gate_up = 3 * random(5, 2 * size, dtype=dtype, device=device)
    close(getattr(kernels, gate)(gate_up), getattr(TORCH_KERNELS, gate)(gate_up))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_norm_rotate(
    head_dim: int, has_norm: bool, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = split_heads(head_dim, dtype, device)
    angles = random(NUM_TOKENS, 1, head_dim // 2, dtype=torch.float32, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [random(head_dim, dtype=dtype, device=device) if has_norm else None for _ in range(2)]
    options = {"q_weight_D": weights[0], "k_weight_D": weights[1], "eps": EPS}
    wanted = TORCH_KERNELS.norm_rotate(q.clone(), k.clone(), cos, sin, **options)
    values = v.clone()
    for one, other in zip(kernels.norm_rotate(q, k, cos, sin, **options), wanted, strict=True):
        close(one, other)
    assert torch.equal(v, values), "the values beside them stay"


def test_write_kv(kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
    _, k, v = split_heads(64, dtype, device)
    pools = [torch.full((20, NUM_KV_HEADS, 64), 7.0, dtype=dtype, device=device) for _ in range(4)]
    slots = torch.tensor([3, 19, 0, 8, 4], device=device)
    kernels.write_kv(pools[0], pools[1], slots, k, v)
    TORCH_KERNELS.write_kv(pools[2], pools[3], slots, k, v)
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])


def test_kernels_of_no_tokens_do_nothing(kernels: KernelSet, device: torch.device) -> None:
    x = random(0, 64, dtype=torch.float16, device=device)
    assert kernels.rms_norm(x, x.new_ones(64), EPS).shape == (0, 64)
    assert kernels.silu_mul(x).shape == (0, 32)
    assert kernels.gelu_tanh_mul(x).shape == (0, 32)


def test_kernels_replay_inside_a_graph(kernels: KernelSet, graph_device: GraphDevice) -> None:
    """All of them in one graph, replayed with other inputs than were captured."""
    device = graph_device.torch_device
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU Triton compiles instead of interpreting")
    weight = random(64, dtype=torch.float16, device=device)
    projection = random(24, 64, dtype=torch.float16, device=device)
    pools = {
        name: [torch.zeros(9, 2, 16, dtype=torch.float16, device=device) for _ in range(2)]
        for name in ("kernels", "torch")
    }

    def forward(
        kernels: KernelSet, x: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normed, total = kernels.add_rms_norm(x * 1, residual * 1, weight, EPS)
        heads = kernels.silu_mul(normed).unflatten(-1, (2, 16))
        angles = heads.float().mean(1, keepdim=True)
        q, k = kernels.norm_rotate(
            heads * 1,
            heads * 2,
            angles.cos().half(),
            angles.sin().half(),
            q_weight_D=weight[:16],
            k_weight_D=weight[16:32],
            eps=EPS,
        )
        kernels.write_kv(*pools["torch" if kernels.name == "torch" else "kernels"], slots, k, q)
        # Of what every set has alike: a product of normed rows would add up how each rounds them.
        product = kernels.linear(x, projection, weight[:24])
        return kernels.rms_norm(q, weight[:16], EPS), total, kernels.gelu_tanh_mul(normed), product

    def inputs() -> tuple[torch.Tensor, ...]:
        slots = torch.randperm(9)[:4].to(device)
        return *(random(4, 64, dtype=torch.float16, device=device) for _ in range(2)), slots

    captured = capture(
        lambda x, residual, slots: forward(kernels, x, residual, slots),
        inputs(),
        strategy="full",
        device=graph_device,
    )
    for pool in [*pools["kernels"], *pools["torch"]]:
        pool.zero_()
    for _ in range(3):
        given = inputs()
        for one, other in zip(captured(*given), forward(TORCH_KERNELS, *given), strict=True):
            close(one, other)
        for one, other in zip(pools["kernels"], pools["torch"], strict=True):
            close(one, other)


def test_an_unknown_set_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        kernel_set("tritn", torch.device("cpu"))


def test_the_cpu_runs_plain_torch() -> None:
    assert kernel_set("auto", torch.device("cpu")) is TORCH_KERNELS


@pytest.mark.parametrize(("name", "package"), [("triton", "triton"), ("flashinfer", "flashinfer")])
def test_a_missing_package_is_an_error_that_names_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "flashinfer":
        pytest.importorskip("triton")  # Where it is missing too, it is the one that is named.
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == package else find_spec(module)
    )
    with pytest.raises(MissingExtraError, match=package):
        kernel_set(name, torch.device("cpu"))
