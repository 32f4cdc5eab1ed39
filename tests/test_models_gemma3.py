"""The real thing: Gemma 3 270M from its GGUF file, against transformers. Needs the file in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_gemma3 import TEXT, reference_gemma3
from models_reference import logits_of, reference_logits
from models_serving import check_greedy, greedy_tokens, model_runner, serving_plan

from sgl_piecewise.models.loading import LoadedModel, load_model
from sgl_piecewise.models.packaged_gguf import packaged_gguf_path
from sgl_piecewise.models.packaged_models import GEMMA3
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.runtime.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def path() -> Path:
    """Its licence is accepted by who fetches it, so tests do not: `load_model("gemma-3-270m-q4")` does."""
    try:
        return packaged_gguf_path(GEMMA3, download=False)
    except CheckpointError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return reference_gemma3(path)


def test_logits_agree_with_transformers_beyond_the_window(loaded: LoadedModel, reference: Any) -> None:
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.encode(TEXT * 9)
    assert len(token_ids) > 600
    ours, theirs = logits_of(loaded.model, token_ids), reference_logits(reference, token_ids)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours - theirs).abs().max() < 1e-3


def test_the_model_is_the_shape_of_its_name(loaded: LoadedModel) -> None:
    found, shape = vars(loaded.config), vars(named_shape("gemma3-270m"))
    differing = {key for key in shape if found[key] != shape[key]}
    assert differing <= {"rms_norm_eps"}  # The file holds it in float32.


def test_it_says_what_a_language_model_says(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    token_ids = loaded.tokenizer.encode("To be, or not to be, that is the")
    next_id = int(logits_of(loaded.model, token_ids)[-1].argmax())
    assert loaded.tokenizer.decode([next_id]) == " question"


def test_the_tokenizer_gives_text_back_and_whole_tokens(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    for text in (TEXT, "  two  spaces\n\n\ttab", "naïve café 日本語 \U0001f600 \u0d9e"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>") == [2, 105, 2364, 107, 10979, 106]


def test_greedy_tokens_equal_transformers_over_two_sub_pools(loaded: LoadedModel, reference: Any) -> None:
    """Prompts on both sides of the window of 512 tokens, batched and in chunks."""
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.encode(TEXT * 9)
    prompts = [token_ids[:length] for length in (600, 5, 40)]
    runner = model_runner(
        loaded.model,
        serving_plan("eager", "eager"),
        max_requests=3,
        max_context=640,
        max_extend_tokens=256,
        max_total_tokens=1024,
    )
    generated = greedy_tokens(runner, prompts, 12, chunk_tokens=200)
    check_greedy(reference, prompts, generated, error=1e-3)
