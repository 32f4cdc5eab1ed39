"""Programmatic dependent launch in Triton kernels: how a kernel starts before its predecessor is done.

A kernel launched so (see `launching.launch`) may become resident while the kernel before it in its
stream still runs, as far as there is room. The rule: every program of such a kernel calls
`wait_for_predecessor` before it reads or writes anything that another kernel of the stream may
write or read. A wait returns when the predecessor is complete, and a predecessor completes only
after its own wait, so order holds along the whole stream, into kernels that are launched as usual
and out of them. The one thing that may be read before is weights. Several kernels of a chain may be
resident together, so it is not enough that the one right before did not write them: whatever writes
weights is launched as usual and lets no successor start, and a kernel that is launched as usual (an
embedding, a copy into static buffers, the beginning of a graph) follows it before the next product.

Imported lazily: importing it imports Triton.
Source: NVIDIA, CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_successor_start(IS_DEPENDENT: tl.constexpr) -> None:
    """Lets the next kernel of the stream start once every program has come here."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(IS_DEPENDENT: tl.constexpr) -> None:
    """Waits until the kernel before is complete and what it wrote is visible."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
