"""The decoder against transformers' classes with the same weights, and its shapes."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import (
    TINY_EXPERTS,
    TINY_GEMMA,
    TINY_SETTINGS,
    logits_of,
    reference_logits,
    reference_model,
    saved,
)

from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.rope import RopeConfig, YarnScaling
from sgl_piecewise.models.shapes import SHAPES, named_shape
from sgl_piecewise.models.weights.huggingface import load_huggingface
from sgl_piecewise.models.weights.huggingface_config import config_from_hf
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.batch.real_tokens import RealTokens, TokenLayout, TokenShard
from sgl_piecewise.runtime.context import ForwardContext, local_real_tokens, use_forward_context
from sgl_piecewise.runtime.errors import CheckpointError, ConfigError
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set

TOKEN_IDS = torch.randint(0, TINY_SETTINGS["vocab_size"], (150,), generator=torch.Generator().manual_seed(1))

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, as many KV heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head, odd head size ratio": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, attention bias": (
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3, head size left to its default": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", TINY_EXPERTS),
    "qwen3_moe, weights of experts not normalised": ("qwen3_moe", TINY_EXPERTS | {"norm_topk_prob": False}),
    "qwen3_moe, every second layer": ("qwen3_moe", TINY_EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3_moe, a layer without": ("qwen3_moe", TINY_EXPERTS | {"mlp_only_layers": [0]}),
    "gemma3": ("gemma3_text", TINY_GEMMA),
    "gemma3, attention bias, untied": (
        "gemma3_text",
        TINY_GEMMA | {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3, logits capped": ("gemma3_text", TINY_GEMMA | {"final_logit_softcapping": 0.7}),
    "gemma3, far layers scaled, bases chosen": (
        "gemma3_text",
        TINY_GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            }
        },
    ),
    "gemma3, no layer sees everything": (
        "gemma3_text",
        TINY_GEMMA | {"layer_types": ["sliding_attention"] * 4},
    ),
}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, all settings": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn, attention factor given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
    },
}


def assert_equal_logits(reference: Any, folder: Path) -> None:
    ours = logits_of(load_huggingface(folder, device="cpu", dtype=torch.float32), TOKEN_IDS)
    theirs = reference_logits(reference, TOKEN_IDS)
    assert theirs.std() > 0.05, "the comparison would say nothing"
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_each_family(family: str, tmp_path: Path) -> None:
    model_type, settings = FAMILIES[family]
    reference = reference_model(model_type, **settings)
    assert_equal_logits(reference, saved(reference, tmp_path))


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_equal_transformers_under_each_rope_scaling(
    scaling: str, head_dim: int, tmp_path: Path
) -> None:
    parameters = {"rope_theta": 500.0, **SCALINGS[scaling]}
    reference = reference_model("llama", head_dim=head_dim, rope_parameters=parameters)
    assert_equal_logits(reference, saved(reference, tmp_path))


def test_a_scaling_changes_the_logits_so_the_test_above_can_fail() -> None:
    config = config_from_hf(
        {"model_type": "llama", **TINY_SETTINGS, "rope_parameters": {"rope_theta": 500.0}}, origin="test"
    )
    plain = logits_of(random_decoder(config, device="cpu", dtype=torch.float32), TOKEN_IDS)
    for scaling in ("linear", "llama3", "yarn"):
        settings = {
            "model_type": "llama",
            **TINY_SETTINGS,
            "rope_parameters": {"rope_theta": 500.0, **SCALINGS[scaling]},
        }
        scaled = random_decoder(config_from_hf(settings, origin="test"), device="cpu", dtype=torch.float32)
        assert (logits_of(scaled, TOKEN_IDS) - plain).abs().max() > 0.01


def test_the_older_spelling_of_rope_settings_means_the_same() -> None:
    base = {"model_type": "llama", **TINY_SETTINGS}
    older = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    newer = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}}
    assert config_from_hf({**base, **older}, origin="a") == config_from_hf({**base, **newer}, origin="b")


@pytest.mark.parametrize("kind", ["longrope", "liner", "mrope"])
def test_an_unknown_rope_scaling_raises_and_lists_the_known(kind: str) -> None:
    settings = {"model_type": "llama", **TINY_SETTINGS, "rope_scaling": {"type": kind, "factor": 2.0}}
    with pytest.raises(ConfigError, match=f"'{kind}'.*linear, llama3, yarn"):
        config_from_hf(settings, origin="config.json")


def test_a_scaling_without_its_settings_names_the_missing_one() -> None:
    settings = {
        "model_type": "llama",
        **TINY_SETTINGS,
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0},
    }
    with pytest.raises(CheckpointError, match="needs the setting 'low_freq_factor'"):
        config_from_hf(settings, origin="config.json")


def test_frequencies_stay_exact_when_the_model_is_cast_or_moved() -> None:
    """In bfloat16 the angle of a far token would be off by whole turns."""
    model = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32)
    expected = SHAPES["tiny"].rope.inverse_frequencies(32)
    for changed in (model.to(torch.bfloat16), copy.deepcopy(model), model.to_empty(device="cpu")):
        assert changed.rotary.inverse_frequencies.dtype == torch.float32
        assert torch.equal(changed.rotary.inverse_frequencies, expected)


# As published with each model.
NUM_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_named_shape_has_the_published_number_of_parameters(name: str) -> None:
    model = Decoder(named_shape(name), device="meta", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


def test_every_named_shape_but_the_made_up_one_is_checked_against_its_publication() -> None:
    assert SHAPES.keys() - NUM_PARAMETERS.keys() == {"tiny", "tiny-moe", "tiny-gemma3"}


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3-8b'\?"):
        named_shape("qwen3-8bb")


def test_random_weights_follow_the_seed() -> None:
    first, same, other = (
        logits_of(random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32, seed=seed), [1, 2, 3])
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("has_tied_embeddings", [False, True])
def test_random_weights_stay_finite_and_varied_at_36_layers_in_bfloat16(has_tied_embeddings: bool) -> None:
    config = dataclasses.replace(
        SHAPES["tiny"], num_layers=36, vocab_size=2000, has_tied_embeddings=has_tied_embeddings
    )
    logits = logits_of(random_decoder(config, device="cpu", dtype=torch.bfloat16), torch.arange(64)).float()
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2.0
    assert logits.argmax(-1).unique().numel() > 8


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_any_number_of_tokens_runs(num_tokens: int) -> None:
    model = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32)
    assert logits_of(model, torch.arange(num_tokens)).shape == (num_tokens, 256)


def test_logits_of_picked_rows_equal_those_rows_of_all_logits() -> None:
    model = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float64)
    input_ids, positions = torch.arange(6), torch.arange(6)

    class OwnValues:
        def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any) -> torch.Tensor:
            return v.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)

    with use_forward_context(ForwardContext(attention=OwnValues())):
        all_logits = model(input_ids, positions)
        picked = model.compute_logits(model.hidden_states(input_ids, positions)[-2:])
    assert torch.allclose(picked, all_logits[-2:], atol=1e-9)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-gemma3"])
def test_models_of_other_kernels_give_the_same_logits(name: str) -> None:
    """On the GPU where there is one, elsewhere in Triton's interpreter."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = kernel_set("triton", device)
    plain = random_decoder(SHAPES[name], device=device, dtype=torch.float32)
    fused = random_decoder(SHAPES[name], device=device, dtype=torch.float32, kernels=kernels)
    input_ids = torch.arange(21, device=device)
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        difference = fused(input_ids, input_ids) - plain(input_ids, input_ids)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-gemma3"])
def test_layers_can_be_run_some_at_a_time(name: str) -> None:
    model = random_decoder(SHAPES[name], device="cpu", dtype=torch.float32)
    input_ids = torch.arange(20)
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        expected = model.hidden_states(input_ids, input_ids)
        state = model.begin_layers(input_ids, input_ids)
        for index in range(model.num_layers):
            state = model.run_layers(state, range(index, index + 1))
        assert torch.equal(model.end_layers(state), expected)


def test_padded_rows_reach_no_expert_and_no_other_row() -> None:
    model = random_decoder(SHAPES["tiny-moe"], device="cpu", dtype=torch.float32)
    input_ids = torch.arange(20)
    real_tokens = RealTokens(num_real_tokens=torch.tensor(12, dtype=torch.int32))
    context = ForwardContext(attention=CausalAttention())
    with use_forward_context(context):
        everything = model(input_ids, input_ids)
    with use_forward_context(dataclasses.replace(context, real_tokens=real_tokens)):
        padded = model(input_ids, input_ids)
    assert torch.equal(padded[:12], everything[:12])
    assert not torch.allclose(padded[12:], everything[12:])


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        (TokenShard(), 12),
        (TokenShard(rank=0, num_ranks=2), 10),
        (TokenShard(rank=1, num_ranks=2), 2),
        (TokenShard(rank=1, num_ranks=2, layout=TokenLayout.RANK_LOCAL), 12),
    ],
)
def test_a_rank_counts_its_own_share_of_the_real_rows(shard: TokenShard, expected: int) -> None:
    """GLOBAL counts 12 real tokens; a rank holds 10 rows, or 20 where it is alone."""
    rows = torch.zeros(20 if shard.num_ranks == 1 or shard.layout is TokenLayout.RANK_LOCAL else 10, 4)
    real_tokens = RealTokens(num_real_tokens=torch.tensor(12, dtype=torch.int32), shard=shard)
    with use_forward_context(ForwardContext(attention=CausalAttention(), real_tokens=real_tokens)):
        assert local_real_tokens(rows).item() == expected


def test_capped_attention_without_a_cache_is_what_a_loop_gives() -> None:
    spec = AttentionSpec(
        layer_index=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.7, window=3, logit_soft_cap=1.5
    )
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    found = CausalAttention().run(q, k, v, spec)
    for row in range(9):
        seen = slice(max(0, row - 2), row + 1)
        for head in range(4):
            scores = 1.5 * torch.tanh(k[seen, head // 2] @ q[row, head] * 0.7 / 1.5)
            assert torch.allclose(found[row, head], scores.softmax(0) @ v[seen, head // 2], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (4, 4, 64), (6, 2, 256), (8, 2, 80)]
)
def test_attention_of_few_and_of_many_tokens_is_right_on_a_gpu(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Against float64."""
    spec = AttentionSpec(
        layer_index=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )
    attention = CausalAttention()
    for num_tokens in (1, 2, 7, 16, 63, 64, 65, 200):
        q, k, v = (
            torch.randn(num_tokens, many, head_dim, device="cuda", dtype=dtype)
            for many in (heads, kv_heads, kv_heads)
        )
        found = attention.run(q, k, v, spec)
        assert found.is_contiguous()
        expected = attention.run(*(t.double().cpu() for t in (q, k, v)), spec)
        torch.testing.assert_close(found.double().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_layers_are_equal_but_for_the_spec_at_the_mark() -> None:
    """A compiler traces one layer for all only if nothing else tells them apart."""
    model = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32)

    def plain_attributes(layer: torch.nn.Module) -> list[tuple[str, Any]]:
        return [
            (f"{name}.{key}", value)
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_") and key != "spec"
        ]

    first, second = model.layers
    assert plain_attributes(first) == plain_attributes(second)
    assert [layer.self_attn.spec.layer_index for layer in model.layers] == [0, 1]


def test_parameters_ask_for_no_gradients() -> None:
    model = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not logits_of(model, [1, 2]).requires_grad


def test_tied_embeddings_are_one_parameter() -> None:
    config = dataclasses.replace(SHAPES["tiny"], has_tied_embeddings=True)
    model = random_decoder(config, device="cpu", dtype=torch.float32)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_depth_can_be_chosen() -> None:
    assert len(Decoder(SHAPES["tiny"].with_num_layers(5), device="meta", dtype=torch.float32).layers) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads .4. must be a multiple of num_kv_heads .3."),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be a positive whole number, got 64.0"),
    ],
)
def test_contradicting_sizes_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SHAPES["tiny"], **change)


def test_a_sequence_beyond_the_positions_is_refused_by_number() -> None:
    config = dataclasses.replace(SHAPES["tiny"], max_positions=100)
    config.check_length(100)
    with pytest.raises(ConfigError, match="101 tokens is longer than the 100 positions"):
        config.check_length(101)


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    settings = {
        "model_type": "qwen3",
        **TINY_SETTINGS,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    }
    assert config_from_hf(settings, origin="config.json").max_positions == 2048


def test_the_older_settings_of_gemmas_windows_mean_the_same() -> None:
    base = {"model_type": "gemma3_text", **TINY_SETTINGS, "num_hidden_layers": 12, "sliding_window": 8}
    older = {"sliding_window_pattern": 3, "rope_local_base_freq": 300.0, "rope_theta": 5000.0}
    newer = {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    config = config_from_hf({**base, **older}, origin="a")
    assert config == config_from_hf({**base, **newer}, origin="b")
    assert [config.window_of(index) for index in range(4)] == [8, 8, None, 8]


def test_yarn_with_a_ramp_of_no_width_stays_finite() -> None:
    scaling = YarnScaling(factor=2.0, original_max_positions=6, beta_fast=1.0, beta_slow=1.0)
    frequencies = RopeConfig(theta=1e4, scaling=scaling).inverse_frequencies(16)
    assert all(math.isfinite(value) for value in frequencies.tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen4"}, r"'qwen4' is not supported\. did you mean 'qwen[23]'\?"),
        ({"model_type": None}, "names no architecture. Known: llama, qwen2, qwen3"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "layer_types": ["chunked_attention"]}, "layer_types"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "'sliding_window' is missing"),
        (
            {"model_type": "gemma3_text", "sliding_window": 8, "final_logit_softcapping": -1.0},
            "final_logit_cap must be over 0",
        ),
        ({"model_type": "gemma3"}, r"'gemma3' is not supported\. did you mean 'gemma3_text'"),
        ({"model_type": "qwen3_moe"}, "'num_local_experts' is missing"),
        (
            {"model_type": "qwen3_moe", **TINY_EXPERTS, "num_experts_per_tok": 9},
            r"num_experts_per_token \(9\) is over num_experts \(8\)",
        ),
        (
            {"model_type": "qwen3_moe", **TINY_EXPERTS, "decoder_sparse_step": 0},
            "sparse_step must be a positive",
        ),
    ],
)
def test_a_config_that_would_compute_something_else_raises(change: dict[str, Any], message: str) -> None:
    settings = {"model_type": "llama", **TINY_SETTINGS, **change}
    with pytest.raises((CheckpointError, ConfigError), match=message):
        config_from_hf(settings, origin="config.json")
