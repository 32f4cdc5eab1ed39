"""Tokenizers: rebuilt from GGUF vocabularies, compared with the tokenizers they were taken from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from sgl_piecewise.models.gguf_tokenizer import tokenizer_from_gguf
from sgl_piecewise.models.tokenizer import Tokenizer, tokenizer_from_huggingface
from sgl_piecewise.runtime.errors import CheckpointError, ConfigError

CONTROL, USER_DEFINED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>"]
TRAINING_TEXT = [
    "A graph is captured once and replayed many times, in 2023, 2024 and 2025.",
    "It's what we'd call the same thing: they'll say it doesn't matter.\n\n  Indented   text\tand tabs.\n",
    "Zahlen wie 1234567 und Wörter wie Straße, naïve café; 日本語のテキスト, и по-русски.",
]
TEXTS = [
    *TRAINING_TEXT,
    "",
    " ",
    "unseen words, WE'LL SEE: 98765 4 32\r\n\r\n   three   spaces  \n",
    "<|im_start|>user\nHello<|im_end|>\n<think>hm</think>",
    "e\u0301 composed or not, \u00e9; emoji \U0001f600 and \u0661\u0662\u0663 digits",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(kind: str) -> Any:
    """Returns the pre-tokenizer as the model's own ``tokenizer.json`` has it."""
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind == "qwen2":
        from transformers.models.qwen2 import tokenization_qwen2

        pattern = tokenization_qwen2.PRETOKENIZE_REGEX
    else:
        pattern = LLAMA3
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(kind: str) -> tokenizers.Tokenizer:
    """Trains a small byte-level BPE that cuts text as this kind does."""
    source = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    source.pre_tokenizer = pre_tokenizer(kind)
    source.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        source.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source.train_from_iterator(TRAINING_TEXT, trainer)
    source.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in USER_DEFINED])
    return source


def gguf_metadata(source: tokenizers.Tokenizer, kind: str, **changes: Any) -> dict[str, Any]:
    """Returns what a GGUF file would hold of a tokenizer."""
    content = json.loads(source.to_str())["model"]
    tokens = [source.id_to_token(index) for index in range(source.get_vocab_size())]
    types = [3 if token in CONTROL else 4 if token in USER_DEFINED else 1 for token in tokens]
    own = {
        "model": "gpt2",
        "pre": kind,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in content["merges"]],
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        "add_bos_token": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in own.items() if value is not None}


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata, origin="model.gguf")
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_a_rebuilt_tokenizer_gives_the_ids_of_the_one_it_was_taken_from(kind: str) -> None:
    source = trained(kind)
    tokenizer = rebuilt(gguf_metadata(source, kind))
    assert tokenizer.vocab_size == source.get_vocab_size()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == source.encode(text).ids
        expected = normalizers.NFC().normalize_str(text) if kind == "qwen2" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_the_kinds_cut_numbers_differently_so_the_test_above_can_fail() -> None:
    """One vocabulary under each kind: digits one by one, by threes, or in a row."""
    source = trained("gpt-2")
    lengths = {
        kind: len(rebuilt(gguf_metadata(source, kind)).backend.pre_tokenizer.pre_tokenize_str("a 1234567"))
        for kind in ("gpt-2", "smollm", "qwen2", "llama-bpe")
    }
    assert lengths == {"gpt-2": 2, "smollm": 9, "qwen2": 9, "llama-bpe": 5}


def test_a_text_that_is_no_unicode_is_refused_by_what_is_in_it() -> None:
    """huggingface/transformers#43459: the error for a lone surrogate said that the text was no text."""
    tokenizer = rebuilt(gguf_metadata(trained("gpt-2"), "gpt-2"))
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")  # As Python reads its command line.
    with pytest.raises(ConfigError, match=r"'\\udce9' at index 3.*UTF-8"):
        tokenizer.encode(argument)


def test_control_tokens_are_single_ids_and_can_be_skipped() -> None:
    tokenizer = rebuilt(gguf_metadata(trained("smollm"), "smollm"))
    ids = tokenizer.encode("<|im_start|>It<|im_end|>")
    assert ids[0] == tokenizer.bos_token_id
    assert (ids[-1],) == tokenizer.eos_token_ids
    assert tokenizer.decode(ids) == "It"


@pytest.mark.parametrize(
    ("kind", "add_bos_token", "is_added"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_text_begins_as_the_model_was_trained_to_begin(
    kind: str, add_bos_token: bool | None, is_added: bool
) -> None:
    """Llama 3's files leave it unsaid, and mean yes."""
    tokenizer = rebuilt(gguf_metadata(trained(kind), kind, add_bos_token=add_bos_token))
    ids, bare = tokenizer.encode("It is"), tokenizer.encode("It is", add_special_tokens=False)
    assert ids == ([tokenizer.bos_token_id, *bare] if is_added else bare)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is not supported, only byte-level BPE"),
        ({"pre": "qwen3"}, r"pre-tokenizer 'qwen3' is not supported\. did you mean 'qwen2'\?"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported.*Hugging Face folder"),
        ({"pre": None}, "pre-tokenizer None is not supported"),
        ({"merges": ["zzz yyy"]}, "the merge 'zzz yyy' does not join two tokens"),
        ({"merges": ["a b c"]}, "the merge 'a b c' does not join two tokens"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id is 1000000, beyond the 4.. tokens"),
    ],
)
def test_a_vocabulary_that_would_give_wrong_ids_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rebuilt(gguf_metadata(trained("gpt-2"), "gpt-2", **changes))


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_from_gguf({"general.architecture": "llama"}, origin="model.gguf") is None


def test_a_folder_gives_its_own_tokenizer(tmp_path: Path) -> None:
    source = trained("smollm")
    source.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    tokenizer = tokenizer_from_huggingface(tmp_path)
    assert tokenizer is not None
    assert all(tokenizer.encode(text) == source.encode(text).ids for text in TEXTS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 0))


def test_a_folder_with_vocabulary_and_merges_is_converted(tmp_path: Path) -> None:
    source = trained("qwen2")
    source.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    tokenizer = tokenizer_from_huggingface(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode(TRAINING_TEXT[0]) == source.encode(TRAINING_TEXT[0]).ids


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert tokenizer_from_huggingface(tmp_path) is None


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_from_huggingface(tmp_path)


SPACE = "\u2581"
PIECES = ["e", "h", "t", "l", "o", SPACE, "he", "th", "the", f"{SPACE}the", "ll", "hell", "o" + SPACE, "lo"]


def scored_metadata(**changes: Any) -> dict[str, Any]:
    """Returns what a GGUF file holds of a SentencePiece vocabulary: bytes, pieces, scores of merges."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "  ", "\n\n"]
    raw = [f"<0x{value:02X}>" for value in range(256)]
    own = {
        "model": "llama",
        "pre": "default",
        "tokens": [*special, *raw, *PIECES],
        "token_type": [3] * 5 + [4] * 2 + [6] * 256 + [1] * len(PIECES),
        # "th" goes before "he", which goes before all longer ones.
        "scores": [-1000.0] * 7
        + [0.0] * 256
        + [-1000.0] * 6
        + [-2.0, -1.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "eot_token_id": 4,
        "unknown_token_id": 3,
        "add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in own.items() if value is not None}


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's algorithm as it is told: the best pair of neighbours first, the leftmost of equals."""
    scores = dict(zip(PIECES, scored_metadata()["tokenizer.ggml.scores"][7 + 256 :], strict=True))
    pieces = list(text.replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        _, index = min(pairs)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]


@pytest.mark.parametrize(
    "text", ["the", "hello the", "hhe", "tthe the", "helloo llll", " ohellothe hello", "lolo o"]
)
def test_a_scored_vocabulary_merges_the_best_pair_first(text: str) -> None:
    tokenizer = rebuilt(scored_metadata())
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert [tokenizer.backend.id_to_token(index) for index in ids[1:]] == merged_by_score(text)
    assert tokenizer.decode(ids) == text


def test_a_scored_vocabulary_falls_back_to_bytes_and_matches_whole_tokens_first() -> None:
    tokenizer = rebuilt(scored_metadata())
    text = "the  the\n\n\u00e9<end_of_turn>"
    tokens = [tokenizer.backend.id_to_token(index) for index in tokenizer.encode(text)]
    assert tokens == ["<bos>", "the", "  ", "the", "\n\n", "<0xC3>", "<0xA9>", "<end_of_turn>"]
    assert tokenizer.decode(tokenizer.encode(text)) == "the  the\n\n\u00e9"
    assert tokenizer.eos_token_ids == (1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_space_prefix": None}, "puts a space before every text"),
        ({"scores": [0.0]}, "277 tokens have 1 scores"),
        ({"unknown_token_id": 999}, "unknown_token_id is 999, beyond the 277 tokens"),
    ],
)
def test_a_scored_vocabulary_that_would_give_wrong_ids_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rebuilt(scored_metadata(**changes))
