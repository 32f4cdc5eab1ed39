"""One build of a language model under a profile: what the command runs.

A build is every capture size made ready, then replayed once. Loading weights, and what a process loads once
(libraries' kernels at a first forward, a first capture), comes before and is shown beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.compiler.memory import pool_estimates
from sgl_piecewise.compiler.options import options_from
from sgl_piecewise.compiler.piece_compilers import piece_compiler_for
from sgl_piecewise.entry import SUFFIXES, capture, compiled_forward, import_compiler, start_compile_workers
from sgl_piecewise.models.loading import load_model
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.build_profile import (
    BUILD_SPAN,
    REPLAY_SPAN,
    BuildProfile,
    heard_build,
    profile_of,
)
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.devices import graph_device_for
from sgl_piecewise.runtime.capture.entry import capture as capture_plain
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError, PieceCompilerUnavailable, nearest
from sgl_piecewise.runtime.records import IMPORT, PhaseClock, PoolReservation
from sgl_piecewise.runtime.time_line import TimeLine, listen, span

from ..comparison.inputs import random_tokens

DEFAULT_STRATEGY = "tc_piecewise"
_REFERENCE = "eager"
_INDUCTOR = "tc"
_STRATEGIES = (
    *("full", "breakable"),
    *(f"{compiler}{suffix}" for compiler in ("fx", _INDUCTOR) for suffix in SUFFIXES.values()),
)


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Which build to profile.

    Attributes:
        model: The default model's name, a shape's name, a folder or a GGUF file.
        strategy: A cell of the grid that builds something, for example ``tc_piecewise``.
        device: Where it runs.
        dtype: Of parameters and activations.
        capture_sizes: Ascending.
        cache_folder: Where compiled pieces are kept; None is the usual folder.
        shares_layers: Whether equal layers are traced once.
        num_layers: Another depth, for random weights only.
        seed: Of random weights and tokens.
        may_download: Whether the default model may be downloaded.
        command: The command line, if there was one.
    """

    model: str
    strategy: str = DEFAULT_STRATEGY
    device: torch.device
    dtype: torch.dtype
    capture_sizes: tuple[int, ...]
    cache_folder: Path | None = None
    shares_layers: bool = True
    num_layers: int | None = None
    seed: int = 0
    may_download: bool = True
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a strategy that is none, or that builds nothing."""
        compiler, _ = cell_of(self.strategy)
        if compiler is None:
            return
        try:
            piece_compiler_for(options_from({"piece_compiler": compiler}))
        except PieceCompilerUnavailable:
            raise
        except ConfigError as err:
            raise ConfigError(
                f"Unknown strategy {self.strategy!r}. {nearest(self.strategy, _STRATEGIES)} The name of any other "
                "Dynamo backend is one too, alone or with _full or _piecewise."
            ) from err


def cell_of(strategy: str) -> tuple[str | None, str]:
    """Returns what compiles and what captures in a cell of the grid.

    Args:
        strategy: Its name: ``full``, ``breakable``, or a compiler (``fx``, ``tc`` for Inductor, the name of a
            Dynamo backend), alone or with ``_full`` or ``_piecewise``.

    Returns:
        The piece compiler, or None, and the capture strategy: ``none``, ``full`` or ``breakable``.

    Raises:
        ConfigError: Nothing is built for it.
    """
    if strategy in ("full", "breakable"):
        return None, strategy
    if strategy in ("", _REFERENCE):
        raise ConfigError(
            f"Nothing is built for {strategy!r}, so there is nothing to profile. Name a strategy such as breakable, "
            "fx_piecewise or tc_piecewise."
        )
    for capture_strategy in ("full", "breakable"):
        suffix = SUFFIXES[capture_strategy]
        if strategy.endswith(suffix):
            return _compiler_of(strategy.removesuffix(suffix)), capture_strategy
    return _compiler_of(strategy), "none"


def _compiler_of(name: str) -> str:
    return "inductor" if name == _INDUCTOR else name


def profile_build(request: ProfileRequest) -> BuildProfile:
    """Loads the model, builds it under a profile and replays each size once.

    Raises:
        ConfigError: A name or size that cannot be used.
        CompileError: The model cannot be compiled.
        CaptureError: It cannot be captured.
    """
    start_compile_workers(cell_of(request.strategy)[:1])
    clock = PhaseClock()
    with clock.phase("load"):
        loaded = load_model(
            request.model,
            device=request.device,
            dtype=request.dtype,
            seed=request.seed,
            num_layers=request.num_layers,
            download=request.may_download,
        )
    loaded.config.check_length(request.capture_sizes[-1])
    ids, _ = random_tokens(request.capture_sizes[-1], loaded.config.vocab_size, request.seed)
    example = (
        torch.tensor(ids, device=request.device),
        torch.arange(len(ids), device=request.device),
    )
    with torch.inference_mode(), use_forward_context(ForwardContext(attention=CausalAttention())):
        with clock.phase("first_forward"):
            loaded.model(*example)
        with clock.phase("first_capture"):
            nothing = torch.zeros(1, device=request.device)
            capture_plain(torch.neg, (nothing,), device=graph_device_for(request.device)).reset()
        with heard_build(BUILD_SPAN) as line:
            run = _build(request, loaded.model, example)
            with span("wait_for_device", "wait_for_device"):
                graph_device_for(request.device).synchronize()
        replays = _first_replays(run, request, example)
        memory = _memory(request, loaded.model, example, run)
    return profile_of([line, replays], _facts(request, loaded.description, clock), memory)


def _build(
    request: ProfileRequest, model: Callable[..., Any], example: tuple[torch.Tensor, ...]
) -> Callable[..., Any]:
    """Makes every size ready; returns what is called then."""
    compiler, strategy = cell_of(request.strategy)
    # Only what Inductor compiled is kept on disk.
    compile_options = {"cache_folder": request.cache_folder} if compiler == "inductor" else None
    if strategy == "none":
        assert compiler is not None, "cell_of() refuses what builds nothing"
        with span(IMPORT, IMPORT):
            import_compiler(compiler)
        compiled = compiled_forward(model, compiler, compile_options, shares_layers=request.shares_layers)
        for size in reversed(request.capture_sizes):
            with span("first_call", "warm_up", size=size):
                compiled(*(tensor[:size] for tensor in example))
        return compiled
    return capture(
        model,
        example,
        compile=compiler,
        compile_options=compile_options,
        shares_layers=request.shares_layers,
        strategy=strategy,
        capture_sizes=request.capture_sizes,
        device=graph_device_for(request.device),
    )


def _memory(
    request: ProfileRequest,
    model: Callable[..., Any],
    example: tuple[torch.Tensor, ...],
    run: Callable[..., Any],
) -> PoolReservation | None:
    """Returns what the pool reserved and, for pieces between breaks, what is estimated; no profile holds its time."""
    if not isinstance(run, CapturedCallable):
        return None
    assert run.build is not None, "capture() returns with its record"
    compiler, strategy = cell_of(request.strategy)
    estimate = None
    if compiler is not None and strategy == "breakable":
        (estimate,) = pool_estimates(
            model,
            example,
            compilers=[compiler],
            capture_sizes=request.capture_sizes,
            device=graph_device_for(request.device),
            shares_layers=request.shares_layers,
        )
    return PoolReservation(
        reserved_bytes=run.pool.memory().reserved_bytes,
        largest_alone_bytes=run.build.sizes[0].reserved_bytes,
        estimate=estimate,
    )


def _first_replays(
    run: Callable[..., Any], request: ProfileRequest, example: tuple[torch.Tensor, ...]
) -> TimeLine:
    """Calls what was built once at each size, on a time line of its own."""
    line = TimeLine()
    with listen(line):
        for size in reversed(request.capture_sizes):
            with span(REPLAY_SPAN, REPLAY_SPAN, size=size):
                run(*(tensor[:size] for tensor in example))
                graph_device_for(request.device).synchronize()
    line.finish()
    return line


def _facts(request: ProfileRequest, description: str, clock: PhaseClock) -> dict[str, str]:
    device = graph_device_for(request.device)
    facts = {
        "model": request.model,
        "description": description,
        "strategy": request.strategy,
        "dtype": str(request.dtype).removeprefix("torch."),
        "device": device.name,
        "emulated": str(device.is_emulated),
        "capture sizes": ", ".join(map(str, request.capture_sizes)),
        **{f"before the build: {name}": f"{seconds:.3f} s" for name, seconds in clock.phases_s.items()},
    }
    if request.command is not None:
        facts["command"] = " ".join(request.command)
    return facts
