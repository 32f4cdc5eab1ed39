"""Values of every backend against float64, over modes, head sizes, dtypes, windows and soft caps.

The pool holds NaN wherever no request's token was written, and padded rows bring NaN: what leaks
shows.
"""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.errors import ConfigError

from .conftest import needs_triton
from .support import TOLERANCE, Request, World, spec

EXTEND = [Request(3, 0, 75), Request(1, 40, 1), Request(5, 7, 33)]
DECODE = [Request(3, 0, 1), Request(1, 130, 1), Request(5, 64, 1)]
VERIFY = [Request(3, 0, 3), Request(1, 126, 3), Request(5, 63, 3)]

LAYERS = {
    "plain": spec(),
    "window": spec(window=20),
    "window_of_one": spec(window=1),
    "soft_cap": spec(logit_soft_cap=1.5),
    "both_and_one_kv_head": spec(num_heads=3, num_kv_heads=1, window=50, logit_soft_cap=30.0),
    "head_size_80": spec(head_dim=80),
    "head_size_96_multi_head": spec(head_dim=96, num_heads=2),
    "head_size_128": spec(head_dim=128),
    "head_size_256": spec(head_dim=256, num_heads=2, num_kv_heads=1),
}


def check(world: World, mode: ForwardMode, requests: list[Request], *, is_causal: bool = True) -> None:
    """Runs a padded batch and compares its real rows."""
    world.give_rows(requests)
    real = sum(one.new for one in requests)
    if requests[0].new == requests[-1].new:
        batch = world.batch(mode, requests, num_requests=len(requests) + 2)
    else:
        batch = world.batch(mode, requests, num_requests=len(requests) + 1, num_tokens=real + 40)
    tokens = world.new_tokens(batch, real)
    out = world.run(batch, tokens)
    assert out.shape == tokens[0].shape
    assert out.dtype == world.dtype
    assert out.is_contiguous()
    want = world.expected(requests, tokens, is_causal=is_causal)
    error = (out[:real].double().cpu() - want).abs().max().item()
    assert error < TOLERANCE[world.dtype], f"off by {error}"
    if batch.num_tokens_per_req is None:
        assert not out[real:].any(), "rows of no request are zero"


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_extend(layer: AttentionSpec, backend_name: str, device: torch.device) -> None:
    check(World(layer, backend=backend_name, device=device), ForwardMode.EXTEND, EXTEND)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_decode(layer: AttentionSpec, backend_name: str, device: torch.device) -> None:
    check(World(layer, backend=backend_name, device=device), ForwardMode.DECODE, DECODE)


@pytest.mark.parametrize("name", ["plain", "window", "both_and_one_kv_head"])
def test_verify(name: str, backend_name: str, device: torch.device) -> None:
    world = World(LAYERS[name], backend=backend_name, device=device)
    check(world, ForwardMode.TARGET_VERIFY, VERIFY)


@pytest.mark.parametrize(
    ("mode", "requests", "is_causal"),
    [
        (ForwardMode.EXTEND, [Request(3, 90, 75), Request(1, 40, 1)], True),
        (ForwardMode.DECODE, [Request(3, 64, 1), Request(1, 130, 1)], True),
        (ForwardMode.TARGET_VERIFY, [Request(3, 64, 3), Request(1, 126, 3)], True),
        (ForwardMode.DLLM_EXTEND, [Request(3, 64, 3), Request(1, 126, 3)], False),
    ],
    ids=["extend", "decode", "verify", "diffusion"],
)
def test_what_left_the_window_is_not_read(
    mode: ForwardMode,
    requests: list[Request],
    is_causal: bool,
    backend_name: str,
    device: torch.device,
) -> None:
    """Its slots were given back, and another request may have written NaN there; the table names them still."""
    window = 20
    world = World(spec(window=window), backend=backend_name, device=device)
    world.give_rows(requests)
    for one in requests:
        left = world.page_table[one.row, : one.prefix + 1 - window].long()
        assert left.numel() > 0
        for buffer in (world.pool.k_buffer(0), world.pool.v_buffer(0)):
            buffer[left] = torch.nan
    batch = world.batch(mode, requests)
    tokens = world.new_tokens(batch, batch.num_tokens)
    want = world.expected(requests, tokens, is_causal=is_causal)
    torch.testing.assert_close(world.run(batch, tokens).double().cpu(), want, rtol=2e-5, atol=2e-5)


def test_a_block_of_a_diffusion_model_sees_all_of_itself(backend_name: str, device: torch.device) -> None:
    world = World(spec(), backend=backend_name, device=device)
    check(world, ForwardMode.DLLM_EXTEND, VERIFY, is_causal=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("mode", "requests"),
    [(ForwardMode.EXTEND, EXTEND), (ForwardMode.DECODE, DECODE)],
    ids=["extend", "decode"],
)
def test_half_precision(
    mode: ForwardMode,
    requests: list[Request],
    dtype: torch.dtype,
    backend_name: str,
    device: torch.device,
) -> None:
    world = World(spec(window=70), backend=backend_name, device=device, dtype=dtype)
    check(world, mode, requests)


def test_mixed_batch_of_a_chunk_and_decoding_requests(backend_name: str, device: torch.device) -> None:
    requests = [Request(2, 64, 50), Request(4, 90, 1), Request(0, 3, 1)]
    check(World(spec(), backend=backend_name, device=device), ForwardMode.MIXED, requests)


def test_many_verify_rows_need_several_row_blocks(backend_name: str, device: torch.device) -> None:
    requests = [Request(3, 5, 20), Request(1, 100, 20)]
    layer = spec(num_heads=8, num_kv_heads=1, head_dim=32)
    check(World(layer, backend=backend_name, device=device), ForwardMode.TARGET_VERIFY, requests)


def test_an_idle_batch_gives_no_rows(backend_name: str, device: torch.device) -> None:
    world = World(spec(), backend=backend_name, device=device)
    batch = world.batch(ForwardMode.IDLE, [Request(0, 0, 0)])
    out = world.run(batch, world.new_tokens(batch, 0))
    assert out.shape == (0, 4, 64)


def test_new_tokens_are_in_the_pool_afterwards(backend_name: str, device: torch.device) -> None:
    """The next forward reads them there, also where this one did not."""
    world = World(spec(), backend=backend_name, device=device)
    world.give_rows(EXTEND)
    batch = world.batch(ForwardMode.EXTEND, EXTEND)
    tokens = world.new_tokens(batch, batch.num_tokens)
    world.run(batch, tokens)
    slots = batch.out_cache_loc
    assert torch.equal(world.pool.k_buffer(0)[slots], tokens[1])
    assert torch.equal(world.pool.v_buffer(0)[slots], tokens[2])


@needs_triton
def test_triton_refuses_what_it_would_misread() -> None:
    """On the GPU where there is one, elsewhere in Triton's interpreter."""
    from sgl_piecewise.runtime.attention.triton_calls import check_supported, num_splits_for

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(spec(), backend="triton", device=device)
    batch = world.batch(ForwardMode.DECODE, DECODE)
    q, k, v = world.new_tokens(batch, 3)
    world.backend.plan(batch)
    with pytest.raises(ConfigError, match="needs one dtype"):
        world.backend.run(q.double(), k, v, world.layer)
    with pytest.raises(ConfigError, match="heads that are contiguous"):
        world.backend.run(q.mT.contiguous().mT, k, v, world.layer)
    with pytest.raises(ConfigError, match="head sizes 16 to 256"):
        check_supported(spec(head_dim=8), torch.float32)
    with pytest.raises(ConfigError, match="float64"):
        check_supported(spec(), torch.float64)
    assert [num_splits_for(batch, 8, 8192) for batch in (1, 8, 32, 64)] == [32, 16, 4, 2]
    assert num_splits_for(1, 8, 64) == 1, "no part is under 64 positions"
