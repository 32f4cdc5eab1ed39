"""Greedy tokens of SmolLM2-135M over KV pools, against transformers: a few in each tier, all in the matrix."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from models_matrix import (
    MATRIX_DEVICES,
    STRATEGIES,
    Judge,
    check_every_way,
    generated_by,
    matrix_lengths,
    matrix_runner,
    prompts_from,
)
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
    return prompts_from(loaded.tokenizer.encode(TEXT * 6), lengths)


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
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "eager"])
def test_greedy_tokens_equal_transformers_under_graphs(
    strategy: str, loaded: LoadedModel, reference: Any
) -> None:
    lengths = [40, 3, 12]
    prompts = prompts_of(loaded, lengths)
    runner = matrix_runner(loaded.model, strategy, lengths, num_new=6, max_extend_tokens=32, sizes=(32,))
    Judge(reference, ERROR).check(prompts, generated_by(runner, strategy, "batched", prompts, 6))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_of_many_prompts_equal_transformers(loaded: LoadedModel, reference: Any) -> None:
    """Prompts of 1 to 900 tokens in every way; all of them, with more tokens, are in the matrix."""
    lengths = matrix_lengths(12)
    prompts, judge = prompts_of(loaded, lengths), Judge(reference, ERROR)
    runner = matrix_runner(loaded.model, "eager", lengths, num_new=8)
    for way in ("batched", "chunked"):
        judge.check(prompts, generated_by(runner, "eager", way, prompts, 8))
    few = [prompts[index] for index in (0, 5, 9)]
    judge.check(few, generated_by(runner, "eager", "one by one", few, 8))


@functools.cache
def _loaded_on(path: Path, device: str) -> tuple[LoadedModel, Judge]:
    loaded = load_model(path, device=device, dtype=torch.float32)
    return loaded, Judge(reference_smollm2(path).to(device), ERROR)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", MATRIX_DEVICES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_way_on_all_prompts(strategy: str, device: str, path: Path) -> None:
    """32 prompts of 1 to 900 tokens, 64 new tokens each."""
    loaded, judge = _loaded_on(path, device)
    check_every_way(judge, loaded.model, strategy, prompts_of(loaded, matrix_lengths()))
