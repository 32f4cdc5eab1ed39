"""Host tensors to the device in one copy, into memory that belongs to nobody else.

Every small copy costs several microseconds, and a decode step has a dozen of them. The staging
block is fresh for every call: what the caller does with its own tensors afterwards is harmless,
on the CPU too, where ``.to(device)`` would return the caller's tensor itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNMENT_BYTES = 16


def copy_to_device(fields: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies host tensors to a device.

    Args:
        fields: Tensors on the host, by name.
        device: Where to.

    Returns:
        Tensors of the same shapes and dtypes, by name: views of one fresh block, aligned to 16 bytes.
    """
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in fields.items():
        offsets[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    # A pinned block goes back to PyTorch's host allocator, which hands it out again only after the
    # copy has run: `onnxruntime#32121` read a recycled one.
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, tensor in fields.items():
        _view(staging, offsets[name], tensor).copy_(tensor)
    block = staging if device.type == "cpu" else staging.to(device, non_blocking=True)
    return {name: _view(block, offsets[name], tensor) for name, tensor in fields.items()}


def _view(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return block[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
