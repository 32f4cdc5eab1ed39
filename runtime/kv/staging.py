"""Host arrays to the device in one copy, into memory that belongs to nobody else.

Every small copy costs several microseconds, and a decode step has a dozen of them. The staging
block is fresh for every call: what the caller does with its own arrays afterwards is harmless, on
the CPU too, where ``.to(device)`` would return the caller's tensor itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

# Kernels are compiled anew for an address that divides by less.
_ALIGNMENT_BYTES = 16


def copy_to_device(
    fields: Mapping[str, np.ndarray | torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copies host arrays to a device.

    Args:
        fields: Arrays or host tensors by name, of one dimension or none, int64, int32 or float32.
        device: Where to.

    Returns:
        Tensors of the same shapes and dtypes, by name: views of one fresh block, aligned to 16 bytes.
    """
    arrays = {
        name: field.numpy() if isinstance(field, torch.Tensor) else field for name, field in fields.items()
    }
    assert all(array.ndim <= 1 for array in arrays.values())
    offsets: dict[str, int] = {}
    end = 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    # A pinned block goes back to PyTorch's host allocator, which hands it out again only after the
    # copy has run: `onnxruntime#32121` read a recycled one.
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    # The block is seen in each dtype once, on either side.
    bytes_of_staging = staging.numpy()
    values = {dtype: bytes_of_staging.view(dtype) for dtype in _DTYPES}
    for name, array in arrays.items():
        begin = offsets[name] // array.itemsize
        values[array.dtype][begin : begin + array.size] = array
    block = staging if device.type == "cpu" else staging.to(device, non_blocking=True)
    typed = {dtype: block.view(torch_dtype) for dtype, torch_dtype in _DTYPES.items()}
    return {
        name: typed[array.dtype].as_strided(array.shape, (1,) * array.ndim, offsets[name] // array.itemsize)
        for name, array in arrays.items()
    }


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
