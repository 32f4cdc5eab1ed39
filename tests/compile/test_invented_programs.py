"""Programs as users write them, through every piece compiler and captured: values and breaks as in eager."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.runtime.capture.segments import EagerSegment

from .support import compiled, noted_breaks

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@eager_on_graph(fake=torch.empty_like)
def clip_outliers(x: torch.Tensor) -> torch.Tensor:
    limit = x.abs().quantile(0.9).item()
    return x.clamp(-limit, limit)


@eager_on_graph(fake=lambda x, weights, chosen, up, down: torch.empty_like(x))
def experts(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Runs each expert on the tokens that chose it: how many is only known to the data."""
    out = torch.zeros_like(x)
    for number in range(up.shape[0]):
        tokens, place = (chosen == number).nonzero(as_tuple=True)
        if tokens.numel():
            values = F.silu(x[tokens] @ up[number]) @ down[number]
            out.index_add_(0, tokens, values * weights[tokens, place, None])
    return out


class Network(nn.Module):
    """A convolutional network with a mark in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Sequential(
            nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(72, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(clip_outliers(self.stem(x)))


class Mixture(nn.Module):
    """A mixture-of-experts layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 24)), nn.Parameter(torch.randn(4, 24, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2)
        return x + experts(x, weights / weights.sum(-1, keepdim=True), chosen, self.up, self.down)


def transformers_model(family: str) -> nn.Module:
    """A tiny model from transformers' classes, its attention routed through a mark."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    @eager_on_graph(fake=lambda module, q, k, v, mask, **kwargs: (torch.empty_like(q.transpose(1, 2)), None))
    def marked_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return marked_attention(module, query, key, value, attention_mask, **kwargs)

    transformers.AttentionInterface.register("test_marked", attention)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        use_cache=False,
        pad_token_id=0,
        attn_implementation="test_marked",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids).logits

    return Logits()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutions": (Network, lambda: torch.randn(2, 3, 8, 8)),
    "mixture of experts": (lambda: nn.Sequential(Mixture(), Mixture()), lambda: torch.randn(9, 16)),
    "llama": (lambda: transformers_model("Llama"), lambda: torch.arange(7)[None] * 5 % 64),
    "qwen3": (lambda: transformers_model("Qwen3"), lambda: torch.arange(7)[None] * 5 % 64),
}


@pytest.mark.parametrize(
    ("name", "piece_compiler"),
    [
        ("convolutions", "fx"),
        ("convolutions", "openvino"),
        pytest.param("convolutions", "inductor", marks=pytest.mark.slow),
        ("mixture of experts", "fx"),
        ("mixture of experts", "openvino"),
        ("mixture of experts", "inductor"),
        ("llama", "fx"),
        ("llama", "openvino"),
        pytest.param("llama", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_captured(name: str, piece_compiler: str) -> None:
    _check(name, piece_compiler=piece_compiler)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_with_every_fusion(name: str) -> None:
    _check(name, piece_compiler="fx", fusions=["join_linears", "fuse_rms_norm"])


def _check(name: str, **options: Any) -> None:
    if options["piece_compiler"] == "openvino" and importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    torch.manual_seed(0)
    make_model, make_input = PROGRAMS[name]
    with torch.inference_mode(False), torch.no_grad():
        model, x = make_model().eval().requires_grad_(False), make_input()
    with noted_breaks() as expected_breaks:
        expected = model(x)
    fn = compiled(model, **options)
    with noted_breaks() as breaks:
        torch.testing.assert_close(fn(x), expected, rtol=1e-4, atol=1e-4)
    assert breaks == expected_breaks
    captured = capture(fn, (x,))
    torch.testing.assert_close(captured(x), expected, rtol=1e-4, atol=1e-4)
    (recording,) = captured.recordings.values()
    assert [one.mark.name for one in recording.segments if isinstance(one, EagerSegment)] == expected_breaks
