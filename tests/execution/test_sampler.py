"""Sampling: each request by itself, the same draw whoever shares the batch, NaN told by name."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.sampling import NO_TOP_K, BatchSampling, SamplingParams
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.sampler.draws import uniform_draws
from sgl_piecewise.runtime.sampler.sampler import INVALID_TOKEN, invalid_logits, sample

VOCABULARY = 50


def batch_of(params: list[SamplingParams]) -> BatchSampling:
    return BatchSampling(
        is_all_greedy=all(one.is_greedy for one in params),
        temperatures=torch.tensor([one.temperature for one in params]),
        top_ks=torch.tensor([one.top_k for one in params], dtype=torch.int32),
        top_ps=torch.tensor([one.top_p for one in params]),
        seeds=torch.tensor([one.seed for one in params]),
    )


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * 3


def test_greedy_takes_the_largest_also_beside_random_requests() -> None:
    scores = logits(3)
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=2.0, top_k=1)]
    tokens = sample(scores, batch_of(params), torch.tensor([1, 2, 3]))
    assert tokens[0] == scores[0].argmax()
    assert tokens[2] == scores[2].argmax()


@pytest.mark.parametrize("temperature", [1e-4, 1e-38, 1e-39, 1e-44, 1e-50])
def test_a_temperature_near_zero_takes_the_largest(temperature: float) -> None:
    """vllm-project/vllm#1623, #2937: logits over a tiny temperature overflowed; the texts were empty or an error."""
    scores = logits(8)
    scores[:, 10:20] = -torch.inf
    tokens = sample(scores, batch_of([SamplingParams(temperature=temperature)] * 8), torch.arange(8))
    assert torch.equal(tokens, scores.argmax(-1))


def test_frequencies_follow_the_softmax() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 20_000
    params = SamplingParams(temperature=0.7, seed=5)
    tokens = sample(scores.expand(count, -1), batch_of([params] * count), torch.arange(count))
    found = torch.bincount(tokens, minlength=4) / count
    assert torch.allclose(found, (scores / 0.7).softmax(0), atol=0.01)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {1, 2}),
        (SamplingParams(temperature=1.0, top_p=0.6), {2}),
        (SamplingParams(temperature=1.0, top_p=0.8), {1, 2}),
        (SamplingParams(temperature=1.0, top_p=1e-6), {2}),
        (SamplingParams(temperature=1.0, top_k=100), {0, 1, 2, 3}),
    ],
)
def test_only_allowed_tokens_are_drawn_and_all_of_them(params: SamplingParams, allowed: set[int]) -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, -0.5])
    tokens = sample(scores.expand(500, -1), batch_of([params] * 500), torch.arange(500))
    assert set(tokens.tolist()) == allowed


def test_a_draw_does_not_depend_on_who_shares_the_batch() -> None:
    scores = logits(4)
    params = [SamplingParams(temperature=0.5 + row, top_k=10, top_p=0.9, seed=row) for row in range(4)]
    lengths = torch.tensor([3, 9, 1, 4])
    together = sample(scores, batch_of(params), lengths)
    for row in range(4):
        alone = sample(scores[row : row + 1], batch_of([params[row]]), lengths[row : row + 1])
        assert alone.item() == together[row]


def test_draws_are_uniform_and_differ_by_seed_and_length() -> None:
    seeds, lengths = torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij")
    draws = uniform_draws(seeds.flatten(), lengths.flatten())
    assert draws.unique().numel() > 9_900
    assert 0 <= draws.min() <= draws.max() < 1
    assert (torch.histc(draws, 10, 0, 1) - 1000).abs().max() < 120
    large = torch.tensor([2**63 - 1])
    assert 0 <= uniform_draws(large, large).item() < 1


@pytest.mark.parametrize("wrong", ["one nan", "an overflow", "all forbidden"])
def test_a_row_that_says_nothing_gives_no_token_and_the_error_names_its_request(wrong: str) -> None:
    scores = logits(3)
    if wrong == "all forbidden":
        scores[1] = -torch.inf
    else:
        scores[1, 7] = torch.nan if wrong == "one nan" else torch.inf
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        tokens = sample(scores, batch_of([params] * 3), torch.tensor([1, 2, 3])).tolist()
        assert tokens[1] == INVALID_TOKEN
        assert INVALID_TOKEN not in (tokens[0], tokens[2])
    assert "'poem'" in str(invalid_logits(Req.of_prompt("poem", [1])))


def test_forbidden_tokens_are_never_drawn() -> None:
    scores = torch.full((200, 4), -torch.inf)
    scores[:, 2] = 0.0
    params = SamplingParams(temperature=1.0, top_k=NO_TOP_K)
    assert set(sample(scores, batch_of([params] * 200), torch.arange(200)).tolist()) == {2}


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed"):
        SamplingParams(seed=-1)
