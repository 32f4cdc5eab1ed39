"""Every strategy on the same prompts, against transformers.

A cell is a model, a strategy and a way of handing prompts in. All cells of a model share its weights,
and transformers judges each continuation once, however many cells give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models_serving import greedy_tokens

from sgl_piecewise.generation.compiling import CompiledModel
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.padding_policy import PaddingPolicy
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

STRATEGIES: dict[str, tuple[str, str]] = {
    "eager": ("eager", "none"),
    "full": ("full", "none"),
    "breakable": ("breakable", "none"),
    "fx_piecewise": ("breakable", "fx"),
    "tc_piecewise": ("breakable", "inductor"),
}
"""Name of a cell of the grid to how forwards are captured and compiled."""

WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"chunk_tokens": 100},
    "one by one": {"is_one_by_one": True},
}
"""How prompts are handed in; chunks of prompts run beside requests that decode."""

NUM_PROMPTS, LONGEST, NUM_NEW = 32, 900, 64

MATRIX_DEVICES = [
    pytest.param("cpu", marks=pytest.mark.matrix),
    pytest.param("cuda", marks=[pytest.mark.matrix, pytest.mark.slow, pytest.mark.gpu]),
]
"""Of tests of all prompts: a tier of their own where graphs are emulated, the second one on a GPU."""


def matrix_lengths(num_prompts: int = NUM_PROMPTS, longest: int = LONGEST) -> list[int]:
    """Returns lengths from 1 to the longest, as many between 1 and 10 as between 10 and 100."""
    return [round(longest ** (index / (num_prompts - 1))) for index in range(num_prompts)]


def prompts_from(token_ids: Sequence[int], lengths: Sequence[int], start: int = 0) -> list[list[int]]:
    """Returns prompts that begin at different tokens of a text."""
    assert len(token_ids) >= start + max(lengths) + len(lengths)
    return [list(token_ids[start + i : start + i + length]) for i, length in enumerate(lengths)]


def matrix_runner(
    model: Decoder,
    strategy: str,
    lengths: Sequence[int],
    *,
    num_new: int = NUM_NEW,
    max_extend_tokens: int = 256,
    sizes: tuple[int, ...] = (32, 128, 256),
    **options: Any,
) -> ModelRunner:
    """Builds a runner with graphs for every batch that these prompts can lead to."""
    capture, compiler = STRATEGIES[strategy]
    num = len(lengths)
    # One forward takes every request that decodes, and tokens of a prompt beside them.
    assert max_extend_tokens > num

    def mode(sizes: tuple[int, ...]) -> ModeStrategy:
        if capture == "eager":
            return ModeStrategy()
        return ModeStrategy(strategy=capture, compile=compiler, capture_sizes=sizes)

    plan = ExecutionPlan(
        modes={
            ForwardMode.DECODE: mode((1, num) if num > 1 else (1,)),
            ForwardMode.EXTEND: mode(tuple(size for size in sizes if size <= max_extend_tokens)),
        },
        padding=PaddingPolicy(max_factor=4.0),
    )
    limits: dict[str, Any] = {
        "max_requests": num,
        "max_context": max(lengths) + num_new,
        "max_extend_tokens": max_extend_tokens,
        "max_total_tokens": sum(lengths) + num * num_new,
    }
    return ModelRunner.ready(
        model, plan=plan, options=RunnerOptions(**limits | options), compiler=CompiledModel
    )


def generated_by(
    runner: ModelRunner, strategy: str, way: str, prompts: Sequence[Sequence[int]], num_new: int = NUM_NEW
) -> list[list[int]]:
    """Generates greedily in one way; fails if a forward did not run as its strategy says."""
    before = runner.log.counts.copy()
    options = dict(WAYS[way])
    if "chunk_tokens" in options:
        options["chunk_tokens"] = min(options["chunk_tokens"], runner.options.max_extend_tokens // 2)
    generated = greedy_tokens(runner, prompts, num_new, **options)
    assert [len(tokens) for tokens in generated] == [num_new] * len(prompts)
    ran = {key.strategy for key in runner.log.counts - before}
    assert ran == {STRATEGIES[strategy][0]}, runner.log.summary()
    return generated


class Judge:
    """Judges greedy tokens teacher-forced against transformers' model, each continuation once.

    A token that is not the reference's first choice is excused where the reference's margin is under
    twice the error; more than one in a hundred excused is a failure.

    Args:
        reference: transformers' model, in float32.
        error: Largest difference of logits that float32 arithmetic in another order gives.
    """

    def __init__(self, reference: Any, error: float) -> None:
        self._reference = reference
        self._error = error
        self._margins: dict[tuple[int, ...], torch.Tensor] = {}

    def margins(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Returns by how much the reference's first choice is ahead of each token (float32[N])."""
        key = (len(prompt), *prompt, *tokens)
        if key not in self._margins:
            ids = torch.tensor([[*prompt, *tokens]], device=self._reference.device)
            with torch.no_grad():
                # Not those of the prompt: a large vocabulary costs more than all layers.
                logits = self._reference(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].cpu()
            assert logits.shape[0] == len(tokens) > 0
            self._margins[key] = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return self._margins[key]

    def check(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]]) -> int:
        """Fails where a token is neither the reference's nor excused; returns how many were excused."""
        num_tokens = num_excused = 0
        for prompt, tokens in zip(prompts, generated, strict=True):
            margin = self.margins(prompt, tokens)
            where = f"prompt of {len(prompt)} tokens, at new tokens {(margin >= 2 * self._error).nonzero()}"
            assert margin.max() < 2 * self._error, f"{where}: behind by {margin.max()}"
            num_tokens += len(tokens)
            num_excused += int((margin > 0).sum())
        assert num_excused <= num_tokens / 100, f"{num_excused} of {num_tokens} tokens were excused"
        return num_excused


def check_every_way(
    judge: Judge,
    model: Decoder,
    strategy: str,
    prompts: Sequence[Sequence[int]],
    num_new: int = NUM_NEW,
    **options: Any,
) -> None:
    """Checks one strategy on prompts handed in each way; options are those of `matrix_runner`."""
    runner = matrix_runner(model, strategy, [len(prompt) for prompt in prompts], num_new=num_new, **options)
    for way in WAYS:
        judge.check(prompts, generated_by(runner, strategy, way, prompts, num_new))
