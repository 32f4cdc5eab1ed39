"""A comparison on a language model and a text: what the command runs.

Joins the parts that otherwise do not know of each other: a loaded model, its tokenizer, an
attention backend, and the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_piecewise.entry import CELLS, start_compile_workers
from sgl_piecewise.models.loading import LoadedModel, load_model
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.captured import ProgressCallback
from sgl_piecewise.runtime.capture.devices import graph_device_for
from sgl_piecewise.runtime.context import ForwardContext
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.records import PhaseClock

from .end_to_end.arm import ServedSubject
from .end_to_end.options import EndToEndOptions
from .inputs import InputFacts, Text, random_tokens, tokens_of_text, windows_of_tokens
from .measure import Subject, count_parameters, run_comparison
from .options import CompareOptions
from .report import ComparisonReport, ModelFacts


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Which model to compare on which text.

    Attributes:
        name: The default model's name, a shape's name, a folder or a GGUF file.
        device: Where it runs.
        dtype: Of parameters and activations.
        text: What it reads, where it has a tokenizer.
        token_counts: Ascending; the largest fits the largest capture size.
        num_layers: Another depth, for random weights only.
        may_download: Whether the default model may be downloaded.
        command: The command line, if there was one.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    text: Text
    token_counts: tuple[int, ...]
    num_layers: int | None = None
    may_download: bool = True
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError without token counts."""
        if not self.token_counts:
            raise ConfigError("There are no token counts to run; give at least one.")


def compare_language_model(
    request: ModelRequest,
    options: CompareOptions,
    on_progress: ProgressCallback | None = None,
    profile: Path | None = None,
    end_to_end: EndToEndOptions | None = None,
) -> ComparisonReport:
    """Loads the model, tokenizes the text and runs the comparison.

    Args:
        request: The model and the text.
        options: The comparison.
        on_progress: Called with a phase's name, steps done and steps in all.
        profile: File for the profile of the builds.
        end_to_end: Also run the model under execution plans, on the text; None for no such arms.

    Raises:
        ConfigError: A name or size that cannot be used.
        CheckpointError: The weights are missing, damaged or do not fit.
        MissingExtraError: A package is needed and not installed.
    """
    if request.token_counts[-1] > options.capture_sizes[-1]:
        raise ConfigError(
            f"The largest token count, {request.token_counts[-1]}, is over the largest capture size, "
            f"{options.capture_sizes[-1]}: no graph holds it. Leave it out or add a capture size."
        )
    start_compile_workers(CELLS[name][0] for name in options.strategies if name in CELLS)
    clock = PhaseClock()
    with clock.phase("load"):
        loaded = load_model(
            request.name,
            device=request.device,
            dtype=request.dtype,
            seed=options.seed,
            num_layers=request.num_layers,
            download=request.may_download,
        )
    # Positions that the model never saw would give values nobody wants compared.
    loaded.config.check_length(options.capture_sizes[-1])
    ids, input_facts = _tokens(loaded, request, options)
    input_sets, is_repeated = windows_of_tokens(ids, request.token_counts, options.num_inputs, request.device)
    subject = Subject(
        model=loaded.model,
        input_sets=input_sets,
        device=graph_device_for(request.device),
        context=ForwardContext(attention=CausalAttention()),
        model_facts=ModelFacts(
            name=request.name,
            description=loaded.description,
            dtype=str(request.dtype).removeprefix("torch."),
            num_parameters=count_parameters(loaded.model),
            load_s=clock.phases_s["load"],
        ),
        input_facts=InputFacts(
            source=input_facts.source,
            num_tokens=input_facts.num_tokens,
            is_repeated=is_repeated,
            is_random=input_facts.is_random,
        ),
        served=ServedSubject(model=loaded.model, tokenizer=loaded.tokenizer, ids=tuple(ids)),
        command=request.command,
    )
    return run_comparison(subject, options, on_progress, profile, end_to_end)


def _tokens(
    loaded: LoadedModel, request: ModelRequest, options: CompareOptions
) -> tuple[list[int], InputFacts]:
    if loaded.tokenizer is not None:
        return tokens_of_text(request.text, loaded.tokenizer.encode)
    num_tokens = request.token_counts[-1] + options.num_inputs - 1
    return random_tokens(num_tokens, loaded.config.vocab_size, options.seed)
