"""Which rows need logits: checked by brute force over every token of every request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving_support import World, world

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.logprobs import logit_rows
from sgl_piecewise.runtime.batch.padding import pad_batch
from sgl_piecewise.runtime.batch.request import LogprobRequest, Req
from sgl_piecewise.runtime.batch.scheduling import schedule
from sgl_piecewise.runtime.errors import BatchError

# Prompt length, chunk that runs now, prefix before it, start of the wanted log-probabilities (None: none).
requests = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 8), st.none() | st.integers(0, 10)),
    min_size=1,
    max_size=5,
)


def request(at: World, index: int, prompt: int, prefix: int, start: int | None) -> Req:
    req = Req.of_prompt(
        f"request {index}",
        [100 * (index + 1) + token for token in range(prompt)],
        logprobs=None if start is None else LogprobRequest(start_len=start, top_num=index),
    )
    if prefix:
        schedule(ForwardMode.EXTEND, [req], [prefix], at.allocator, at.table)
        req.num_computed_tokens = prefix
    return req


@given(requests, st.integers(0, 7))
def test_rows_targets_and_samples(given_requests: list[tuple[int, int, int, int | None]], more: int) -> None:
    at = world()
    reqs, news, expected = [], [], []
    for index, (prompt, chunk, computed, start) in enumerate(given_requests):
        prefix = min(computed, prompt - 1)
        new = min(chunk, prompt - prefix)
        req = request(at, index, prompt, prefix, start)
        reqs.append(req)
        news.append(new)
        # Every new token from the start on whose successor is in the prompt.
        expected.append(
            [
                (req.token_ids[token], req.token_ids[token + 1])
                for token in range(prefix, prefix + new)
                if start is not None and token >= start and token + 1 < prompt
            ]
        )
    batch = at.forward(schedule(ForwardMode.EXTEND, reqs, news, at.allocator, at.table))
    rows = logit_rows(
        pad_batch(batch, num_tokens=batch.num_tokens + more, batch_size=batch.batch_size + more)
    )
    with_logits = batch.input_ids[rows.hidden_rows]
    pairs = list(zip(with_logits[rows.input_rows].tolist(), rows.input_token_ids.tolist(), strict=True))
    assert pairs == [pair for per_request in expected for pair in per_request]
    assert rows.num_input_rows == tuple(len(per_request) for per_request in expected)
    ends = torch.tensor(news).cumsum(0) - 1
    assert torch.equal(rows.hidden_rows[rows.sample_rows], ends)
    assert len(rows.hidden_rows) <= sum(max(1, len(pairs) + 1) for pairs in expected)


def test_without_a_wish_only_last_rows_get_logits() -> None:
    at = world()
    reqs = [request(at, 0, 4, 0, None), request(at, 1, 2, 0, None)]
    rows = logit_rows(at.forward(schedule(ForwardMode.EXTEND, reqs, [4, 2], at.allocator, at.table)))
    assert rows.hidden_rows.tolist() == [3, 5]
    assert rows.input_rows.numel() == 0


def test_chunks_together_give_what_one_prefill_gives() -> None:
    """The successor of a chunk's last token is in the next chunk, and is known."""
    found = []
    for chunks in ([8], [3, 3, 2], [1] * 8):
        at = world()
        req = request(at, 0, 8, 0, 2)
        targets: list[int] = []
        for chunk in chunks:
            forward = at.forward(schedule(ForwardMode.EXTEND, [req], [chunk], at.allocator, at.table))
            targets += logit_rows(forward).input_token_ids.tolist()
            req.num_computed_tokens += chunk
        found.append(targets)
    assert found[0] == found[1] == found[2] == [103, 104, 105, 106, 107]


def test_a_decoding_request_in_a_mixed_batch_has_no_prompt_rows() -> None:
    at = world()
    running = request(at, 0, 3, 2, 0)
    running.num_computed_tokens = 2
    schedule(ForwardMode.EXTEND, [running], [1], at.allocator, at.table)
    running.num_computed_tokens = 3
    running.token_ids.append(199)
    prompt = request(at, 1, 3, 0, 0)
    batch = schedule(ForwardMode.MIXED, [prompt, running], [3, 1], at.allocator, at.table)
    rows = logit_rows(at.forward(batch))
    assert rows.num_input_rows == (2, 0)
    assert rows.sample_rows.tolist() == [2, 3]


def test_decode_says_which_top_tokens_are_wanted_and_has_no_prompt_rows() -> None:
    at = world()
    req = request(at, 0, 3, 2, 5)
    batch: ForwardBatch = at.forward(schedule(ForwardMode.DECODE, [req], [1], at.allocator, at.table))
    assert batch.return_logprob
    assert batch.top_logprobs_nums == (0,)
    assert batch.extend_logprob_start_lens is None
    with pytest.raises(BatchError, match="DECODE computes logits for all"):
        logit_rows(batch)
