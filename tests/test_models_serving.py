"""Models over KV pools and graphs, against transformers' classes with the same random weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from models_matrix import (
    MATRIX_DEVICES,
    NUM_NEW,
    STRATEGIES,
    Judge,
    check_every_way,
    matrix_lengths,
)
from models_reference import TINY_EXPERTS, TINY_GEMMA, reference_model, saved
from models_serving import check_greedy, forced_logits, greedy_tokens, model_runner, serving_plan

from sgl_piecewise.models.weights.huggingface import load_huggingface
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", TINY_EXPERTS),
    "gemma3": ("gemma3_text", TINY_GEMMA),
    "windows only": ("gemma3_text", TINY_GEMMA | {"layer_types": ["sliding_attention"] * 4}),
}
PLANS = {"eager": ("eager", "eager"), "graphs": ("full", "breakable"), "whole graphs": ("full", "full")}
TOKEN_IDS = torch.randint(0, 96, (4, 100), generator=torch.Generator().manual_seed(1)).tolist()
LENGTHS = [60, 9, 33, 1]
"""Tokens of each prompt: over and under a chunk of 32 and Gemma's window of 16."""


@functools.cache
def reference_of(family: str) -> Any:
    model_type, settings = FAMILIES[family]
    return reference_model(model_type, **settings)


def runner_of(family: str, plan: str, folder: Path, **options: Any) -> ModelRunner:
    model = load_huggingface(saved(reference_of(family), folder), device="cpu", dtype=torch.float32)
    return model_runner(model, serving_plan(*PLANS[plan]), **options)


def in_tiers(*first: tuple[str, str]) -> list[Any]:
    """Returns every family under every plan; emulated graphs take seconds, so most are of the second tier."""
    return [
        pytest.param(family, plan, marks=() if (family, plan) in first else pytest.mark.slow)
        for family in FAMILIES
        for plan in PLANS
    ]


@pytest.mark.parametrize(
    ("family", "plan"),
    in_tiers(*((family, "eager") for family in FAMILIES), ("qwen3_moe", "graphs"), ("gemma3", "graphs")),
)
def test_logits_of_prefill_and_decode_equal_transformers(family: str, plan: str, tmp_path: Path) -> None:
    num_forced = 3 if plan == "eager" else 1
    sequences = [ids[: length + num_forced] for ids, length in zip(TOKEN_IDS, LENGTHS, strict=True)]
    found = forced_logits(runner_of(family, plan, tmp_path), sequences, LENGTHS)
    for sequence, length, ours in zip(sequences, LENGTHS, found, strict=True):
        with torch.no_grad():
            theirs = reference_of(family)(input_ids=torch.tensor([sequence])).logits[0, length - 1 :]
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(
    ("family", "plan"),
    in_tiers(("qwen3", "eager"), ("qwen3_moe", "eager"), ("gemma3", "eager")),
)
def test_greedy_tokens_equal_transformers_batched_chunked_and_one_by_one(
    family: str, plan: str, tmp_path: Path
) -> None:
    prompts = [ids[:length] for ids, length in zip(TOKEN_IDS, LENGTHS, strict=True)]
    runner = runner_of(family, plan, tmp_path)
    found = {
        "batched": greedy_tokens(runner, prompts, 6),
        "chunked": greedy_tokens(runner, prompts, 6, chunk_tokens=9),
        "one by one": greedy_tokens(runner, prompts, 6, is_one_by_one=True),
    }
    for generated in found.values():
        check_greedy(reference_of(family), prompts, generated, error=1e-4)


def test_a_request_does_not_depend_on_who_shares_its_experts(tmp_path: Path) -> None:
    """Bit for bit at one padded size, although its neighbours choose other experts, and padding none."""
    runner = runner_of("qwen3_moe", "graphs", tmp_path)
    lengths = [7, 5, 3, 2]
    sequences = [ids[: length + 2] for ids, length in zip(TOKEN_IDS, lengths, strict=True)]
    together = forced_logits(runner, sequences, lengths)
    for sequence, length, expected in zip(sequences, lengths, together, strict=True):
        assert torch.equal(forced_logits(runner, [sequence], [length])[0], expected)


def check_all_ways(
    family: str, strategy: str, folder: Path, lengths: list[int], num_new: int, *, device: str, **sizes: Any
) -> None:
    reference = reference_model(
        FAMILIES[family][0], **FAMILIES[family][1] | {"max_position_embeddings": 1024}
    )
    model = load_huggingface(saved(reference, folder), device=device, dtype=torch.float32)
    judge = Judge(reference.to(device), 1e-4)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]
    check_every_way(judge, model, strategy, prompts, num_new, **sizes)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "eager"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3"])
def test_greedy_tokens_equal_transformers_under_every_strategy(
    family: str, strategy: str, tmp_path: Path
) -> None:
    """Few prompts; all of them are in the matrix."""
    check_all_ways(
        family, strategy, tmp_path, [1, 9, 60], 4, device="cpu", max_extend_tokens=64, sizes=(32, 64)
    )


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", MATRIX_DEVICES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3"])
def test_every_strategy_and_way_on_all_prompts(
    family: str, strategy: str, device: str, tmp_path: Path
) -> None:
    """32 prompts of 1 to 900 tokens, 64 new tokens each."""
    check_all_ways(family, strategy, tmp_path, matrix_lengths(), NUM_NEW, device=device)
