"""Language models of transformers' own classes: prefill and decode steps with a static cache, against eager.

``sdpa`` is transformers' attention as it comes; ``sgl_eager`` is a marked call. Under Dynamo transformers takes
another way to the same attention, so values are compared within rounding.
"""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.models.transformers_attention import register_sgl_eager
from sgl_piecewise.runtime.errors import ConfigError

from .families import CONFIGS, generate, tiny_model
from .support import assert_same, drop_in, failures, stats_now, total, without_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

# Falcon's classes do not ask the attention interface. Under fx, Falcon and Gemma 3 make tensors from host data.
_CELLS = [
    (family, attention)
    for family in CONFIGS
    for attention in ("sdpa", "sgl_eager")
    if (family, attention) != ("falcon", "sgl_eager")
]
_QUICK = {("llama", "sgl_eager"), ("gpt2", "sdpa"), ("qwen3_moe", "sgl_eager")}
_WITHOUT_REPLAYS = {"falcon", "gemma3"}


@pytest.mark.parametrize(
    ("family", "attention"),
    [pytest.param(*cell, marks=[] if cell in _QUICK else pytest.mark.slow) for cell in _CELLS],
)
def test_family_generates_what_eager_does(family: str, attention: str, device: torch.device) -> None:
    register_sgl_eager()
    model = tiny_model(family, attention).to(device)
    expected = generate(model, model, num_prompts=2, num_steps=5, device=device)
    actual = generate(drop_in(model), model, num_prompts=2, num_steps=5, device=device)
    assert_same(actual, expected, tolerance=1e-5 if device.type == "cpu" else 1e-4)
    if family not in _WITHOUT_REPLAYS:
        assert total("num_replays") >= 4, (without_graph(), failures())
        # Laying out a fresh cache copies a counter from host memory to a GPU: that prefill runs without a graph.
        assert all(device.type == "cuda" and "cumulative_length" in failure for failure in failures())
    num_breaks = max(stats.num_breaks for stats in stats_now())
    if attention == "sgl_eager" and family != "opt":  # Dynamo splits OPT into a frame per layer.
        assert num_breaks == 2
    if attention == "sdpa":
        assert num_breaks == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_family_compiled_by_inductor(family: str) -> None:
    model = tiny_model(family, "sdpa")
    expected = generate(model, model, num_prompts=2, num_steps=5)
    actual = generate(drop_in(model, piece_compiler="inductor"), model, num_prompts=2, num_steps=5)
    assert_same(actual, expected, tolerance=1e-4)
    assert total("num_captures"), (without_graph(), failures())


def test_attention_that_sdpa_does_not_compute_is_refused() -> None:
    from sgl_piecewise.models.transformers_attention import _forward

    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ConfigError, match="softcap"):
        _forward(torch.nn.Module(), q, q, q, None, softcap=30.0)
