"""Which graph device serves a PyTorch device."""

from __future__ import annotations

import functools

import torch

from ..errors import ConfigError
from .cuda_device import CudaDevice
from .device import GraphDevice, GraphPool
from .emulated.device import EmulatedDevice


def graph_device_for(device: GraphDevice | torch.device | str) -> GraphDevice:
    """Returns the graph device for a PyTorch device: CUDA itself, or its emulation on the CPU.

    Args:
        device: A PyTorch device, for which the same graph device is returned each time; or a graph
            device, which is returned as it is.

    Raises:
        ConfigError: No device, or a type that neither serves.
        DeviceUnavailableError: CUDA was asked for where there is none.
    """
    if isinstance(device, GraphDevice):
        return device
    try:
        asked = torch.device(device)
    except (TypeError, RuntimeError) as err:
        raise ConfigError(
            f"{device!r} is no device; use 'cuda', 'cuda:N', or 'cpu' for emulated capture."
        ) from err
    if asked.type == "cuda" and asked.index is None and torch.cuda.is_available():
        asked = torch.device("cuda", torch.cuda.current_device())
    return _graph_device(asked)


def refuse_other_device(pool: GraphPool, device: GraphDevice) -> None:
    """Checks that a pool and a capture are on the same device.

    Raises:
        ConfigError: They are not; names both.
    """
    if pool.device.torch_device != device.torch_device:
        raise ConfigError(
            f"The pool is on {pool.device.torch_device}, but the capture is on {device.torch_device}. "
            "Leave one of the two out, or give a pool of that device."
        )


@functools.cache
def _graph_device(device: torch.device) -> GraphDevice:
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return EmulatedDevice()
    raise ConfigError(f"No graph device for {device}; use cuda, or cpu for emulated capture.")
