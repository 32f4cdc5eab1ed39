"""One execution plan, built and ready: logits with given tokens for the check, the engine for times.

An arm owns a model runner with pools of its own and the engine over it. It must not know of other arms, of timing
or of reports.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_piecewise.entry import import_compiler
from sgl_piecewise.generation.compiling import CompiledModel
from sgl_piecewise.generation.driving import (
    begin_decoding,
    fill_cache,
    first_token,
    forward_batch,
    give_back,
)
from sgl_piecewise.generation.engine import EngineOptions, OfflineEngine
from sgl_piecewise.models.tokenizer import Tokenizer
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import LogprobRequest, Req
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.records import IMPORT, PhaseClock
from sgl_piecewise.runtime.runners.plan import ExecutionPlan
from sgl_piecewise.runtime.runners.served_model import ServedModel

from .plans import NamedPlan
from .report import PlanAttention, PlanBuild

BATCH_INDEPENDENT_ATTENTION = frozenset({"torch"})
"""Backends whose results do not depend on padding or on who shares the batch: with these, graphs keep every bit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedSubject:
    """What the engine serves.

    Attributes:
        model: The model.
        tokenizer: None where there is none: tokens without text.
        ids: Tokens in a row that prompts are cut from.
    """

    model: ServedModel
    tokenizer: Tokenizer | None
    ids: tuple[int, ...]


class PlanArm:
    """A plan over one model.

    Args:
        subject: The model and its tokenizer.
        plan: The plan's name and compilers.
        execution_plan: The same with its sizes.
        options: Limits; all arms have the same.

    Raises:
        ConfigError: The plan or a limit cannot be met.

    Attributes:
        plan: The plan's name and compilers.
    """

    def __init__(
        self,
        subject: ServedSubject,
        plan: NamedPlan,
        execution_plan: ExecutionPlan,
        options: RunnerOptions,
    ) -> None:
        self.plan = plan
        self._tokenizer = subject.tokenizer
        # Not built: it says what its plan comes to, and holds next to nothing.
        self._runner: ModelRunner | None = ModelRunner(
            subject.model, plan=execution_plan, options=options, compiler=CompiledModel
        )
        self._built: OfflineEngine | None = None

    def build(self, on_progress: ProgressCallback) -> PlanBuild:
        """Makes pools, attention and graphs.

        Args:
            on_progress: Called with (phase, done, total).

        Raises:
            ConfigError: The plan or a limit cannot be met.
            PoolError: Memory does not suffice.
        """
        imports = PhaseClock()
        with imports.phase(IMPORT):
            for compiler in self.plan.compilers:
                import_compiler(compiler)
        clock = PhaseClock()
        runner = self.runner
        runner.build_pools()
        runner.install_hooks()
        runner.build_attention()
        runner.build_graphs(on_progress)
        # Prompts are through before any request decodes: then each step of decoding is one batch of all.
        self._built = OfflineEngine(runner, tokenizer=self._tokenizer, options=EngineOptions(mixes=False))
        build = runner.graph_build
        assert build is not None, "the runner is built"
        return PlanBuild(
            total_s=clock.total_s(),
            import_s=imports.phases_s[IMPORT],
            graphs_s=build.total_s,
            num_graphs=build.num_graphs,
            pool_bytes=build.pool_bytes,
            driver_bytes=build.driver_bytes,
            failures=build.failures,
        )

    @property
    def _engine(self) -> OfflineEngine:
        assert self._built is not None, "an arm is built before it is used"
        return self._built

    @property
    def runner(self) -> ModelRunner:
        """The model runner."""
        assert self._runner is not None, "an arm is not used once it is closed"
        return self._runner

    def close(self) -> None:
        """Lets go of pools and graphs."""
        self._runner = self._built = None

    @property
    def attention(self) -> PlanAttention:
        """The attention backends that the plan comes to."""
        resolved = self.runner.plan
        return PlanAttention(prompts=resolved.prefill_attention, decode=resolved.decode_attention)

    @property
    def why_other_plan(self) -> str | None:
        """Why the attention backends cannot do what the plan says; None where they can."""
        return "; ".join(map(str, self.runner.plan_changes)) or None

    @property
    def has_bit_keeping_attention(self) -> bool:
        """Whether attention gives the same bits in a graph as outside."""
        return {self.attention.prompts, self.attention.decode} <= BATCH_INDEPENDENT_ATTENTION

    def prompt_logits(self, prompt_ids: Sequence[int]) -> torch.Tensor:
        """Returns logits after every token of a prompt, and once more after the last as the engine has them.

        The engine computes one row of logits for a prompt, and arithmetic may depend on the number of rows.

        Returns:
            Dtype[T + 1, V], fresh.
        """
        # Log-probabilities of all tokens are asked for, so that all rows get logits.
        rows = [self._extend_logits(prompt_ids, asked) for asked in (LogprobRequest(start_len=0), None)]
        return torch.cat(rows)

    def _extend_logits(self, prompt_ids: Sequence[int], asked: LogprobRequest | None) -> torch.Tensor:
        req = Req.of_prompt("check", prompt_ids, logprobs=asked)
        output = self.runner.forward(forward_batch(self.runner, ForwardMode.EXTEND, [req], [len(prompt_ids)]))
        assert output.logits is not None, "an extend gives logits"
        logits_NV = output.logits.logits.clone()
        give_back(self.runner, [req])
        return logits_NV

    def decode_logits(self, sequences: Sequence[Sequence[int]], context_tokens: int) -> torch.Tensor:
        """Decodes sequences with their own tokens.

        Args:
            sequences: Equally long; the first ``context_tokens`` of each are its prompt.
            context_tokens: At least one.

        Returns:
            Logits after every decoded token, step by step (dtype[steps * B, V], fresh).
        """
        runner = self.runner
        reqs = [Req.of_prompt(f"check {index}", ids) for index, ids in enumerate(sequences)]
        for req in reqs:
            fill_cache(runner, req, context_tokens)
        steps = []
        for _ in range(len(sequences[0]) - context_tokens):
            output = runner.forward(forward_batch(runner, ForwardMode.DECODE, reqs, [1] * len(reqs)))
            assert output.logits is not None, "a decode gives logits"
            steps.append(output.logits.next_token_logits.clone())
            for req in reqs:
                req.num_computed_tokens += 1
        give_back(runner, reqs)
        return torch.cat(steps)

    def first_token(self, prompt_ids: Sequence[int]) -> int | None:
        """Runs one prompt through the engine; returns the token that follows it."""
        return first_token(self._engine, prompt_ids)

    def begin_decoding(self, prompts: Sequence[Sequence[int]], num_steps: int) -> None:
        """Brings the engine to where each `decode_step` decodes all prompts; `end_decoding` ends it."""
        begin_decoding(self._engine, prompts, num_steps)

    def decode_step(self) -> int:
        """Runs one step of the engine; returns how many tokens came of it."""
        return sum(event.token_id is not None for event in self._engine.step())

    def end_decoding(self) -> None:
        """Gives back what the decoding requests hold."""
        self._engine.drop_all()

    def padded_tokens(self) -> int:
        """Tokens that the last forward computed, padding included."""
        return self.runner.log.last[-1].extent.padded_tokens

    def fallbacks(self, mode: ForwardMode) -> dict[str, int]:
        """Forwards of a mode so far that did not run as planned, by reason."""
        counted: collections.Counter[str] = collections.Counter()
        for key, count in self.runner.log.counts.items():
            if key.mode is mode and key.fallback is not None:
                counted[key.fallback] += count
        return dict(counted)
