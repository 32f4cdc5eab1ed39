"""Text to token ids and back: what a tokenizer is here, and how one is read from a Hugging Face folder.

Both this reader and that of GGUF files (`gguf_tokenizer.py`) end as a ``tokenizers.Tokenizer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError, ConfigError

from .extras import import_extra
from .weights.huggingface import read_json


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

        Raises:
            ConfigError: The text is no Unicode: it holds a lone surrogate, which is how Python reads a byte that is not
                UTF-8 on a command line.
        """
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise ConfigError(
                f"The text holds {text[err.start]!r} at index {err.start}, a lone surrogate, and no tokenizer knows "
                "that. Give text in UTF-8, or replace what is not (bytes.decode(errors='replace'))."
            ) from err
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


def _read_tokenizer_json(path: Path) -> Any:
    """Returns the ``tokenizers.Tokenizer`` of a file."""
    tokenizers = import_extra("tokenizers", purpose="read tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as err:  # the package raises nothing narrower
        raise CheckpointError(f"{path} is damaged or not a tokenizer ({err}). Download it again.") from err
