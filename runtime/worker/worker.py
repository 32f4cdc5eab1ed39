"""The worker of one rank: makes the forward batch, runs it, samples where sampling is due.

It decides what a forward's result becomes; how the forward runs is the model runner's matter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import CaptureHiddenMode, NewTokens
from ..batch.sampling import BatchSampling
from ..batch.schedule_batch import ScheduleBatch
from ..errors import BatchError, ConfigError
from ..kv.loc_plan import KVLocPlan
from ..model_runner.model_runner import ModelRunner
from ..runners.base import ModelRunnerOutput
from ..runners.logits import ForwardLogits
from ..runners.split_prefill import SplitProgress
from ..sampler.logprobs import batch_logprobs
from ..sampler.sampler import sample
from .pipeline import PipelinePlace, PPProxyTensors
from .result import GenerationBatchResult, SampledTokens, TokenGrammar

PREFILL_ONLY_TOKEN = 0
"""Stands for a token where nobody wants one."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Switches of a worker.

    Attributes:
        has_overlap: The next forward is launched before the tokens of this one are read.
        has_speculation: Drafts are verified.
        delays_sampling: With overlap, sample when the tokens are asked for, also without a grammar.
        pipeline: The worker's place among pipeline ranks.
    """

    has_overlap: bool = False
    has_speculation: bool = False
    delays_sampling: bool = False
    pipeline: PipelinePlace = field(default_factory=PipelinePlace)


class TpModelWorker:
    """Runs batches for a scheduler.

    Args:
        runner: Built.
        options: Switches.
    """

    def __init__(self, runner: ModelRunner, options: WorkerOptions | None = None) -> None:
        self.runner = runner
        self.options = options or WorkerOptions()

    @torch.no_grad()
    def forward_batch_generation(
        self,
        batch: ScheduleBatch | ForwardBatch,
        *,
        positions: torch.Tensor | None = None,
        capture_hidden_mode: CaptureHiddenMode | None = None,
        kv_plan: KVLocPlan | None = None,
        cols: range | None = None,
        is_prefill_only: bool = False,
        keeps_logits: bool = False,
        grammars: Sequence[TokenGrammar | None] | None = None,
        num_layers: int | None = None,
        split_progress: SplitProgress | None = None,
        proxy_tensors: PPProxyTensors | None = None,
    ) -> GenerationBatchResult:
        """Runs one batch.

        Args:
            batch: A decision, or a forward batch that is ready.
            positions: Overrides those of a decision, as in `ForwardBatch.init_new`.
            capture_hidden_mode: Likewise.
            kv_plan: Likewise.
            cols: Likewise.
            is_prefill_only: Nobody wants a token: one stand-in is returned for each sequence.
            keeps_logits: Hand out logits as they were before sampling.
            grammars: Which tokens are allowed, by request; None for all.
            num_layers: Layers of this call, in SPLIT_PREFILL.
            split_progress: From the call before, in SPLIT_PREFILL.
            proxy_tensors: From the pipeline rank before.

        Raises:
            BatchError: Overrides given with a ready batch, or grammars that do not match requests or rows.
            ConfigError: Proxy tensors, which a first rank cannot take.
        """
        forward_batch = self._forward_batch(batch, positions, capture_hidden_mode, kv_plan, cols)
        if grammars is not None and len(grammars) != forward_batch.batch_size:
            raise BatchError(f"grammars: {len(grammars)} entries for {forward_batch.batch_size} requests.")
        if grammars is not None and forward_batch.forward_mode.properties.new_tokens is NewTokens.FIXED:
            raise BatchError(
                f"grammars: {forward_batch.forward_mode.value} has several rows for each request, and a grammar knows "
                "one next token."
            )
        if proxy_tensors is not None:
            raise ConfigError(
                f"proxy_tensors came to pipeline rank {self.options.pipeline.rank}, whose model takes tokens. A rank "
                "after the first needs a model of its own layers, which models here do not have yet."
            )
        output = self.runner.forward(forward_batch, num_layers=num_layers, progress=split_progress)
        return self._result(forward_batch, output, is_prefill_only, keeps_logits, grammars)

    def _forward_batch(
        self,
        batch: ScheduleBatch | ForwardBatch,
        positions: torch.Tensor | None,
        capture_hidden_mode: CaptureHiddenMode | None,
        kv_plan: KVLocPlan | None,
        cols: range | None,
    ) -> ForwardBatch:
        overrides = {
            "positions": positions,
            "capture_hidden_mode": capture_hidden_mode,
            "kv_plan": kv_plan,
            "cols": cols,
        }
        if isinstance(batch, ScheduleBatch):
            return ForwardBatch.init_new(
                batch,
                self.runner,
                positions=positions,
                capture_hidden_mode=capture_hidden_mode,
                kv_plan=kv_plan,
                cols=cols,
            )
        given = [name for name, value in overrides.items() if value is not None]
        if given:
            raise BatchError(
                f"{', '.join(given)}: given with a ForwardBatch, whose fields stand already. Give the ScheduleBatch, "
                "or make the batch with it."
            )
        return batch

    def _result(
        self,
        batch: ForwardBatch,
        output: ModelRunnerOutput,
        is_prefill_only: bool,
        keeps_logits: bool,
        grammars: Sequence[TokenGrammar | None] | None,
    ) -> GenerationBatchResult:
        execution, logits = output.execution, output.logits
        if logits is None:
            return GenerationBatchResult(execution=execution, split_progress=output.unfinished)
        hidden = None if logits.hidden is None else logits.hidden.clone()
        if not self.options.pipeline.is_last:
            if hidden is None:
                raise ConfigError(
                    "A pipeline rank that is not the last hands on hidden states: build its model runner with "
                    "capture_hidden_mode FULL."
                )
            proxies = PPProxyTensors(tensors={"hidden_states": hidden})
            return GenerationBatchResult(execution=execution, proxy_tensors=proxies)
        if batch.forward_mode.is_target_verify():
            return GenerationBatchResult(
                execution=execution, logits=logits.next_token_logits.clone(), hidden=hidden
            )
        is_delayed = self._is_delayed(is_prefill_only, grammars)
        if is_delayed:
            # The graph's next replay overwrites its outputs, and may come before the closure is called.
            logits = ForwardLogits(logits=logits.logits.clone(), rows=logits.rows, hidden=None)
        sample_now = functools.partial(_sample, batch, logits, is_prefill_only, grammars)
        return GenerationBatchResult(
            execution=execution,
            sampled=None if is_delayed else sample_now(),
            delayed_sample=sample_now if is_delayed else None,
            logits=logits.next_token_logits.clone() if keeps_logits else None,
            hidden=hidden,
        )

    def _is_delayed(self, is_prefill_only: bool, grammars: Sequence[TokenGrammar | None] | None) -> bool:
        has_grammars = grammars is not None and any(grammar is not None for grammar in grammars)
        options = self.options
        return (
            options.has_overlap
            and not options.has_speculation
            and (has_grammars or (options.delays_sampling and not is_prefill_only))
        )


@torch.no_grad()
def _sample(
    batch: ForwardBatch,
    logits: ForwardLogits,
    is_prefill_only: bool,
    grammars: Sequence[TokenGrammar | None] | None,
) -> SampledTokens:
    """Samples a batch; or, where nobody wants tokens, gives one stand-in for each sequence."""
    next_logits = logits.next_token_logits
    if is_prefill_only:
        tokens = torch.full(
            (batch.batch_size,), PREFILL_ONLY_TOKEN, dtype=torch.int64, device=batch.seq_lens.device
        )
    else:
        next_logits = _allowed(next_logits, grammars)
        tokens = sample(next_logits, *_by_row(batch, next_logits.shape[0]))
    logprobs = None
    if batch.logprobs is not None:
        logprobs = batch_logprobs(
            logits.logits, next_logits, tokens, logits.rows, batch.logprobs.top_logprobs_nums
        )
    return SampledTokens(next_token_ids=tokens, logprobs=logprobs)


def _by_row(batch: ForwardBatch, num_rows: int) -> tuple[BatchSampling, torch.Tensor]:
    """Returns sampling parameters and lengths of every row: diffusion blocks and draft extends have several each."""
    if num_rows == batch.batch_size:
        return batch.sampling, batch.seq_lens
    each, given = num_rows // batch.batch_size, batch.sampling
    sampling = BatchSampling(
        is_all_greedy=given.is_all_greedy,
        temperatures=given.temperatures.repeat_interleave(each),
        top_ks=given.top_ks.repeat_interleave(each),
        top_ps=given.top_ps.repeat_interleave(each),
        seeds=given.seeds.repeat_interleave(each),
    )
    last = batch.seq_lens.unsqueeze(1) - (each - 1)
    return sampling, (last + torch.arange(each, device=last.device)).flatten()


def _allowed(logits_BV: torch.Tensor, grammars: Sequence[TokenGrammar | None] | None) -> torch.Tensor:
    """Returns logits in which forbidden tokens cannot be chosen."""
    if grammars is None or all(grammar is None for grammar in grammars):
        return logits_BV
    allowed_BV = torch.ones(logits_BV.shape, dtype=torch.bool)
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed_BV[row] = grammar.allowed_tokens().cpu()
    return logits_BV.masked_fill(~allowed_BV.to(logits_BV.device), -torch.inf)
