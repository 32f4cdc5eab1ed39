"""The capture engine's figures on one GPU: memory, build, replay, break cost, values.

One process, one model (Qwen3-8B's shape, random bf16 weights, 42 capture sizes 4..4096, SDPA
attention as the break). Arms: eager, full, breakable, and the package breakable-cuda-graphs 0.1.0,
whose breaks write into given outputs. Values are compared first; an arm that differs gets no time.

    python benchmarks/capture_qwen3_8b.py --json docs/results/NAME.json

The captured forward is ``Decoder.hidden_states`` (no output layer). Outputs are graph-owned views
on all sides.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.comparison.benchmarking import report_head, settle, write_json
from sgl_piecewise.models import decoder as decoder_module
from sgl_piecewise.models.loading import load_model
from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.cuda_device import CudaDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.capture.segments import EagerSegment, GraphSegment
from sgl_piecewise.runtime.capture.sizes import ShapeKey, default_capture_sizes, padded_size
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.mark import eager_on_graph

SCHEMA = "sgl_piecewise.benchmarks.capture/1"
REPLAY_SIZES = (4, 16, 64, 256, 1024, 2048, 4096)
NUM_BUILD_ROUNDS = 3
NUM_REPLAY_ROUNDS = 40
CUDA = torch.device("cuda")


def median_interval(values: list[float]) -> dict[str, float]:
    """Median with a 95% interval from order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    half = 0.98 * count**0.5
    low = max(0, round(count / 2 - half))
    high = min(count - 1, round(count / 2 + half))
    return {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[high], "n": count}


class OtherPackage:
    """breakable-cuda-graphs 0.1.0 on the same forward: its breaks write into given outputs.

    Build includes one warm-up forward per size, as ours does, on the same stream.
    """

    def __init__(
        self, forward: Callable[..., torch.Tensor], sizes: tuple[int, ...], attention: CausalAttention
    ):
        import breakable_cuda_graphs as package

        self._package = package
        self._forward = forward
        self._sizes = sizes
        self._graphs: dict[int, Any] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        max_size = sizes[-1]
        self._ids = torch.zeros(max_size, dtype=torch.int64, device="cuda")
        self._positions = torch.arange(max_size, device="cuda")

        @package.no_graph
        def write(q: Any, k: Any, v: Any, spec: AttentionSpec, out: torch.Tensor) -> None:
            out.copy_(attention.run(q, k, v, spec))

        def attend(q: Any, k: Any, v: Any, spec: AttentionSpec) -> torch.Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            write(q, k, v, spec, out)
            return out

        self._attend = attend

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        original = decoder_module.attend
        decoder_module.attend = self._attend
        try:
            yield
        finally:
            decoder_module.attend = original

    def build(self) -> float:
        begin = time.perf_counter()
        with self._attention():
            for size in reversed(self._sizes):
                ids, positions = self._ids[:size], self._positions[:size]
                with torch.cuda.stream(self._stream):
                    self._forward(ids, positions)
                graph = self._package.BreakableCUDAGraph(self._pool)
                with self._package.breakable_graph(
                    graph, stream=self._stream, capture_error_mode="thread_local"
                ):
                    output = self._forward(ids, positions)
                self._graphs[size] = graph
                self._outputs[size] = torch_private.alias_without_owning(output)
                del output
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        real = ids.shape[0]
        size = padded_size(real, self._sizes)
        assert size is not None
        self._ids[:real].copy_(ids)
        self._positions[:real].copy_(positions)
        if real < size:
            self._ids[real:size].fill_(0)
            self._positions[real:size].fill_(0)
        self._graphs[size].replay()
        return self._outputs[size][:real]

    def replay(self, size: int) -> None:
        self._graphs[size].replay()

    def pool_bytes(self) -> int:
        return sum(segment["total_size"] for segment in torch_private.pool_segments(self._pool))

    def reset(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._outputs.clear()


def driver_beyond_allocator() -> int:
    free, total = torch.cuda.mem_get_info()
    return (total - free) - torch.cuda.memory_reserved()


def host_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def eager_forwards(subject: Subject) -> float:
    """Returns seconds of one eager forward at each size, largest first."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for size in reversed(subject.sizes):
        subject.forward(subject.ids[:size], subject.positions[:size])
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure_builds(subject: Subject, other: Callable[[], OtherPackage] | None) -> dict[str, Any]:
    """Builds every arm in turn, several rounds; returns seconds and the ratio to 42 eager forwards."""

    def ours(strategy: str, launch_segments: bool) -> Callable[[], dict[str, Any]]:
        def build() -> dict[str, Any]:
            captured = subject.capture(strategy, launch_segments=launch_segments)
            assert captured.build is not None
            result = {
                "total_s": captured.build.total_s,
                "phases_s": captured.build.phases_s,
                "unattributed_s": captured.build.unattributed_s,
            }
            captured.reset()
            return result

        return build

    arms: dict[str, Callable[[], dict[str, Any]]] = {
        "eager_42": lambda: {"total_s": eager_forwards(subject)},
        "full": ours("full", False),
        "breakable": ours("breakable", False),
        "breakable_launched": ours("breakable", True),
    }
    if other is not None:
        make_other = other
        arms["breakable_cuda_graphs"] = lambda: {"total_s": make_other().build()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for index in range(NUM_BUILD_ROUNDS + 1):
        for name in random.sample(list(arms), len(arms)):
            settle(CUDA)
            result = arms[name]()
            if index:  # the first round warms up
                rounds[name].append(result)
    totals = {name: [entry["total_s"] for entry in entries] for name, entries in rounds.items()}
    eager = statistics.median(totals["eager_42"])
    return {
        name: {
            "total_s": totals[name],
            "median_s": statistics.median(totals[name]),
            "ratio_to_eager_42": statistics.median(totals[name]) / eager,
            "last": entries[-1],
        }
        for name, entries in rounds.items()
    }


def check_values(arms: dict[str, Any], forward: Any, vocab: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Bit-compares every arm with padded eager: all sizes, sizes between, random order, after churn."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    lengths = [*sizes, *(max(1, (a + b) // 2) for a, b in itertools.pairwise(sizes))]
    random.shuffle(lengths)
    wrong: dict[str, list[int]] = {name: [] for name in arms}
    churn: list[torch.Tensor] = []
    for real in lengths:
        size = padded_size(real, sizes)
        assert size is not None
        ids = torch.randint(0, vocab, (real,), device="cuda", generator=generator)
        positions = torch.arange(real, device="cuda")
        padded_ids = torch.cat([ids, ids.new_zeros(size - real)])
        padded_positions = torch.cat([positions, positions.new_zeros(size - real)])
        expected = forward(padded_ids, padded_positions)[:real].clone()
        churn = [torch.full((random.randrange(1, 1 << 22),), float("nan"), device="cuda") for _ in range(8)]
        del churn[::2]
        for name in random.sample(list(arms), len(arms)):
            if not torch.equal(arms[name](ids, positions), expected):
                wrong[name].append(real)
    del churn
    return {name: {"compared": len(lengths), "wrong_sizes": bad} for name, bad in wrong.items()}


def measure_replays(arms: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Times every arm at several sizes, interleaved in rounds, by device events.

    ``NAME.replay`` is the replay alone, its inputs being in place; ``NAME`` is a call, inputs copied in.
    """
    report: dict[str, Any] = {}
    callers = dict(arms)
    for size in REPLAY_SIZES:
        batches = [torch.randint(0, vocab, (size,), device="cuda") for _ in range(4)]
        positions = torch.arange(size, device="cuda")
        for name in ("breakable", "breakable_cuda_graphs"):
            if name in arms:
                callers[f"{name}.replay"] = _bare_replay(arms[name], size)
        times: dict[str, list[float]] = {name: [] for name in callers}
        for call in callers.values():
            for ids in batches[:2]:
                call(ids, positions)
        rounds = NUM_REPLAY_ROUNDS if size <= 1024 else NUM_REPLAY_ROUNDS // 2
        for index in range(rounds):
            ids = batches[index % len(batches)]
            for name in random.sample(list(callers), len(callers)):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                callers[name](ids, positions)
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
        entry: dict[str, Any] = {name: median_interval(values) for name, values in times.items()}
        for name, own in times.items():
            for base in ("full", "breakable_cuda_graphs", "breakable_cuda_graphs.replay", "eager"):
                if base in times and base != name:
                    ratios = [a / b for a, b in zip(own, times[base], strict=True)]
                    entry[name][f"ratio_to_{base}"] = median_interval(ratios)
        report[str(size)] = entry
    return report


def _bare_replay(arm: Any, size: int) -> Callable[..., None]:
    replay = (
        arm.recordings[ShapeKey(size=size)].replay
        if isinstance(arm, CapturedCallable)
        else functools.partial(arm.replay, size)
    )
    return lambda ids, positions: replay()


def measure_break_cost(captured: CapturedCallable, full: CapturedCallable) -> dict[str, Any]:
    """Host time that a break adds beyond its own function, in microseconds.

    From the recordings of the model at 16 tokens: host time of a breakable replay, less that of
    its bodies called with the same arguments, less that of the full recording's launch, per break.
    """
    key = ShapeKey(size=16)
    recording, whole = captured.recordings[key], full.recordings[key]
    eager = [segment for segment in recording.segments if isinstance(segment, EagerSegment)]
    graphs = [segment for segment in recording.segments if isinstance(segment, GraphSegment)]
    bodies = [segment.arguments.bind(segment.mark.fn, lambda result: None) for segment in eager]
    receivers = [segment.bind() for segment in eager]
    launches = [step for step in (segment.bind() for segment in graphs) if step is not None]

    def host_us(work: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return seconds * 1e6

    def each(steps: list[Callable[[], None]]) -> Callable[[], None]:
        def run() -> None:
            for step in steps:
                step()

        return run

    series: dict[str, list[float]] = {"break": [], "copy_and_check": [], "launch": []}
    with captured.pool.exclusive("replay"):
        captured.pool.order_after_last_use()
    for _ in range(200):
        replay, body, with_copy = host_us(recording.replay), host_us(each(bodies)), host_us(each(receivers))
        one, many = host_us(whole.replay), host_us(each(launches))
        series["break"].append((replay - body - one) / len(eager))
        series["copy_and_check"].append((with_copy - body) / len(eager))
        series["launch"].append((many - one) / len(eager))
    return {name: median_interval(values) for name, values in series.items()}


def measure_break_alone(body_kind: str, device: CudaDevice) -> dict[str, float]:
    """The same difference on a chain of 36 breaks that do nothing, four small kernels between them."""
    held = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)

    def same_tensor(x: torch.Tensor) -> torch.Tensor:
        return held

    def through_argument(x: torch.Tensor) -> None:
        return None

    body = {"returns_a_tensor": same_tensor, "writes_through_an_argument": through_argument}[body_kind]
    mark = eager_on_graph(body)
    num_breaks = 36

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_breaks):
            y = (x * 1.0 + 0.0) * 1.0 - 0.0
            result = mark(y)
            x = y if result is None else result
        return x * 1.0

    example = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    broken = capture(chain, (example,), outputs="view", device=device)
    whole = capture(chain, (example,), strategy="full", outputs="view", device=device)
    one, other = next(iter(broken.recordings.values())), next(iter(whole.recordings.values()))
    values = []
    for index in range(300):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        one.replay()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        start = time.perf_counter()
        other.replay()
        end = time.perf_counter()
        torch.cuda.synchronize()
        begin_body = time.perf_counter()
        for _ in range(num_breaks):
            body(example)
        bodies = time.perf_counter() - begin_body
        if index >= 20:
            values.append(((middle - begin) - (end - start) - bodies) / num_breaks * 1e6)
    broken.reset()
    whole.reset()
    return median_interval(values)


def floors() -> dict[str, float]:
    """Copy bandwidth (bytes read and written) and bf16 matrix rate, measured now."""

    def seconds(work: Callable[[], Any], repeats: int) -> float:
        for _ in range(3):
            work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / seconds(functools.partial(target.copy_, source), 10)
    del source, target
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / seconds(lambda: a @ a, 10)
    return {"copy_bytes_per_s": bandwidth, "matrix_flop_per_s": rate}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a forward, its inputs at the largest size, and the sizes."""

    forward: Callable[..., torch.Tensor]
    ids: torch.Tensor
    positions: torch.Tensor
    vocab_size: int
    sizes: tuple[int, ...]
    device: CudaDevice

    def capture(self, strategy: str, *, launch_segments: bool = False) -> CapturedCallable:
        return capture(
            self.forward,
            (self.ids, self.positions),
            strategy=strategy,
            launch_segments=launch_segments,
            capture_sizes=self.sizes,
            outputs="view",
            device=self.device,
        )


def measure_memory(
    subject: Subject, other: Callable[[], OtherPackage] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Builds each arm once in a process that has captured nothing yet; returns memory and the arms."""
    memory: dict[str, Any] = {}
    arms: dict[str, Any] = {}
    for strategy in ("breakable", "full"):
        settle(CUDA)
        driver, host = driver_beyond_allocator(), host_bytes()
        captured = subject.capture(strategy)
        settle(CUDA)
        driver, host = driver_beyond_allocator() - driver, host_bytes() - host
        assert captured.build is not None
        first, last = captured.build.sizes[0], captured.build.sizes[-1]
        num_graphs = sum(entry.num_graph_segments for entry in captured.build.sizes)
        memory[strategy] = {
            "largest_size_bytes": first.reserved_bytes,
            "all_sizes_bytes": last.reserved_bytes,
            "ratio": last.reserved_bytes / first.reserved_bytes,
            "allocated_after_bytes": captured.pool.memory().allocated_bytes,
            "driver_bytes": driver,
            "host_bytes": host,
            "num_graphs": num_graphs,
            "driver_bytes_per_graph": driver / num_graphs,
            "host_bytes_per_graph": host / num_graphs,
        }
        arms[strategy] = captured
    if other is not None:
        settle(CUDA)
        driver, host = driver_beyond_allocator(), host_bytes()
        package = other()
        package.build()
        settle(CUDA)
        memory["breakable_cuda_graphs"] = {
            "all_sizes_bytes": package.pool_bytes(),
            "driver_bytes": driver_beyond_allocator() - driver,
            "host_bytes": host_bytes() - host,
        }
        arms["breakable_cuda_graphs"] = package
    return memory, arms


def load_subject(model: str, num_layers: int | None, device: CudaDevice) -> Subject:
    loaded = load_model(model, device="cuda", dtype=torch.bfloat16, num_layers=num_layers)
    sizes = tuple(default_capture_sizes(4096))
    vocab_size = loaded.config.vocab_size
    return Subject(
        forward=loaded.model.hidden_states,
        ids=torch.randint(0, vocab_size, (sizes[-1],), device="cuda"),
        positions=torch.arange(sizes[-1], device="cuda"),
        vocab_size=vocab_size,
        sizes=sizes,
        device=device,
    )


def other_package(subject: Subject, attention: CausalAttention) -> Callable[[], OtherPackage] | None:
    """Returns what makes the other package's arm, or None where it is not installed."""
    if importlib.util.find_spec("breakable_cuda_graphs") is None:
        return None
    return lambda: OtherPackage(subject.forward, subject.sizes, attention)


def measure(
    subject: Subject,
    attention: CausalAttention,
    report: dict[str, Any],
    save: Callable[[], None],
    *,
    with_builds: bool,
) -> set[str]:
    """Fills the report, memory first, since builds leave memory with the process; returns wrong arms."""
    other = other_package(subject, attention)
    for size in reversed(subject.sizes):
        subject.forward(subject.ids[:size], subject.positions[:size])
    report["memory"], arms = measure_memory(subject, other)
    save()
    report["values"] = check_values(arms, subject.forward, subject.vocab_size, subject.sizes)
    save()
    wrong = {name for name, entry in report["values"].items() if entry["wrong_sizes"]}
    right = {name: arm for name, arm in arms.items() if name not in wrong}
    report["replay"] = measure_replays({"eager": subject.forward} | right, subject.vocab_size)
    save()
    report["break_cost_us"] = {
        "in_the_model": measure_break_cost(arms["breakable"], arms["full"]),
        **{
            f"{kind}, copies {where} graphs": measure_break_alone(
                kind, CudaDevice(edits_graphs=where == "in")
            )
            for kind in ("returns_a_tensor", "writes_through_an_argument")
            for where in ("between", "in")
        },
    }
    save()
    for arm in arms.values():
        arm.reset()
    if with_builds:
        report["build"] = measure_builds(subject, other)
        save()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--copies-between-graphs", action="store_true")
    parser.add_argument("--no-builds", action="store_true", help="leave out the rounds of builds")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    random.seed(3)
    torch.set_grad_enabled(False)
    report: dict[str, Any] = {
        **report_head(SCHEMA),
        "model": arguments.model,
        "copies_in_graphs": not arguments.copies_between_graphs,
        "floors": floors(),
    }
    settle(CUDA)

    def save() -> None:
        write_json(arguments.json, report)
        name = list(report)[-1]
        print(f"== {name}\n{json.dumps(report[name], indent=1)}", flush=True)

    device = CudaDevice(edits_graphs=not arguments.copies_between_graphs)
    subject = load_subject(arguments.model, arguments.layers, device)
    attention = CausalAttention()
    with use_forward_context(ForwardContext(attention=attention)):
        wrong = measure(subject, attention, report, save, with_builds=not arguments.no_builds)
    query = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,clocks.mem,driver_version,power.draw",
        "--format=csv,noheader",
    ]
    report["clocks_after"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    save()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
