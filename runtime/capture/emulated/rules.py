"""What CUDA refuses while a stream is being captured, told by the operator and its arguments.

Host and device tensors look alike on the emulated device, so the rules go by what an operator
must do on CUDA: give a value to the host, choose a shape from values, copy from pageable memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CaptureForbiddenError
from ..user_code import current_user_line

_REMEDY = "Put it into a function marked @eager_on_graph, or do it before the capture."

_HOST_SYNC = "it gives a value to the host, which would have to wait for work that is only written down"
_SHAPE = "the shape of its result depends on values, which a graph does not have"
_ERROR_CHECK = "on CUDA it checks for errors on the host, which would have to wait for the device"
_HOST_DATA = (
    "it copies a host list or array to the device from pageable memory, which CUDA refuses during capture, "
    "and a replay would not see other values"
)

# Composite parts of linalg.inv, cholesky, solve and others that look at the error code.
_CHECKS_ERRORS = frozenset(
    (
        "aten::_linalg_check_errors",
        "aten::_linalg_eigh",
        "aten::_linalg_svd",
        "aten::linalg_eig",
        "aten::_linalg_eigvals",
        "aten::linalg_lstsq",
    )
)
_MASK_TYPES = (torch.bool, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class CaptureRefusal:
    """Why a graph cannot hold something.

    Attributes:
        what: What it is: an operator, a call.
        why: The reason.
        remedy: What to do instead.
    """

    what: str
    why: str
    remedy: str = _REMEDY


def forbidden(what: str, why: str, remedy: str = _REMEDY) -> CaptureForbiddenError:
    """Makes the error for something that a graph cannot hold."""
    return CaptureForbiddenError(f"{what} at {current_user_line()} cannot be captured: {why}. {remedy}")


def check_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses an operator that CUDA refuses to capture.

    Raises:
        CaptureForbiddenError: Names the operator, the reason and the user's line.
    """
    refusal = refusal_of(func, args, kwargs)
    if refusal is not None:
        raise forbidden(refusal.what, refusal.why, refusal.remedy)


def refusal_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureRefusal | None:
    """Returns why CUDA refuses to capture an operator, or None; reads no values, so fake tensors will do."""
    name: str = func._schema.name
    tags = func.tags
    if name in _CHECKS_ERRORS:
        return CaptureRefusal(what=str(func), why=_ERROR_CHECK)
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return _refusal_of_indices(func, args)
    if name == "aten::lift_fresh":
        # Zero dimensions are baked, as a Python scalar is; of an empty tensor nothing is copied.
        if args[0].dim() > 0 and args[0].numel() > 0:
            return CaptureRefusal(
                what="A tensor made from host data (torch.tensor([...]))", why=_HOST_DATA, remedy=_HOST_REMEDY
            )
    elif name == "aten::repeat_interleave":
        if kwargs.get("output_size") is None:
            return CaptureRefusal(
                what=str(func), why=_SHAPE, remedy="Give output_size=, or put it into a marked function."
            )
    elif name == "aten::histc":
        if _argument(func, args, kwargs, "min") == _argument(func, args, kwargs, "max"):
            return CaptureRefusal(
                what=str(func), why=_HOST_SYNC, remedy="Give min= and max=, or put it into a marked function."
            )
    elif name == "aten::normal":
        if isinstance(_argument(func, args, kwargs, "std"), torch.Tensor):
            return CaptureRefusal(
                what=str(func),
                why=f"it checks std on the host; {_HOST_SYNC}",
                remedy="Scale torch.randn instead.",
            )
    elif torch.Tag.data_dependent_output in tags:
        return CaptureRefusal(what=str(func), why=_HOST_SYNC)
    elif torch.Tag.dynamic_output_shape in tags:
        return CaptureRefusal(what=str(func), why=_SHAPE)
    elif name == "aten::_pin_memory":
        return CaptureRefusal(what=str(func), why="pinning host memory is refused by CUDA during capture")
    return None


_HOST_REMEDY = (
    "Make the tensor before the capture, compute it with operators (torch.arange, torch.full), or put this into "
    "a function marked @eager_on_graph."
)


def _refusal_of_indices(func: Any, args: tuple[Any, ...]) -> CaptureRefusal | None:
    """Integer indices are harmless; masks are turned into indices, whose number depends on values."""
    indices = [index for index in args[1] if index is not None]
    masks = [index for index in indices if index.dtype in _MASK_TYPES]
    if not masks:
        return None
    is_fill = (
        func._schema.name != "aten::index"
        and len(indices) == 1
        and args[2].dim() == 0
        and not (len(args) > 3 and args[3])
    )
    if is_fill:  # x[mask] = 0 becomes masked_fill_.
        return None
    return CaptureRefusal(
        what=f"Indexing with a mask ({func})",
        why=_SHAPE,
        remedy="Use torch.where or masked_fill, which keep the shape, or a function marked @eager_on_graph.",
    )


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Returns an operator's argument by name, its default if it was not given."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    raise KeyError(name)
