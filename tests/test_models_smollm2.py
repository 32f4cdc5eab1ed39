"""The real thing: SmolLM2-135M-Instruct from its GGUF file, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models_gguf import gguf_name, interleaved_order
from models_reference import logits_of, reference_logits

from sgl_piecewise.models.loading import LoadedModel, default_gguf_path, load_model
from sgl_piecewise.models.shapes import named_shape

pytestmark = pytest.mark.slow

TEXT = """\
A CUDA graph records a sequence of kernels once and launches them again with one call. On a model
that runs many small kernels this removes most of the time that the host spends on launching them.
What cannot be recorded has to run between two graphs: here that is attention, whose work depends
on how long each sequence is. In 2024, a batch of 16 tokens took about 9 milliseconds that way.

    def replay(self):
        for segment in self.segments:
            segment.run()

"Is the result the same?" she asked. It is, bit for bit, as long as nothing is read before it has
been written, and nothing that is still needed is given back too early.
"""


@pytest.fixture(scope="module")
def path() -> Path:
    return default_gguf_path(download=True)


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """transformers' class, filled from the file by the package and the converter's order of rows."""
    import transformers

    # As published in HuggingFaceTB/SmolLM2-135M-Instruct, config.json.
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for name, parameter in model.named_parameters():
        values = torch.from_numpy(np.array(stored[gguf_name(name)]))
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        with torch.no_grad():
            if heads is None:
                parameter.copy_(values)
            else:
                parameter[torch.from_numpy(interleaved_order(values.shape[0], heads))] = values
    return model


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
