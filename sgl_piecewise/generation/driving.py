"""A model runner or an engine driven step by step: what checks and measurements share.

Whoever measures decides what runs next, so nothing here schedules by itself. What a request took is the
caller's to give back.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.scheduling import release, schedule
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner

from .engine import OfflineEngine
from .requests import GenerationRequest


def forward_batch(
    runner: ModelRunner, mode: ForwardMode, reqs: Sequence[Req], num_new_tokens: Sequence[int]
) -> ForwardBatch:
    """Takes slots for new tokens of requests and returns the batch of their forward.

    Args:
        runner: Built.
        mode: What the forward is for.
        reqs: Its requests; the new tokens are the next of their own.
        num_new_tokens: Of each.

    Raises:
        PoolError: Rows or slots are missing.
    """
    decided = schedule(mode, reqs, num_new_tokens, runner.allocator, runner.req_to_token)
    return ForwardBatch.init_new(decided, runner)


def fill_cache(runner: ModelRunner, req: Req, num_tokens: int) -> None:
    """Computes the first tokens of a request, in chunks of the runner's largest extend.

    Args:
        runner: Built.
        req: Has at least so many tokens.
        num_tokens: How many are to be in the cache.
    """
    while req.num_computed_tokens < num_tokens:
        num_new = min(num_tokens - req.num_computed_tokens, runner.options.max_extend_tokens)
        runner.forward(forward_batch(runner, ForwardMode.EXTEND, [req], [num_new]))
        req.num_computed_tokens += num_new


def give_back(runner: ModelRunner, reqs: Sequence[Req]) -> None:
    """Gives back the rows and slots of requests."""
    for req in reqs:
        release(req, runner.allocator, runner.req_to_token)


def first_token(engine: OfflineEngine, prompt_ids: Sequence[int]) -> int | None:
    """Runs one prompt through an idle engine and returns the token that follows it; None where none could be chosen.

    From scheduling to the token on the host and its text: what a time to first token holds.
    """
    output = engine.generate([GenerationRequest(prompt_ids=prompt_ids, max_new_tokens=1)])[0]
    return output.token_ids[0] if output.token_ids else None


def begin_decoding(engine: OfflineEngine, prompts: Sequence[Sequence[int]], num_steps: int) -> None:
    """Brings an idle engine to where each step is one decode of all prompts; `OfflineEngine.drop_all` ends it.

    With overlap the first decode is in flight then, and each step launches the one that the next step reads.

    Args:
        engine: Does not mix prompts and decoding, so that all prompts are through at the same step.
        prompts: Their tokens.
        num_steps: Steps that will follow at most.
    """
    for prompt_ids in prompts:
        engine.add(GenerationRequest(prompt_ids=prompt_ids, max_new_tokens=num_steps + 2))
    while engine.num_prefilling:
        engine.step()
