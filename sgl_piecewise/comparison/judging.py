"""One output against eager's: bit for bit, or within eager's own rounding error.

The rule of a comparison, for whatever runs the model. This module must not know where outputs come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .records import CaseValues, FirstDifference
from .tolerance import closeness
from .values import first_difference, max_abs_difference, next_token_agreement


@dataclass(frozen=True, kw_only=True, eq=False)
class Outputs:
    """Outputs of one input, a row a token.

    Attributes:
        reference: Eager's, computed on as many rows as ``got``; its real rows.
        eager: Eager's on the real tokens alone.
        got: What is judged.
        wide: The model's in a wider dtype; None where ``got`` must equal ``reference`` bit for bit.
    """

    reference: torch.Tensor
    eager: torch.Tensor
    got: torch.Tensor
    wide: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of it.

    Attributes:
        values: How the outputs differ; None where they have other shapes.
        first_difference: Where the output is wrong; None where it is right.
    """

    values: CaseValues | None
    first_difference: FirstDifference | None


def judge(outputs: Outputs, *, num_tokens: int, padded_size: int, input_index: int) -> Judgement:
    """Judges one output.

    Args:
        outputs: The output and what it is compared with.
        num_tokens: Real tokens, for the entry.
        padded_size: Rows that were computed, likewise.
        input_index: Which of the case's inputs, likewise.
    """
    reference, got = outputs.reference, outputs.got
    close = None
    wrong: tuple[int, ...] | None
    if got.shape != reference.shape or got.dtype != reference.dtype:
        wrong = ()
    elif outputs.wide is None:
        wrong = first_difference(reference, got)
    else:
        close = closeness(outputs.wide, reference, got)
        wrong = close.first_wrong
    difference = None
    if wrong is not None:
        expected_text, got_text = (
            repr(one[wrong].item()) if wrong else f"{one.dtype} {list(one.shape)}" for one in (reference, got)
        )
        difference = FirstDifference(
            num_tokens=num_tokens,
            padded_size=padded_size,
            input_index=input_index,
            index=wrong,
            expected=expected_text,
            got=got_text,
        )
    if got.shape != reference.shape:
        return Judgement(values=None, first_difference=difference)
    values = differences(reference, outputs.eager, got, num_tokens, padded_size)
    if close is not None:
        values = dataclasses.replace(
            values, max_error=close.max_error, eager_error=close.eager_error, num_excused=close.num_excused
        )
    return Judgement(values=values, first_difference=difference)


def differences(
    reference: torch.Tensor, eager: torch.Tensor, got: torch.Tensor, num_tokens: int, padded_size: int
) -> CaseValues:
    """Returns how an output differs from eager's, whatever that means."""
    return CaseValues(
        num_tokens=num_tokens,
        padded_size=padded_size,
        max_diff_to_padded_eager=max_abs_difference(reference, got),
        max_diff_to_eager=max_abs_difference(eager, got),
        next_token_agreement=next_token_agreement(eager, got),
        num_rows=got.shape[0],
    )


def worst(entries: Sequence[CaseValues]) -> CaseValues:
    """Joins the entries of a token count's inputs: the largest difference, the mean agreement."""

    def largest(differences: list[float | None]) -> float | None:
        finite = [difference for difference in differences if difference is not None]
        return max(finite) if len(finite) == len(differences) else None

    agreements = [entry.next_token_agreement for entry in entries if entry.next_token_agreement is not None]
    return CaseValues(
        num_tokens=entries[0].num_tokens,
        padded_size=entries[0].padded_size,
        max_diff_to_padded_eager=largest([entry.max_diff_to_padded_eager for entry in entries]),
        max_diff_to_eager=largest([entry.max_diff_to_eager for entry in entries]),
        next_token_agreement=sum(agreements) / len(agreements) if agreements else None,
        max_error=largest([entry.max_error for entry in entries]),
        eager_error=largest([entry.eager_error for entry in entries]),
        num_excused=sum(entry.num_excused for entry in entries),
        num_rows=sum(entry.num_rows for entry in entries),
    )
