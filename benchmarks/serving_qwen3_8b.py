"""What the execution layer costs and gives on one GPU: decode and prefill against floors, first tokens, gaps.

    python benchmarks/serving_qwen3_8b.py --json docs/results/NAME.json
    python benchmarks/serving_qwen3_8b.py --attention flashinfer --kernels torch --compile inductor --json ...

All arms are model runners over one model with random bf16 weights, in one process, timed in turns:

- ``eager``: no graphs; ``breakable``: decode full, prompts between breaks; ``full``: both whole.
- with ``--compile NAME`` also ``NAME_breakable`` and ``NAME_full``: the same, compiled first.

Measured, for decode at several batches and one context, and for prompts: ``ModelRunner.forward`` from an idle device
to its last result (`latency`), until it returns (`host`), and one of ten that follow without a wait (`queued`); one
replay alone, of the batch that is loaded, and the part of it in which the device does not compute (`gap`). The floor
of decode is every weight but the input embedding and all keys and values once, at the copy bandwidth measured in the
same run; that of prompts is their products at the measured matrix rate. Also time to first token, from the engine's
scheduling to the token on the host, and steps of the engine at every batch: what a step takes beside its forward is
`between_s`, its time less that of a queued forward at the same batch and context. ``--transformers`` measures
transformers' `generate_batch` at the same batches, last, when the arms are gone. Logits of every arm are compared
with padded eager first; an arm that differs gets no times.

Without a GPU everything runs on the emulated device, whose times say nothing. A dry run:
``--model tiny --context 32 --batches 1,2 --prompts 8,16 --rounds 2 --json out.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.comparison.benchmarking import (
    default_device,
    default_dtype,
    report_head,
    settle,
    write_json,
)
from sgl_piecewise.comparison.serving.calls import (
    measure_floors,
    measure_gap,
    spans_on_device,
    time_in_turns,
    time_queued,
)
from sgl_piecewise.comparison.serving.transformers_batching import measure_generate_batch, reference_of
from sgl_piecewise.generation.compiling import CompiledModel
from sgl_piecewise.generation.driving import fill_cache, first_token, forward_batch, give_back
from sgl_piecewise.generation.engine import EngineOptions, OfflineEngine
from sgl_piecewise.generation.requests import GenerationRequest
from sgl_piecewise.models.loading import LoadedModel, load_model
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.records import PhaseClock
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

SCHEMA = "sgl_piecewise.benchmarks.serving/4"
NUM_STEPS = 4  # of the engine, for each round
ENGINE_PROMPT = 8  # tokens from which the engine decodes
TOLERANCE = 2e-2  # of the largest logit, for compiled arms; others are equal bit for bit


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run: strategies of prompts and of decoding, and what compiles them."""

    extend: str
    decode: str
    compiler: str = "none"

    def plan(
        self, prefill: str, decode: str, batches: tuple[int, ...], prompts: tuple[int, ...]
    ) -> ExecutionPlan:
        def strategy(name: str, sizes: tuple[int, ...]) -> ModeStrategy:
            if name == "eager":
                return ModeStrategy()
            return ModeStrategy(strategy=name, compile=self.compiler, capture_sizes=sizes)

        modes = {
            ForwardMode.DECODE: strategy(self.decode, batches),
            ForwardMode.EXTEND: strategy(self.extend, prompts),
        }
        return ExecutionPlan(modes=modes, prefill_attention=prefill, decode_attention=decode)


ARMS = {
    "eager": Arm(extend="eager", decode="eager"),
    "padded_eager": Arm(extend="none", decode="none"),
    "breakable": Arm(extend="breakable", decode="full"),
    "full": Arm(extend="full", decode="full"),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured, on what."""

    loaded: LoadedModel
    device: torch.device
    context: int
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    rounds: int
    floors: dict[str, float]


def weights_read(model: torch.nn.Module, embedding: torch.nn.Parameter) -> tuple[int, int]:
    """Returns bytes and number of the weights that a token reads: of the input embedding only what is the output's."""
    output = model.lm_head.weight
    read = [one for one in model.parameters() if one is not embedding or one is output]
    return sum(one.nbytes for one in read), sum(one.numel() for one in read)


def prompt_of(length: int, name: str, vocab_size: int) -> Req:
    generator = torch.Generator().manual_seed(length + len(name))
    return Req.of_prompt(name, torch.randint(0, vocab_size, (length,), generator=generator).tolist())


def filled_requests(runner: ModelRunner, batch_size: int, context: int, vocab_size: int) -> list[Req]:
    """Returns requests that have a context in the cache and one token to decode."""
    reqs = [prompt_of(context, f"decode {index}", vocab_size) for index in range(batch_size)]
    for req in reqs:
        fill_cache(runner, req, context)
        req.token_ids.append(1)
    return reqs


def times_of(
    runners: dict[str, ModelRunner], batches: dict[str, ForwardBatch], setting: Setting, floor_s: float
) -> dict[str, Any]:
    """Times forwards of one batch by every arm whose values are right, and replays where there are graphs."""
    errors = differing(runners, batches)
    device, rounds = setting.device, setting.rounds
    forwards = {name: functools.partial(runners[name].forward, batches[name]) for name in right_arms(errors)}
    found: dict[str, Any] = {"floor_s": floor_s, "errors": errors}
    found["forward"] = time_in_turns(forwards, device, rounds)
    latency = found["forward"]["latency"]
    found["of_floor"] = {name: floor_s / one["median_s"] for name, one in latency.items()}
    found["queued"] = time_queued(forwards, device, 1 + rounds // 3)
    # A runner's buffers hold one batch: nothing else is run by an arm while its replays are timed.
    loaded = {name: runners[name].load_graph(batches[name]) for name in forwards}
    replays = {name: call for name, call in loaded.items() if call is not None}
    found["replay"] = time_in_turns(replays, device, rounds)
    found["replay"]["gap"] = {name: gap_facts(call, setting) for name, call in replays.items()}
    return found


def gap_facts(call: Callable[[], Any], setting: Setting) -> dict[str, float] | None:
    """Returns how long the device computes in one call, of how long a time, and the part in which it does not."""
    found = measure_gap(call, setting.device, setting.rounds)
    return None if found is None else {**dataclasses.asdict(found), "gap": found.gap}


def differing(runners: dict[str, ModelRunner], batches: dict[str, ForwardBatch]) -> dict[str, float]:
    """Returns how far each arm's logits are from padded eager's, over the largest logit."""
    logits: dict[str, torch.Tensor] = {}
    for name, batch in batches.items():
        output = runners[name].forward(batch).logits
        assert output is not None
        logits[name] = output.next_token_logits.float().clone()
    want = logits["padded_eager"]
    return {name: float((found - want).abs().max() / want.abs().max()) for name, found in logits.items()}


def right_arms(errors: dict[str, float]) -> list[str]:
    """Returns the arms whose values allow a time: equal where nothing changes them, else within tolerance."""
    exact = ("padded_eager", "breakable", "full")
    return [name for name, error in errors.items() if error <= (0.0 if name in exact else TOLERANCE)]


def measure_decode(runners: dict[str, ModelRunner], setting: Setting) -> list[dict[str, Any]]:
    model = setting.loaded.model
    weight_bytes, _ = weights_read(model, model.embed_tokens.weight)
    found = []
    for batch_size in setting.batches:
        reqs = {
            name: filled_requests(runner, batch_size, setting.context, model.vocab_size)
            for name, runner in runners.items()
        }
        batches = {
            name: forward_batch(runner, ForwardMode.DECODE, reqs[name], [1] * batch_size)
            for name, runner in runners.items()
        }
        pool = next(iter(runners.values())).pool
        token_bytes = sum(one.spec.bytes_per_token for one in pool.sub_pools.values())
        read = weight_bytes + batch_size * (setting.context + 1) * token_bytes
        row = {"batch_size": batch_size, "context": setting.context, "bytes_read": read}
        floor_s = read / setting.floors["copy_bytes_per_s"]
        found.append(row | times_of(runners, batches, setting, floor_s))
        for name, runner in runners.items():
            give_back(runner, reqs[name])
    return found


def measure_prefill(runners: dict[str, ModelRunner], setting: Setting) -> list[dict[str, Any]]:
    model = setting.loaded.model
    _, num_weights = weights_read(model, model.embed_tokens.weight)
    num_weights -= model.lm_head.weight.numel()  # the output layer sees one row
    found = []
    for length in setting.prompts:
        reqs = {name: prompt_of(length, "prefill", model.vocab_size) for name in runners}
        batches = {
            name: forward_batch(runner, ForwardMode.EXTEND, [reqs[name]], [length])
            for name, runner in runners.items()
        }
        heads = sum(layer.num_heads * layer.head_dim for layer in model.attention_layers)
        operations = 2 * num_weights * length + 2 * heads * length * (length + 1)
        row = {"num_tokens": length, "operations": operations}
        floor_s = operations / setting.floors["matrix_flop_per_s"]
        row |= times_of(runners, batches, setting, floor_s)
        for name, runner in runners.items():
            give_back(runner, [reqs[name]])
        firsts = {name: _first_token(runners[name], length, model.vocab_size) for name in row["of_floor"]}
        row["first_token"] = time_in_turns(firsts, setting.device, setting.rounds)["latency"]
        found.append(row)
    return found


def _first_token(runner: ModelRunner, length: int, vocab_size: int) -> Callable[[], Any]:
    prompt_ids = prompt_of(length, "first", vocab_size).token_ids
    return functools.partial(first_token, OfflineEngine(runner), prompt_ids)


def engine_prompts(batch_size: int, vocab_size: int) -> list[list[int]]:
    """Returns the short prompts from which the engine, and transformers', decode."""
    return [prompt_of(ENGINE_PROMPT, f"engine {index}", vocab_size).token_ids for index in range(batch_size)]


def measure_engine(runners: dict[str, ModelRunner], setting: Setting) -> list[dict[str, Any]]:
    """Steps of the engine at every batch: their wall time, and what the host does in them beside waiting for tokens.

    With overlap the host's work runs while the device computes; what it still costs is `between_s`, the difference to
    queued forwards, which are timed right before and right after.
    """
    return [
        {
            "batch_size": size,
            "arms": {name: _engine_facts(runner, size, setting) for name, runner in runners.items()},
        }
        for size in setting.batches
    ]


def _engine_facts(runner: ModelRunner, batch_size: int, setting: Setting) -> dict[str, Any]:
    before_s = _queued_forward(runner, batch_size, setting)
    found: dict[str, Any] = {"overlap": _steps(runner, batch_size, setting, has_overlap=True)}
    found["forward_s"] = (before_s + _queued_forward(runner, batch_size, setting)) / 2
    found["no_overlap"] = _steps(runner, batch_size, setting, has_overlap=False)
    for steps in (found["overlap"], found["no_overlap"]):
        steps["between_s"] = steps["step_s"] - found["forward_s"]
        steps["between"] = steps["between_s"] / steps["step_s"]
    return found


def _queued_forward(runner: ModelRunner, batch_size: int, setting: Setting) -> float:
    """Returns seconds of one of many forwards at the middle of the engine's steps, queued behind each other."""
    context = ENGINE_PROMPT + NUM_STEPS * setting.rounds // 2
    reqs = filled_requests(runner, batch_size, context, setting.loaded.model.vocab_size)
    batch = forward_batch(runner, ForwardMode.DECODE, reqs, [1] * batch_size)
    times = time_queued({"": functools.partial(runner.forward, batch)}, setting.device, 4)
    give_back(runner, reqs)
    return times[""]["median_s"]


def _steps(runner: ModelRunner, batch_size: int, setting: Setting, *, has_overlap: bool) -> dict[str, Any]:
    engine = OfflineEngine(runner, options=EngineOptions(has_overlap=has_overlap))
    num_steps = NUM_STEPS * setting.rounds
    for ids in engine_prompts(batch_size, setting.loaded.model.vocab_size):
        engine.add(GenerationRequest(prompt_ids=ids, max_new_tokens=num_steps + 4))
    while engine.num_prefilling:
        engine.step()
    engine.step()
    settle(setting.device)
    before, clock = dict(engine.clock.phases_s), PhaseClock()
    with clock.phase("steps"):
        num_tokens = sum(len(engine.step()) for _ in range(num_steps))
    engine.drop_all()
    assert num_tokens == num_steps * batch_size, "every step gave every request a token"
    return {
        "step_s": clock.phases_s["steps"] / num_steps,
        "host_s": {name: (spent - before[name]) / num_steps for name, spent in engine.clock.phases_s.items()},
        "tokens_per_s": num_tokens / clock.phases_s["steps"],
    }


def measure_transformers(setting: Setting, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Decode tokens a second of transformers' `generate_batch`, at the engine's batches and lengths."""
    config = setting.loaded.config
    model = reference_of(config, device=setting.device, dtype=dtype)
    found = []
    for size in setting.batches:
        prompts = engine_prompts(size, config.vocab_size)
        pace = measure_generate_batch(model, prompts, num_new_tokens=NUM_STEPS * setting.rounds)
        found.append({"batch_size": size, **pace})
        settle(setting.device)
    return found


def make_runners(
    arguments: argparse.Namespace, setting: Setting
) -> tuple[dict[str, ModelRunner], dict[str, Any]]:
    arms = dict(ARMS)
    if arguments.compile != "none":
        for name in ("breakable", "full"):
            arms[f"{arguments.compile}_{name}"] = Arm(
                extend=ARMS[name].extend, decode=ARMS[name].decode, compiler=arguments.compile
            )
    context = max(setting.context + 8 * setting.rounds + 16, setting.prompts[-1] + 1)
    options = RunnerOptions(
        max_requests=setting.batches[-1],
        kernels=arguments.kernels,
        max_context=context,
        max_extend_tokens=setting.prompts[-1],
        max_total_tokens=setting.batches[-1] * (setting.context + 8) + setting.prompts[-1],
    )
    runners, builds = {}, {}
    for name, arm in arms.items():
        runner = ModelRunner.ready(
            setting.loaded.model,
            plan=arm.plan(
                arguments.prefill_attention or arguments.attention,
                arguments.attention,
                setting.batches,
                setting.prompts,
            ),
            options=options,
            compiler=CompiledModel,
        )
        build = runner.graph_build
        assert build is not None
        runners[name] = runner
        builds[name] = {
            "total_s": build.total_s,
            "num_graphs": build.num_graphs,
            "pool_bytes": build.pool_bytes,
            "driver_bytes": build.driver_bytes,
            "failures": build.failures,
        }
        gc.collect()
    return runners, builds


def sizes_of(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache while decoding")
    parser.add_argument("--batches", type=sizes_of, default=(1, 8, 32), help="requests of decode")
    parser.add_argument("--prompts", type=sizes_of, default=(64, 128, 256, 512, 1024, 2048, 4096))
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--prefill-attention", default=None, help="of prompts; as --attention by default")
    parser.add_argument("--kernels", default="auto", help="fused kernels: torch, triton, flashinfer")
    parser.add_argument(
        "--compile", default="none", help="adds compiled arms: fx, inductor, a Dynamo backend"
    )
    parser.add_argument("--transformers", action="store_true", help="measure its continuous batching too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = default_device()
    dtype = default_dtype(device)
    if device.type == "cuda":
        # A profiler sees kernels only of graphs that were made after the first profile.
        spans_on_device(lambda: torch.zeros(1, device=device), device)
    setting = Setting(
        loaded=load_model(
            arguments.model,
            device=device,
            dtype=dtype,
            num_layers=arguments.layers,
            kernels=kernel_set(arguments.kernels, device),
        ),
        device=device,
        context=arguments.context,
        batches=arguments.batches,
        prompts=arguments.prompts,
        rounds=arguments.rounds,
        floors=measure_floors(device),
    )
    runners, builds = make_runners(arguments, setting)
    report = {
        **report_head(SCHEMA),
        "model": setting.loaded.description,
        "kernels": arguments.kernels,
        "attention": {
            name: {"prefill": runner.plan.prefill_attention, "decode": runner.plan.decode_attention}
            for name, runner in runners.items()
        },
        "floors": setting.floors,
        "builds": builds,
    }
    # Written after each part: what comes later may run out of time.
    for part, measure in (
        ("decode", measure_decode),
        ("prefill", measure_prefill),
        ("engine", measure_engine),
    ):
        report[part] = measure(runners, setting)
        write_json(arguments.json, report)
    if arguments.transformers:
        runners.clear()
        settle(device)
        report["transformers"] = measure_transformers(setting, dtype)
        write_json(arguments.json, report)
    keys = ("floors", "builds", "decode", "prefill", "engine", "transformers")
    print(json.dumps({key: report[key] for key in keys if key in report}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
