"""Networks that are no language models: convolutions, a vision transformer, recurrent layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .support import assert_like_eager

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Convolutions(nn.Module):
    """A residual block with batch norm, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: torch.Tensor) -> Any:
        x = torch.relu_(self.norm(self.stem(images)))
        x = x + self.body(x)
        pooled = nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return {"logits": self.head(self.dropout(pooled)), "features": x}


IMAGES = [torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(size)) for size in (1, 2, 4)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutional_network(training: bool, memory_format: Any) -> None:
    model = Convolutions().train(training).to(memory_format=memory_format)
    calls = [(images.to(memory_format=memory_format),) for images in IMAGES[1:]]
    # Strides of features may be eager's or the compiler's own; oneDNN chooses by address.
    assert_like_eager(model, calls, tolerance=1e-5, min_replays=3)


def test_vision_transformer() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    model = ViTForImageClassification(config).eval()
    assert_like_eager(model, [((), {"pixel_values": images}) for images in IMAGES], num_rounds=3)


def test_recurrent_layer() -> None:
    model = nn.GRU(4, 8, batch_first=True).eval()

    def fn(x: torch.Tensor, h: torch.Tensor) -> Any:
        return model(x, h)

    assert_like_eager(fn, [(torch.randn(2, 5, 4), torch.zeros(1, 2, 8))], min_replays=0)


def test_transformer_encoder_layer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert_like_eager(
        model, [((x,), {"src_key_padding_mask": mask}), ((x + 1,), {"src_key_padding_mask": mask})]
    )


@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_numbers_of_modules_under_dynamic_shapes(piece_compiler: str) -> None:
    """Dynamo makes them inputs and reads them in the graph; what it knows of them must reach the pieces.

    No graph can hold the read, so the calls run without.
    """

    class Attention(nn.Module):
        scaling = 0.3

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q + 1, q, scale=self.scaling)

    calls = [(torch.randn(2, 3, size, 4),) for size in (5, 6, 7)]
    assert_like_eager(
        Attention(), calls, dynamic=True, piece_compiler=piece_compiler, tolerance=1e-5, min_replays=0
    )
