"""Refusal of autograd: graphs hold no history, so nothing may record any while capturing."""

from __future__ import annotations

from typing import Any

import torch

from .. import tree
from ..errors import CaptureError


def refuse_history(value: Any, what: str) -> None:
    """Raises if autograd is recording and a tensor in ``value`` requires grad.

    Args:
        value: Any nested value.
        what: Names it in the error, for example "an output of the captured function".

    Raises:
        CaptureError: Says what to do.
    """
    if not torch.is_grad_enabled():
        return
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree.flatten(value)[0]):
        raise CaptureError(
            f"Autograd is recording while capturing: {what} requires grad. Graphs hold no autograd history; "
            "capture under `with torch.inference_mode():` or `torch.no_grad()`."
        )
