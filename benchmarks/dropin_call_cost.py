"""Host time per call of a compiled model: what capture at the first calls adds, beside other ways.

One process, one small model, calls that are already captured. Each way is timed in turns with the others:

- ``eager``: the model itself;
- ``dynamo_floor``: a backend that does nothing, so Dynamo's guards and its own call are what is left of it;
- ``none``: our backend, pieces compiled, nothing captured;
- ``full`` and ``breakable``: ours with graphs, with 0, 1 and 8 marked calls between the layers;
- ``direct``: as ``full``, the compiled forward called without Dynamo;
- ``bare_graph``: a backend that copies its input, launches one graph of the operators and clones the output, and checks
  nothing; ``bare_compiled_graph``: the same with a graph of our compiled pieces, so the least that ``full`` could cost
  behind Dynamo if it copied around the launch; its copies are inside the graph, so it may cost less. Their three parts
  are timed by themselves as well, each begun with an idle device (CUDA only);
- ``reduce_overhead``: Inductor with PyTorch's own CUDA graphs (CUDA only).

All calls get one tensor, and what they return is dropped. ``full: moving`` gets another tensor each time and keeps what
it returned until the next call is done, so that no address comes again at once; ``dynamo_floor: moving`` likewise.

What a break adds is what 8 of them add, less what the marked function itself takes in ``eager``.

Host time is the time until a call returns, the device being idle when it begins. On a GPU, run

    python benchmarks/dropin_call_cost.py --device cuda --output docs/results/DATE-gpu-dropin-call-cost.json

Without one, ``--device cpu`` is a dry run on the emulated device; its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sgl_piecewise import capture_stats, eager_on_graph
from sgl_piecewise.comparison.benchmarking import synchronize, write_json
from sgl_piecewise.compiler.backend import sgl_piecewise
from sgl_piecewise.runtime.torch_private_entries import with_own_code

NUM_LAYERS = 8


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@eager_on_graph(fake=_like, capture_stub=_like)
def passes_on(x: torch.Tensor) -> torch.Tensor:
    """A marked call with as little in it as there can be."""
    return x.clone()


class Model(nn.Module):
    """Linear layers; the first ``num_breaks`` of them are followed by a marked call."""

    def __init__(self, num_breaks: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))
        self.num_breaks = num_breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the form of ``x``."""
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if index < self.num_breaks:
                x = passes_on(x)
        return x


def do_nothing(gm: Any, example_inputs: Any) -> Callable[..., Any]:
    """A Dynamo backend whose compiled code returns its last result again, whatever it gets."""
    kept: list[Any] = []

    def call(*args: Any) -> Any:
        if not kept:
            kept.append(gm.forward(*args))
        return kept[0]

    return call


class BareGraph:
    """A Dynamo backend that captures its first call, of one shape, and replays it without a check.

    Args:
        compiler: What compiles the traced forward first; None for the operators as they are.

    Attributes:
        parts: What a replay does, each part by itself, once it was captured.
    """

    def __init__(self, compiler: Callable[..., Callable[..., Any]] | None = None) -> None:
        self.parts: dict[str, Callable[[], Any]] = {}
        self._compiler = compiler

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        """Returns what Dynamo is to call."""
        forward = gm.forward if self._compiler is None else self._compiler(gm, example_inputs)
        replay: list[Callable[..., Any]] = []

        def call(*args: Any) -> Any:
            if not replay:
                replay.append(self._capture(forward, args))
            return replay[0](*args)

        return call

    def _capture(self, forward: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        # Parameters come as inputs too, and stay where they are.
        (given,) = [index for index, arg in enumerate(args) if not isinstance(arg, nn.Parameter)]
        static = args[given].clone()
        values = [static if index == given else arg for index, arg in enumerate(args)]
        forward(*values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (output,) = forward(*values)
        x = args[given].clone()
        self.parts = {
            "copy_in": lambda: static.copy_(x),
            "launch": graph.replay,
            "clone_output": output.clone,
        }

        def run(x: torch.Tensor) -> tuple[torch.Tensor]:
            static.copy_(x)
            graph.replay()
            return (output.clone(),)

        return lambda *args: run(args[given])


class Direct:
    """Our backend, whose compiled forward can be called without Dynamo.

    Attributes:
        call: The last call again; None before the first.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.call: Callable[[], Any] | None = None
        self._options = options

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        """Returns what Dynamo is to call."""
        forward = sgl_piecewise(gm, example_inputs, options=self._options)

        def call(*args: Any) -> Any:
            self.call = functools.partial(forward, *args)
            return forward(*args)

        return call


class Moving:
    """Calls whose tensors lie elsewhere than in the call before."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self._fn = fn
        self._inputs = itertools.cycle([x.clone() for _ in range(4)])
        self._kept: torch.Tensor | None = None

    def __call__(self) -> None:
        """Calls the function once."""
        self._kept = self._fn(next(self._inputs))


def ways(device: torch.device, piece_compiler: str) -> dict[tuple[str, int], dict[str, Any] | None]:
    """Returns for each way and number of breaks the arguments of ``torch.compile``; None for eager."""

    def ours(capture: str) -> dict[str, Any]:
        return {
            "backend": "sgl_piecewise",
            "options": {"capture": capture, "piece_compiler": piece_compiler},
        }

    found: dict[tuple[str, int], dict[str, Any] | None] = {}
    for num_breaks in (0, 1, 8):
        found["eager", num_breaks] = None
        found["dynamo_floor", num_breaks] = {"backend": do_nothing}
        found["none", num_breaks] = ours("none")
        found["full", num_breaks] = ours("full")
        found["breakable", num_breaks] = ours("breakable")
    found["direct", 0] = {"backend": Direct({"capture": "full", "piece_compiler": piece_compiler})}
    if device.type == "cuda":
        found["bare_graph", 0] = {"backend": BareGraph()}
        options = {"capture": "none", "piece_compiler": piece_compiler}
        compiled = functools.partial(sgl_piecewise, options=options)
        found["bare_compiled_graph", 0] = {"backend": BareGraph(compiled)}
        found["reduce_overhead", 0] = {"mode": "reduce-overhead"}
    return found


def host_us(call: Callable[[], Any], wait: Callable[[], None], num_calls: int) -> list[float]:
    """Times calls on the host, each begun with nothing pending, in microseconds."""
    times = []
    for _ in range(num_calls):
        wait()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Builds every way, checks its values, then times all in turns."""
    device = torch.device(args.device)
    wait = functools.partial(synchronize, device)
    x = torch.randn(args.rows, args.width, device=device)
    arms: dict[tuple[str, int], Callable[[], Any]] = {}
    parts: dict[tuple[str, int], Callable[[], Any]] = {}
    for (way, num_breaks), settings in ways(device, args.piece_compiler).items():
        torch.manual_seed(0)
        model = Model(num_breaks, args.width).to(device).eval()
        # Frames of one code object share Dynamo's limit of compiles, so each way has its own.
        fn = model if settings is None else torch.compile(_own_code(model), **settings)
        expected = model(x)
        for _ in range(6):
            torch.testing.assert_close(fn(x), expected, rtol=1e-3, atol=1e-3)
        arms[way, num_breaks] = lambda fn=fn: fn(x)
        if num_breaks == 0 and way in ("full", "dynamo_floor"):
            arms[f"{way}: moving", 0] = Moving(fn, x)
        backend = None if settings is None else settings.get("backend")
        if isinstance(backend, Direct):
            assert backend.call is not None, "it was called above"
            arms[way, num_breaks] = backend.call
        if isinstance(backend, BareGraph):
            parts.update({(f"{way}: {part}", num_breaks): call for part, call in backend.parts.items()})
    arms.update(parts)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in arms}
    for _ in range(args.rounds):
        for key, call in arms.items():
            times[key] += host_us(call, wait, args.calls)
    rows = []
    for (way, num_breaks), found in times.items():
        floor = statistics.median(times["dynamo_floor", num_breaks])
        median = statistics.median(found)
        rows.append(
            {
                "way": way,
                "num_breaks": num_breaks,
                "host_us_median": round(median, 2),
                "host_us_p10": round(statistics.quantiles(found, n=10)[0], 2),
                "host_us_p90": round(statistics.quantiles(found, n=10)[-1], 2),
                "over_dynamo_floor_us": round(median - floor, 2),
                "num_calls": len(found),
            }
        )
    return {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "emulated",
        "is_emulated": device.type != "cuda",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": args.rows,
        "width": args.width,
        "num_layers": NUM_LAYERS,
        "piece_compiler": args.piece_compiler,
        "findings": findings(rows),
        "results": rows,
        "captured": [
            {"name": one.name, "graphs": one.num_graphs, "breaks": one.num_breaks, "replays": one.num_replays}
            for one in capture_stats()
        ],
    }


def findings(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns what the targets are about, in microseconds."""
    medians = {(row["way"], row["num_breaks"]): row["host_us_median"] for row in rows}

    def added(way: str) -> float:
        return (medians[way, 8] - medians[way, 0]) / 8

    found = {
        "over_dynamo_floor": medians["full", 0] - medians["dynamo_floor", 0],
        "over_dynamo_floor_moving": medians["full: moving", 0] - medians["dynamo_floor: moving", 0],
        "break_with_its_function": added("breakable"),
        "break": added("breakable") - added("eager"),
    }
    if ("bare_graph", 0) in medians:
        found["bare_graph_over_dynamo_floor"] = medians["bare_graph", 0] - medians["dynamo_floor", 0]
        found["over_bare_graph"] = medians["full", 0] - medians["bare_graph", 0]
        found["over_bare_compiled_graph"] = medians["full", 0] - medians["bare_compiled_graph", 0]
        found["over_reduce_overhead"] = medians["full", 0] - medians["reduce_overhead", 0]
    return {name: round(value, 2) for name, value in found.items()}


def _own_code(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that calls the model, with a code object of its own that Dynamo takes for the user's."""

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x)
        return found

    return with_own_code(call, "call")


def main() -> None:
    """Reads the command line, measures, writes JSON and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--piece-compiler", default="inductor")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with torch.inference_mode():
        report = measure(args)
    if args.output is not None:
        write_json(args.output, report)
    print(f"{report['device']}: host time per call, microseconds (median; over Dynamo's floor)")
    for row in report["results"]:
        median, over = row["host_us_median"], row["over_dynamo_floor_us"]
        print(f"  {row['way']:34} {row['num_breaks']} breaks {median:9.1f} {over:+9.1f}")
    for name, value in report["findings"].items():
        print(f"  {name:30} {value:9.1f}")


if __name__ == "__main__":
    main()
