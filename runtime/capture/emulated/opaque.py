"""Compiled code inside a recording: one operation that the recorder cannot look into.

Inductor's CPU kernels never dispatch, so a recorder would see only some of their calls and lose
the rest silently. All such code enters through `record_opaque`; Inductor's compiled graphs do so
by themselves while a capture scope is open. This module must not know how it was compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from ... import torch_private
from .patching import Patch, ThreadPatches


def record_opaque(
    call: Callable[[list[Any]], Any],
    inputs: list[Any],
    *,
    name: str,
    mutated: Collection[int] | None = None,
) -> Any:
    """Runs code that does not dispatch, as one operation if a graph is being recorded.

    Args:
        call: The code; takes a list of inputs (which it may clear) and touches no other tensor
            that changes. Called again at every replay.
        inputs: Tensors and other values.
        name: For reports and errors.
        mutated: Which inputs it writes; None if that is not known.

    Returns:
        What ``call`` returns. Fresh tensors in it lie in the graph pool; inputs and views of them
        are still that.
    """
    recorder = compiled_code_patches().watcher()
    if recorder is None or recorder.recording is None:
        return call(inputs)
    return recorder.record_opaque(call, inputs, name, mutated)


@functools.cache
def compiled_code_patches() -> ThreadPatches:
    """Returns the hooks into Inductor's compiled graphs; the watcher is the Recorder."""
    return ThreadPatches(
        [
            Patch(owner=kind, name="__call__", replacement=_call_compiled)
            for kind in torch_private.compiled_graph_types()
        ]
    )


def _call_compiled(recorder: Any, original: Callable[..., Any], compiled: Any, inputs: list[Any]) -> Any:
    if recorder.recording is None or torch_private.is_compiling_now():
        return original(compiled, inputs)
    given = list(inputs)
    mutated = torch_private.mutated_inputs(compiled)
    result = recorder.record_opaque(functools.partial(original, compiled), given, "inductor graph", mutated)
    if isinstance(inputs, list):
        inputs.clear()  # As the compiled graph does, so that inputs can die early.
    return result
