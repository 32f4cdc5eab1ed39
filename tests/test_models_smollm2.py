"""The real thing: SmolLM2-135M-Instruct from its GGUF file, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import logits_of, reference_logits
from models_smollm2 import TEXT, reference_smollm2

from sgl_piecewise.models.loading import LoadedModel, default_gguf_path, load_model
from sgl_piecewise.models.shapes import named_shape

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Path:
    return default_gguf_path(download=True)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return reference_smollm2(path)


def test_logits_agree_with_transformers_on_a_text(loaded: LoadedModel, reference: Any) -> None:
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.encode(TEXT)
    assert len(token_ids) > 150
    ours, theirs = logits_of(loaded.model, token_ids), reference_logits(reference, token_ids)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours - theirs).abs().max() < 1e-3


def test_the_model_is_the_shape_of_its_name(loaded: LoadedModel) -> None:
    shape = named_shape("smollm2-135m")
    assert loaded.config.rms_norm_eps == pytest.approx(shape.rms_norm_eps)
    assert {**vars(loaded.config), "rms_norm_eps": 0} == {**vars(shape), "rms_norm_eps": 0}


def test_it_says_what_a_language_model_says(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.encode("The capital of France is")
    next_id = int(logits_of(loaded.model, token_ids)[-1].argmax())
    assert loaded.tokenizer.decode([next_id]) == " Paris"


def test_the_tokenizer_gives_known_ids_and_text_back(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    # Digits stand alone in SmolLM2's vocabulary, whatever merges there are.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024 ab")] == ["2", "0", "2", "4", " ab"]
    for text in (TEXT, "  two  spaces\n\n\ttab", "naïve café 日本語 \U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_agrees_with_transformers_where_no_digits_are(path: Path, loaded: LoadedModel) -> None:
    """transformers' reading of the file knows no ``smollm`` pre-tokenizer: it keeps GPT-2's."""
    import transformers

    assert loaded.tokenizer is not None
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "".join(character for character in TEXT if not character.isdigit())
    assert loaded.tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
