"""Makes the runners of a plan, over pools and attention backends that are in place."""

from __future__ import annotations

from dataclasses import dataclass

from ..attention.plan import PlanLimits
from ..batch.forward_mode import ForwardMode
from ..batch.padding import padded_batch_size, padded_num_tokens
from ..capture.device import GraphPool
from ..capture.statics import StaticTensorMap
from ..graph_backends.registry import make_graph_backend
from ..runners.base import RunnerParts
from ..runners.compiling import CompiledForwards
from ..runners.decode import DecodeFamily, DecodeRunner
from ..runners.extend import ExtendRunner
from ..runners.padding_policy import sizes_up_to
from ..runners.plan import EAGER, ExecutionPlan, ModeStrategy
from .options import RunnerOptions

_UNIFORM_MODES = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND_V2,
    ForwardMode.DLLM_EXTEND,
)


@dataclass(frozen=True, kw_only=True)
class CaptureSizes:
    """Sizes of every graph of a plan.

    Attributes:
        requests: Ascending, by mode of the decode runner.
        tokens: Ascending, of the extend runner; empty where it is off.
        request_slots: Requests in every extend graph; None where they serve any number.
        rows: Tokens of every request, by mode of the decode runner.
    """

    requests: dict[ForwardMode, tuple[int, ...]]
    tokens: tuple[int, ...]
    request_slots: int | None
    rows: dict[ForwardMode, int]

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """Ascending numbers of tokens of all graphs, of every runner."""
        decode = (size * self.rows[mode] for mode, sizes in self.requests.items() for size in sizes)
        return tuple(sorted({*self.tokens, *decode}))


def capture_sizes(plan: ExecutionPlan, options: RunnerOptions) -> CaptureSizes:
    """Returns the sizes that get graphs: those asked for, the limits, multiples where needed."""
    multiple = options.token_multiple
    requests = {}
    for mode in _UNIFORM_MODES:
        strategy = plan.of(mode)
        if strategy.strategy == EAGER:
            continue
        rows = _rows_per_request(mode, strategy)
        sizes = sizes_up_to(options.max_requests, strategy.capture_sizes, begins_at_one=True)
        requests[mode] = tuple(sorted({padded_batch_size(size, rows, multiple) for size in sizes}))
    extend = plan.of(ForwardMode.EXTEND)
    tokens: tuple[int, ...] = ()
    if extend.strategy != EAGER:
        sizes = sizes_up_to(options.max_extend_tokens, extend.capture_sizes, begins_at_one=False)
        tokens = tuple(sorted({padded_num_tokens(size, multiple) for size in sizes}))
    slots = (extend.request_slots or options.max_requests) if extend.strategy == "full" else None
    rows_of = {mode: _rows_per_request(mode, plan.of(mode)) for mode in requests}
    return CaptureSizes(requests=requests, tokens=tokens, request_slots=slots, rows=rows_of)


_SPARE_TOKENS = 64  # A size to trace with equals no dimension of the model: the next that is free.


def plan_limits(sizes: CaptureSizes, options: RunnerOptions) -> PlanLimits:
    """Returns the largest batch that attention is planned for, padding included."""
    most_requests = [options.max_requests, sizes.request_slots or 0]
    most_requests += [of_mode[-1] for of_mode in sizes.requests.values()]
    most_tokens = [padded_num_tokens(options.max_forward_tokens, options.token_multiple)]
    most_tokens += [of_mode[-1] * sizes.rows[mode] for mode, of_mode in sizes.requests.items()]
    # Stand-in batches are cut into requests of the longest context; one to trace with may be over the largest size.
    most_stand_in = max(sizes.tokens, default=1) + _SPARE_TOKENS
    most_requests.append(-(-most_stand_in // options.max_context))
    most_tokens.append(most_stand_in)
    return PlanLimits(
        max_requests=max(most_requests), max_tokens=max(most_tokens), max_context=options.max_context
    )


def make_decode_runner(
    plan: ExecutionPlan,
    sizes: CaptureSizes,
    parts: RunnerParts,
    pool: GraphPool,
    static_tensors: StaticTensorMap,
    forwards: CompiledForwards,
    *,
    is_debug: bool,
) -> DecodeRunner | None:
    """Returns the decode runner, or None where the plan has no graphs for it."""
    families = [
        DecodeFamily(
            mode=mode,
            num_tokens_per_req=sizes.rows[mode],
            sizes=of_mode,
            backend=make_graph_backend(plan.of(mode).strategy, pool, static_tensors, is_debug=is_debug),
            hidden_states=forwards.of(plan.of(mode).compile),
        )
        for mode, of_mode in sizes.requests.items()
    ]
    if not families:
        return None
    return DecodeRunner(parts, families, serves_idle=plan.of(ForwardMode.IDLE).strategy != EAGER)


def make_extend_runner(
    plan: ExecutionPlan,
    sizes: CaptureSizes,
    parts: RunnerParts,
    pool: GraphPool,
    static_tensors: StaticTensorMap,
    forwards: CompiledForwards,
    *,
    max_requests: int,
    is_debug: bool,
) -> ExtendRunner | None:
    """Returns the extend runner, or None where the plan has no graphs for it."""
    if not sizes.tokens:
        return None
    modes = (ForwardMode.EXTEND, ForwardMode.MIXED)
    backend = make_graph_backend(
        plan.of(ForwardMode.EXTEND).strategy, pool, static_tensors, is_debug=is_debug
    )
    return ExtendRunner(
        parts,
        modes=frozenset(mode for mode in modes if plan.of(mode).strategy != EAGER),
        sizes=sizes.tokens,
        backend=backend,
        hidden_states=forwards.of(plan.of(ForwardMode.EXTEND).compile),
        request_slots=sizes.request_slots,
        max_requests=max_requests,
    )


def _rows_per_request(mode: ForwardMode, strategy: ModeStrategy) -> int:
    return 1 if mode.is_decode() else strategy.num_tokens_per_req or 1
