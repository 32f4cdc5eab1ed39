"""The model runner: built in one fixed order, then one forward after another to the runner that can.

The order is weights, pools, hooks, attention, graphs; `ModelRunner.ready` goes through it. A batch
is offered to the decode graphs, then to the split prefill or the extend graphs, and runs eager
where none can; every no has a reason that is counted. This module must not know how a forward is
captured.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from ..attention.choice import attention_backend_class, build_attention_backend, resolve_attention_backend
from ..attention.paged import PagedAttention
from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import CaptureHiddenMode, ForwardMode
from ..batch.positions import StartLocEncoding
from ..capture.captured import ProgressCallback
from ..capture.devices import graph_device_for
from ..capture.statics import StaticTensor, StaticTensorMap
from ..errors import ConfigError
from ..kernels.kernel_set import kernel_set
from ..kv.allocator import KVSlotAllocator
from ..kv.capacity import KVCapacity, MemoryBudget, profile_capacity, verify_after_capture
from ..kv.pool import KVPool, KVSubPool
from ..kv.req_to_token import ReqToTokenPool
from ..kv.translator import KVIndexTranslator, bind_and_verify_backends
from ..records import LapClock, PhaseClock
from ..runners.base import GraphRunner, ModelRunnerOutput, Runner, RunnerParts
from ..runners.compiling import CompiledForwards, ForwardCompiler
from ..runners.decode import DecodeRunner
from ..runners.eager import EagerRunner
from ..runners.execution import ExecutionLog, Reason, Refusal
from ..runners.extend import ExtendRunner
from ..runners.plan import RUNNER_OF_MODE, ExecutionPlan
from ..runners.served_model import ServedModel
from ..runners.split_prefill import SplitPrefillRunner, SplitProgress
from .agreement import RankAgreement, SingleRank
from .graph_build import GraphBuild, collect_failures, count_graphs
from .hooks import install_write_hooks
from .memory import free_bytes, measure_forward_bytes, sub_pool_specs
from .options import RunnerOptions
from .runner_factory import (
    capture_sizes,
    make_decode_runner,
    make_extend_runner,
    plan_limits,
)
from .stages import Stage, StageTracker

_logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs batches of one model on one device.

    Args:
        model: With its weights in place.
        plan: What runs how.
        options: Limits and switches.
        agreement: Asks other ranks before a graph is chosen.
        compiler: Compiles forwards, for plans with compile values; the runtime knows none.

    Raises:
        ConfigError: The plan or a limit cannot be met; an attention backend is unknown.

    Attributes:
        model: The model.
        plan: The plan as resolved.
        plan_changes: What the plan asked for and did not get.
        log: What ran, how and why.
        clock: Host seconds of forwards by category: ``extend``, ``verify``, ``decode``.
        graph_build: Time and memory of graphs; None before `build_graphs`.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        plan: ExecutionPlan | None = None,
        options: RunnerOptions | None = None,
        agreement: RankAgreement | None = None,
        compiler: ForwardCompiler | None = None,
    ) -> None:
        self.model = model
        self.options = options or RunnerOptions()
        if self.options.max_context > model.max_positions:
            raise ConfigError(
                f"max_context is {self.options.max_context}, and the model was made for {model.max_positions} "
                "positions. Choose a smaller max_context."
            )
        asked = plan or ExecutionPlan()
        self._graph_device = graph_device_for(model.device)
        # Names are resolved before anything is built, so that a wrong one costs no memory.
        breaks = asked.of(ForwardMode.EXTEND).strategy != "full"
        prefill = resolve_attention_backend(
            asked.prefill_attention,
            model.device,
            breaks_for=(model.attention_layers, model.kv_dtype) if breaks else None,
        )
        decode = resolve_attention_backend(asked.decode_attention, model.device)
        asked = dataclasses.replace(asked, prefill_attention=prefill, decode_attention=decode)
        self.plan, self.plan_changes = asked.resolve(
            attention_backend_class(prefill), attention_backend_class(decode)
        )
        self._sizes = capture_sizes(self.plan, self.options)
        self.log = ExecutionLog()
        self.clock = LapClock()
        self.graph_build: GraphBuild | None = None
        self._agreement = agreement or SingleRank()
        self._compiler = compiler
        self._graph_pool = self._graph_device.new_pool()
        self._stages = StageTracker()
        self._deferred: list[Callable[[], None]] = []

    @classmethod
    def ready(
        cls,
        model: ServedModel,
        *,
        plan: ExecutionPlan | None = None,
        options: RunnerOptions | None = None,
        agreement: RankAgreement | None = None,
        compiler: ForwardCompiler | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> ModelRunner:
        """Returns a model runner that is built; arguments as in the class.

        Args:
            model: The model.
            plan: What runs how.
            options: Limits and switches.
            agreement: Asks other ranks.
            compiler: Compiles forwards.
            on_progress: Called with (phase, done, total) while graphs are built.
        """
        runner = cls(model, plan=plan, options=options, agreement=agreement, compiler=compiler)
        runner.build_pools()
        runner.install_hooks()
        runner.build_attention()
        runner.build_graphs(on_progress)
        return runner

    # Construction -------------------------------------------------------------------------------

    def build_pools(self) -> None:
        """Sizes KV pools from the memory that is left, and makes them.

        Raises:
            ConfigError: Out of order.
            PoolError: Not a single token fits.
        """
        self._stages.begin(Stage.POOLS)
        options = self.options
        specs = sub_pool_specs(self.model.attention_layers, self.model.kv_dtype)
        activations = measure_forward_bytes(self.model, self._largest_forward(), self._graph_device)
        budget = MemoryBudget(
            free_bytes=free_bytes(self.device),
            graph_bytes=activations if options.graph_bytes is None else options.graph_bytes,
            margin_bytes=options.margin_bytes + activations,
        )
        most = options.max_requests * options.max_context
        self.capacity: KVCapacity = profile_capacity(
            specs,
            budget,
            window_fraction=options.window_fraction,
            min_window_slots=options.max_context,
            max_slots=most if options.max_total_tokens is None else min(most, options.max_total_tokens),
        )
        self.pool = KVPool(
            (
                KVSubPool(spec, num_slots=self.capacity.num_slots[spec.name], device=self.device)
                for spec in specs
            ),
            kernels=kernel_set(options.kernels, self.device),
        )
        self.allocator = KVSlotAllocator.of_pool(self.pool)
        self.req_to_token = ReqToTokenPool(max_requests=options.max_requests, max_context=options.max_context)
        self._stages.end(Stage.POOLS)

    def install_hooks(self) -> None:
        """Hooks the watchers of the options into the pool.

        Raises:
            ConfigError: Out of order.
        """
        self._stages.begin(Stage.HOOKS)
        install_write_hooks(self.pool, self.options.write_hooks)
        self._stages.end(Stage.HOOKS)

    def build_attention(self) -> None:
        """Makes attention backends and the translator, and checks that they mean the same pools.

        Raises:
            ConfigError: Out of order, or a backend does not fit the model.
        """
        self._stages.begin(Stage.ATTENTION)
        self._translator = KVIndexTranslator(self.pool, self.allocator, self.req_to_token)
        layers = self.model.attention_layers
        limits = plan_limits(self._sizes, self.options)
        self.attention: dict[str, PagedAttention] = {
            name: build_attention_backend(name, layers, limits=limits)
            for name in {self.plan.prefill_attention, self.plan.decode_attention}
        }
        bind_and_verify_backends(self._translator, self.attention, [layer.layer_index for layer in layers])
        self._stages.end(Stage.ATTENTION)

    def build_graphs(self, on_progress: ProgressCallback | None = None) -> None:
        """Makes the runners and builds their graphs, then checks memory against the estimate.

        Args:
            on_progress: Called with (phase, done, total).

        Raises:
            ConfigError: Out of order.
            PoolError: Graphs took more than the estimate and the margin.
        """
        self._stages.begin(Stage.GRAPHS)
        parts = RunnerParts(
            model=self.model,
            batch_runner=self,
            max_context=self.options.max_context,
            attention_for=self.attention_for,
            policy=self.plan.padding,
            token_multiple=self.options.token_multiple,
            token_layout=self.options.token_layout,
            reads_requests=self.options.reads_requests,
        )
        forwards = CompiledForwards(parts, self._compiler, self._sizes.all_tokens)
        statics, is_debug = self._static_tensors(), self.options.is_debug
        self._decode: DecodeRunner | None = make_decode_runner(
            self.plan, self._sizes, parts, self._graph_pool, statics, forwards, is_debug=is_debug
        )
        self._extend: ExtendRunner | None = make_extend_runner(
            self.plan,
            self._sizes,
            parts,
            self._graph_pool,
            statics,
            forwards,
            max_requests=self.options.max_requests,
            is_debug=is_debug,
        )
        self._split = SplitPrefillRunner(parts)
        self._eager = EagerRunner(parts)
        self._build_all(on_progress)
        self._stages.end(Stage.GRAPHS)

    def _build_all(self, on_progress: ProgressCallback | None) -> None:
        device, clock = self._graph_device, PhaseClock()
        used, reserved = device.used_bytes(), device.allocator_reserved_bytes()
        # One pool serves all: the runner with the larger forwards comes first.
        runners: list[GraphRunner] = [one for one in (self._extend, self._decode) if one is not None]
        with torch.no_grad():
            for runner in runners:
                runner.build(on_progress)
        device.synchronize()
        driver = None
        used_now = device.used_bytes()
        if used is not None and used_now is not None:
            driver = (used_now - used) - (device.allocator_reserved_bytes() - reserved)
        backends = tuple(backend for runner in runners for backend in runner.backends)
        pool_bytes = self._graph_pool.memory().reserved_bytes
        self.graph_build = GraphBuild(
            total_s=clock.total_s(),
            num_graphs=count_graphs(backends),
            pool_bytes=pool_bytes,
            driver_bytes=driver,
            failures=collect_failures(backends),
            capacity=verify_after_capture(
                self.capacity,
                measured_bytes=pool_bytes + max(driver or 0, 0),
                free_bytes=free_bytes(self.device),
            ),
        )

    def _largest_forward(self) -> int:
        return max([self.options.max_extend_tokens, *self._sizes.all_tokens])

    def _static_tensors(self) -> StaticTensorMap:
        found: dict[str, StaticTensor] = dict(self.model.static_tensors())
        found |= {f"kv.{name}": tensor for name, tensor in self.pool.static_tensors().items()}
        for name, backend in self.attention.items():
            found |= {f"{name}.{what}": tensor for what, tensor in backend.static_tensors().items()}
        return found

    # What batches are made for ------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model and all batches are."""
        return self._graph_device.torch_device

    @property
    def is_emulated(self) -> bool:
        """Whether graphs are imitated on the CPU, so that times say nothing about a GPU."""
        return self._graph_device.is_emulated

    @property
    def start_loc_encoding(self) -> StartLocEncoding:
        """What the prefill's attention backend counts; it exists before the first batch."""
        self._stages.require(Stage.ATTENTION, "A batch")
        return self.attention[self.plan.prefill_attention].start_loc_encoding

    @property
    def capture_hidden_mode(self) -> CaptureHiddenMode:
        """Hidden states that every batch hands out."""
        return self.options.capture_hidden_mode

    @property
    def is_draft_worker(self) -> bool:
        """Whether it runs a draft model."""
        return self.options.is_draft_worker

    @property
    def kv_translator(self) -> KVIndexTranslator:
        """Who knows the slots of its pools."""
        self._stages.require(Stage.ATTENTION, "The translator")
        return self._translator

    def attention_for(self, batch: ForwardBatch) -> PagedAttention:
        """Returns the attention backend of a batch, by its mode."""
        is_decode = batch.forward_mode.is_decode_or_idle()
        return self.attention[self.plan.decode_attention if is_decode else self.plan.prefill_attention]

    # Forwards -----------------------------------------------------------------------------------

    def defer_state_copy(self, copy: Callable[[], None]) -> None:
        """Runs something once, before the next forward that is no decode graph.

        Args:
            copy: For example a copy of recurrent state to the row that a prefill will continue from.
        """
        self._deferred.append(copy)

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, *, num_layers: int | None = None, progress: SplitProgress | None = None
    ) -> ModelRunnerOutput:
        """Runs a batch.

        Args:
            batch: Without padding.
            num_layers: Layers of this call, in SPLIT_PREFILL; all that are left by default.
            progress: From the call before, in SPLIT_PREFILL.

        Returns:
            Logits and hidden states of real rows, and who ran them; logits may be graph-owned,
            overwritten by the next forward.

        Raises:
            ConfigError: The runner is not built, or layers are named in another mode.
        """
        self._stages.require(Stage.GRAPHS, "A forward")
        if (num_layers is not None or progress is not None) and not batch.forward_mode.is_split_prefill():
            raise ConfigError(
                f"num_layers and progress are for split_prefill, and this is {batch.forward_mode.value}."
            )
        before = self.clock.enter(_category(batch))
        try:
            output = self._dispatch(batch, num_layers, progress)
        finally:
            self.clock.enter(before)
        self.log.note(output.execution)
        return output

    def _dispatch(
        self, batch: ForwardBatch, num_layers: int | None, progress: SplitProgress | None
    ) -> ModelRunnerOutput:
        refusals: list[Refusal] = []
        if self._takes("decode", self._decode, batch, refusals):
            assert self._decode is not None
            return self._decode.run(batch)
        while self._deferred:
            self._deferred.pop(0)()
        if self._split.can_run(batch) is None:
            return self._split.run(batch, num_layers=num_layers, progress=progress)
        if self._takes("extend", self._extend, batch, refusals):
            assert self._extend is not None
            return self._extend.run(batch).after(refusals)
        return self._eager.run(batch).after(refusals)

    def load_graph(self, batch: ForwardBatch) -> Callable[[], Any] | None:
        """Pads and plans a batch for its graph, for who measures a replay alone.

        Returns:
            What replays it until another batch is loaded or run; None where it would run eager.

        Raises:
            ConfigError: The runner is not built.
        """
        self._stages.require(Stage.GRAPHS, "A replay")
        for runner in (self._decode, self._extend):
            if runner is not None and runner.can_run(batch) is None:
                return runner.load(batch)
        return None

    def _takes(self, name: str, runner: Runner | None, batch: ForwardBatch, refusals: list[Refusal]) -> bool:
        """Whether a graph runner, here and on every rank, takes a batch; notes why not."""
        refusal: Refusal | None
        if runner is not None:
            refusal = runner.can_run(batch)
        else:
            is_its_mode = RUNNER_OF_MODE[batch.forward_mode] == name
            refusal = Refusal(runner=name, reason=Reason.SWITCHED_OFF if is_its_mode else Reason.MODE)
        can_all = self._agreement.all_can(refusal is None)
        if refusal is None and not can_all:
            refusal = Refusal(runner=name, reason=Reason.OTHER_RANKS)
        if refusal is not None:
            refusals.append(refusal)
        return refusal is None

    def explain(self, num_last: int = 8) -> str:
        """Returns why the last batches ran as they did, one line each."""
        return self.log.explain(num_last)


def _category(batch: ForwardBatch) -> str:
    """Returns what a forward's time is booked to."""
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        return "verify"
    return "extend" if mode.is_extend() else "decode"
