"""What the model is run on: token counts, and several inputs for each.

An input is a tuple of positional arguments. Tensors whose dim 0 is the token count are *dynamic*:
a shorter input is padded in that dim with zeros. Everything else is passed as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.runtime.errors import ConfigError

from .report import InputFacts

TEXT_NAME = "alice.txt"
TEXT_SOURCE = "Lewis Carroll, Alice's Adventures in Wonderland (1865), the beginning"


@dataclass(frozen=True, kw_only=True)
class InputSet:
    """Inputs of one token count.

    Attributes:
        num_tokens: Dim 0 of every dynamic tensor.
        inputs: Positional arguments, one tuple an input.
    """

    num_tokens: int
    inputs: tuple[tuple[Any, ...], ...]


def num_tokens_of(arguments: tuple[Any, ...]) -> int:
    """Returns dim 0 of the first tensor.

    Raises:
        ConfigError: No argument is a tensor with a dim 0.
    """
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.dim() > 0:
            return argument.shape[0]
    raise ConfigError(
        "An input holds no tensor with a token dimension (dim 0), so there is nothing to pad. Give inputs whose "
        "first tensor has a row for each token."
    )


def padded_to(arguments: tuple[Any, ...], num_rows: int) -> tuple[Any, ...]:
    """Returns the arguments with every dynamic tensor padded with zeros (fresh) to ``num_rows``."""
    num_tokens = num_tokens_of(arguments)
    return tuple(
        _padded_tensor(argument, num_rows) if _is_dynamic(argument, num_tokens) else argument
        for argument in arguments
    )


def cut_to(arguments: tuple[Any, ...], num_rows: int) -> tuple[Any, ...]:
    """Returns the arguments with every dynamic tensor cut (fresh) to its first ``num_rows`` rows."""
    num_tokens = num_tokens_of(arguments)
    return tuple(
        argument[:num_rows].clone() if _is_dynamic(argument, num_tokens) else argument
        for argument in arguments
    )


def _is_dynamic(argument: Any, num_tokens: int) -> bool:
    return isinstance(argument, torch.Tensor) and argument.dim() > 0 and argument.shape[0] == num_tokens


def _padded_tensor(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    padded = tensor.new_zeros((num_rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def group_by_tokens(inputs: Sequence[Any] | torch.Tensor) -> tuple[InputSet, ...]:
    """Groups inputs by token count, ascending.

    Args:
        inputs: Tuples of positional arguments, or single tensors.

    Raises:
        ConfigError: There are none, or one has no token dimension.
    """
    if isinstance(inputs, torch.Tensor) or not inputs:
        raise ConfigError(
            "compare needs a non-empty sequence of inputs, each a tuple of the model's positional arguments."
        )
    groups: dict[int, list[tuple[Any, ...]]] = {}
    for given in inputs:
        arguments = given if isinstance(given, tuple) else (given,)
        groups.setdefault(num_tokens_of(arguments), []).append(arguments)
    return tuple(InputSet(num_tokens=count, inputs=tuple(groups[count])) for count in sorted(groups))


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and where it is from.

    Attributes:
        content: Not empty.
        source: Title or file name.
    """

    content: str
    source: str


def read_text(path: Path | None) -> Text:
    """Reads a text file, or the text that ships with the package.

    Raises:
        ConfigError: The file is missing, no file, unreadable, empty or not UTF-8.
    """
    if path is None:
        shipped = resources.files("sgl_piecewise").joinpath("data", TEXT_NAME)
        return Text(content=shipped.read_text(encoding="utf-8"), source=TEXT_SOURCE)
    try:
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"The text {path} is not UTF-8 (byte {err.start} is {err.object[err.start]:#04x}). "
            "Convert it first."
        ) from err
    except OSError as err:
        raise ConfigError(f"The text {path} cannot be read: {err.strerror or err}.") from err
    if not content.strip():
        raise ConfigError(f"The text {path} is empty; there is nothing to run the model on.")
    return Text(content=content, source=str(path))


def tokens_of_text(text: Text, encode: Callable[[str], Any]) -> tuple[list[int], InputFacts]:
    """Tokenizes a text.

    Args:
        text: What to tokenize.
        encode: A tokenizer's ``encode``: returns token ids, or an object that has them as ``ids``.

    Raises:
        ConfigError: The tokenizer made no tokens of it.
    """
    encoded = encode(text.content)
    ids = list(encoded if isinstance(encoded, list) else encoded.ids)
    if not ids:
        raise ConfigError(f"The tokenizer made no tokens of the text {text.source}; give another text.")
    return ids, InputFacts(source=text.source, num_tokens=len(ids), is_repeated=False, is_random=False)


def random_tokens(num_tokens: int, vocab_size: int, seed: int) -> tuple[list[int], InputFacts]:
    """Makes seeded random token ids, for a model that has no tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    source = f"random token ids (seed {seed}): the model has no tokenizer"
    return ids, InputFacts(source=source, num_tokens=num_tokens, is_repeated=False, is_random=True)


def windows_of_tokens(
    ids: list[int], token_counts: Sequence[int], num_inputs: int, device: torch.device
) -> tuple[tuple[InputSet, ...], bool]:
    """Cuts inputs ``(input_ids, positions)`` out of a row of tokens.

    The inputs of one count start at evenly spaced places, so they differ from one another.

    Args:
        ids: The row; repeated until the longest count has room for ``num_inputs`` different starts.
        token_counts: How many tokens, ascending.
        num_inputs: Inputs per count.
        device: Where the tensors go.

    Returns:
        One set per count, each of ``(int64[T], int64[T])``; and whether the row was repeated.
    """
    needed = token_counts[-1] + num_inputs - 1
    repeats = -(-needed // len(ids))
    row = torch.tensor(ids, dtype=torch.int64).repeat(repeats)
    sets = []
    for count in token_counts:
        stride = (len(row) - count) // max(1, num_inputs - 1) if num_inputs > 1 else 0
        windows = [row[start : start + count] for start in (index * stride for index in range(num_inputs))]
        sets.append(
            InputSet(
                num_tokens=count,
                inputs=tuple(
                    (window.to(device, copy=True), torch.arange(count, device=device)) for window in windows
                ),
            )
        )
    return tuple(sets), repeats > 1
