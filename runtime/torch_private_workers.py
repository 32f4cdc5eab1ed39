"""Private PyTorch APIs of Inductor's compile workers: a pool that is ready to compile when the first kernel comes.

Inductor compiles Triton kernels in worker processes, forked from a helper process that does nothing else. It starts
them when the first kernel is there, and each takes several times as long for its first as for any other: Triton's
compiler and driver are loaded then. Here the helper starts early, and each worker compiles a kernel that nobody needs.

As in ``torch_private`` each piece says what it relies on; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
from typing import Any

import torch
from torch.utils._triton import has_triton_package

_LEAST_CORES = 8  # With fewer the helper takes from the imports what it gives to the first kernels.
_warm_ups: list[concurrent.futures.Future[None]] = []


def start_workers() -> bool:
    """Starts Inductor's pool of compile workers, if nobody did; returns before they are up, whether there is one.

    None is started without CUDA, on few cores, or where Inductor compiles one at a time. It lives as long as the
    process, as Inductor's own; Inductor ends workers that had nothing to do for a minute, and starts others.
    """
    is_useful = (
        torch.cuda.is_available()
        and torch.version.cuda is not None
        and len(os.sched_getaffinity(0)) >= _LEAST_CORES
        and has_triton_package()
        and os.environ.get("TRITON_INTERPRET", "0") != "1"
    )
    if not is_useful:
        return False
    from torch._inductor import config
    from torch._inductor.async_compile import get_compile_threads

    if config.worker_start_method != "subprocess" or get_compile_threads() < 2:
        return False
    make_pool()
    return True


def make_pool() -> Any:
    """Makes Inductor's pool of compile workers and returns it; an older one stays.

    Relies on ``AsyncCompile.process_pool()`` making one pool a process, on jobs that are submitted at once going to
    as many workers, and on ``use_process_pool()`` sending a job that says when the pool is up.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    from .torch_private_warm_up import compile_one

    pool = AsyncCompile.process_pool()
    if not _warm_ups:
        AsyncCompile.use_process_pool()
        _warm_ups.extend(pool.submit(compile_one) for _ in range(get_compile_threads()))
        # Runs before Inductor ends its pool, as what was registered later.
        atexit.register(_end_unfinished, pool)
    return pool


def are_workers_ready() -> bool:
    """Tells whether Inductor has a pool of workers that is up and, if we started it, has compiled in each."""
    from torch._inductor.async_compile import AsyncCompile

    ready = AsyncCompile._ready_future
    return ready is not None and ready.done() and all(one.done() for one in _warm_ups)


def _end_unfinished(pool: Any) -> None:
    """Ends the helper of a pool that is not up yet: a process that ends early would wait for it for seconds.

    Relies on the pool's ``process`` being the helper.
    """
    if not all(one.done() for one in _warm_ups):
        pool.process.kill()
