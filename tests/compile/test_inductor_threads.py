"""Triton kernels that Inductor generates are compiled in threads, and finished where Inductor asks for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sgl_piecewise.runtime.torch_private_inductor import kernels_in_threads

pytest.importorskip("triton")


class FakeKernel:
    """Stands for a kernel of Inductor's: says which thread compiles it, and waits until others do too."""

    def __init__(self, together: threading.Barrier, *, fails: bool = False) -> None:
        self._together = together
        self._fails = fails
        self.compiled_by: list[str] = []
        self.finished_by: list[str] = []
        self.autotune_cache_info: dict[str, Any] | None = None
        self.configs: list[Any] = []

    def set_compile_info(self, compile_id: Any, is_backward: bool) -> None:
        pass

    def precompile(self, warm_cache_only: bool = False, **kwargs: Any) -> None:
        name = threading.current_thread().name
        if not warm_cache_only:
            self.finished_by.append(name)
            if self._fails:
                raise RuntimeError("no such instruction")
            return
        self.compiled_by.append(name)
        self._together.wait(timeout=20)
        if self._fails:
            raise RuntimeError("no such instruction")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeKernel]:
    """Kernels by name, found by Inductor in place of generated ones."""
    from torch._inductor import async_compile

    found: dict[str, FakeKernel] = {}

    def load(kernel_name: str, source_code: str) -> FakeKernel:
        return found[kernel_name]

    monkeypatch.setattr(async_compile, "_load_triton_kernel_from_source", load)
    monkeypatch.setattr(async_compile.AsyncCompile, "_ready_future", None)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return found


def test_kernels_are_compiled_side_by_side_and_finished_by_the_caller(kernels: dict[str, FakeKernel]) -> None:
    from torch._inductor.async_compile import AsyncCompile

    together = threading.Barrier(2)
    kernels.update(first=FakeKernel(together), second=FakeKernel(together))
    plain = AsyncCompile.triton
    compiler = AsyncCompile()
    with kernels_in_threads():
        assert AsyncCompile.use_process_pool(), "kernels are asked for as soon as they are generated"
        for name in kernels:
            compiler.triton(name, f"source of {name}")
        scope: dict[str, Any] = {name: compiler.triton(name, f"source of {name}") for name in kernels}
        found = {name: future.result() for name, future in scope.items()}
    assert found == kernels
    here = threading.current_thread().name
    for kernel in kernels.values():
        (thread,) = kernel.compiled_by
        assert thread != here
        assert kernel.finished_by == [here]
    assert AsyncCompile.triton is plain


def test_a_kernel_that_does_not_compile_raises_where_it_is_waited_for(kernels: dict[str, FakeKernel]) -> None:
    from torch._inductor.async_compile import AsyncCompile

    kernels["broken"] = FakeKernel(threading.Barrier(1), fails=True)
    plain = AsyncCompile.triton
    with pytest.raises(RuntimeError, match="no such instruction"), kernels_in_threads():
        AsyncCompile().triton("broken", "source").result()
    assert AsyncCompile.triton is plain


def test_who_asked_for_one_compile_at_a_time_gets_it(
    kernels: dict[str, FakeKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import async_compile

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    plain = async_compile.AsyncCompile.triton
    with kernels_in_threads():
        assert async_compile.AsyncCompile.triton is plain
