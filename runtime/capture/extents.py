"""What memory a tensor covers: its span, overlaps, the bytes themselves, and how they are read.

Pure questions about strides and addresses; nothing here allocates or copies. This module must not
know of pools, breaks or captures.
"""

from __future__ import annotations

import torch


def span_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes from a tensor's first element to its last, both included; 0 if it is empty."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def address_of(tensor: torch.Tensor) -> int:
    """Returns where a tensor begins, also of an empty one, which PyTorch gives the address 0."""
    return int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size())


def share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether the byte ranges that two tensors span overlap."""
    if not one.numel() or not other.numel():
        return False
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + span_bytes(other) and other_start < start + span_bytes(one)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tells whether two indices of a tensor may name one element (expanded or overlapping strides)."""
    if tensor.is_contiguous():
        return False
    expected = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= expected:
            return True
        expected += (size - 1) * stride
    return False


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor's values are its bytes, in order: what a plain memory copy can move."""
    return (
        bool(tensor.numel())
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.dtype.is_complex  # which may be conjugated lazily
    )


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Returns whether a tensor is lazily conjugated, and lazily negated."""
    return tensor.is_conj(), tensor.is_neg()


def bytes_of(tensor: torch.Tensor, address: int, num_bytes: int) -> torch.Tensor:
    """Views ``num_bytes`` of a tensor's storage from ``address`` on.

    Args:
        tensor: Its storage is viewed; the view owns that too.
        address: In the storage.
        num_bytes: At most what the storage holds from there.

    Returns:
        A view (uint8[num_bytes]).
    """
    storage = tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, address - storage.data_ptr(), (num_bytes,), (1,))
