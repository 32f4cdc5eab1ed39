"""Text to token ids and back: from a Hugging Face folder, or from the vocabulary in a GGUF file.

Both end as a ``tokenizers.Tokenizer``. A GGUF file names its pre-tokenizer (how text is cut before
merging) and holds only tokens and merges; the pre-tokenizers known here are rebuilt from their
published patterns, and any other raises: a wrong one would give ids that look right.

Source of the patterns: the ``tokenizer.json`` files of GPT-2, SmolLM2, Llama 3 and Qwen2; of the
names: llama.cpp ``src/llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError, nearest

from .extras import import_extra
from .weights.huggingface import read_json

_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_CONTRACTIONS_AND_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2_PATTERN = rf"{_CONTRACTIONS_AND_WORDS}|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", *_LLAMA3_NAMES)

_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4  # GGUF token types that are matched before text is cut


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A model's vocabulary at work.

    Attributes:
        backend: The ``tokenizers.Tokenizer`` that does it.
        bos_token_id: Begins a text, or None where the model has none.
        eos_token_ids: Any of these ends a text.
    """

    backend: Any
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included; a model's ``vocab_size`` may be padded beyond it."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: Special tokens written out in it, such as ``<|im_start|>``, become single ids.
            add_special_tokens: Begins as the model was trained to begin (some with a BOS token).
        """
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def tokenizer_from_huggingface(folder: Path) -> Tokenizer | None:
    """Reads the tokenizer of a Hugging Face folder.

    Args:
        folder: With ``tokenizer.json``, or with files from which transformers can make one.

    Returns:
        The tokenizer, or None where the folder holds weights only.

    Raises:
        CheckpointError: The files are damaged.
        MissingExtraError: The package tokenizers (or transformers) is not installed.
    """
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder / "tokenizer.json")
    elif any((folder / name).is_file() for name in ("vocab.json", "tokenizer.model")):
        transformers = import_extra("transformers", purpose="convert an older tokenizer")
        backend = transformers.AutoTokenizer.from_pretrained(folder, use_fast=True).backend_tokenizer
    else:
        return None
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):  # the latter knows more ends of text
        if (folder / name).is_file():
            given = read_json(folder / name)
            settings |= {k: given[k] for k in ("bos_token_id", "eos_token_id") if given.get(k) is not None}
    eos = settings.get("eos_token_id", ())
    return Tokenizer(
        backend=backend,
        bos_token_id=settings.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
    )


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
    if own["model"] != "gpt2":
        raise CheckpointError(
            f"{origin}: tokenizer model {own['model']!r} is not supported, only byte-level BPE ('gpt2'). "
            "Use the model's Hugging Face folder, with its tokenizer.json."
        )
    kind = own.get("pre")
    if kind not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{origin}: pre-tokenizer {kind!r} is not supported. {nearest(str(kind), _PRE_TOKENIZERS)} "
            "Use the model's Hugging Face folder, with its tokenizer.json."
        )
    bos, eos = (_token_id(own, key, origin) for key in ("bos_token_id", "eos_token_id"))
    backend = _byte_level_bpe(own, kind, origin)
    if own.get("add_bos_token", kind in _LLAMA3_NAMES) and bos is not None:
        _begin_with(backend, bos)
    return Tokenizer(backend=backend, bos_token_id=bos, eos_token_ids=() if eos is None else (eos,))


def _read_tokenizer_json(path: Path) -> Any:
    """Returns the ``tokenizers.Tokenizer`` of a file."""
    tokenizers = import_extra("tokenizers", purpose="read tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as err:  # the package raises nothing narrower
        raise CheckpointError(f"{path} is damaged or not a tokenizer ({err}). Download it again.") from err


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
    types = own.get("token_type", ())
    added = [
        tokenizers.AddedToken(token, special=token_type == _CONTROL_TOKEN, normalized=False)
        for token, token_type in zip(own.get("tokens", ()), types, strict=False)
        if token_type in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
    ]
    backend.add_tokens(added)
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
