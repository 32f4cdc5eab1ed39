"""SentencePiece's BPE rebuilt from a GGUF vocabulary: tokens with scores instead of merges.

A score says how early a token was merged together; two tokens merge into a third when no other pair
gives one with a higher score. So every way to cut a token in two is a merge of its rank.

Source: llama.cpp ``src/llama-vocab.cpp`` (token types, what is matched first); the published
``tokenizer.json`` of Gemma (normalizer, byte fallback, decoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError

from .extras import import_extra

_NORMAL_TOKEN, _CONTROL_TOKEN, _USER_DEFINED_TOKEN = 1, 3, 4  # GGUF token types
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def add_special_tokens(backend: Any, own: Mapping[str, Any]) -> None:
    """Makes a tokenizer match whole tokens of the vocabulary that are never merged together.

    Args:
        backend: A ``tokenizers.Tokenizer``.
        own: Tokenizer metadata of a GGUF file.
    """
    tokenizers = import_extra("tokenizers", purpose="build the tokenizer of a GGUF file")
    added = [
        tokenizers.AddedToken(token, special=token_type == _CONTROL_TOKEN, normalized=False)
        for token, token_type in zip(own.get("tokens", ()), own.get("token_type", ()), strict=False)
        if token_type in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
    ]
    backend.add_tokens(added)


def sentencepiece_bpe(own: Mapping[str, Any], origin: str) -> Any:
    """Returns a ``tokenizers.Tokenizer`` with the file's tokens, merged in the order of their scores.

    Args:
        own: Tokenizer metadata of a GGUF file, without its prefix.
        origin: The file's path, for errors.

    Raises:
        CheckpointError: The vocabulary contradicts itself, or a space is put before every text,
            which is not supported.
    """
    tokenizers = import_extra("tokenizers", purpose="build the tokenizer of a GGUF file")
    if own.get("add_space_prefix", True):
        raise CheckpointError(
            f"{origin}: its tokenizer puts a space before every text (add_space_prefix), which is not supported. "
            "Use the model's Hugging Face folder, with its tokenizer.json."
        )
    tokens = own.get("tokens", ())
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = own.get("unknown_token_id")
    if unknown is not None and unknown >= len(tokens):
        raise CheckpointError(
            f"{origin}: unknown_token_id is {unknown}, beyond the {len(tokens)} tokens of the vocabulary. The "
            "file is damaged; download it again."
        )
    model = tokenizers.models.BPE(
        vocab,
        _merges(own, vocab, origin),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Replace(" ", _SPACE)
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    add_special_tokens(backend, own)
    return backend


def _merges(own: Mapping[str, Any], vocab: Mapping[str, int], origin: str) -> list[tuple[str, str]]:
    """Returns every way to cut a token in two, tokens with the highest score first."""
    tokens, scores, types = (own.get(key, ()) for key in ("tokens", "scores", "token_type"))
    if not len(tokens) == len(scores) == len(types):
        raise CheckpointError(
            f"{origin}: {len(tokens)} tokens have {len(scores)} scores and {len(types)} types. The file is damaged; "
            "download it again."
        )
    is_mergeable = {
        token for token, token_type in zip(tokens, types, strict=True) if token_type == _NORMAL_TOKEN
    }
    order = sorted(range(len(tokens)), key=lambda index: -scores[index])
    return [
        (tokens[index][:cut], tokens[index][cut:])
        for index in order
        if types[index] == _NORMAL_TOKEN
        for cut in range(1, len(tokens[index]))
        if tokens[index][:cut] in is_mergeable and tokens[index][cut:] in is_mergeable
    ]
