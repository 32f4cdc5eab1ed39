"""The reference backend: a request's result does not depend on the rest, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode

from .support import Request, World, spec

LAYERS = [spec(num_heads=3, num_kv_heads=1), spec(num_heads=4, num_kv_heads=2, head_dim=80, window=30)]
ME = {
    ForwardMode.EXTEND: Request(7, 21, 45),
    ForwardMode.DECODE: Request(7, 21, 1),
    ForwardMode.TARGET_VERIFY: Request(7, 21, 4),
}


def result_in(
    layer: AttentionSpec,
    mode: ForwardMode,
    others: list[Request],
    *,
    place: int,
    num_requests: int | None = None,
    num_tokens: int | None = None,
    is_for_graph: bool = False,
    device: torch.device,
) -> torch.Tensor:
    """Returns my rows of a batch in which I stand among others; my own tokens are always the same."""
    me = ME[mode]
    torch.manual_seed(hash((tuple(others), place)) % 1000)
    world = World(layer, backend="torch", device=device)
    requests = [*others[:place], me, *others[place:]]
    world.give_rows(requests)
    batch = world.batch(mode, requests, num_requests=num_requests, num_tokens=num_tokens)
    tokens = world.new_tokens(batch, sum(one.new for one in requests))
    begin = sum(one.new for one in requests[:place])
    generator = torch.Generator().manual_seed(5)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(device)

    for tensor in tokens:
        tensor[begin : begin + me.new] = mine(tensor[begin : begin + me.new])
    slots = world.page_table[me.row, : me.prefix].long()
    world.pool.k_buffer(0)[slots] = mine(world.pool.k_buffer(0)[slots])
    world.pool.v_buffer(0)[slots] = mine(world.pool.v_buffer(0)[slots])
    plan = world.backend.plan_for_capture if is_for_graph else world.backend.plan
    plan(batch)
    return world.backend.run(*tokens, layer)[begin : begin + me.new].clone()


@st.composite
def companies(draw: st.DrawFn, mode: ForwardMode) -> tuple[list[Request], int]:
    num_others = draw(st.integers(0, 4))
    new = st.integers(0, 30) if mode is ForwardMode.EXTEND else st.just(ME[mode].new)
    others = [Request(row, draw(st.integers(0, 80)), draw(new)) for row in range(num_others)]
    return others, draw(st.integers(0, num_others))


@pytest.mark.parametrize("mode", ME)
@pytest.mark.parametrize("layer", LAYERS, ids=["plain", "window"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_company_order_padding_and_capture_change_no_bit(
    layer: AttentionSpec, mode: ForwardMode, data: st.DataObject
) -> None:
    """Also across padded sizes, on the CPU; on a GPU a library may choose another kernel for another size."""
    device = torch.device("cpu")
    alone = result_in(layer, mode, [], place=0, device=device)
    others, place = data.draw(companies(mode))
    total = sum(one.new for one in others) + ME[mode].new
    padding = data.draw(st.integers(0, 20)) if mode is ForwardMode.EXTEND else 0
    among = result_in(
        layer,
        mode,
        others,
        place=place,
        num_requests=data.draw(st.integers(len(others) + 1, 6)),
        num_tokens=total + padding if mode is ForwardMode.EXTEND else None,
        is_for_graph=data.draw(st.booleans()),
        device=device,
    )
    assert torch.equal(alone, among)


@pytest.mark.parametrize("mode", ME)
def test_company_and_order_change_no_bit_at_equal_padded_size(
    mode: ForwardMode, device: torch.device
) -> None:
    new = 20 if mode is ForwardMode.EXTEND else ME[mode].new
    ones = [Request(0, 5, new), Request(1, 60, new), Request(2, 0, new)]
    results = [
        result_in(
            LAYERS[0],
            mode,
            others,
            place=place,
            num_requests=5,
            num_tokens=128 if mode is ForwardMode.EXTEND else None,
            is_for_graph=True,
            device=device,
        )
        for others, place in [([], 0), (ones, 0), (ones, 2), (ones[::-1], 3), (ones[:1], 1)]
    ]
    for other in results[1:]:
        assert torch.equal(results[0], other)
