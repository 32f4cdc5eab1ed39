"""A recording is text: a golden file says what a small program becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from contract.support import ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import break_graph, eager_on_graph

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "describe_small_program.txt"


@eager_on_graph
def attention(q: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    cache.add_(q.sum())
    return {"output": q * 2, "cache": cache, "heads": 4, "none": None}


attention.name = "attention"


def small_program(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x.relu() + 1
    result = attention(hidden, cache)
    hidden = (hidden - result["output"]).to(torch.bfloat16)
    break_graph()
    return hidden.sum(-1), result["cache"] * result["heads"]


def test_small_program_is_described_as_in_the_golden_file() -> None:
    """To change it on purpose: print ``captured.describe()`` and put that into the file."""
    device = EmulatedDevice()
    captured = capture(
        small_program, (ramp(device, 4, 8), torch.zeros(3)), capture_sizes=[2, 4], device=device
    )
    assert captured.describe() == GOLDEN.read_text().rstrip("\n")


def test_description_names_device_strategy_segments_and_outputs(graph_device: GraphDevice) -> None:
    example = (ramp(graph_device, 4, 8), torch.zeros(3, device=graph_device.torch_device))
    text = capture(small_program, example, device=graph_device).describe()
    assert f"device={graph_device.name}" in text
    assert "strategy=breakable" in text
    assert "graphs=3 breaks=2" in text
    assert "float32[4, 8] (boundary)" in text
    assert "float32[3] (alias)" in text
    assert "result['heads']=4 (baked)" in text
    assert "output[0]: bfloat16[4]" in text
