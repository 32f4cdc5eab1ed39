"""Private PyTorch APIs of Inductor: what it and Dynamo set up once a process, settings, kernels in threads.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13. Only what runs while something is compiled imports this file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._triton import has_triton_package

from .torch_private_workers import are_workers_ready, start_workers

# What Inductor imports in the middle of its first compile.
_MODULES = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.runtime.triton_heuristics",
)
# And Dynamo in the middle of its first trace.
_DYNAMO_MODULES = (
    "torch._inductor.compiler_bisector",  # By `torch.compile` itself.
    "torch._dynamo.repro.after_dynamo",
    "torch._dynamo.dce_extra_outputs",
    "torch._export.db.logging",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "sympy.tensor.tensor",
)
_MOST_THREADS = 8


def inductor_settings() -> list[str]:
    """Returns the names of all settings of Inductor; ``list_options`` leaves out those that stand for others."""
    from torch._inductor import config

    settings: dict[str, Any] = vars(config)["_config"]
    return list(settings)


def import_dynamo() -> None:
    """Imports what Dynamo would import while it traces its first function; a module that is gone is left out.

    Also the backends that Dynamo knows, which it imports when it is first asked for one by name.
    """
    _import_those_there(_DYNAMO_MODULES)
    torch.compiler.list_backends()


def _import_those_there(names: Sequence[str]) -> None:
    for name in names:
        package = name.rpartition(".")[0]
        if importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def set_up_inductor() -> None:
    """Does what Inductor does once a process, whatever it compiles: its imports, its patterns, hashes of sources.

    Else its first compile would do it. The keys of its caches hold hashes of PyTorch's and Triton's sources,
    which are read in a thread meanwhile; compile workers start beside all of it. What a version of PyTorch does not
    have is left out.
    """
    start_workers()
    _import_those_there(_MODULES)
    _register_code_generators()
    # After the imports: hashing Triton's sources imports some of it, and two threads that import can block each other.
    hashing = threading.Thread(target=_hash_sources, name="hash sources of torch and triton")
    hashing.start()
    try:
        _register_patterns()
    finally:
        hashing.join()


def _register_code_generators() -> None:
    """Imports the code generators of all devices, as the first compile does; relies on one function that does it."""
    from torch._inductor.codegen import common

    common.init_backend_registration()


def _hash_sources() -> None:
    """Relies on both functions keeping their results."""
    from torch._inductor import codecache

    codecache.torch_key()
    if has_triton_package():
        from torch._inductor.runtime import triton_compat

        triton_compat.triton_key()


def _register_patterns() -> None:
    """Relies on the functions that register patterns of graph passes, once for an input's device."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(False), torch.no_grad():
        joint_graph.lazy_init(device)
        post_grad.lazy_init()


@contextlib.contextmanager
def kernels_in_threads() -> Iterator[None]:
    """Compiles Triton kernels of the block in threads of this process, from the moment that each is generated.

    Inductor compiles them one after the other where its pool of worker processes is not up, and it is not in the
    first ten seconds or more. A thread fills what the kernel holds and Triton's folder; launchers are made where
    Inductor makes them. Does nothing where Inductor was told to compile one at a time (``compile_threads=1``) or
    where its workers are ready.

    Relies on ``AsyncCompile.triton`` being asked for each kernel, when it is generated (if ``use_process_pool()``
    is true) and again when the generated module is run, and on futures being waited for there.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    interprets = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if not has_triton_package() or interprets or get_compile_threads() < 2 or are_workers_ready():
        yield
        return
    plain_triton, plain_use = AsyncCompile.triton, vars(AsyncCompile)["use_process_pool"]
    num_threads = min(_MOST_THREADS, get_compile_threads())
    with concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="triton") as pool:
        compiling = _Compiling(pool, plain_triton)

        def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
            return compiling.future(self, kernel_name, source_code, device_str)

        AsyncCompile.triton = triton  # type: ignore[method-assign]
        AsyncCompile.use_process_pool = classmethod(lambda cls: not compiling.is_finishing)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            AsyncCompile.triton = plain_triton  # type: ignore[method-assign]
            AsyncCompile.use_process_pool = plain_use  # type: ignore[method-assign]


class _Compiling:
    """The kernels of a block, each compiled once."""

    def __init__(self, pool: concurrent.futures.Executor, plain: Callable[..., Any]) -> None:
        self._pool = pool
        self._plain = plain
        self._results: dict[str, Any] = {}
        self.is_finishing = False

    def future(self, compiler: Any, kernel_name: str, source_code: str, device_str: str) -> Any:
        """Returns what Inductor waits for; starts compiling the first time."""
        from torch._inductor.async_compile import CompiledTritonKernels
        from torch._inductor.codecache import LambdaFuture

        def finish() -> Any:
            # Errors are raised by the plain way, which compiles anew what a thread could not.
            concurrent.futures.wait([work])
            self.is_finishing = True
            try:
                return self._plain(compiler, kernel_name, source_code, device_str)
            finally:
                self.is_finishing = False

        key = f"{kernel_name}\n{source_code}"
        if key not in self._results:
            if CompiledTritonKernels.get(source_code) is not None:
                work: concurrent.futures.Future[None] = concurrent.futures.Future()
                work.set_result(None)
            else:
                context = contextvars.copy_context()
                work = self._pool.submit(context.run, _compile_kernel, kernel_name, source_code)
            self._results[key] = LambdaFuture(finish, future=work)
        return self._results[key]


def _compile_kernel(kernel_name: str, source_code: str) -> None:
    from torch._inductor import async_compile

    async_compile._set_triton_ptxas_path()
    kernel = async_compile._load_triton_kernel_from_source(kernel_name, source_code)
    kernel.precompile(warm_cache_only=True)
