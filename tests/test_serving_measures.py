"""What the serving benchmark measures with; its times are a GPU's matter, its shape and its refusals are not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_piecewise.comparison.serving.calls import (
    NUM_QUEUED,
    Gap,
    busy_part,
    measure_gap,
    time_in_turns,
    time_queued,
)
from sgl_piecewise.comparison.serving.transformers_batching import measure_generate_batch, reference_of
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.runtime.errors import ConfigError

CPU = torch.device("cpu")


def test_calls_take_turns_and_each_is_called_once_before() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    found = time_in_turns(calls, CPU, 2)
    assert order == ["a", "b"] * 3
    assert set(found) == {"latency", "host"}
    assert set(found["latency"]["a"]) == {"median_s", "least_s", "most_s"}
    order.clear()
    time_queued(calls, CPU, 1)
    assert order == (["a"] * NUM_QUEUED + ["b"] * NUM_QUEUED) * 2


def test_a_gap_is_the_part_of_a_call_without_the_device() -> None:
    found = busy_part([(18.0, 20.0), (12.0, 16.0), (13.0, 15.0), (15.0, 17.0)])
    assert found == pytest.approx(7 / 8)
    assert busy_part([]) == 0
    assert Gap(wall_s=2.0, device_s=1.5, busy_part=0.8).gap == pytest.approx(0.4)
    assert measure_gap(lambda: None, CPU, 1) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wait_of_the_host_is_a_gap() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)

    def call() -> None:
        time.sleep(0.02)
        torch.mm(a, a)

    found = measure_gap(call, device, 3)
    assert found is not None
    assert found.wall_s - found.device_s > 0.019
    assert 0 < found.device_s < 0.02
    assert found.gap > 0.5
    with pytest.raises(RuntimeError, match="waits for the device"):
        measure_gap(lambda: torch.mm(a, a).cpu(), device, 1)


class Batching:
    """Stands in for a model of transformers'."""

    device = CPU

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def generate_batch(self, inputs: Any, **options: Any) -> Any:
        if isinstance(self.outputs, Exception):
            raise self.outputs
        return self.outputs


def test_the_pace_is_the_median_between_two_tokens() -> None:
    pytest.importorskip("transformers")
    output = SimpleNamespace(timestamps=[0.0, 1.0, 1.5, 2.0], error=None)
    found = measure_generate_batch(Batching({"a": output, "b": output}), [[1], [2]], num_new_tokens=4)
    assert (found["step_s"], found["tokens_per_s"]) == (0.5, 4.0)


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        (TypeError("no such argument"), "no such argument"),
        ({}, "answered 0 of 1 requests"),
        ({"a": SimpleNamespace(timestamps=None, error="out of memory")}, "out of memory"),
    ],
)
def test_what_transformers_refuses_becomes_a_message(outputs: Any, told: str) -> None:
    pytest.importorskip("transformers")
    assert told in measure_generate_batch(Batching(outputs), [[1]], num_new_tokens=4)["error"]


def test_a_reference_has_the_shape_and_others_are_named() -> None:
    pytest.importorskip("transformers")
    config = named_shape("tiny")
    model = reference_of(config, device=CPU, dtype=torch.float32)
    assert model.config.num_hidden_layers == config.num_layers
    assert model.lm_head.weight.shape == (config.vocab_size, config.hidden_size)
    with pytest.raises(ConfigError, match="qwen3_moe"):
        reference_of(named_shape("tiny-moe"), device=CPU, dtype=torch.float32)
