"""What compiling costs and gives on one GPU: builds cold and warm, compile share, replay against other ways.

    python benchmarks/compile_qwen3_8b.py --json docs/results/NAME.json
    python benchmarks/compile_qwen3_8b.py --model qwen3-0.6b --json ...
    python benchmarks/compile_qwen3_8b.py --model tiny --layers 94 --json ...

Each step is a process of its own, with the model's shape filled with random bf16 weights and the forward
``Decoder.hidden_states`` (no output layer), SDPA attention as the break, graph-owned outputs:

- ``cold``: Inductor's, Triton's and our cache folders are new. Builds ``breakable``, then ``tc_piecewise``.
  Imports, first kernels and the first capture of the process are done before and shown apart. Afterwards the
  memory estimate stands beside the pools of ``fx_piecewise`` and ``tc_piecewise``: all sizes, and the largest alone.
- ``warm``: the same with the folders that ``cold`` left. ``--steps cold,warm,warm`` measures two warm starts.
- ``replay``: other new folders. Builds ``torch.compile(mode="reduce-overhead")`` of the plain model (attention
  inside its graphs) for five sizes, then the other arms; checks values; times all arms in turns.

Without a GPU everything runs on the emulated device, whose times say nothing: a dry run is
``--model tiny --largest 16 --json out.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise import capture
from sgl_piecewise.comparison.benchmarking import (
    default_device,
    default_dtype,
    report_head,
    settle,
    synchronize,
    write_json,
)
from sgl_piecewise.comparison.tolerance import closeness, wide_model
from sgl_piecewise.entry import import_compiler, start_compile_workers
from sgl_piecewise.models import layers as layers_module
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.loading import load_model
from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.sizes import default_capture_sizes
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.stopwatch import stopwatch_for

SCHEMA = "sgl_piecewise.benchmarks.compile/2"
STEPS = ("cold", "warm", "replay")
REPLAY_SIZES = (4, 16, 64, 256, 1024, 4096)
NUM_OVERHEAD_SIZES = 5
NUM_ROUNDS = 25
ARMS: dict[str, tuple[str, str | None]] = {
    "breakable": ("breakable", None),
    "tc_piecewise": ("breakable", "inductor"),
    "tc_full": ("full", "inductor"),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a model, its inputs at the largest size, and the sizes."""

    model: Decoder
    ids: torch.Tensor
    positions: torch.Tensor
    vocab_size: int
    sizes: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def build(self, arm: str, *, shares_layers: bool = True) -> CapturedCallable:
        strategy, compiler = ARMS[arm]
        return capture(
            self.model.hidden_states,
            (self.ids, self.positions),
            compile=compiler,
            shares_layers=shares_layers,
            strategy=strategy,
            launch_segments=False,
            capture_sizes=self.sizes,
            outputs="view",
        )

    def arguments(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, self.vocab_size, (size,), device=self.device)
        return ids, torch.arange(size, device=self.device)


def seconds_of(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def load_subject(arguments: argparse.Namespace) -> Subject:
    start_compile_workers(["inductor"])  # As the commands do; they come up while the model is loaded.
    device = default_device()
    dtype = default_dtype(device)
    loaded = load_model(arguments.model, device=device, dtype=dtype, num_layers=arguments.layers)
    sizes = tuple(default_capture_sizes(arguments.largest))
    return Subject(
        model=loaded.model,
        ids=torch.randint(0, loaded.config.vocab_size, (sizes[-1],), device=device),
        positions=torch.arange(sizes[-1], device=device),
        vocab_size=loaded.config.vocab_size,
        sizes=sizes,
    )


def prepare(subject: Subject) -> dict[str, float]:
    """Does once what a process does once; returns what that took."""
    import_s = seconds_of(lambda: import_compiler("inductor"))

    def all_sizes() -> None:
        for size in reversed(subject.sizes):
            subject.model.hidden_states(subject.ids[:size], subject.positions[:size])
        synchronize(subject.device)

    first_eager_s = seconds_of(all_sizes)
    eager_s = seconds_of(all_sizes)
    first_capture_s = seconds_of(lambda: capture(torch.neg, (subject.ids,)).reset())
    return {
        "import_s": import_s,
        "first_eager_sweep_s": first_eager_s,
        "eager_sweep_s": eager_s,
        "first_capture_s": first_capture_s,
    }


def built_facts(captured: CapturedCallable) -> dict[str, Any]:
    build = captured.build
    assert build is not None
    facts: dict[str, Any] = {
        "total_s": build.total_s,
        "phases_s": build.phases_s,
        "unattributed_s": build.unattributed_s,
        "compile_share": build.compile_share,
        "pool_bytes": captured.pool.memory().reserved_bytes,
        "pool_bytes_largest_alone": build.sizes[0].reserved_bytes,
    }
    counts = getattr(captured.fn, "counts", None)
    if counts is not None:
        facts["counts"] = vars(counts)
    return facts


def measure_builds(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds ``breakable`` three times and ``tc_piecewise`` once (then once more, to see what is left in memory)."""
    report: dict[str, Any] = {"before": prepare(subject), "breakable": [], "tc_piecewise": []}
    for arm in ("breakable", "breakable", "breakable", "tc_piecewise", "tc_piecewise"):
        settle(subject.device)
        captured = subject.build(arm)
        report[arm].append(built_facts(captured))
        captured.reset()
        del captured
    if arguments.whole:
        settle(subject.device)
        captured = subject.build("tc_piecewise", shares_layers=False)
        report["tc_piecewise_whole"] = built_facts(captured)
        captured.reset()
    report["memory_estimate"] = estimated_memory(subject, report["tc_piecewise"][0])
    breakable_s = statistics.median(entry["total_s"] for entry in report["breakable"])
    report["breakable_s"] = breakable_s
    report["tc_piecewise_s"] = report["tc_piecewise"][0]["total_s"]
    report["ratio"] = report["tc_piecewise_s"] / breakable_s
    return report


def estimated_memory(subject: Subject, built: dict[str, Any]) -> dict[str, Any]:
    """Estimates the pool beside what was measured, after the builds and in none of them.

    ``fx_piecewise`` is built here: the estimate is of pieces that run as FX, and an upper bound for Inductor's.
    """
    from sgl_piecewise.compiler.memory import (
        pool_estimates,
    )  # Here, so that the import of Dynamo is measured.

    settle(subject.device)
    captured = capture(
        subject.model.hidden_states,
        (subject.ids, subject.positions),
        compile="fx",
        launch_segments=False,
        capture_sizes=subject.sizes,
        outputs="view",
    )
    measured = {"fx": built_facts(captured), "inductor": built}
    began = time.perf_counter()
    estimates = pool_estimates(
        subject.model.hidden_states,
        (subject.ids, subject.positions),
        compilers=list(measured),
        capture_sizes=subject.sizes,
        device=captured.pool.device,
    )
    found: dict[str, Any] = {"estimate_s": time.perf_counter() - began}
    captured.reset()
    for (compiler, facts), estimate in zip(measured.items(), estimates, strict=True):
        found[compiler] = {
            **dataclasses.asdict(estimate),
            "pool_bytes": facts["pool_bytes"],
            "pool_bytes_largest_alone": facts["pool_bytes_largest_alone"],
            "ratio": ratio_of(estimate.reserved_bytes, facts["pool_bytes"]),
            "ratio_largest_alone": ratio_of(estimate.largest_alone_bytes, facts["pool_bytes_largest_alone"]),
        }
    return found


def ratio_of(estimated: int | None, measured: int) -> float | None:
    return None if estimated is None else estimated / measured


class ReduceOverhead:
    """``torch.compile(mode="reduce-overhead")`` on a copy of the model whose attention is plain SDPA."""

    def __init__(self, subject: Subject, attention: CausalAttention) -> None:
        tensors = [*subject.model.parameters(), *subject.model.buffers()]
        # The copy has the same tensors: sharing layers changes classes of the original.
        self._model = copy.deepcopy(subject.model, {id(tensor): tensor for tensor in tensors})
        self._attention = attention
        self._compiled = torch.compile(self._model.hidden_states, mode="reduce-overhead", fullgraph=True)

    @contextlib.contextmanager
    def _unmarked(self) -> Iterator[None]:
        def attend(q: Any, k: Any, v: Any, spec: AttentionSpec) -> torch.Tensor:
            return self._attention.run(q, k, v, spec)

        original = layers_module.attend
        layers_module.attend = attend  # type: ignore[assignment]
        try:
            yield
        finally:
            layers_module.attend = original

    def build(self, subject: Subject, sizes: tuple[int, ...]) -> float:
        """Returns seconds until each size has been recorded: three calls of each, largest first."""
        begin = time.perf_counter()
        with self._unmarked():
            for size in reversed(sizes):
                ids, positions = subject.ids[:size].clone(), subject.positions[:size].clone()
                torch._dynamo.mark_dynamic(ids, 0)
                torch._dynamo.mark_dynamic(positions, 0)
                for _ in range(3):
                    torch.compiler.cudagraph_mark_step_begin()
                    self._compiled(ids, positions)
        synchronize(subject.device)
        return time.perf_counter() - begin

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with self._unmarked():  # What it was compiled with is a guard of every call.
            result: torch.Tensor = self._compiled(ids, positions)
        return result


def check_values(subject: Subject, arms: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Compares every arm with eager: bit for bit without a compiler, else by eager's own error in float32."""
    sizes = [size for size in REPLAY_SIZES if size in subject.sizes]
    wide = wide_model(subject.model.hidden_states)
    assert wide is not None
    found: dict[str, Any] = {name: {"compared": 0, "wrong_sizes": [], "error_ratio": 0.0} for name in arms}
    for size in random.sample(sizes, len(sizes)):
        arguments = subject.arguments(size)
        expected = subject.model.hidden_states(*arguments)
        reference = wide(*arguments)
        for name, arm in arms.items():
            if name == "reduce_overhead" and size not in overhead_sizes(subject):
                continue
            got = arm(*arguments).clone()
            found[name]["compared"] += 1
            if name == "breakable":
                is_right = torch.equal(got, expected)
            else:
                close = closeness(reference, expected, got)
                is_right = close.first_wrong is None
                if close.max_error is not None and close.eager_error:
                    ratio = close.max_error / close.eager_error
                    found[name]["error_ratio"] = max(found[name]["error_ratio"], ratio)
            if not is_right:
                found[name]["wrong_sizes"].append(size)
    return found


def overhead_sizes(subject: Subject) -> tuple[int, ...]:
    return tuple(size for size in REPLAY_SIZES if size in subject.sizes)[-NUM_OVERHEAD_SIZES:]


def measure_replays(subject: Subject, arms: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Times every arm in turns; medians, and medians of ratios within a round."""
    stopwatch = stopwatch_for(subject.device)
    report: dict[str, Any] = {}
    for size in (one for one in REPLAY_SIZES if one in subject.sizes):
        names = [name for name in arms if name != "reduce_overhead" or size in overhead_sizes(subject)]
        batches = [subject.arguments(size) for _ in range(4)]
        samples: dict[str, list[Any]] = {name: [] for name in names}
        for index in range(NUM_ROUNDS + 2):
            for name in random.sample(names, len(names)):
                arm, batch = arms[name], batches[index % len(batches)]
                sample = stopwatch.measure(lambda arm=arm, batch=batch: arm(*batch))  # type: ignore[misc]
                if index >= 2:
                    samples[name].append(sample)
        entry: dict[str, Any] = {}
        for name in names:
            latencies = [sample.latency_s for sample in samples[name]]
            entry[name] = {
                "latency_ms": statistics.median(latencies) * 1e3,
                "host_ms": statistics.median(sample.host_s for sample in samples[name]) * 1e3,
            }
            for base in ("eager", "breakable", "tc_full", "reduce_overhead"):
                if base in samples and base != name:
                    pairs = zip(latencies, samples[base], strict=True)
                    entry[name][f"ratio_to_{base}"] = statistics.median(
                        own / other.latency_s for own, other in pairs
                    )
        report[str(size)] = entry
    return report


def measure_replay_step(
    subject: Subject, attention: CausalAttention, arguments: argparse.Namespace
) -> dict[str, Any]:
    report: dict[str, Any] = {"before": prepare(subject)}
    arms: dict[str, Callable[..., Any]] = {"eager": subject.model.hidden_states}
    if not arguments.no_reduce_overhead:
        other = ReduceOverhead(subject, attention)
        settle(subject.device)
        report["reduce_overhead_build_s"] = other.build(subject, overhead_sizes(subject))
        report["reduce_overhead_sizes"] = overhead_sizes(subject)
        arms["reduce_overhead"] = other
    for arm in ARMS:
        settle(subject.device)
        captured = subject.build(arm)
        report[f"{arm}_build"] = built_facts(captured)
        arms[arm] = captured
    candidates = {name: arm for name, arm in arms.items() if name != "eager"}
    report["values"] = check_values(subject, candidates)
    settle(subject.device)
    wrong = {name for name, entry in report["values"].items() if entry["wrong_sizes"]}
    report["replay"] = measure_replays(
        subject, {name: arm for name, arm in arms.items() if name not in wrong}
    )
    return report


def run_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """The work of one child process."""
    random.seed(3)
    torch.manual_seed(3)
    load_s = time.perf_counter()
    subject = load_subject(arguments)
    settle(subject.device)
    load_s = time.perf_counter() - load_s
    attention = CausalAttention()
    with torch.inference_mode(), use_forward_context(ForwardContext(attention=attention)):
        if arguments.step == "replay":
            report = measure_replay_step(subject, attention, arguments)
        else:
            report = measure_builds(subject, arguments)
    return {"load_s": load_s, **report}


def run_children(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs each step in a fresh process with the caches that it asks for."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in arguments.steps.split(","):
            if step not in STEPS:
                raise SystemExit(f"Unknown step {step!r}; there are {', '.join(STEPS)}.")
            cache = Path(folder, "replay" if step == "replay" else "builds")
            nth = sum(1 for done in report if done.partition(" ")[0] == step) + 1
            name = step if nth == 1 else f"{step} {nth}"
            output = Path(folder, f"{step}.json")
            environment = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
                "TRITON_CACHE_DIR": str(cache / "triton"),
                "SGL_PIECEWISE_CACHE": str(cache / "pieces"),
            }
            if arguments.compile_threads is not None:
                environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(arguments.compile_threads)
            command = [sys.executable, __file__, *sys.argv[1:], "--step", step, "--json", str(output)]
            begin = time.perf_counter()
            subprocess.run(command, env=environment, check=True)
            report[name] = json.loads(output.read_text())
            report[name]["process_s"] = time.perf_counter() - begin
            print(f"== {name}\n{json.dumps(report[name], indent=1)}", flush=True)
            save(arguments, report)
    return report


def findings(report: dict[str, Any]) -> dict[str, float]:
    """The ratios that the targets are about."""
    found: dict[str, float] = {}
    for name, step in report.items():
        if name.partition(" ")[0] not in ("cold", "warm"):
            continue
        prefix = name.replace(" ", "_")
        for compiler in ("fx", "inductor"):
            ratio = step["memory_estimate"][compiler]["ratio_largest_alone"]
            if ratio is not None:
                found[f"{prefix}_{compiler}_memory_estimate_over_measured"] = ratio
        found[f"{prefix}_build_over_breakable"] = step["ratio"]
        found[f"{prefix}_compile_share"] = step["tc_piecewise"][0]["compile_share"]
    replay = report.get("replay", {})
    if "reduce_overhead_build_s" in replay:
        own_s = (report.get("cold") or {}).get("tc_piecewise_s") or replay["tc_piecewise_build"]["total_s"]
        found["cold_build_over_reduce_overhead"] = own_s / replay["reduce_overhead_build_s"]
    for size, entry in replay.get("replay", {}).items():
        for base in ("breakable", "tc_full", "reduce_overhead"):
            ratio = entry.get("tc_piecewise", {}).get(f"ratio_to_{base}")
            if ratio is not None:
                found[f"replay_over_{base}_at_{size}"] = ratio
    return found


def save(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    head = {
        **report_head(SCHEMA),
        "model": arguments.model,
        "num_layers": arguments.layers,
        "num_capture_sizes": len(default_capture_sizes(arguments.largest)),
        "findings": findings(report),
    }
    write_json(arguments.json, head | report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--largest", type=int, default=4096, help="largest capture size")
    parser.add_argument(
        "--steps", default=",".join(STEPS), help="which of cold,warm,replay to run, in this order"
    )
    parser.add_argument("--compile-threads", type=int, default=None, help="of Inductor")
    parser.add_argument("--no-reduce-overhead", action="store_true")
    parser.add_argument("--whole", action="store_true", help="build without sharing layers too, for contrast")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--step", choices=STEPS, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step is not None:
        arguments.json.write_text(json.dumps(run_step(arguments)))
        return 0
    report = run_children(arguments)
    print(json.dumps(findings(report), indent=1))
    values = report.get("replay", {}).get("values", {})
    return 1 if any(entry["wrong_sizes"] for entry in values.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
