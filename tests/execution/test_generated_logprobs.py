"""Log-probabilities through the engine: those of the model computed whole, however its forwards were cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_piecewise.generation.engine import EngineOptions, OfflineEngine
from sgl_piecewise.generation.logprobs import TokenLogprob
from sgl_piecewise.generation.requests import FinishReason, GenerationOutput, GenerationRequest
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.batch.request import LogprobRequest
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError

from .support import make_runner, plan, tiny_model

ASKED = (
    LogprobRequest(start_len=0, top_num=3),
    LogprobRequest(start_len=9, top_num=1),
    LogprobRequest(start_len=17),
    None,
    LogprobRequest(start_len=0),
)
LENGTHS = (5, 33, 17, 1, 20)
PLANS = {
    "eager": plan("eager", "eager", has_verify=False),
    "graphs": plan("full", "breakable", has_verify=False),
}


def requests() -> list[GenerationRequest]:
    """Some ask for all of their prompt, for its end, for new tokens alone, or for nothing; two are drawn."""
    generator = torch.Generator().manual_seed(5)
    return [
        GenerationRequest(
            prompt_ids=torch.randint(0, 64, (length,), generator=generator).tolist(),
            max_new_tokens=6,
            sampling=SamplingParams(temperature=float(index % 2) * 2, top_k=5, seed=index),
            logprobs=asked,
        )
        for index, (length, asked) in enumerate(zip(LENGTHS, ASKED, strict=True))
    ]


def engine(asked: Any, *, chunk: int = 7, **options: Any) -> OfflineEngine:
    return OfflineEngine(make_runner(asked, **options), options=EngineOptions(chunk_tokens=chunk))


def whole_logprobs(model: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """The distribution after every token, computed at once and without a cache."""
    with torch.no_grad(), use_forward_context(ForwardContext(attention=CausalAttention())):
        return model(torch.tensor(ids), torch.arange(len(ids))).float().log_softmax(-1)


def assert_right(output: GenerationOutput, asked: LogprobRequest | None) -> None:
    """Every entry is the model's own, and there are as many as were asked for."""
    if asked is None:
        assert output.logprobs is output.prompt_logprobs is None
        return
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    ids = output.prompt_ids + output.token_ids
    expected_TV = whole_logprobs(tiny_model(), ids)
    first = asked.start_len + 1
    assert [one.token_id for one in output.prompt_logprobs] == list(output.prompt_ids[first:])
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)
    places = [*range(first, len(output.prompt_ids)), *range(len(output.prompt_ids), len(ids))]
    for place, one in zip(places, (*output.prompt_logprobs, *output.logprobs), strict=True):
        assert one.logprob == pytest.approx(float(expected_TV[place - 1, ids[place]]), abs=1e-4)
        assert len(one.top) == asked.top_num
        values, token_ids = expected_TV[place - 1].topk(asked.top_num)
        assert [token_id for token_id, _ in one.top] == token_ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="chunked and mixed"),
        pytest.param({"chunk": 16, "max_extend_tokens": 48}, id="prompts whole"),
        pytest.param({"max_total_tokens": 48}, id="retracted and computed again"),
    ],
)
def test_they_are_those_of_the_model_computed_whole(name: str, options: dict[str, Any]) -> None:
    one = engine(PLANS[name], **options)
    outputs = one.generate(requests())
    assert (one.scheduler.num_retractions > 0) == ("max_total_tokens" in options)
    for output, asked in zip(outputs, ASKED, strict=True):
        assert output.finish_reason is FinishReason.LENGTH
        assert_right(output, asked)


def test_padding_and_company_change_no_bit() -> None:
    """One request alone in a graph of two, and with others: the same numbers, not only close ones."""
    together = engine(PLANS["graphs"]).generate(requests())
    alone = [engine(PLANS["graphs"]).generate([request])[0] for request in requests()]
    for index, (with_others, by_itself) in enumerate(zip(together, alone, strict=True)):
        assert with_others.token_ids == by_itself.token_ids, index
    assert together[0].prompt_logprobs == alone[0].prompt_logprobs


def test_asking_changes_no_token() -> None:
    asked = [output.token_ids for output in engine(PLANS["graphs"]).generate(requests())]
    silent = [
        GenerationRequest(
            prompt_ids=request.prompt_ids, max_new_tokens=request.max_new_tokens, sampling=request.sampling
        )
        for request in requests()
    ]
    assert [output.token_ids for output in engine(PLANS["graphs"]).generate(silent)] == asked


def test_a_stream_has_the_prompts_with_the_first_event_and_each_tokens_with_its_own() -> None:
    request = requests()[0]
    events = list(engine(PLANS["graphs"]).stream([request]))
    assert [len(event.prompt_logprobs) for event in events] == [LENGTHS[0] - 1, 0, 0, 0, 0, 0]
    for event in events:
        assert isinstance(event.logprob, TokenLogprob)
        assert event.logprob.token_id == event.token_id
        assert event.logprob.top[0][0] == event.token_id  # greedy takes the most likely


def test_a_token_that_ends_a_request_has_none() -> None:
    request = requests()[0]
    second = engine(PLANS["eager"]).generate([request])[0].token_ids[1]
    stopped = GenerationRequest(
        prompt_ids=request.prompt_ids,
        max_new_tokens=5,
        stop_token_ids=frozenset({second}),
        logprobs=request.logprobs,
    )
    output = engine(PLANS["eager"]).generate([stopped])[0]
    assert output.finish_reason is FinishReason.STOP_TOKEN
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)


def test_more_likely_tokens_than_the_model_knows_are_refused() -> None:
    request = GenerationRequest(
        prompt_ids=[1], max_new_tokens=1, logprobs=LogprobRequest(start_len=0, top_num=65)
    )
    with pytest.raises(ConfigError, match=r"65 most likely tokens, and the model knows 64"):
        engine(PLANS["eager"]).add(request)
