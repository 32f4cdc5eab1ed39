"""Runs our models as the execution layer runs them, for tests against transformers' classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_piecewise.generation.engine import EngineOptions, OfflineEngine
from sgl_piecewise.generation.requests import GenerationRequest
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.scheduling import release, schedule
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy


def serving_plan(decode: str, extend: str, *, decode_size: int = 4, extend_size: int = 32) -> ExecutionPlan:
    """Returns a plan with one graph of each kind, or none where a strategy is eager."""

    def mode(strategy: str, size: int) -> ModeStrategy:
        return ModeStrategy(strategy=strategy, capture_sizes=None if strategy == "eager" else (size,))

    return ExecutionPlan(
        modes={
            ForwardMode.DECODE: mode(decode, decode_size),
            ForwardMode.EXTEND: mode(extend, extend_size),
        }
    )


def model_runner(model: Decoder, plan: ExecutionPlan, **options: Any) -> ModelRunner:
    defaults: dict[str, Any] = {"max_requests": 4, "max_context": 128, "max_extend_tokens": 32}
    return ModelRunner.ready(model, plan=plan, options=RunnerOptions(**defaults | options))


@torch.no_grad()
def forced_logits(
    runner: ModelRunner, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]
) -> list[torch.Tensor]:
    """Runs prompts in chunks and then decodes, with the tokens given and not those sampled.

    Returns:
        For each sequence the logits after its prompt and after every token that follows it
        (float32[N, V]).
    """
    reqs = [Req.of_prompt(f"{i}", sequence) for i, sequence in enumerate(sequences)]
    found: list[list[torch.Tensor]] = [[] for _ in reqs]

    def forward(mode: ForwardMode, indices: list[int], num_new: list[int]) -> None:
        chosen = [reqs[index] for index in indices]
        decided = schedule(mode, chosen, num_new, runner.allocator, runner.req_to_token)
        output = runner.forward(ForwardBatch.init_new(decided, runner))
        assert output.logits is not None
        for index, new, logits in zip(indices, num_new, output.logits.next_token_logits.clone(), strict=True):
            reqs[index].num_computed_tokens += new
            if reqs[index].num_computed_tokens >= prompt_lens[index]:
                found[index].append(logits)

    for index, length in enumerate(prompt_lens):
        for start in range(0, length, runner.options.max_extend_tokens):
            forward(ForwardMode.EXTEND, [index], [min(length - start, runner.options.max_extend_tokens)])
    while alive := [i for i, one in enumerate(reqs) if one.num_computed_tokens < len(one.token_ids)]:
        forward(ForwardMode.DECODE, alive, [1] * len(alive))
    for req in reqs:
        release(req, runner.allocator, runner.req_to_token)
    return [torch.stack(rows) for rows in found]


def greedy_tokens(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    *,
    is_one_by_one: bool = False,
    **options: Any,
) -> list[list[int]]:
    """Generates greedily, all prompts at once or each alone."""
    engine = OfflineEngine(runner, options=EngineOptions(**options))
    requests = [GenerationRequest(prompt_ids=prompt, max_new_tokens=num_new) for prompt in prompts]
    batches = [[request] for request in requests] if is_one_by_one else [requests]
    return [list(output.token_ids) for batch in batches for output in engine.generate(batch)]


def check_greedy(
    reference: Any, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], *, error: float
) -> None:
    """Judges greedy tokens teacher-forced against transformers' model.

    A token that is not the reference's first choice is excused where the reference's margin is under
    twice the error; more than one in a hundred excused is a failure.

    Args:
        reference: transformers' model, in float32.
        prompts: What was asked.
        generated: What came, each the continuation of its prompt.
        error: Largest difference of logits that float32 arithmetic in another order gives.
    """
    num_tokens = num_excused = 0
    for prompt, tokens in zip(prompts, generated, strict=True):
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert len(tokens) == logits.shape[0] > 0
        margin = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert margin.max() < 2 * error, (prompt[:8], tokens, margin)
        num_tokens += len(tokens)
        num_excused += int((margin > 0).sum())
    assert num_excused <= num_tokens / 100, f"{num_excused} of {num_tokens} tokens were excused"
