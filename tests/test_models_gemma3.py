"""The real thing: Gemma 3 270M from its GGUF file, against transformers. Needs the file in the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_gemma3 import TEXT, reference_gemma3
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
from models_reference import logits_of, reference_logits

from sgl_piecewise.models.loading import LoadedModel, load_model
from sgl_piecewise.models.packaged_gguf import packaged_gguf_path
from sgl_piecewise.models.packaged_models import GEMMA3
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.runtime.errors import CheckpointError

ERROR = 1e-3
"""What float32 sums in another order differ by in this model's logits."""


def _slow(test: Callable[..., None]) -> Callable[..., None]:
    """Puts a test into the second tier."""
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


@pytest.fixture(scope="module")
def path() -> Path:
    """Its licence is accepted by who fetches it, so tests do not: `load_model("gemma-3-270m-q4")` does."""
    try:
        return packaged_gguf_path(GEMMA3, download=False)
    except CheckpointError as err:
        pytest.skip(str(err))


def prompts_of(loaded: LoadedModel, lengths: list[int]) -> list[list[int]]:
    """Returns prompts that begin at different words of the text."""
    assert loaded.tokenizer is not None
    return prompts_from(loaded.tokenizer.encode(TEXT * 14), lengths)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return reference_gemma3(path)


@_slow
def test_logits_agree_with_transformers_beyond_the_window(loaded: LoadedModel, reference: Any) -> None:
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.encode(TEXT * 9)
    assert len(token_ids) > 600
    ours, theirs = logits_of(loaded.model, token_ids), reference_logits(reference, token_ids)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours - theirs).abs().max() < 1e-3


@_slow
def test_the_model_is_the_shape_of_its_name(loaded: LoadedModel) -> None:
    found, shape = vars(loaded.config), vars(named_shape("gemma3-270m"))
    differing = {key for key in shape if found[key] != shape[key]}
    assert differing <= {"rms_norm_eps"}  # The file holds it in float32.


@_slow
def test_it_says_what_a_language_model_says(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    token_ids = loaded.tokenizer.encode("To be, or not to be, that is the")
    next_id = int(logits_of(loaded.model, token_ids)[-1].argmax())
    assert loaded.tokenizer.decode([next_id]) == " question"


@_slow
def test_the_tokenizer_gives_text_back_and_whole_tokens(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    for text in (TEXT, "  two  spaces\n\n\ttab", "naïve café 日本語 \U0001f600 \u0d9e"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>") == [2, 105, 2364, 107, 10979, 106]


@_slow
@pytest.mark.parametrize("strategy", ["eager", "breakable"])
def test_greedy_tokens_equal_transformers_over_two_sub_pools(
    strategy: str, loaded: LoadedModel, reference: Any
) -> None:
    """Prompts on both sides of the window of 512 tokens, in chunks."""
    lengths, num_new = [600, 5, 40], 8
    prompts = prompts_of(loaded, lengths)
    runner = matrix_runner(loaded.model, strategy, lengths, num_new=num_new, window_fraction=1.0)
    Judge(reference, ERROR).check(prompts, generated_by(runner, strategy, "chunked", prompts, num_new))


@_slow
def test_greedy_tokens_equal_transformers_captured_whole(loaded: LoadedModel, reference: Any) -> None:
    """Both windows inside a graph; short prompts, since emulated attention reads all there can be."""
    lengths = [20, 3]
    prompts = prompts_of(loaded, lengths)
    runner = matrix_runner(loaded.model, "full", lengths, num_new=6, max_extend_tokens=32, sizes=(32,))
    Judge(reference, ERROR).check(prompts, generated_by(runner, "full", "batched", prompts, 6))


@functools.cache
def _loaded_on(path: Path, device: str) -> tuple[LoadedModel, Judge]:
    loaded = load_model(path, device=device, dtype=torch.float32)
    return loaded, Judge(reference_gemma3(path).to(device), ERROR)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", MATRIX_DEVICES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_way_on_all_prompts(strategy: str, device: str, path: Path) -> None:
    """32 prompts of 1 to 900 tokens, 64 new tokens each."""
    loaded, judge = _loaded_on(path, device)
    check_every_way(judge, loaded.model, strategy, prompts_of(loaded, matrix_lengths()))
