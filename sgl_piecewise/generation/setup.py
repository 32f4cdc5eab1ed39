"""From words to a ready engine: what the command and the scripts call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_piecewise.entry import start_compile_workers
from sgl_piecewise.models.loading import LoadedModel, load_model
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import LogprobRequest
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.plan import ExecutionPlan
from sgl_piecewise.runtime.runners.plan_file import read_plan, with_strategies

from .compiling import CompiledModel
from .engine import EngineOptions, OfflineEngine
from .requests import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What an engine is made of.

    Attributes:
        model: A folder, a GGUF file, or a name, as `load_model` takes it.
        device: Where it runs.
        dtype: Of parameters, activations and KV pool.
        plan: What runs how.
        runner: Limits of the model runner, and the kernels of model and KV pool.
        engine: How it batches.
        num_layers: Another depth, for random weights only.
        seed: Of random weights.
        may_download: Whether the default model may be downloaded.
    """

    model: str
    device: torch.device
    dtype: torch.dtype
    plan: ExecutionPlan = dataclasses.field(default_factory=ExecutionPlan)
    runner: RunnerOptions = dataclasses.field(default_factory=RunnerOptions)
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    num_layers: int | None = None
    seed: int = 0
    may_download: bool = True


@dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    """Log-probabilities that all prompts want.

    Attributes:
        prompt_start: First token of each prompt whose successor's is wanted; None for those of new tokens alone.
        top_num: Most likely tokens to report in each place.
    """

    prompt_start: int | None = None
    top_num: int = 0

    def request_for(self, num_prompt_tokens: int, name: str) -> LogprobRequest:
        """Returns what one prompt asks for.

        Args:
            num_prompt_tokens: Of the prompt.
            name: Of the prompt, for errors.

        Raises:
            ConfigError: The start is after the prompt.
            BatchError: A number is negative.
        """
        start = num_prompt_tokens if self.prompt_start is None else self.prompt_start
        if start > max(num_prompt_tokens, 1) - 1 and self.prompt_start is not None:
            raise ConfigError(
                f"Log-probabilities are to start at token {start} (counted from 0), and {name} has "
                f"{num_prompt_tokens} tokens. Give a smaller start."
            )
        return LogprobRequest(start_len=start, top_num=self.top_num)


def load_for(setup: EngineSetup) -> LoadedModel:
    """Loads the model of a setup.

    Raises:
        ConfigError: No model or no kernel set has this name.
        MissingExtraError: What the kernels need is not installed.
        CheckpointError: The model cannot be loaded.
    """
    start_compile_workers(strategy.compile for strategy in setup.plan.modes.values())
    return load_model(
        setup.model,
        device=setup.device,
        dtype=setup.dtype,
        seed=setup.seed,
        num_layers=setup.num_layers,
        kernels=kernel_set(setup.runner.kernels, setup.device),
        download=setup.may_download,
    )


def build_engine(
    setup: EngineSetup, loaded: LoadedModel, on_progress: ProgressCallback | None = None
) -> OfflineEngine:
    """Builds pools, attention and graphs for a loaded model.

    Args:
        setup: What to make.
        loaded: From `load_for`.
        on_progress: Called with (phase, done, total).

    Raises:
        ConfigError: A limit is over the model's, or the plan cannot be met.
        PoolError: Memory does not suffice.
    """
    runner = ModelRunner.ready(
        loaded.model,
        plan=setup.plan,
        options=setup.runner,
        compiler=CompiledModel,
        on_progress=on_progress,
    )
    return OfflineEngine(runner, tokenizer=loaded.tokenizer, options=setup.engine)


def plan_of(
    file: Path | None,
    strategies: Mapping[ForwardMode, str | None],
    prefill_attention: str | None,
    decode_attention: str | None,
) -> ExecutionPlan:
    """Returns the plan of a file, or the defaults, with settings of the command line on top.

    Raises:
        ConfigError: The file or a setting names something unknown.
    """
    plan = ExecutionPlan() if file is None else read_plan(file)
    plan = with_strategies(plan, {mode: name for mode, name in strategies.items() if name is not None})
    return dataclasses.replace(
        plan,
        prefill_attention=plan.prefill_attention if prefill_attention is None else prefill_attention,
        decode_attention=plan.decode_attention if decode_attention is None else decode_attention,
    )


def requests_of(
    prompts: Sequence[str],
    prompt_ids: Sequence[str],
    loaded: LoadedModel,
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_texts: tuple[str, ...],
    logprobs: LogprobOptions | None = None,
) -> list[GenerationRequest]:
    """Makes requests of texts and of lists of token ids.

    Args:
        prompts: Texts.
        prompt_ids: Token ids with commas between them, for models without a tokenizer too.
        loaded: The model; its tokenizer's end tokens end a request.
        max_new_tokens: Tokens of each at most.
        sampling: For all; each request gets a seed of its own, counted from this one.
        stop_texts: For all.
        logprobs: For all; None for none.

    Raises:
        ConfigError: A text without a tokenizer; ids that are no numbers; a start of log-probabilities after a prompt.
        BatchError: A negative number in ``logprobs``.
    """
    tokenizer = loaded.tokenizer
    if prompts and tokenizer is None:
        raise ConfigError(
            f"{loaded.description} has no tokenizer, so a text cannot be its prompt. Give --prompt-ids 1,2,3."
        )
    ids = [] if tokenizer is None else [tokenizer.encode(text) for text in prompts]
    ids += [_parse_ids(text) for text in prompt_ids]
    return [
        GenerationRequest(
            prompt_ids=one,
            max_new_tokens=max_new_tokens,
            sampling=dataclasses.replace(sampling, seed=(sampling.seed + index) % 2**63),
            stop_token_ids=frozenset() if tokenizer is None else frozenset(tokenizer.eos_token_ids),
            stop_texts=stop_texts,
            logprobs=None if logprobs is None else logprobs.request_for(len(one), f"prompt {index + 1}"),
            request_id=f"prompt {index + 1}",
        )
        for index, one in enumerate(ids)
    ]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError as err:
        raise ConfigError(
            f"--prompt-ids takes whole numbers with commas between them, got {text!r}."
        ) from err
