"""Greedy tokens of SmolLM2-135M over KV pools, against transformers; few here, more in the second tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_serving import check_greedy, greedy_tokens, model_runner, serving_plan
from models_smollm2 import TEXT, reference_smollm2

from sgl_piecewise.models.loading import LoadedModel, default_gguf_path, load_model
from sgl_piecewise.runtime.errors import CheckpointError

# What float32 sums in another order differ by in this model's logits, measured on its text.
ERROR = 1e-3


@pytest.fixture(scope="module")
def path() -> Path:
    """The first tier downloads nothing; the second one does, in `test_models_smollm2.py`."""
    try:
        return default_gguf_path(download=False)
    except CheckpointError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return reference_smollm2(path)


def prompts_of(loaded: LoadedModel, lengths: list[int]) -> list[list[int]]:
    """Returns prompts that begin at different words of the text."""
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(TEXT * 6)
    assert len(ids) >= max(lengths) + len(lengths)
    return [ids[start : start + length] for start, length in enumerate(lengths)]


@pytest.mark.timeout(400)  # Both models are loaded.
def test_a_few_greedy_tokens_equal_transformers_in_mixed_batches(loaded: LoadedModel, reference: Any) -> None:
    prompts = prompts_of(loaded, [1, 21, 6])  # The second goes on while the first decodes.
    runner = model_runner(
        loaded.model, serving_plan("eager", "eager"), max_requests=2, max_context=64, max_extend_tokens=16
    )
    generated = greedy_tokens(runner, prompts, 6)
    check_greedy(reference, prompts, generated, error=ERROR)
    assert "mixed" in runner.log.summary()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_equal_transformers_under_graphs(loaded: LoadedModel, reference: Any) -> None:
    prompts = prompts_of(loaded, [40, 3, 12])
    for decode, extend in (("full", "breakable"), ("breakable", "full")):
        plan = serving_plan(decode, extend, decode_size=3, extend_size=32)
        runner = model_runner(loaded.model, plan, max_requests=3, max_context=64, max_extend_tokens=32)
        check_greedy(reference, prompts, greedy_tokens(runner, prompts, 6), error=ERROR)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_of_many_prompts_equal_transformers(loaded: LoadedModel, reference: Any) -> None:
    """Prompts of 1 to 300 tokens; batched, in chunks, and some one by one."""
    lengths = [1 + round(299 * (index / 11) ** 3) for index in range(12)]
    prompts = prompts_of(loaded, lengths)
    runner = model_runner(
        loaded.model,
        serving_plan("eager", "eager"),
        max_requests=12,
        max_context=384,
        max_extend_tokens=256,
        max_total_tokens=3000,
    )
    batched = greedy_tokens(runner, prompts, 12)
    check_greedy(reference, prompts, batched, error=ERROR)
    chunked = greedy_tokens(runner, prompts, 6, chunk_tokens=50)
    check_greedy(reference, prompts, chunked, error=ERROR)
    few = [prompts[index] for index in (0, 5, 11)]
    check_greedy(reference, few, greedy_tokens(runner, few, 6, is_one_by_one=True), error=ERROR)
