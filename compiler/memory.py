"""The memory that a forward will need of a graph pool, asked before anything is captured."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from sgl_piecewise.passes.estimate_memory import MEMORY
from sgl_piecewise.passes.memory_estimate import MemoryEstimate, PiecesRun
from sgl_piecewise.passes.pipeline import pipeline, run_passes
from sgl_piecewise.runtime import torch_private_compiling, torch_private_entries, tree
from sgl_piecewise.runtime.capture.arguments import ArgumentBinder
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.errors import CompileError, ConfigError
from sgl_piecewise.runtime.records import PoolEstimate
from sgl_piecewise.runtime.torch_private_entries import TRACING_FAILURES

from .layer_runner import LayerRunner
from .layer_sharing import layers_shared
from .layered_memory import LayeredEstimates
from .trace_size import arguments_to_trace
from .tracing_errors import explained_tracing_errors

_TRACED_TOKENS = 61


def memory_estimate(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_dims: Mapping[int | str, int] | None = None,
    shares_layers: bool = True,
) -> MemoryEstimate:
    """Traces a forward and estimates what a graph pool needs to capture it, as a function of its size.

    The forward runs once, uncompiled, on the arguments; nothing is captured.

    Args:
        fn: The forward: a function or module, not compiled yet.
        args: Example arguments. Their token count should be equal to no other size.
        kwargs: Example keyword arguments.
        dynamic_dims: Which dimension of which argument (position or name) is the token count; by default
            dimension 0 of every tensor that is as long there as the first tensor.
        shares_layers: Whether equal layers are traced once, as ``capture`` does. A layer's inputs then live
            until it has run; else as long as something reads them.

    Returns:
        The estimate; ``estimate.reserved_bytes(sizes, device)`` is what a pool on that device reserves, and
        ``estimate.peak.at(num_tokens)`` what of it lives at once. Both hold for pieces that run as FX;
        ``reserved_bytes(..., pieces_run="fused")`` predicts what Inductor keeps, which is less.

    Raises:
        CompileError: The forward cannot be traced in one graph, or computes nothing with tensors.
        ConfigError: An argument of ``dynamic_dims`` is not a tensor argument, ``fn`` is no function or module,
            or ``args`` is not a tuple or list.

    Example:
        >>> memory_estimate(model, (input_ids, positions)).peak.at(4096)
    """
    if not callable(fn) or isinstance(fn, type):
        raise ConfigError(f"memory_estimate takes a function or module, got {type(fn).__name__}.")
    if not isinstance(args, tuple | list):
        raise ConfigError(
            f"args must be a tuple of positional arguments, got {type(args).__name__}. Write (x,) for one argument."
        )
    named: dict[int | str, Any] = dict(enumerate(args))
    named.update(kwargs or {})
    return _traced(fn, args, kwargs or {}, _dynamic(named, dynamic_dims), shares_layers)


def pool_estimates(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    compilers: Sequence[str | Callable[..., Any]],
    capture_sizes: Sequence[int] | None,
    device: GraphDevice,
    dynamic_dims: Mapping[str, int] | None = None,
    shares_layers: bool = True,
) -> tuple[PoolEstimate, ...]:
    """Estimates what breakable captures of a compiled forward reserve, by one trace that compiles nothing.

    Args:
        fn: As for ``capture``.
        args: Positional arguments at the largest size.
        kwargs: Keyword arguments likewise.
        compilers: What compiles the pieces, as for ``capture``.
        capture_sizes: As for ``capture``; None where all shapes are fixed.
        device: Whose allocator is imitated.
        dynamic_dims: As for ``capture``.
        shares_layers: As for ``capture``.

    Returns:
        An estimate for each compiler. Where the forward cannot be traced they say why.
    """
    args, kwargs = ArgumentBinder(fn).canonical(tuple(args), dict(kwargs or {}))
    try:
        if capture_sizes is None:
            estimate, sizes = _traced(fn, args, kwargs, [], shares_layers), [0]
        else:
            args, kwargs, dims = arguments_to_trace(
                fn, args, kwargs, capture_sizes, dynamic_dims, at_most=_TRACED_TOKENS
            )
            leaves = tree.flatten((args, kwargs))[0]
            dynamic = [(leaves[index], dim) for index, dim in dims.items()]
            estimate, sizes = _traced(fn, args, kwargs, dynamic, shares_layers), list(capture_sizes)
        return tuple(_pool_estimate(estimate, sizes, device, compiler) for compiler in compilers)
    except (CompileError, ConfigError, torch.OutOfMemoryError) as err:
        reason = str(err).splitlines()[0]
        return tuple(
            PoolEstimate(
                reserved_bytes=None,
                largest_alone_bytes=None,
                is_upper_bound=_is_upper_bound(compiler),
                missing_because=reason,
            )
            for compiler in compilers
        )


def _pool_estimate(
    estimate: MemoryEstimate, sizes: list[int], device: GraphDevice, compiler: str | Callable[..., Any]
) -> PoolEstimate:
    pieces_run: PiecesRun = "compiled"
    if compiler == "fx":
        pieces_run = "fx"
    elif compiler == "inductor":
        pieces_run = "fused"
    reserved = list(estimate.reserved_after_each(sizes, device, pieces_run=pieces_run).values())
    return PoolEstimate(
        reserved_bytes=reserved[-1], largest_alone_bytes=reserved[0], is_upper_bound=_is_upper_bound(compiler)
    )


def _is_upper_bound(compiler: str | Callable[..., Any]) -> bool:
    """Whether all that is known of a compiler is that it keeps no more than FX does."""
    return compiler not in ("fx", "inductor")


def _traced(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Sequence[tuple[torch.Tensor, int]],
    shares_layers: bool,
) -> MemoryEstimate:
    """Traces the forward by running it once; see `memory_estimate`."""
    estimates = LayeredEstimates(_estimate)
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_private_compiling.dynamic_sizes(dynamic))
        if isinstance(owner, torch.nn.Module):
            stack.enter_context(layers_shared(owner, shares_layers))
        # Its own code, so that nothing of this is left where others compile the forward.
        assert isinstance(_call, types.FunctionType)
        function = torch_private_entries.with_own_code(_call, "memory_estimate")
        stack.callback(torch_private_entries.forget_compiles, function.__code__)
        compiled = torch.compile(function, backend=estimates, fullgraph=True)
        try:
            with explained_tracing_errors():
                LayerRunner(estimates).around(compiled)(fn, tuple(args), dict(kwargs))
        except TRACING_FAILURES as err:  # Its size is a constant: the guards of the trace say so at its end.
            raise CompileError(
                "The forward works at the size of its arguments only, so no estimate holds at another: "
                f"{err}\nTake the size from an argument (x.shape[0]), or name the dimensions that vary: "
                "dynamic_dims={} is for none."
            ) from err
    estimate = estimates.linked()
    if estimate is None:
        raise CompileError(
            "The forward was not traced. Either it computes nothing with tensors, or compiling is switched off around "
            "this call (torch.compiler.disable, set_stance, or TORCHDYNAMO_DISABLE)."
        )
    return estimate


def _call(fn: Any, args: Any, kwargs: Any) -> Any:
    """What Dynamo traces."""
    return fn(*args, **kwargs)


def _estimate(gm: GraphModule, example_inputs: Sequence[Any]) -> MemoryEstimate:
    """Estimates one trace, on a copy: the trace itself is to be run."""
    copy = GraphModule(gm, _copied(gm))
    found: MemoryEstimate = run_passes(copy, example_inputs, pipeline(estimates_memory=True)).meta[MEMORY]
    return found


def _dynamic(
    named: Mapping[int | str, Any], dims: Mapping[int | str, int] | None
) -> list[tuple[torch.Tensor, int]]:
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    if dims is not None:
        for name, dim in dims.items():
            if name not in tensors or not -tensors[name].dim() <= dim < tensors[name].dim():
                raise ConfigError(
                    f"dynamic_dims names dimension {dim} of argument {name!r}; tensor arguments are "
                    f"{ {name: tuple(one.shape) for name, one in tensors.items()} }."
                )
        return [(tensors[name], dim) for name, dim in dims.items()]
    with_sizes = [one for one in tensors.values() if one.dim() > 0]
    return [(one, 0) for one in with_sizes if one.shape[0] == with_sizes[0].shape[0]]


def _copied(gm: GraphModule) -> Any:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return graph
