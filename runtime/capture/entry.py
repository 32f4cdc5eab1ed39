"""``capture``: from a function and example arguments to a callable that replays graphs.

Checks the options once, decides device and pool, and hands over to `CapturedCallable`. This module
must not know of models or of compilers: it takes a callable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import tree
from ..build_profile import profiled
from ..errors import ConfigError, nearest
from ..garbage import full_collections_put_off
from ..mark import eager_on_graph
from ..time_line import span
from .autograd import refuse_history
from .captured import CapturedCallable, ProgressCallback
from .device import GraphDevice, GraphPool
from .devices import graph_device_for, refuse_other_device
from .session import CaptureMode, refuse_nested_capture
from .sizes import validate_capture_sizes
from .static_inputs import StaticInputs
from .static_outputs import OUTPUT_MODES
from .statics import StaticTensorMap, StaticTensors

CAPTURE_STRATEGIES: tuple[CaptureMode, ...] = ("full", "breakable")


def capture(
    fn: Callable[..., Any],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    strategy: str = "breakable",
    outputs: str = "copy",
    capture_sizes: Sequence[int] | None = None,
    dynamic_dims: Mapping[str, int] | None = None,
    pad_values: Mapping[str, int | float | bool] | None = None,
    static_tensors: StaticTensorMap | None = None,
    device: GraphDevice | torch.device | str | None = None,
    pool: GraphPool | None = None,
    launch_segments: bool | None = None,
    num_warm_ups: int = 1,
    debug: bool = False,
    on_progress: ProgressCallback | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> CapturedCallable:
    """Captures a function or module at one fixed shape, or at a ladder of sizes.

    Args:
        fn: Any callable; run without autograd.
        example_args: Positional arguments, at the largest capture size. Tensors are copied.
        example_kwargs: Keyword arguments likewise.
        strategy: The capture strategy: ``breakable`` (a break at every mark) or ``full`` (one graph, marks included).
        outputs: ``copy`` returns fresh tensors; ``view`` returns graph-owned ones, valid until
            the next replay on the same pool.
        capture_sizes: Ascending padded sizes; None captures the example's shapes only.
        dynamic_dims: Argument path to the dimension that follows the size, for example
            ``{"input_ids": 0}``; needs ``capture_sizes``. Default: dimension 0 of every device tensor
            that has the largest size there.
        pad_values: Argument path to what padded rows hold; 0 unless named. An argument that is never
            padded needs none.
        static_tensors: Tensors outside the module that the graphs read in place (KV buffers,
            workspaces), or callables that return the one in use; checked like parameters.
        device: Graph device, or a PyTorch device; the example tensors' device if None.
        pool: Pool to share with other recordings that are never replayed at once.
        launch_segments: Whether closed segments run while capturing. None launches where a body
            will run: in a breakable capture that meets a mark with neither ``capture_stub`` nor
            ``fake``.
        num_warm_ups: Forwards per size before its capture, at least one.
        debug: Run the whole forward as one eager segment through the same buffers and replay path,
            whatever the capture strategy.
        on_progress: Called with (phase, done, total).
        profile: File for the build's profile as JSON: what was traced, compiled, warmed up and captured.

    Returns:
        A callable with ``fn``'s signature.

    Raises:
        ConfigError: An option that cannot be accepted.
        CaptureError: The function cannot be captured; nothing is left half-captured.

    Source: the shape of ``torch.cuda.make_graphed_callables``; differs: sizes, breaks, inputs
    written in place are written back.
    """
    refuse_nested_capture()
    _check_call(fn, example_args, example_kwargs)
    if strategy not in CAPTURE_STRATEGIES:
        raise ConfigError(f"Unknown capture strategy {strategy!r}. {nearest(strategy, CAPTURE_STRATEGIES)}")
    if outputs not in OUTPUT_MODES:
        raise ConfigError(f"Unknown outputs mode {outputs!r}. {nearest(outputs, OUTPUT_MODES)}")
    if type(num_warm_ups) is not int or num_warm_ups < 1:
        raise ConfigError(
            f"num_warm_ups is {num_warm_ups!r}; at least one forward must run before a capture."
        )
    if pool is not None and not isinstance(pool, GraphPool):
        raise ConfigError(f"pool must be a GraphPool (captured.pool), got {type(pool).__name__}.")
    sizes = None if capture_sizes is None else validate_capture_sizes(capture_sizes)
    kwargs = dict(example_kwargs or {})
    module = _module_of(fn)
    graph_device = _device_for(device, pool, (example_args, kwargs), module)
    refuse_history((example_args, kwargs), "an argument")
    refuse_history(list(module.parameters()) if module is not None else [], "a parameter of the module")
    facts = {"device": graph_device.name, "emulated": str(graph_device.is_emulated)}
    noted = profiled(profile, "build", strategy="debug" if debug else strategy, **facts)
    with noted, full_collections_put_off():
        with span("static_inputs", "static_inputs"):
            inputs = StaticInputs(
                fn,
                tuple(example_args),
                kwargs,
                device=graph_device.torch_device,
                sizes=sizes,
                dynamic_dims=dynamic_dims,
                pad_values=pad_values,
            )
            captured = CapturedCallable(
                _as_one_break(fn) if debug else fn,
                inputs,
                strategy="debug" if debug else strategy,
                mode="breakable" if debug or strategy == "breakable" else "full",
                copy_outputs=outputs == "copy",
                sizes=sizes,
                pool=graph_device.new_pool() if pool is None else pool,
                statics=StaticTensors(static_tensors, module),
            )
        captured.build_all(
            launch_segments=launch_segments, num_warm_ups=num_warm_ups, on_progress=on_progress
        )
    return captured


def _as_one_break(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a whole forward. A module is called, not unwrapped: hooks belong to it."""

    def whole_forward(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    whole_forward.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
    return eager_on_graph(whole_forward)


def _check_call(fn: Any, example_args: Any, example_kwargs: Any) -> None:
    """Refuses what would be taken apart into other arguments than the caller meant."""
    if not callable(fn):
        raise ConfigError(f"capture takes a function or module, got {type(fn).__name__}.")
    if not isinstance(example_args, tuple | list):
        raise ConfigError(
            f"example_args must be a tuple of positional arguments, got {type(example_args).__name__}. Write (x,) "
            "for one argument; keyword arguments go into example_kwargs."
        )
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise ConfigError(f"example_kwargs must map names to arguments, got {type(example_kwargs).__name__}.")


def _module_of(fn: Callable[..., Any]) -> torch.nn.Module | None:
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _device_for(
    device: GraphDevice | torch.device | str | None,
    pool: GraphPool | None,
    arguments: Any,
    module: torch.nn.Module | None,
) -> GraphDevice:
    if device is not None:
        found = graph_device_for(device)
    elif pool is not None:
        return pool.device
    else:
        tensors = [leaf for leaf in tree.flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]
        tensors += list(module.parameters()) if module is not None else []
        devices = {tensor.device for tensor in tensors}
        accelerators = {one for one in devices if one.type != "cpu"}
        if len(accelerators) > 1:
            raise ConfigError(
                f"Arguments and parameters lie on {sorted(map(str, accelerators))}; a capture has one device. "
                "Say which with device=."
            )
        found = graph_device_for(next(iter(accelerators), torch.device("cpu")))
    if pool is not None:
        refuse_other_device(pool, found)
    return found
