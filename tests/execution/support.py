"""A tiny model with its model runner, and a script of forwards that walks through every mode."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.schedule_batch import DllmBlocks, ScheduleBatch, SpeculativeInput
from sgl_piecewise.runtime.batch.scheduling import schedule
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.base import ModelRunnerOutput
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

ROWS = 4
"""Tokens per request in verify and in diffusion blocks."""

OPTIONS = RunnerOptions(max_requests=4, max_context=48, max_extend_tokens=16)


def tiny_model(device: torch.device | str = "cpu", *, num_layers: int = 2) -> Decoder:
    config = dataclasses.replace(
        named_shape("tiny"),
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        vocab_size=64,
        num_layers=num_layers,
    )
    return random_decoder(config, device=device, dtype=torch.float32, seed=1)


def plan(decode: str, extend: str, *, has_verify: bool = True, **modes: ModeStrategy) -> ExecutionPlan:
    """Returns a plan with few capture sizes."""
    found = {
        ForwardMode.DECODE: _mode(decode, (2,)),
        ForwardMode.EXTEND: _mode(extend, (8,)),
    }
    if has_verify:
        for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DLLM_EXTEND):
            found[mode] = dataclasses.replace(_mode(decode, (2,)), num_tokens_per_req=ROWS)
        found[ForwardMode.DRAFT_EXTEND_V2] = dataclasses.replace(_mode(decode, (2,)), num_tokens_per_req=2)
    found |= {ForwardMode(name): strategy for name, strategy in modes.items()}
    return ExecutionPlan(modes=found)


def _mode(strategy: str, sizes: tuple[int, ...]) -> ModeStrategy:
    return ModeStrategy(strategy=strategy, capture_sizes=None if strategy == "eager" else sizes)


def make_runner(asked: ExecutionPlan, *, device: torch.device | str = "cpu", **options: Any) -> ModelRunner:
    return ModelRunner.ready(tiny_model(device), plan=asked, options=dataclasses.replace(OPTIONS, **options))


def prompt(name: str, length: int, **fields: Any) -> Req:
    """Returns a request whose tokens follow from its name and length."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 100 + length)
    return Req.of_prompt(name, torch.randint(1, 64, (length,), generator=generator).tolist(), **fields)


def decide(
    runner: ModelRunner,
    mode: ForwardMode,
    reqs: Sequence[Req],
    num_new: Sequence[int],
    input_ids: Sequence[int] | None = None,
) -> ScheduleBatch:
    """Schedules one forward of any mode."""
    speculative = dllm = None
    if mode.is_dllm_extend():
        dllm = DllmBlocks(block_size=num_new[0], block_offsets=tuple(req.num_computed_tokens for req in reqs))
    elif mode.is_target_verify() or mode.is_draft_extend_v2():
        speculative = SpeculativeInput(num_tokens_per_req=num_new[0])
    return schedule(
        mode,
        reqs,
        num_new,
        runner.allocator,
        runner.req_to_token,
        input_ids=None if input_ids is None else torch.tensor(input_ids),
        speculative=speculative,
        dllm=dllm,
    )


def run(
    runner: ModelRunner,
    mode: ForwardMode,
    reqs: Sequence[Req],
    num_new: Sequence[int],
    input_ids: Sequence[int] | None = None,
    **options: Any,
) -> ModelRunnerOutput:
    """Schedules and runs one forward; requests then count its tokens as computed."""
    batch = ForwardBatch.init_new(decide(runner, mode, reqs, num_new, input_ids), runner)
    batch.check()
    output = runner.forward(batch, **options)
    for req, new in zip(reqs, num_new, strict=True):
        req.num_computed_tokens += new
    return output


def extend_and_append(runner: ModelRunner, reqs: Sequence[Req], token: int = 7) -> ModelRunnerOutput:
    """Runs prompts whole, and gives every request a next token."""
    output = run(runner, ForwardMode.EXTEND, reqs, [len(req.token_ids) for req in reqs])
    for req in reqs:
        req.token_ids.append(token)
    return output


class Walk:
    """Runs one script of forwards through every mode; keeps what each gave and what ran it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.logits: list[torch.Tensor | None] = []
        self.executions: list[str] = []
        self.reqs = [prompt("a", 5), prompt("b", 3), prompt("c", 7)]

    def play(self) -> Walk:
        a, b, c = self.reqs
        self._step(ForwardMode.EXTEND, [a], [5])
        a.token_ids.append(9)
        self._step(ForwardMode.MIXED, [a, b, c], [1, 3, 4])  # c in chunks
        b.token_ids.append(11)
        a.token_ids.append(12)
        self._step(ForwardMode.MIXED, [b, c], [1, 3])
        b.token_ids.append(13)
        c.token_ids.append(14)
        self._step(ForwardMode.DECODE, [c, a, b], [1, 1, 1])
        self._step(ForwardMode.IDLE, [], [])
        self._step(ForwardMode.TARGET_VERIFY, [a, c], [ROWS, ROWS], [3, 4, 5, 6, 7, 8, 9, 10])
        for req in (a, c):  # Two of the drafts were right; the slots of the others are used again.
            req.num_computed_tokens -= 2
            req.token_ids += [1] * (req.num_computed_tokens - len(req.token_ids))
        self._step(ForwardMode.TARGET_VERIFY, [c], [ROWS], [21, 22, 23, 24])
        c.num_computed_tokens -= ROWS
        self._step(ForwardMode.DLLM_EXTEND, [b], [ROWS], [31, 32, 33, 34])
        b.num_computed_tokens -= ROWS
        self._step(ForwardMode.DLLM_EXTEND, [b, c], [ROWS] * 2, [31, 42, 33, 44, 1, 2, 3, 4])
        self._step(ForwardMode.DRAFT_EXTEND_V2, [a, b], [2, 2], [5, 6, 7, 8])
        for req in (a, b):
            req.num_computed_tokens -= 2
        self._step(ForwardMode.PREBUILT, [a], [0])
        d = prompt("d", 9)
        self._step(ForwardMode.SPLIT_PREFILL, [d], [9])
        d.token_ids.append(2)
        a.token_ids.append(3)
        self._step(ForwardMode.DECODE, [d, a], [1, 1])
        return self

    def _step(
        self,
        mode: ForwardMode,
        reqs: Sequence[Req],
        num_new: Sequence[int],
        input_ids: Sequence[int] | None = None,
    ) -> None:
        output = run(self.runner, mode, reqs, num_new, input_ids)
        logits = None if output.logits is None else output.logits.next_token_logits.clone()
        self.logits.append(logits)
        execution = output.execution
        self.executions.append(f"{mode.value} {execution.runner} {execution.strategy}")


def live_kv(runner: ModelRunner) -> list[torch.Tensor]:
    """Every buffer of the pool without its scratch slot."""
    return [buffer[1:].clone() for buffer in runner.pool.static_tensors().values()]


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Python's own handler of SIGINT, also where the tests were started in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
