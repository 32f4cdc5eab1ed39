"""Private PyTorch APIs of Inductor's compile workers: a pool that is ready to compile when the first kernel comes.

Inductor compiles Triton kernels in worker processes, forked from one helper process that does nothing else. It
starts them when the first kernel is there, and each is slow at its first: Triton's compiler and LLVM are loaded
then. Here the helper starts early and compiles a kernel before it forks, so its workers have all that from the
beginning.

As in ``torch_private`` each piece says what it relies on; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch._inductor.compile_worker.subproc_pool import SubprocPickler
from torch.utils._triton import has_triton_package

_logger = logging.getLogger(__name__)

_LEAST_CORES = 8  # With fewer the helper takes from the imports what it gives to the first kernels.


class WarmingPickler(SubprocPickler):
    """Makes the helper process compile a kernel before it forks its workers.

    Relies on the helper importing and making its pickler, by name and without arguments, first of all.

    Args:
        compiles: Whether to; not in the process that the kernels are for.
    """

    def __init__(self, *, compiles: bool = True) -> None:
        if not compiles:
            return
        try:
            from .triton_warm_up import compile_one

            compile_one()
        except Exception as error:  # noqa: BLE001 - workers that are not warm compile as well, and say what is wrong
            _logger.info("compile workers start cold: %s: %s", type(error).__name__, error)


def start_workers() -> bool:
    """Starts Inductor's pool of compile workers, if nobody did; returns at once, whether there is one.

    A pool that is not up when a kernel is to be compiled is passed over by Inductor. None is started without CUDA,
    on few cores, or where Inductor compiles one at a time. It lives as long as the process, as Inductor's own.
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

    Relies on ``AsyncCompile.process_pool()`` making one pool a process, of the class ``SubprocPool`` that its module
    names, and on ``use_process_pool()`` sending it a first job.
    """
    from torch._inductor import async_compile

    plain: Any = async_compile.SubprocPool
    async_compile.SubprocPool = functools.partial(plain, pickler=WarmingPickler(compiles=False))  # type: ignore[assignment, misc]
    try:
        pool = async_compile.AsyncCompile.process_pool()
    finally:
        async_compile.SubprocPool = plain  # type: ignore[misc]
    async_compile.AsyncCompile.use_process_pool()
    return pool
