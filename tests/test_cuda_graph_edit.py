"""Memsets in captured graphs become copies of zeros: same values, and a graph that cannot be changed stays whole."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sgl_piecewise.runtime.capture import cuda_runtime
from sgl_piecewise.runtime.capture.cuda_graph_edit import (
    MAX_ZEROED_BYTES,
    CudaGraphEditor,
    Memset,
    load_editor,
    replace_memsets,
    zeros_on,
)

ZEROS = torch.zeros(64, dtype=torch.uint8)


class Graph:
    """A graph as `GraphEditor` sees it: nodes, edges, and what CUDA is to refuse."""

    def __init__(self, *kinds: str | Memset, refused: Sequence[str] = ()) -> None:
        self.kinds: dict[int, object] = dict(enumerate(kinds))
        self.edges = {(index, index + 1) for index in range(len(kinds) - 1)}
        self.refused = set(refused)

    def memset_nodes(self, graph: int) -> list[int]:
        return [node for node, kind in self.kinds.items() if isinstance(kind, Memset)]

    def memset_of(self, node: int) -> Memset | None:
        found = self.kinds[node]
        assert isinstance(found, Memset)
        return None if "memset_of" in self.refused else found

    def neighbours(self, node: int) -> tuple[list[int], list[int]] | None:
        if "neighbours" in self.refused:
            return None
        return [a for a, b in self.edges if b == node], [b for a, b in self.edges if a == node]

    def add_copy(
        self, graph: int, dependencies: Sequence[int], target: int, source: int, num_bytes: int
    ) -> int | None:
        if "add_copy" in self.refused:
            return None
        node = max(self.kinds) + 1
        self.kinds[node] = ("copy", target, source, num_bytes)
        self.edges |= {(before, node) for before in dependencies}
        return node

    def connect(self, graph: int, node: int, dependents: Sequence[int]) -> bool:
        if "connect" in self.refused:
            return False
        self.edges |= {(node, after) for after in dependents}
        return True

    def remove(self, node: int) -> bool:
        if "remove" in self.refused and isinstance(self.kinds[node], Memset):
            return False
        del self.kinds[node]
        self.edges = {edge for edge in self.edges if node not in edge}
        return True


def memset(num_bytes: int = 4, *, is_zeros: bool = True) -> Memset:
    return Memset(address=1000, num_bytes=num_bytes, is_zeros=is_zeros)


def test_memsets_of_zeros_become_copies_in_the_same_place() -> None:
    graph = Graph(memset(), "kernel", memset(64), "kernel", memset())
    assert replace_memsets(graph, 7, ZEROS) == 3
    address = ZEROS.data_ptr()
    copies = {node: kind for node, kind in graph.kinds.items() if node > 4}
    assert sorted(copies.values()) == [("copy", 1000, address, n) for n in (4, 4, 64)]
    (middle,) = [node for node, kind in copies.items() if kind[-1] == 64]  # type: ignore[index]
    assert {(1, middle), (middle, 3)} <= graph.edges
    assert all(node in graph.kinds for edge in graph.edges for node in edge)


@pytest.mark.parametrize("kept", [memset(65), memset(is_zeros=False)], ids=["long", "no zeros"])
def test_other_memsets_stay(kept: Memset) -> None:
    graph = Graph("kernel", kept, "kernel")
    before = dict(graph.kinds)
    assert replace_memsets(graph, 7, ZEROS) == 0
    assert graph.kinds == before


@pytest.mark.parametrize("refused", ["memset_of", "neighbours", "add_copy", "connect"])
def test_what_cuda_refuses_leaves_the_graph_as_it_was(refused: str) -> None:
    graph = Graph("kernel", memset(), "kernel", refused=[refused])
    kinds, edges = dict(graph.kinds), set(graph.edges)
    assert replace_memsets(graph, 7, ZEROS) == 0
    assert (graph.kinds, graph.edges) == (kinds, edges)


def test_a_memset_that_cannot_be_removed_writes_the_same_zeros_again() -> None:
    graph = Graph("kernel", memset(), "kernel", refused=["remove"])
    assert replace_memsets(graph, 7, ZEROS) == 0
    assert {(0, 1), (1, 2), (0, 3), (3, 2)} == graph.edges


def test_an_error_that_is_of_no_consequence_is_forgotten() -> None:
    """The runtime keeps it, and PyTorch would raise it after its next kernel."""

    class Functions:
        """A library all of whose functions refuse."""

        def __init__(self) -> None:
            self.called: list[str] = []

        def __getattr__(self, name: str) -> Any:
            def function(*args: object) -> int:
                self.called.append(name)
                return 1

            return function

    runtime = Functions()
    editor = CudaGraphEditor(runtime, Functions())
    assert editor.add_copy(7, [], 1000, ZEROS.data_ptr(), 4) is None
    assert runtime.called == ["cudaGraphAddMemcpyNode1D", "cudaGetLastError"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_on_the_device_gives_the_same_bytes() -> None:
    """Memsets between kernels: zeros, another value, more than is replaced, and one at either end."""
    libraries, editor = cuda_runtime.libraries(), load_editor()
    assert libraries is not None
    assert editor is not None
    set_async = libraries[0].cudaMemsetAsync
    set_async.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
    x = torch.zeros(1 << 18, dtype=torch.uint8, device="cuda")

    def clear(offset: int, value: int, num_bytes: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert set_async(x.data_ptr() + offset, value, num_bytes, stream) == 0

    def work() -> None:
        clear(0, 0, 100)
        x.add_(3)
        clear(8, 0, 5)
        x.mul_(2)
        clear(1000, 7, 300)
        x.add_(1)
        clear(4096, 0, MAX_ZEROED_BYTES + 1)
        clear(1100, 0, MAX_ZEROED_BYTES)
        x.add_(1)
        clear(200, 0, 1)

    zeros = zeros_on(torch.device("cuda", torch.cuda.current_device()))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    assert len(editor.memset_nodes(graph.raw_cuda_graph())) == 6
    assert replace_memsets(editor, graph.raw_cuda_graph(), zeros) == 4
    assert len(editor.memset_nodes(graph.raw_cuda_graph())) == 2
    graph.instantiate()
    expected = torch.randint(0, 256, x.shape, dtype=torch.uint8, device="cuda")
    start = expected.clone()
    for _ in range(3):
        x.copy_(start)
        work()
        expected = x.clone()
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, expected)
    assert not zeros.any()
