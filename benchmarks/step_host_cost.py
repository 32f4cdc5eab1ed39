"""What one step costs the host, launches left out: scheduling, the batch, the forward, sampling.

    python benchmarks/step_host_cost.py --json docs/results/NAME.json

On the CPU with the emulated device and a tiny model, whatever GPU there is: replays are replaced by nothing, so what
is left is Python and the operators that a step calls beside its graph. On a GPU each operator that is no view is a
launch or a copy more. Times are this host's; the counts are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sgl_piecewise.comparison.benchmarking import CountedOperators, report_head, write_json
from sgl_piecewise.generation.driving import fill_cache, forward_batch
from sgl_piecewise.models.loading import load_model
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.schedule_batch import ScheduleBatch
from sgl_piecewise.runtime.batch.scheduling import schedule
from sgl_piecewise.runtime.capture.recording import Recording
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy
from sgl_piecewise.runtime.sampler.sampler import sample
from sgl_piecewise.runtime.stopwatch import stopwatch_for

SCHEMA = "sgl_piecewise.benchmarks.step_host_cost/1"
PROMPT = 50
CPU = torch.device("cpu")
_FREE = ("view", "slice", "select", "as_strided", "expand", "unsqueeze", "alias", "detach", "t.", "unbind")
"""Beginnings of operators that make no kernel."""


def replay_nothing(recording: Recording) -> None:
    """Stands in for a replay."""


def cost_of(work: Callable[[], Any], num_rounds: int) -> dict[str, Any]:
    """Returns time and operators of one part of a step."""
    stopwatch = stopwatch_for(CPU)
    with mock.patch.object(Recording, "run", replay_nothing):
        times = [stopwatch.measure(work).host_s for _ in range(num_rounds)]
        with CountedOperators() as operators:
            work()
    working = {name: count for name, count in operators.counts.items() if not name.startswith(_FREE)}
    return {
        "median_us": 1e6 * statistics.median(times),
        "least_us": 1e6 * min(times),
        "num_operators": operators.counts.total(),
        "no_views": working,
    }


def make_runner(graph_size: int) -> ModelRunner:
    decode = ModeStrategy(strategy="full", capture_sizes=(graph_size,))
    extend = ModeStrategy(strategy="full", capture_sizes=(64,), request_slots=graph_size)
    return ModelRunner.ready(
        load_model("tiny", device=CPU, dtype=torch.float32, num_layers=1).model,
        plan=ExecutionPlan(modes={ForwardMode.DECODE: decode, ForwardMode.EXTEND: extend}),
        options=RunnerOptions(max_requests=graph_size + 1, max_context=4096, max_extend_tokens=64),
    )


def costs(runner: ModelRunner, batch_size: int, num_rounds: int) -> dict[str, Any]:
    """Measures a decode step of so many requests, and one prompt."""
    reqs = [Req.of_prompt(f"request {index}", range(1, 9)) for index in range(batch_size)]
    for req in reqs:
        fill_cache(runner, req, 8)
        req.token_ids.append(1)

    def decide() -> ScheduleBatch:
        for req in reqs:
            req.num_computed_tokens += 1
            req.token_ids.append(1)
        return schedule(ForwardMode.DECODE, reqs, [1] * batch_size, runner.allocator, runner.req_to_token)

    found = {"schedule": cost_of(decide, num_rounds)}
    decided = decide()
    found["init_new"] = cost_of(lambda: ForwardBatch.init_new(decided, runner), num_rounds)
    batch = ForwardBatch.init_new(decided, runner)
    found["forward"] = cost_of(lambda: runner.forward(batch), num_rounds)
    logits = runner.forward(batch).logits
    assert logits is not None
    row_logits = logits.next_token_logits
    found["sample"] = cost_of(lambda: sample(row_logits, batch.sampling, batch.seq_lens), num_rounds)
    prompt = Req.of_prompt("prompt", range(1, PROMPT + 1))
    prompt_batch = forward_batch(runner, ForwardMode.EXTEND, [prompt], [PROMPT])
    found["prompt: forward"] = cost_of(lambda: runner.forward(prompt_batch), num_rounds)
    found["prompt: pad and plan"] = cost_of(lambda: runner.load_graph(prompt_batch), num_rounds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=3, help="requests of a decode step")
    parser.add_argument("--graph-size", type=int, default=4, help="requests of the graph that serves it")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runner = make_runner(arguments.graph_size)
    with torch.no_grad():
        found = costs(runner, arguments.batch, arguments.rounds)
    sizes = {"batch_size": arguments.batch, "graph_size": arguments.graph_size}
    report = {**report_head(SCHEMA), **sizes, "costs": found}
    write_json(arguments.json, report)
    print(json.dumps(report["costs"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
