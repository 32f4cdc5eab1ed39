"""Points 2 and 4: what a marked function may return, and that captured code sees it as it was."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.support import WAYS, assert_equal, assert_like_eager, ramp
from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureError
from sgl_piecewise.runtime.mark import eager_on_graph


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenPair:
    first: torch.Tensor
    tag: str = "tag"


Named = collections.namedtuple("Named", ["values", "extra"])


def _shared_views(t: torch.Tensor) -> Any:
    whole = t * 2
    return whole[:2], whole[1:], whole, whole.t()


def _same_twice(t: torch.Tensor) -> Any:
    whole = t * 2
    return [whole, whole]


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t * 2,
    "none": lambda t: None,
    "tuple": lambda t: (t * 2, t + 1),
    "one_tuple": lambda t: (t * 2,),
    "empty_tuple": lambda t: (),
    "list": lambda t: [t * 2, t + 1],
    "dict": lambda t: {"a": t * 2, 3: t + 1},
    "ordered_dict": lambda t: collections.OrderedDict(b=t * 2, a=t + 1),
    "dataclass": lambda t: Pair(t * 2, [t + 1]),
    "frozen_dataclass": lambda t: FrozenPair(first=t * 2),
    "namedtuple": lambda t: Named(t * 2, None),
    "torch_return_type": lambda t: torch.topk(t, 2),
    "nested": lambda t: {"x": (t * 2, [Named(Pair(t + 1, None), (t - 1,))]), "y": None},
    "scalars": lambda t: (t * 2, 3, "word", 1.5, True, None, torch.float32, t.shape, 1 + 2j, b"b"),
    "only_scalars": lambda t: (1, 2.5),
    "integers": lambda t: t.to(torch.int64),
    "small_integers": lambda t: (t.to(torch.int8), t.to(torch.uint8)),
    "booleans": lambda t: t > 5,
    "half": lambda t: (t.to(torch.bfloat16), t.to(torch.float16)),
    "double": lambda t: t.to(torch.float64),
    "complex": lambda t: torch.complex(t, t + 1),
    "conjugate": lambda t: torch.complex(t, t + 1).conj(),
    "negative_bit": lambda t: torch.complex(t, t + 1).conj().imag,
    "no_elements": lambda t: (t[:0] * 2, t * 2),
    "no_dimensions": lambda t: t.sum(),
    "transposed": lambda t: (t * 2).t(),
    "offset_view": lambda t: (t * 2)[1:, 1:],
    "strided_view": lambda t: (t * 2)[::2, ::2],
    "expanded": lambda t: (t[:1] * 2).expand(4, -1),
    "expanded_scalar": lambda t: t.sum().expand(2, 3),
    "overlaps_itself": lambda t: (t * 2).as_strided((3, 4), (2, 1)),
    "views_of_one_storage": _shared_views,
    "same_tensor_twice": _same_twice,
    "argument": lambda t: t,
    "view_of_argument": lambda t: t[1:, ::2],
    "argument_and_fresh": lambda t: (t, t * 2, t.t()),
}


def _consume(result: Any) -> list[Any]:
    """Uses every leaf in captured code; strides and structure are what eager code sees too."""
    leaves, spec = tree.flatten(result)
    used: list[Any] = [str(spec.kind)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            used += [leaf * 3, list(leaf.stride()), str(leaf.dtype)]
        else:
            used.append(leaf)
    return used


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RESULTS)
def test_result_of_every_kind(graph_device: GraphDevice, kind: str, way: str) -> None:
    make = eager_on_graph(RESULTS[kind])
    calls = [(ramp(graph_device, 4, 4),), (ramp(graph_device, 4, 4, start=30.0),)]
    assert_like_eager(graph_device, lambda x: _consume(make(x + 1)), calls, **WAYS[way])


@pytest.mark.parametrize("kind", ["views_of_one_storage", "overlaps_itself", "same_tensor_twice"])
def test_write_through_one_leaf_shows_in_the_others(graph_device: GraphDevice, kind: str) -> None:
    """Leaves that share a storage share one boundary storage, so captured writes go where eager's do."""
    make = eager_on_graph(RESULTS[kind])

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        leaves = tree.flatten(make(x + 1))[0]
        leaves[0][0, 1:].add_(100)
        return [leaf * 1 for leaf in leaves]

    if kind == "overlaps_itself":

        def forward(x: torch.Tensor) -> list[torch.Tensor]:
            (leaf,) = tree.flatten(make(x + 1))[0]
            leaf[1, 2].fill_(-1)
            return [leaf * 1]

    calls = [(ramp(graph_device, 4, 4),), (ramp(graph_device, 4, 4, start=30.0),)]
    assert_like_eager(graph_device, forward, calls)


def test_result_is_dense_only_where_it_was(graph_device: GraphDevice) -> None:
    """Strides and the address modulo 16 bytes are kept: kernels choose code by both."""
    made: list[int] = []

    @eager_on_graph
    def sliced(t: torch.Tensor) -> torch.Tensor:
        result = (t * 2).flatten()[1:]
        made.append(result.data_ptr() % 16)
        return result

    seen: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        result = sliced(x)
        seen.append(result.data_ptr() % 16)
        return result + 1

    assert_like_eager(graph_device, forward, [(ramp(graph_device, 4, 4),)])
    assert set(seen) == set(made)


def test_several_consumers_of_one_result(graph_device: GraphDevice) -> None:
    @eager_on_graph
    def double(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        a = double(x)
        b = double(a)
        c = double(a) + b
        return a + b + double(c) + a

    assert_like_eager(graph_device, forward, [(ramp(graph_device, 4),), (ramp(graph_device, 4, start=7.0),)])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda t: object(), "object"),
        (lambda t: {"a": [t * 2, {1, 2}]}, "set"),
        (lambda t: (t * 2).to_sparse(), "sparse"),
    ],
    ids=["object", "set", "sparse"],
)
def test_result_that_captured_code_cannot_use_is_refused(
    graph_device: GraphDevice, make: Callable[[torch.Tensor], Any], named: str
) -> None:
    marked = eager_on_graph(make)
    with pytest.raises(CaptureError, match=named) as caught:
        capture(lambda x: marked(x + 1), (ramp(graph_device, 4, 4),), device=graph_device)
    assert marked.name in str(caught.value)
    assert "result" in str(caught.value)


def test_fresh_results_of_many_replays_do_not_mix(graph_device: GraphDevice) -> None:
    """The body keeps its results alive; captured code must read this call's, not an earlier one's."""
    kept: list[torch.Tensor] = []

    @eager_on_graph
    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t * 2)
        return kept[-1]

    captured = capture(lambda x: keep(x + 1) - 1, (ramp(graph_device, 4),), device=graph_device)
    inputs = [ramp(graph_device, 4, start=float(n)) for n in range(6)]
    results = [captured(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert_equal(result, (x + 1) * 2 - 1)
    for x, result in zip(inputs, kept[-6:], strict=True):
        assert_equal(result, (x + 1) * 2)
