"""What a step does on the host beside its graph: counted in operators, of which each is a launch or a copy on a GPU."""

from __future__ import annotations

import collections
from unittest import mock

import pytest
import torch

from sgl_piecewise.comparison.benchmarking import CountedOperators
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.capture.recording import Recording
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner

from .support import decide, extend_and_append, make_runner, plan, prompt

HOST_ONLY = {"cat", "detach", "slice", "empty", "clone", "view", "as_strided", "select"}
"""Views, and operators on host tensors."""


def working(operators: CountedOperators) -> dict[str, int]:
    """Returns the operators that are launches or copies on a GPU, by name without overload."""
    found: collections.Counter[str] = collections.Counter()
    for name, count in operators.counts.items():
        found[name.partition(".")[0]] += count
    return {name: count for name, count in found.items() if name not in HOST_ONLY}


def decoding(runner: ModelRunner, names: str) -> tuple[list[Req], ForwardBatch]:
    reqs = [prompt(name, 3) for name in names]
    extend_and_append(runner, reqs)
    return reqs, ForwardBatch.init_new(decide(runner, ForwardMode.DECODE, reqs, [1] * len(reqs)), runner)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(plan("full", "full", has_verify=False))


@pytest.mark.parametrize("names", ["ab", "c"], ids=["exact", "padded"])
def test_a_decode_forward_is_one_copy_and_its_graph(runner: ModelRunner, names: str) -> None:
    """Plans read the padded batch where it lies, and real entries and tails are written in one launch."""
    _, batch = decoding(runner, names)
    with mock.patch.object(Recording, "run"):
        runner.forward(batch)  # Finds the room; later batches of these sizes find it kept.
        with CountedOperators() as operators:
            runner.forward(batch)
    assert working(operators) == {"_foreach_copy_": 1}


def test_a_decode_batch_reaches_the_device_in_one_copy(runner: ModelRunner) -> None:
    """Beside it, one write enters the new tokens into the table that attention reads."""
    reqs, _ = decoding(runner, "d")
    decided = decide(runner, ForwardMode.DECODE, reqs, [1])
    with CountedOperators() as operators:
        ForwardBatch.init_new(decided, runner)
    # `_to_copy` is of the host's lengths; to a GPU the block is copied in the same way once more.
    assert working(operators) == {"_to_copy": 1, "index_put_": 1}


@pytest.mark.parametrize("strategy", ["none", "full", "breakable"])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_loaded_graph_gives_what_the_forward_gives(strategy: str, mode: ForwardMode) -> None:
    runner = make_runner(plan(strategy, strategy, has_verify=False))
    _, batch = decoding(runner, "ab")
    if mode is ForwardMode.EXTEND:
        batch = ForwardBatch.init_new(decide(runner, mode, [prompt("e", 6)], [6]), runner)
    wanted = runner.forward(batch).logits
    assert wanted is not None
    want = wanted.next_token_logits.clone()
    replay = runner.load_graph(batch)
    assert replay is not None
    for _ in range(2):
        found = replay()
        if mode is ForwardMode.DECODE:
            assert torch.equal(found[1], want)
        else:
            with torch.no_grad():
                assert torch.allclose(runner.model.compute_logits(found[5:6]), want)


def test_nothing_is_loaded_of_what_would_run_eager() -> None:
    runner = make_runner(plan("eager", "eager", has_verify=False))
    _, batch = decoding(runner, "a")
    assert runner.load_graph(batch) is None
