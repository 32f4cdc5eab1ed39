"""Values before times: every strategy against padded eager, bit for bit or within eager's own rounding error.

Each output is looked at only after the same strategy has run at another size: memory that was
freed too early, or shared between sizes, shows then and not before. Token counts come in a
seeded random order for the same reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.errors import ConfigError

from .candidate import Candidate
from .inputs import InputSet, padded_to
from .judging import Outputs, differences, judge, worst
from .records import CaseValues
from .tolerance import wide_model
from .values import first_difference

Model = Callable[..., torch.Tensor]


def check_values(
    model: Model,
    candidates: Sequence[Candidate],
    input_sets: Sequence[InputSet],
    *,
    seed: int,
    on_progress: ProgressCallback,
) -> None:
    """Runs every candidate on every input and notes how its values differ from eager's.

    Args:
        model: The reference.
        candidates: Eager among them: its entry shows what padding alone changes.
        input_sets: Ascending by token count.
        seed: Of the order.
        on_progress: Told after every token count.

    Raises:
        ConfigError: The model gives no tensor of one row a token, differs from itself, or cannot be widened
            though a strategy is to be judged by a tolerance.
    """
    wide = _wide_reference(model, candidates)
    order = list(range(len(input_sets)))
    random.Random(seed).shuffle(order)
    for done, index in enumerate(order):
        on_progress("checking values", done, len(order))
        other = input_sets[0] if index else input_sets[-1]
        _CountCheck(model, wide, candidates, input_sets[index], other).run()
    for candidate in candidates:
        candidate.judge_excused()
    on_progress("checking values", len(order), len(order))


def _wide_reference(model: Model, candidates: Sequence[Candidate]) -> Model | None:
    """Returns the model in a wider dtype if a strategy needs it for its tolerance."""
    names = [one.strategy for one in candidates if one.takes_part and not one.arm.keeps_bits]
    if not names:
        return None
    wide = wide_model(model)
    if wide is None:
        raise ConfigError(
            f"Strategy {names[0]!r} rounds otherwise than eager, so its values are judged by eager's own error "
            "against the model in a wider dtype, and of a plain function there is no such copy. Give the module, "
            "or a method of it."
        )
    return wide


class _CountCheck:
    """The check of one token count.

    Args:
        model: The reference.
        wide: The model in a wider dtype, where a candidate needs it.
        candidates: Eager among them.
        inputs: Of this token count.
        other: Of another one; run between a candidate's output and the look at it.
    """

    def __init__(
        self,
        model: Model,
        wide: Model | None,
        candidates: Sequence[Candidate],
        inputs: InputSet,
        other: InputSet,
    ) -> None:
        self._model = model
        self._wide = wide
        self._candidates = candidates
        self._inputs = inputs
        self._other = other

    def run(self) -> None:
        """Checks every input and adds one entry to each candidate that ran."""
        found: dict[str, list[CaseValues]] = {candidate.strategy: [] for candidate in self._candidates}
        for input_index in range(len(self._inputs.inputs)):
            # Padded sizes to outputs; made on demand, dropped with the input: logits are large.
            references: dict[tuple[Model, int], torch.Tensor] = {}
            for candidate in self._candidates:
                if not candidate.takes_part or not candidate.can_run(self._inputs.num_tokens):
                    continue
                try:
                    entry = self._check_input(candidate, input_index, references)
                except torch.OutOfMemoryError as err:
                    candidate.problems[self._inputs.num_tokens] = f"eager is out of memory: {err}"
                    continue
                if entry is not None:
                    found[candidate.strategy].append(entry)
        for candidate in self._candidates:
            if found[candidate.strategy]:
                candidate.values.append(worst(found[candidate.strategy]))

    def _check_input(
        self, candidate: Candidate, input_index: int, references: dict[tuple[Model, int], torch.Tensor]
    ) -> CaseValues | None:
        """Checks one candidate on one input; None where it gave no output of the right shape."""
        arguments, count = self._inputs.inputs[input_index], self._inputs.num_tokens
        eager = self._reference(self._model, arguments, count, references)
        padded_size = self._compared_size(candidate)
        reference = self._reference(self._model, arguments, padded_size, references)
        if candidate.is_reference:
            return differences(reference, eager, eager, count, padded_size)
        got = candidate.run(arguments, count)
        if got is None:
            return None
        if candidate.can_run(self._other.num_tokens):
            candidate.run(self._other.inputs[0], self._other.num_tokens)
        wide = None
        if not candidate.arm.keeps_bits:
            assert self._wide is not None, "made before the check"
            wide = self._reference(self._wide, arguments, padded_size, references)
        found = judge(
            Outputs(reference=reference, eager=eager, got=got, wide=wide),
            num_tokens=count,
            padded_size=padded_size,
            input_index=input_index,
        )
        if found.first_difference is not None:
            candidate.first_difference = found.first_difference
            _check_repeatable(self._model, padded_to(arguments, padded_size), reference)
        return found.values

    def _reference(
        self,
        model: Model,
        arguments: tuple[Any, ...],
        num_rows: int,
        references: dict[tuple[Model, int], torch.Tensor],
    ) -> torch.Tensor:
        """Returns the real rows of a model's output when it runs on ``num_rows`` rows."""
        if (model, num_rows) not in references:
            output = checked_output(model(*padded_to(arguments, num_rows)), num_rows)
            references[model, num_rows] = output[: self._inputs.num_tokens]
        return references[model, num_rows]

    def _compared_size(self, candidate: Candidate) -> int:
        """Eager itself is compared with eager padded as the first other candidate pads."""
        compared = [other for other in self._candidates if other.takes_part and not other.is_reference]
        for one in compared if candidate.is_reference else [candidate]:
            size = one.arm.padded_size(self._inputs.num_tokens)
            if size is not None:
                return size
        return self._inputs.num_tokens


def checked_output(output: object, num_rows: int) -> torch.Tensor:
    """Returns the model's output if it is a tensor of one row a token.

    Raises:
        ConfigError: It is something else; says what.
    """
    if isinstance(output, torch.Tensor) and output.dim() > 0 and output.shape[0] == num_rows:
        return output
    what = (
        f"a tensor of shape {tuple(output.shape)}"
        if isinstance(output, torch.Tensor)
        else type(output).__name__
    )
    raise ConfigError(
        f"The model returned {what} for {num_rows} tokens; compare needs one tensor with a row for each "
        "token (dim 0). Wrap the model in a function that returns such a tensor."
    )


def _check_repeatable(model: Model, padded: tuple[Any, ...], reference: torch.Tensor) -> None:
    """A strategy is not to blame for a model that differs from itself."""
    again = model(*padded)[: reference.shape[0]]
    index = first_difference(reference, again)
    if index is not None:
        raise ConfigError(
            f"The model differs from itself: two eager calls on the same input give "
            f"{reference[index].item()!r} and {again[index].item()!r} at {list(index)}, so nothing can be "
            "compared bit for bit. Put it in eval mode, or use torch.use_deterministic_algorithms(True)."
        )
