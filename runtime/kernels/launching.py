"""How a Triton kernel is launched: on the GPU as it is, on the CPU through the interpreter.

The interpreter does not dispatch, so on the CPU a launch is one opaque operation to a recording.
Nothing here imports Triton before it is asked for. This module must not know what kernels compute.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Collection
from typing import Any

import torch

from ..capture.emulated.opaque import record_opaque
from ..errors import ConfigError, MissingExtraError
from .interpreter import is_interpreted, repair_interpreter


def has_triton() -> bool:
    """Tells whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


def require_triton() -> None:
    """Checks that Triton is installed.

    Raises:
        MissingExtraError: It is not.
    """
    if not has_triton():
        raise MissingExtraError(
            "The package 'triton' is needed to run Triton kernels and is not installed. CUDA builds of torch "
            "bring it; elsewhere install it with: pip install 'sgl-piecewise[triton]', or choose torch instead."
        )


def import_triton_module(name: str, package: str) -> Any:
    """Imports a module of ours that imports Triton at its top.

    Args:
        name: Its name, relative to ``package``.
        package: The package that holds it.

    Returns:
        The module.

    Raises:
        MissingExtraError: Triton is not installed.
    """
    require_triton()
    return importlib.import_module(f".{name}", package)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not under ``number``; Triton's blocks have such sizes."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def launches_dependents(device: torch.device) -> bool:
    """Tells whether a device has programmatic dependent launch: NVIDIA's, from Hopper (sm_90) on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: list[torch.Tensor],
    *,
    written: Collection[int],
    is_dependent: bool | None = None,
    **constants: Any,
) -> None:
    """Launches a Triton kernel.

    Args:
        kernel: A ``triton.jit`` function whose first parameters are the tensors.
        grid: Programs in each dimension; a launch of none does nothing.
        tensors: What the kernel reads and writes.
        written: Indices in ``tensors`` of those that it writes.
        is_dependent: Of a kernel that keeps the rule of `triton_dependent` and has a parameter
            ``IS_DEPENDENT``: whether it starts before its predecessor in the stream is complete, on a
            device that can. None for other kernels.
        **constants: Its other parameters, and Triton's launch options.

    Raises:
        ConfigError: The tensors lie on the CPU and the kernel was not made for the interpreter.
    """
    if 0 in grid:
        return
    if is_dependent is not None:
        can_overlap = is_dependent and launches_dependents(tensors[0].device)
        constants.update(IS_DEPENDENT=can_overlap, launch_pdl=can_overlap)
    if tensors[0].is_cuda:
        kernel[grid](*tensors, **constants)
        return
    if not is_interpreted(kernel):
        raise ConfigError(
            f"The Triton kernel {kernel.__name__} was given tensors on {tensors[0].device}. Outside a GPU Triton "
            "only interprets: set TRITON_INTERPRET=1 before it is first imported, or choose the torch kernels."
        )
    repair_interpreter()
    record_opaque(
        lambda inputs: kernel[grid](*inputs, **constants),
        list(tensors),
        name=kernel.__name__,
        mutated=written,
    )
