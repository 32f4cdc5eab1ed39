"""What is compiled is for inference: autograd is refused while compiling, and at calls that guards let through."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime.errors import CompileError


def refuse_autograd(values: Iterable[Any]) -> None:
    """Refuses to compile or to run where autograd would record.

    Args:
        values: Inputs, parameters and buffers; what is no tensor is passed over.

    Raises:
        CompileError: Autograd is on, and a tensor requires grad.
    """
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    ):
        raise CompileError(
            "Backend 'sgl_piecewise' compiles for inference, and autograd is recording. Call the compiled function "
            "under torch.inference_mode() or torch.no_grad(), from the first call on."
        )


def refusing_autograd(
    forward: Callable[..., Any], inputs: Sequence[Any], held: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Returns a forward that refuses calls whose gradients it would drop; the same one where guards refuse them.

    Dynamo guards on the mode of autograd, so what was compiled without it never runs with it. What was compiled with
    it on, for a frozen model, may meet parameters that require grad by now: PyTorch 2.13 guards on that, and 2.11 does
    not.

    Args:
        forward: What Dynamo is to call, compiled just now.
        inputs: Of the call that it was compiled for.
        held: Tensors that it holds itself.
    """
    if not torch.is_grad_enabled():
        return forward

    # Which inputs are tensors is guarded on; that autograd is on as well.
    places = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    requires_grad = operator.attrgetter("requires_grad")

    @functools.wraps(forward)
    def call(*args: Any) -> Any:
        if any(map(requires_grad, (*map(args.__getitem__, places), *held))):
            refuse_autograd((*args, *held))
        return forward(*args)

    return call
