"""Programmatic dependent launch in Triton kernels: how a kernel starts before its predecessor is done.

A kernel launched so (see `launching.launch`) may become resident while the kernel before it in its
stream still runs, as far as there is room. The one rule: every program of such a kernel calls
`wait_for_predecessor`, before it reads or writes anything that another kernel of the stream may
write or read. A wait returns when the predecessor is complete, and a predecessor completes only
after its own wait, so order holds along the whole stream, into kernels that are launched as usual
and out of them. Imported lazily: importing it imports Triton.

Source: NVIDIA, CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(IS_DEPENDENT: tl.constexpr) -> None:
    """Lets the next kernel start, and waits until the one before is complete; else does nothing."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
