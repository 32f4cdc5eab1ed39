"""Call sites and handles, apart from Dynamo."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from sgl_piecewise import eager_on_graph
from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.errors import CompileError
from sgl_piecewise.runtime.mark_call_site import (
    ArgumentLeaf,
    CallSite,
    ResultLeaf,
    call_site,
    register_call_site,
)
from sgl_piecewise.runtime.mark_handles import handle_of, num_handles
from sgl_piecewise.runtime.mark_operator import call_marked


class Thing:
    pass


class Slotted:
    __slots__ = ()


def site(name: str, constant: Any) -> CallSite:
    """A call with one constant argument that returns None."""
    arguments = tree.Spec(tuple, (0, 1), (tree.Spec(tuple, (0,), (tree.LEAF,)), tree.Spec(dict)))
    return CallSite(
        name=name,
        arguments=arguments,
        argument_leaves=(ArgumentLeaf(kind="constant", value=constant),),
        results=tree.LEAF,
        result_leaves=(ResultLeaf(kind="constant", value=None),),
    )


def test_equal_call_sites_have_one_signature_and_others_never_do() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "Odd()"

    assert register_call_site(site("m", 1)) == register_call_site(site("m", 1)) == "m(1) -> None"
    assert register_call_site(site("m", True)) == "m(True) -> None"
    one, other = Odd(), Odd()
    first, second = register_call_site(site("m", one)), register_call_site(site("m", other))
    assert first != second
    assert call_site(first).argument_leaves[0].value is one
    assert call_site(second).argument_leaves[0].value is other


def test_unknown_signature_says_where_it_comes_from() -> None:
    with pytest.raises(CompileError, match="traced in another process"):
        call_site("never(1) -> None")


def test_handle_is_one_per_object_and_dies_with_it() -> None:
    thing, other = Thing(), Thing()
    gc.collect()  # What other tests left is not counted.
    before = num_handles()
    assert handle_of(thing) is handle_of(thing)
    assert handle_of(thing).item() != handle_of(other).item()
    assert num_handles() == before + 2
    del thing, other
    gc.collect()
    assert num_handles() == before


@pytest.mark.parametrize("value", [(1, 2), Slotted()], ids=["tuple", "slots"])
def test_object_without_weak_references_lives_as_long_as_its_handle(value: Any) -> None:
    seen: list[Any] = []
    mark = eager_on_graph(seen.append)
    before = num_handles()
    object_site = CallSite(
        name="seen",
        arguments=site("seen", 0).arguments,
        argument_leaves=(ArgumentLeaf(kind="object", index=0),),
        results=tree.LEAF,
        result_leaves=(ResultLeaf(kind="constant", value=None),),
    )
    handle = handle_of(value)
    assert call_marked([], [handle_of(mark), handle.clone()], [], register_call_site(object_site)) == []
    assert seen[0] is value
    del handle
    assert num_handles() == before + 1  # The mark's.


def test_equal_plain_values_share_a_handle_and_others_do_not() -> None:
    """A recording holds the handle's address: a number that is the same at each call must not look changed."""
    assert handle_of(2.5) is handle_of(float("2.5"))
    assert handle_of(0.0) is not handle_of(-0.0)
    assert handle_of(1) is not handle_of(True)
    assert handle_of(1) is not handle_of(1.0)


def test_call_for_an_object_that_is_gone_is_an_error() -> None:
    thing = Thing()
    handle = handle_of(thing)
    del thing
    gc.collect()
    with pytest.raises(CompileError, match="no longer exists"):
        call_marked([], [handle], [], register_call_site(site("m", 1)))


def test_handles_are_real_host_tensors_whatever_is_on() -> None:
    with torch.device("meta"), torch.inference_mode():
        handle = handle_of(Slotted())
    assert handle.device.type == "cpu"
    assert handle.dtype is torch.int64
    assert not handle.is_inference()


def test_threads_get_one_handle() -> None:
    thing = Thing()
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(handle_of(thing))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(handle) for handle in found}) == 1
