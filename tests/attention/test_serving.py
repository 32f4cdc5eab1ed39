"""Attention under real batches: scheduling, both sub-pools of a hybrid model, padding, over many forwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import serving_support
import torch

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.plan import PlanLimits
from sgl_piecewise.runtime.attention.torch_paged import TorchAttention
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.padding import pad_batch
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.schedule_batch import SpeculativeInput
from sgl_piecewise.runtime.batch.scheduling import release_out_of_window, schedule
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.kv.translator import bind_and_verify_backends

from .support import dense_attention

LIMITS = PlanLimits(max_requests=6, max_tokens=64, max_context=64)
LAYERS = [
    AttentionSpec(
        layer_index=index,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        scale=0.5,
        window=serving_support.WINDOW if index % 2 else None,
    )
    for index in range(4)
]


def backend_at(world: serving_support.World, layers: Sequence[AttentionSpec] = LAYERS) -> TorchAttention:
    backend = TorchAttention(layers, limits=LIMITS)
    bind_and_verify_backends(world.kv_translator, {"torch": backend}, [layer.layer_index for layer in layers])
    return backend


def test_many_forwards_of_a_hybrid_model_see_their_own_tokens() -> None:
    """Every sub-pool is read where it was written; scratch slots are poisoned, so padding shows."""
    world = serving_support.world()
    world.pool.poison_scratch()
    backend = backend_at(world)
    reqs = [Req.of_prompt(f"request {index}", list(range(1, 41))) for index in range(3)]
    history = {
        layer.layer_index: [torch.empty(2, 0, 2, 4) for _ in reqs] for layer in LAYERS
    }  # keys and values of every request so far
    steps: list[tuple[ForwardMode, tuple[int, ...]]] = [
        (ForwardMode.EXTEND, (7, 3, 5)),
        *[(ForwardMode.DECODE, (1, 1, 1))] * 4,
        (ForwardMode.MIXED, (6, 1, 1)),
        (ForwardMode.TARGET_VERIFY, (4, 4, 4)),
        (ForwardMode.DECODE, (1, 1, 1)),
    ]
    for mode, new_lens in steps:
        speculative = SpeculativeInput(num_tokens_per_req=4) if mode.is_target_verify() else None
        decision = schedule(mode, reqs, new_lens, world.allocator, world.table, speculative=speculative)
        batch = world.forward(decision)
        is_ragged = batch.num_tokens_per_req is None
        padded = pad_batch(batch, batch_size=5, num_tokens=batch.num_tokens + 9 if is_ragged else None)
        backend.plan(padded)
        for layer in LAYERS:
            qkv = torch.randn(padded.num_tokens, 8, 4)
            qkv[batch.num_tokens :] = torch.nan
            q, k, v = qkv.split([4, 2, 2], dim=1)
            out = backend.run(q, k, v, layer)
            begin = 0
            for index, new in enumerate(new_lens):
                rows = slice(begin, begin + new)
                begin += new
                past = history[layer.layer_index][index]
                past = torch.cat([past, torch.stack([k[rows], v[rows]])], dim=1)
                history[layer.layer_index][index] = past
                wanted = dense_attention(
                    q[rows].double(), past[0].double(), past[1].double(), past.shape[1] - new, layer
                )
                torch.testing.assert_close(out[rows].double(), wanted, rtol=1e-5, atol=1e-5)
        for req, new in zip(reqs, new_lens, strict=True):
            req.num_computed_tokens += new
            release_out_of_window(req, world.pool, world.allocator, world.table)


def test_layers_that_the_pool_does_not_fit_are_refused() -> None:
    world = serving_support.world()
    wide = AttentionSpec(layer_index=0, num_heads=4, num_kv_heads=4, head_dim=4, scale=1.0)
    with pytest.raises(ConfigError, match="4 KV heads of size 4"):
        backend_at(world, [wide])
    unlimited = AttentionSpec(layer_index=1, num_heads=4, num_kv_heads=2, head_dim=4, scale=1.0)
    with pytest.raises(ConfigError, match="keeps only 4 tokens"):
        backend_at(world, [unlimited])
    backend = TorchAttention(LAYERS, limits=PlanLimits(max_requests=1, max_tokens=1, max_context=65))
    with pytest.raises(ConfigError, match="64 columns"):
        backend.bind_kv(world.kv_translator)


def test_what_comes_too_early_or_is_too_large_is_refused() -> None:
    world = serving_support.world()
    unbound = TorchAttention(LAYERS, limits=LIMITS)
    req = Req.of_prompt("request", list(range(1, 60)))
    batch = world.forward(schedule(ForwardMode.EXTEND, [req], [5], world.allocator, world.table))
    with pytest.raises(ConfigError, match="no KV pool yet"):
        unbound.plan(batch)
    backend = backend_at(world)
    tokens = torch.zeros(5, 4, 4), torch.zeros(5, 2, 4), torch.zeros(5, 2, 4)
    with pytest.raises(ConfigError, match="no batch is planned"):
        backend.run(*tokens, LAYERS[0])
    backend.plan(pad_batch(batch, num_tokens=6))
    with pytest.raises(ConfigError, match="brings 5 tokens"):
        backend.run(*tokens, LAYERS[0])
    with pytest.raises(ConfigError, match="at most 64"):
        backend.plan(pad_batch(batch, num_tokens=65))
    with pytest.raises(ConfigError, match="at most 6"):
        backend.plan(pad_batch(batch, batch_size=7))


def test_layers_that_make_no_sense_are_refused() -> None:
    sizes = {"layer_index": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 1.0}
    for wrong, match in [
        ({"num_kv_heads": 3}, "do not share"),
        ({"window": 0}, "window must be at least 1"),
        ({"logit_soft_cap": 0.0}, "over 0"),
    ]:
        with pytest.raises(ConfigError, match=match):
            AttentionSpec(**{**sizes, **wrong})
