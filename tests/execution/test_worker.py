"""What a forward's result becomes: sampled now, later, not at all, or handed on."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import CaptureHiddenMode, ForwardMode
from sgl_piecewise.runtime.batch.request import LogprobRequest, Req
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.batch.scheduling import release
from sgl_piecewise.runtime.errors import BatchError, ConfigError
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.worker.pipeline import PipelinePlace, PPProxyTensors
from sgl_piecewise.runtime.worker.worker import PREFILL_ONLY_TOKEN, TpModelWorker, WorkerOptions

from .support import ROWS, decide, extend_and_append, make_runner, plan, prompt


@pytest.fixture
def runner() -> ModelRunner:
    return make_runner(plan("none", "none"))


@pytest.fixture
def worker(runner: ModelRunner) -> TpModelWorker:
    return TpModelWorker(runner)


class Only:
    """A grammar of one token; counts how often it is asked."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.num_asked = 0

    def allowed_tokens(self) -> torch.Tensor:
        self.num_asked += 1
        return torch.arange(64) == self.token


def test_a_decision_and_a_ready_batch_give_the_same(worker: TpModelWorker, runner: ModelRunner) -> None:
    first = worker.forward_batch_generation(decide(runner, ForwardMode.EXTEND, [prompt("a", 5)], [5]))
    batch = ForwardBatch.init_new(decide(runner, ForwardMode.EXTEND, [prompt("a", 5)], [5]), runner)
    second = worker.forward_batch_generation(batch)
    assert first.sampled is not None
    assert second.sampled is not None
    assert torch.equal(first.sampled.next_token_ids, second.sampled.next_token_ids)
    assert not first.can_run_graph
    with pytest.raises(BatchError, match="positions, cols"):
        worker.forward_batch_generation(batch, positions=torch.arange(5), cols=range(5))


def test_verify_is_not_sampled_and_keeps_its_logits(worker: TpModelWorker, runner: ModelRunner) -> None:
    req = prompt("a", 5)
    extend_and_append(runner, [req])
    result = worker.forward_batch_generation(
        decide(runner, ForwardMode.TARGET_VERIFY, [req], [ROWS], [1, 2, 3, 4])
    )
    assert result.tokens() is None
    assert result.logits is not None
    assert result.logits.shape == (ROWS, 64)


def test_prefill_only_gives_one_stand_in_for_each_sequence(
    worker: TpModelWorker, runner: ModelRunner
) -> None:
    result = worker.forward_batch_generation(
        decide(runner, ForwardMode.EXTEND, [prompt("a", 5), prompt("b", 3)], [5, 3]), is_prefill_only=True
    )
    assert result.sampled is not None
    assert result.sampled.next_token_ids.tolist() == [PREFILL_ONLY_TOKEN] * 2


def test_kept_logits_are_those_before_sampling(worker: TpModelWorker, runner: ModelRunner) -> None:
    result = worker.forward_batch_generation(
        decide(runner, ForwardMode.EXTEND, [prompt("a", 5)], [5]), keeps_logits=True, grammars=[Only(9)]
    )
    assert result.logits is not None
    assert result.logits.isfinite().all()
    assert result.sampled is not None
    assert result.sampled.next_token_ids.tolist() == [9]


@pytest.mark.parametrize("has_overlap", [False, True])
@pytest.mark.parametrize("has_speculation", [False, True])
@pytest.mark.parametrize("delays_sampling", [False, True])
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("is_prefill_only", [False, True])
def test_when_sampling_is_delayed(
    runner: ModelRunner,
    has_overlap: bool,
    has_speculation: bool,
    delays_sampling: bool,
    has_grammar: bool,
    is_prefill_only: bool,
) -> None:
    worker = TpModelWorker(
        runner,
        WorkerOptions(
            has_overlap=has_overlap, has_speculation=has_speculation, delays_sampling=delays_sampling
        ),
    )
    result = worker.forward_batch_generation(
        decide(runner, ForwardMode.EXTEND, [prompt("a", 5)], [5]),
        is_prefill_only=is_prefill_only,
        grammars=[Only(9) if has_grammar else None],
    )
    expected = (
        has_overlap and not has_speculation and (has_grammar or (delays_sampling and not is_prefill_only))
    )
    assert (result.delayed_sample is not None) == expected
    assert (result.sampled is None) == expected
    assert result.tokens() is not None


def test_delayed_sampling_asks_the_grammar_late_and_reads_logits_of_its_own() -> None:
    """A forward that ran in between has overwritten the graph's outputs."""
    runner = make_runner(plan("full", "none", has_verify=False))
    reqs = [prompt("a", 5), prompt("b", 4)]
    extend_and_append(runner, reqs)
    at_once, later = TpModelWorker(runner), TpModelWorker(runner, WorkerOptions(has_overlap=True))
    grammar = Only(17)
    decided = [decide(runner, ForwardMode.DECODE, [req], [1]) for req in reqs]
    expected = at_once.forward_batch_generation(decided[0], keeps_logits=True)
    result = later.forward_batch_generation(decided[0], grammars=[grammar], keeps_logits=True)
    assert grammar.num_asked == 0
    at_once.forward_batch_generation(decided[1])
    assert result.delayed_sample is not None
    assert result.delayed_sample().next_token_ids.tolist() == [17]
    assert grammar.num_asked == 1
    assert result.logits is not None
    assert expected.logits is not None
    assert torch.equal(result.logits, expected.logits)


def test_a_rank_that_is_not_the_last_hands_on_hidden_states() -> None:
    runner = make_runner(plan("none", "none"), capture_hidden_mode=CaptureHiddenMode.FULL)
    worker = TpModelWorker(runner, WorkerOptions(pipeline=PipelinePlace(rank=0, num_ranks=2)))
    result = worker.forward_batch_generation(decide(runner, ForwardMode.EXTEND, [prompt("a", 5)], [5]))
    assert result.tokens() is None
    assert result.proxy_tensors is not None
    assert result.proxy_tensors.tensors["hidden_states"].shape == (5, 32)


def test_a_first_rank_takes_no_proxy_tensors(worker: TpModelWorker, runner: ModelRunner) -> None:
    with pytest.raises(ConfigError, match="pipeline rank 0"):
        worker.forward_batch_generation(
            decide(runner, ForwardMode.EXTEND, [prompt("a", 5)], [5]), proxy_tensors=PPProxyTensors()
        )


@pytest.mark.parametrize(
    ("mode", "hidden_mode", "rows"),
    [
        (ForwardMode.EXTEND, CaptureHiddenMode.FULL, 8),
        (ForwardMode.EXTEND, CaptureHiddenMode.LAST, 2),
        (ForwardMode.TARGET_VERIFY, CaptureHiddenMode.FULL, 2 * ROWS),
        (ForwardMode.TARGET_VERIFY, CaptureHiddenMode.LAST, 2),
        (ForwardMode.DECODE, CaptureHiddenMode.LAST, 2),
    ],
)
@pytest.mark.parametrize("strategy", ["none", "eager"])
def test_hidden_states_are_those_of_real_rows(
    mode: ForwardMode, hidden_mode: CaptureHiddenMode, rows: int, strategy: str
) -> None:
    runner = make_runner(plan(strategy, strategy, has_verify=strategy != "eager"))
    worker = TpModelWorker(runner)
    reqs = [prompt("a", 5), prompt("b", 3)]
    num_new = [5, 3]
    if mode is not ForwardMode.EXTEND:
        extend_and_append(runner, reqs)
        num_new = [1, 1] if mode is ForwardMode.DECODE else [ROWS] * 2
    ids = [1] * (2 * ROWS) if mode is ForwardMode.TARGET_VERIFY else None
    result = worker.forward_batch_generation(
        decide(runner, mode, reqs, num_new, ids), capture_hidden_mode=hidden_mode
    )
    assert result.hidden is not None
    assert result.hidden.shape == (rows, 32)


def test_logprobs_of_prompt_and_chosen_token_are_those_of_the_softmax(
    worker: TpModelWorker, runner: ModelRunner
) -> None:
    wants = prompt("a", 6)
    wants = Req.of_prompt("a", wants.token_ids, logprobs=LogprobRequest(start_len=0, top_num=3))
    other = prompt("b", 3)
    result = worker.forward_batch_generation(
        decide(runner, ForwardMode.EXTEND, [other, wants], [3, 6]), keeps_logits=True
    )
    assert result.sampled is not None
    logprobs = result.sampled.logprobs
    assert logprobs is not None
    assert logprobs.input is not None
    assert logprobs.num_input == (0, 5)
    assert logprobs.num_top == (0, 3)
    assert result.logits is not None
    expected = result.logits.log_softmax(-1).gather(1, result.sampled.next_token_ids.unsqueeze(1)).squeeze(1)
    assert torch.allclose(logprobs.next_token, expected)
    # One by one: the logits of every prefix are about the token after it.
    for position in range(5):
        prefix = Req.of_prompt(f"p{position}", wants.token_ids[: position + 1])
        alone = worker.forward_batch_generation(
            decide(runner, ForwardMode.EXTEND, [prefix], [position + 1]), keeps_logits=True
        )
        release(prefix, runner.allocator, runner.req_to_token)
        assert alone.logits is not None
        want = alone.logits.log_softmax(-1)[0, wants.token_ids[position + 1]]
        assert torch.isclose(logprobs.input[position], want, atol=1e-5)
    assert logprobs.input_top is not None
    assert logprobs.input_top.values.shape == (5, 3)


def test_every_row_of_a_block_is_sampled_by_its_requests_parameters(
    worker: TpModelWorker, runner: ModelRunner
) -> None:
    greedy = prompt("a", 4)
    drawn = prompt("b", 4, sampling=SamplingParams(temperature=5.0, seed=3))
    extend_and_append(runner, [greedy, drawn])
    result = worker.forward_batch_generation(
        decide(runner, ForwardMode.DLLM_EXTEND, [greedy, drawn], [ROWS] * 2, [1, 2, 3, 4] * 2),
        keeps_logits=True,
    )
    assert result.sampled is not None
    assert result.logits is not None
    tokens, likely = result.sampled.next_token_ids, result.logits.argmax(-1)
    assert torch.equal(tokens[:ROWS], likely[:ROWS])
    assert not torch.equal(tokens[ROWS:], likely[ROWS:])
    with pytest.raises(BatchError, match="several rows"):
        worker.forward_batch_generation(
            decide(runner, ForwardMode.DLLM_EXTEND, [greedy], [ROWS], [1, 2, 3, 4]), grammars=[None]
        )
