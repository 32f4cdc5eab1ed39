"""The tokenizer in a GGUF file's vocabulary.

A file names its pre-tokenizer (how text is cut before merging) and holds only tokens and merges, or
tokens and scores; the pre-tokenizers known here are rebuilt from their published patterns, and any
other raises: a wrong one would give ids that look right.

Source of the patterns: the ``tokenizer.json`` files of GPT-2, SmolLM2, Llama 3 and Qwen2; of the
names: llama.cpp ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError, nearest

from .extras import import_extra
from .sentencepiece import add_special_tokens, sentencepiece_bpe
from .tokenizer import Tokenizer

_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_CONTRACTIONS_AND_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2_PATTERN = rf"{_CONTRACTIONS_AND_WORDS}|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", *_LLAMA3_NAMES)

_INSTEAD = "Use the model's Hugging Face folder, with its tokenizer.json."


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, origin: str) -> Tokenizer | None:
    """Builds the tokenizer of a GGUF file from its vocabulary.

    Args:
        metadata: The file's metadata, key to value.
        origin: Its path, for errors.

    Returns:
        The tokenizer, or None where the file holds no vocabulary.

    Raises:
        CheckpointError: It is of a kind, or cuts text in a way, that is not known here; or the
            vocabulary contradicts itself.
        MissingExtraError: The package tokenizers is not installed.
    """
    own = {
        k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")
    }
    if "model" not in own:
        return None
    kind = own.get("pre")
    if own["model"] == "gpt2":
        if kind not in _PRE_TOKENIZERS:
            raise CheckpointError(
                f"{origin}: pre-tokenizer {kind!r} is not supported. {nearest(str(kind), _PRE_TOKENIZERS)} {_INSTEAD}"
            )
        backend, begins = _byte_level_bpe(own, kind, origin), kind in _LLAMA3_NAMES
    elif own["model"] == "llama":
        backend, begins = sentencepiece_bpe(own, origin), True
    else:
        raise CheckpointError(
            f"{origin}: tokenizer model {own['model']!r} is not supported, only byte-level BPE ('gpt2') and "
            f"SentencePiece's BPE ('llama'). {_INSTEAD}"
        )
    bos, *ends = (_token_id(own, key, origin) for key in ("bos_token_id", "eos_token_id", "eot_token_id"))
    if own.get("add_bos_token", begins) and bos is not None:
        _begin_with(backend, bos)
    eos = tuple(dict.fromkeys(end for end in ends if end is not None))
    return Tokenizer(backend=backend, bos_token_id=bos, eos_token_ids=eos)


def _token_id(own: Mapping[str, Any], key: str, origin: str) -> int | None:
    """Returns the id of a special token, or None where the file names none."""
    token_id, num_tokens = own.get(key), len(own.get("tokens", ()))
    if token_id is not None and token_id >= num_tokens:
        raise CheckpointError(
            f"{origin}: {key} is {token_id}, beyond the {num_tokens} tokens of the vocabulary. The file is "
            "damaged; download it again."
        )
    return token_id


def _byte_level_bpe(own: Mapping[str, Any], kind: str, origin: str) -> Any:
    """Returns a ``tokenizers.Tokenizer`` with the file's tokens, merges and added tokens."""
    tokenizers = import_extra("tokenizers", purpose="build the tokenizer of a GGUF file")
    vocab = {token: index for index, token in enumerate(own.get("tokens", ()))}
    merges = [tuple(merge.split(" ")) for merge in own.get("merges", ())]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise CheckpointError(
                f"{origin}: the merge {' '.join(merge)!r} does not join two tokens of the vocabulary to a "
                "third. The file is damaged; download it again."
            )
    model = tokenizers.models.BPE(vocab, merges, ignore_merges=kind in _LLAMA3_NAMES)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(tokenizers, kind)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    add_special_tokens(backend, own)
    return backend


def _pre_tokenizer(tokenizers: Any, kind: str) -> Any:
    """Returns what cuts text into the words within which merges happen."""
    pre = tokenizers.pre_tokenizers
    if kind == "gpt-2":
        return pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    pattern = _QWEN2_PATTERN if kind == "qwen2" else _LLAMA3_PATTERN
    return pre.Sequence(
        [
            pre.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _begin_with(backend: Any, token_id: int) -> None:
    """Makes every encoded text begin with a token."""
    tokenizers = import_extra("tokenizers", purpose="build the tokenizer of a GGUF file")
    token = backend.id_to_token(token_id)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )
