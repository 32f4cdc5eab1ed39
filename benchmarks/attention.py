"""Attention backends and kernel sets side by side on one GPU: decode and extend, over batch and size.

One process, one layer shape (Qwen3-8B's by default), bf16. Every arm reads the same KV pool, whose
layers take turns so that no context stays in the L2 cache. Values are compared first; an arm that
differs gets no time. Times are of one layer, KV write included: inside a graph (device only), and
for extends as a break too (what a breakable forward pays). Rounds are interleaved.

    python benchmarks/attention.py --json docs/results/NAME.json
    python benchmarks/attention.py --sweep    # block sizes of the Triton kernels, to choose defaults
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.comparison.benchmarking import write_json
from sgl_piecewise.comparison.environment import seen_clocks, seen_environment
from sgl_piecewise.comparison.intervals import median_of
from sgl_piecewise.runtime.attention import triton_calls
from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.flashinfer_paged import FlashInferAttention
from sgl_piecewise.runtime.attention.paged import PagedAttention
from sgl_piecewise.runtime.attention.plan import PlanLimits
from sgl_piecewise.runtime.attention.torch_paged import TorchAttention
from sgl_piecewise.runtime.attention.triton_paged import TritonAttention
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import CaptureHiddenMode, ForwardMode
from sgl_piecewise.runtime.batch.positions import StartLocEncoding
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.scheduling import schedule
from sgl_piecewise.runtime.capture.cuda_device import CudaDevice
from sgl_piecewise.runtime.kernels.kernel_set import KernelSet, available_kernel_sets, kernel_set
from sgl_piecewise.runtime.kv.allocator import KVSlotAllocator
from sgl_piecewise.runtime.kv.pool import KVPool, KVSubPool, SubPoolSpec
from sgl_piecewise.runtime.kv.req_to_token import ReqToTokenPool
from sgl_piecewise.runtime.kv.slots import FULL_POOL
from sgl_piecewise.runtime.kv.translator import KVIndexTranslator

SCHEMA = "sgl_piecewise.benchmarks.attention/1"
NUM_ROUNDS = 25
TOLERANCE = 0.04  # of values of size one in bf16, against float32 arithmetic
TORCH_MOST_TILES = 34  # of 32 rows at most, up to which the reference is timed: it is slow


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured batch: equal requests."""

    mode: str
    num_requests: int
    prefix: int
    new: int

    @property
    def name(self) -> str:
        return f"{self.mode} {self.num_requests} x ({self.prefix} + {self.new})"

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return self.num_requests * (self.new * self.prefix + self.new * (self.new + 1) // 2)


CELLS = [
    *(
        Cell(mode="decode", num_requests=batch, prefix=context - 1, new=1)
        for batch in (1, 8, 32, 64)
        for context in (1024, 8192)
    ),
    *(Cell(mode="extend", num_requests=1, prefix=0, new=new) for new in (64, 256, 1024, 4096)),
    Cell(mode="extend", num_requests=1, prefix=4096, new=4096),
    Cell(mode="extend", num_requests=8, prefix=0, new=512),
]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What a batch is built for."""

    kv_translator: KVIndexTranslator
    device: torch.device
    start_loc_encoding: StartLocEncoding = StartLocEncoding.TOKEN_OFFSET
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    is_draft_worker: bool = False


class Setting:
    """Layers, their pool filled with random tokens, and the arms over it."""

    def __init__(self, cells: Sequence[Cell], *, layer: AttentionSpec, num_layers: int, device: torch.device):
        self.device = device
        self.layers = [
            AttentionSpec(**{**asdict(layer), "layer_index": index}) for index in range(num_layers)
        ]
        contexts = [cell.num_requests * (cell.prefix + cell.new) for cell in cells]
        max_context = max(cell.prefix + cell.new for cell in cells)
        max_requests = max(cell.num_requests for cell in cells)
        self.dtype = torch.bfloat16
        spec = SubPoolSpec(
            name=FULL_POOL,
            layer_ids=tuple(range(num_layers)),
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=self.dtype,
        )
        name = "triton" if device.type == "cuda" else "torch"
        self.pool = KVPool(
            [KVSubPool(spec, num_slots=max(contexts), device=device)], kernels=kernel_set(name, device)
        )
        for tensor in self.pool.static_tensors().values():
            tensor.normal_()
        self._max_requests, self._max_context = max_requests, max_context
        self.limits = PlanLimits(
            max_requests=max_requests,
            max_tokens=max(cell.num_requests * cell.new for cell in cells),
            max_context=max_context,
        )

    def batch(self, cell: Cell) -> tuple[ForwardBatch, KVIndexTranslator]:
        """Returns a batch that went through scheduling, and the tables that it stands in."""
        allocator = KVSlotAllocator.of_pool(self.pool)
        table = ReqToTokenPool(max_requests=self._max_requests, max_context=self._max_context)
        translator = KVIndexTranslator(self.pool, allocator, table)
        runner = Runner(kv_translator=translator, device=self.device)
        length = cell.prefix + cell.new
        reqs = [Req.of_prompt(f"request {n}", [1] * (length + 1)) for n in range(cell.num_requests)]
        if cell.prefix:
            lens = [cell.prefix] * len(reqs)
            ForwardBatch.init_new(schedule(ForwardMode.EXTEND, reqs, lens, allocator, table), runner)
            for req in reqs:
                req.num_computed_tokens = cell.prefix
        mode = ForwardMode.DECODE if cell.mode == "decode" else ForwardMode.EXTEND
        decision = schedule(mode, reqs, [cell.new] * len(reqs), allocator, table)
        return ForwardBatch.init_new(decision, runner), translator

    def tokens(self, batch: ForwardBatch) -> list[torch.Tensor]:
        """Returns q, k and v as the views of one projection that a layer passes."""
        first = self.layers[0]
        heads = [first.num_heads, first.num_kv_heads, first.num_kv_heads]
        qkv = torch.randn(batch.num_tokens, sum(heads), first.head_dim, device=self.device).to(self.dtype)
        return list(qkv.split(heads, dim=1))

    def arms(self, cell: Cell, translator: KVIndexTranslator) -> dict[str, PagedAttention]:
        """Returns the arms that can run a cell, the reference first where it is not too slow."""
        kinds: dict[str, type[PagedAttention]] = {}
        if cell.num_requests * -(-cell.new // 32) <= TORCH_MOST_TILES:
            kinds["torch"] = TorchAttention
        names = available_kernel_sets()
        if "triton" in names:
            kinds["triton"] = TritonAttention
        if "flashinfer" in names and self.device.type == "cuda":
            kinds["flashinfer"] = FlashInferAttention
        found = {}
        for name, kind in kinds.items():
            found[name] = kind(self.layers, limits=self.limits)
            found[name].bind_kv(translator)
        return found


def check_values(
    setting: Setting, arms: dict[str, PagedAttention], batch: ForwardBatch, tokens: list[torch.Tensor]
) -> dict[str, float]:
    """Returns how far each arm is from the first one, or from itself where it is the first."""
    results = {}
    for name, arm in arms.items():
        arm.plan(batch)
        results[name] = arm.run(*tokens, setting.layers[0]).float()
    reference = next(iter(results.values()))
    return {name: (found - reference).abs().max().item() for name, found in results.items()}


def graph_of(run: Callable[[], Any]) -> Callable[[], None]:
    """Captures a run as one CUDA graph, after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def interleaved(runs: dict[str, Callable[[], None]], *, per_run: int, rounds: int) -> dict[str, Any]:
    """Times runs in shuffled rounds with device events; microseconds for one of ``per_run`` parts."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    order = list(runs)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            runs[name]()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {
        name: asdict(median_of([1000 * begin.elapsed_time(end) / per_run for begin, end in pairs]))
        for name, pairs in events.items()
    }


def measure_cell(setting: Setting, cell: Cell, floors: dict[str, float], rounds: int) -> dict[str, Any]:
    """Measures one cell on every arm whose values are right."""
    batch, translator = setting.batch(cell)
    tokens = setting.tokens(batch)
    arms = setting.arms(cell, translator)
    errors = check_values(setting, arms, batch, tokens)
    right = {name: arm for name, arm in arms.items() if errors[name] <= TOLERANCE}

    def all_layers(arm: PagedAttention) -> Callable[[], None]:
        def run() -> None:
            for layer in setting.layers:
                arm.run(*tokens, layer)

        return run

    graphs = {}
    for name, arm in right.items():
        arm.plan_for_capture(batch)
        graphs[name] = graph_of(all_layers(arm))
    found: dict[str, Any] = {
        "cell": cell.name,
        **asdict(cell),
        "max_error": errors,
        "in_graph_us": interleaved(graphs, per_run=len(setting.layers), rounds=rounds),
    }
    del graphs
    if cell.mode == "extend":
        for arm in right.values():
            arm.plan(batch)
        breaks = {name: all_layers(arm) for name, arm in right.items()}
        found["as_break_us"] = interleaved(breaks, per_run=len(setting.layers), rounds=rounds)
    first = setting.layers[0]
    kv_bytes = cell.num_requests * (cell.prefix + cell.new) * 2 * first.num_kv_heads * first.head_dim * 2
    token_bytes = 2 * batch.num_tokens * first.num_heads * first.head_dim * 2
    operations = 4 * cell.num_pairs * first.num_heads * first.head_dim
    found["bytes"] = kv_bytes + token_bytes
    found["operations"] = operations
    found["floor_us"] = max(
        1e6 * found["bytes"] / floors["copy_bytes_per_s"], 1e6 * operations / floors["matrix_flops_per_s"]
    )
    found["of_floor"] = {
        name: found["floor_us"] / timing["value"] for name, timing in found["in_graph_us"].items()
    }
    return found


def measure_floors() -> dict[str, float]:
    """Returns what the device can do: bytes copied (read and written) and bf16 products a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = interleaved(
        {"copy": lambda: target.copy_(source), "matrix": lambda: torch.mm(a, b)}, per_run=1, rounds=20
    )
    return {
        "copy_bytes_per_s": 2e6 * source.numel() / times["copy"]["value"],
        "matrix_flops_per_s": 2e6 * 8192**3 / times["matrix"]["value"],
    }


def measure_kernels(num_tokens: int, layer: AttentionSpec, rounds: int) -> dict[str, Any]:
    """Times one layer's fused kernels of each set, inside graphs of eight."""
    hidden, inner = layer.num_heads * layer.head_dim, 3 * layer.num_heads * layer.head_dim

    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    x, residual, weight = random_of(num_tokens, hidden), random_of(num_tokens, hidden), random_of(hidden)
    gate_up = random_of(num_tokens, 2 * inner)
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    q, k, v = random_of(num_tokens, sum(heads), layer.head_dim).split(heads, dim=1)
    cos, sin = random_of(num_tokens, 1, layer.head_dim), random_of(num_tokens, 1, layer.head_dim)
    pool = [random_of(num_tokens + 1, layer.num_kv_heads, layer.head_dim) for _ in range(2)]
    slots = torch.randperm(num_tokens, device="cuda") + 1
    norms = {"q_weight_D": random_of(layer.head_dim), "k_weight_D": random_of(layer.head_dim), "eps": 1e-6}
    calls: dict[str, Callable[[KernelSet], Any]] = {
        "add_rms_norm": lambda kernels: kernels.add_rms_norm(x, residual, weight, 1e-6),
        "silu_mul": lambda kernels: kernels.silu_mul(gate_up),
        "gelu_tanh_mul": lambda kernels: kernels.gelu_tanh_mul(gate_up),
        "norm_rotate": lambda kernels: kernels.norm_rotate(q, k, cos, sin, **norms),
        "write_kv": lambda kernels: kernels.write_kv(*pool, slots, k, v),
    }
    sets = [kernel_set(name, torch.device("cuda")) for name in available_kernel_sets()]
    found: dict[str, Any] = {"num_tokens": num_tokens}
    for name, call in calls.items():

        def repeated(kernels: KernelSet, call: Callable[[KernelSet], Any] = call) -> Callable[[], None]:
            return graph_of(lambda: [call(kernels) for _ in range(8)])

        runs = {kernels.name: repeated(kernels) for kernels in sets}
        found[name] = interleaved(runs, per_run=8, rounds=rounds)
    return found


def sweep(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Times other block sizes of the Triton kernels on three cells, best first in each."""
    found = []
    for cell in (
        Cell(mode="decode", num_requests=1, prefix=8191, new=1),
        Cell(mode="decode", num_requests=32, prefix=8191, new=1),
        Cell(mode="extend", num_requests=1, prefix=0, new=4096),
    ):
        batch, translator = setting.batch(cell)
        arm = TritonAttention(setting.layers, limits=setting.limits)
        arm.bind_kv(translator)
        arm.plan_for_capture(batch)
        tokens = setting.tokens(batch)
        name = "_decode_blocks" if cell.mode == "decode" else "_extend_blocks"
        built_in = getattr(triton_calls, name)
        runs = {}
        for block_n, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 5, 7)):
            blocks = {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
            setattr(triton_calls, name, lambda *_, blocks=blocks: blocks)
            try:
                runs[json.dumps(blocks)] = graph_of(
                    lambda arm=arm, tokens=tokens: [arm.run(*tokens, layer) for layer in setting.layers]
                )
            except RuntimeError as err:  # more shared memory than there is
                print(f"{blocks}: {str(err).splitlines()[0]}", file=sys.stderr)
        setattr(triton_calls, name, built_in)
        times = interleaved(runs, per_run=len(setting.layers), rounds=rounds)
        ordered = sorted(times.items(), key=lambda item: item[1]["value"])
        found.append({"cell": cell.name, "us": dict(ordered)})
        print(cell.name, *(f"\n  {one['value']:9.1f} us {blocks}" for blocks, one in ordered[:6]))
        torch.cuda.empty_cache()
    return found


def print_cell(found: dict[str, Any]) -> None:
    arms = ", ".join(
        f"{name} {timing['value']:.1f} us ({found['of_floor'][name]:.0%} of the floor)"
        for name, timing in found["in_graph_us"].items()
    )
    print(f"{found['cell']:28} floor {found['floor_us']:7.1f} us: {arms}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the report is written")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--layers", type=int, default=4, help="layers that take turns")
    parser.add_argument("--sweep", action="store_true", help="block sizes of the Triton kernels instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.", file=sys.stderr)
        return 1
    began = time.perf_counter()
    torch.manual_seed(0)
    random.seed(0)
    device = CudaDevice()
    layer = AttentionSpec(layer_index=0, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    setting = Setting(CELLS, layer=layer, num_layers=arguments.layers, device=torch.device("cuda"))
    with torch.inference_mode():
        if arguments.sweep:
            report: dict[str, Any] = {"schema": SCHEMA, "sweep": sweep(setting, arguments.rounds)}
        else:
            clocks = seen_clocks(setting.device, "before")
            floors = measure_floors()
            print({name: f"{value:.3g}" for name, value in floors.items()})
            cells = []
            for cell in CELLS:
                cells.append(measure_cell(setting, cell, floors, arguments.rounds))
                print_cell(cells[-1])
                torch.cuda.empty_cache()
            report = {
                "schema": SCHEMA,
                "floors": floors,
                "cells": cells,
                "kernels": [measure_kernels(size, layer, arguments.rounds) for size in (1, 32, 4096)],
            }
            clocks = (*clocks, *seen_clocks(setting.device, "after"))
            report["environment"] = asdict(seen_environment(device, clocks))
    report |= {"layer": asdict(layer), "num_layers": arguments.layers, "command": " ".join(sys.argv)}
    report["seconds"] = time.perf_counter() - began
    if arguments.json:
        write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
