"""A forward that captures itself while it is called: graphs for the shapes that come again.

Calls run the forward as it is until a shape was met often enough; that call runs once more as it is, on
the capture stream, and is then recorded with nothing executed, so all that it does happens once. Later calls
of the shape replay. Whatever no graph can serve runs the forward as it is, counted with its reason.
This module must not know of compilers or models: it takes a forward of flat inputs, and facts about them.
"""

from __future__ import annotations

import collections
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .. import torch_private
from ..mark import active_capture, active_capture_getter
from ..records import CallStats
from .call_capture import run_before_capture
from .call_copies import CopiesIn, CopiesOut
from .call_padding import GUARDED, CallPadding
from .call_policy import CallPolicy
from .call_replay import CapturedCall, ReplayCounts
from .captured import ALIASED_INPUTS, SIZE_OVER_LARGEST
from .device import GraphPool
from .devices import graph_device_for
from .flat_inputs import FlatInputs, InputFacts, key_maker, share_memory
from .flat_outputs import FlatOutputs, detached_outputs
from .session import CaptureMode, CaptureSession, is_session_open
from .sizes import padded_size

_logger = logging.getLogger(__name__)

# Why a call ran without a graph: the keys of ``CallStats.without_graph``.
WARM_UP = "shape_is_new"
CAPTURING = "captured_by_this_call"
GRAPH_LIMIT = "max_graphs_reached"
FAILED = "capture_failed"
INSIDE_CAPTURE = "inside_another_capture"
IN_USE = "called_by_its_own_marked_function"
MOVED = "static_input_changed"  # A parameter or buffer moved, or a marked call gets another object.
CONFLICT = "input_shares_memory_with_a_static_tensor"
NOT_LISTED = "not_in_capture_sizes"

# Shapes that are only counted so far, the oldest forgotten first; and shapes that were found unfit for padding.
_MAX_COUNTED_SHAPES = 4096
# A shape whose static tensors keep moving is captured ever more seldom, up to this.
_MOST_CALLS_BEFORE_RECAPTURE = 64
# Recordings of one shape for other static tensors (two models share one compiled forward); the oldest goes.
_MAX_PER_SHAPE = 4

_FORWARDS: weakref.WeakSet[OnCallCapture] = weakref.WeakSet()


def capture_stats() -> tuple[CallStats, ...]:
    """Returns what every compiled forward that is alive captured, and why calls ran without a graph.

    One entry for each graph that Dynamo handed to the backend and that may be captured, oldest first.
    """
    return tuple(forward.stats() for forward in sorted(_FORWARDS, key=lambda one: one.number))


class OnCallCapture:
    """A compiled forward that captures itself; `entry` gives the callable that stands for it.

    Args:
        forward: Takes flat inputs, returns a flat sequence of outputs.
        facts: Of its inputs.
        mode: How sessions capture.
        policy: When.
        padding: How calls are padded to capture sizes, or why they are not; None where nobody asked for it.
        name: For reports.
        held: Tensors that the forward holds itself and may be given other memory (parameters of a module
            that was traced with them inside).
        is_borrowed: As for `CaptureSession`.

    Attributes:
        number: Counts such objects in a process.
        device: The graph device.
    """

    _numbers = iter(range(1 << 62))

    def __init__(
        self,
        forward: Callable[..., Sequence[Any]],
        facts: InputFacts,
        *,
        mode: CaptureMode,
        policy: CallPolicy,
        name: str,
        padding: CallPadding | str | None = None,
        held: Sequence[torch.Tensor] = (),
        is_borrowed: Callable[[Any], bool] | None = None,
    ) -> None:
        assert facts.device is not None, "a forward without tensors has nothing to capture"
        self.number = next(self._numbers)
        self.device = graph_device_for(facts.device)
        self._pool: GraphPool | None = None  # While there are recordings.
        self._forward = forward
        self._facts = facts
        self._mode = mode
        self._policy = policy
        self._name = name
        self._held = list(held)
        self._is_borrowed = is_borrowed
        self._padding = padding if isinstance(padding, CallPadding) else None
        self._no_padding = padding if isinstance(padding, str) else NOT_LISTED
        self._sizes = tuple(policy.capture_sizes or ())
        self._not_admitted: set[Any] = set()
        self._is_copied = policy.outputs == "copy"
        # By code that is not ours.
        self._is_capturing = torch_private.stream_capture_check(facts.device)
        self._by_key: dict[Any, tuple[CapturedCall, ...]] = {}
        self._counted: collections.OrderedDict[Any, int] = collections.OrderedDict()
        self._captures_of: collections.Counter[Any] = collections.Counter()
        self._failures: dict[Any, str] = {}
        self._in_progress: dict[Any, int] = {}
        self._dead: collections.deque[CapturedCall] = collections.deque()
        self._tables = threading.RLock()
        self._without_graph: collections.Counter[str] = collections.Counter()
        self._num_captures = 0
        self._num_forgets = 0
        self._counts = ReplayCounts()
        _FORWARDS.add(self)

    def entry(self) -> Callable[..., Sequence[Any]]:
        """Returns the callable that stands for the forward: a replay where a graph fits, else the forward as it is.

        It returns what the forward does. Tensors are fresh or the caller's own; with ``outputs="view"`` graph-owned.
        It is a closure, and what it calls at a replay are closures or functions in C: each look-up of an attribute
        and each frame counts here (``tests/compile/dropin/test_host_cost.py``).
        """
        padding, sizes, held, key_of = self._padding, self._sizes, self._held, key_maker(self._facts)
        find, run_without_graph = self._by_key.get, self._run_without_graph
        active_capture, is_capturing = active_capture_getter(), self._is_capturing
        lie_at = torch_private.address_check()

        def call(*args: Any) -> Sequence[Any]:
            size, seen = None, args
            if padding is not None:
                size = padded_size(args[padding.size], sizes)
                if size is not None:
                    seen = padding.at(args, size)
            key = None if key_of is None else key_of(seen)
            found = find(key)
            if found is None or active_capture() is not None or is_capturing():
                return run_without_graph(key, args, None, size)
            values = [*args, *held]
            for captured in found:
                if lie_at(values, captured.addresses, captured.places):
                    break
            else:
                return run_without_graph(key, args, MOVED, size)
            if captured.conflicts_with is not None and captured.conflicts_with(args):
                return run_without_graph(key, args, CONFLICT, size)
            if captured.is_held():
                return run_without_graph(key, args, IN_USE, size)
            if padding is not None and not captured.is_for_padding and args[padding.size] != size:
                return run_without_graph(key, args, ALIASED_INPUTS, size)
            outputs = captured.replay(args)
            return run_without_graph(key, args, None, size) if outputs is None else outputs

        return call

    def stats(self) -> CallStats:
        """Returns counts and reasons so far."""
        with self._tables:
            recordings = [one.recording for found in self._by_key.values() for one in found]
            return CallStats(
                name=self._name,
                strategy=self._mode,
                device=self.device.name,
                is_emulated=self.device.is_emulated,
                num_graphs=len(recordings),
                num_breaks=max((one.num_breaks for one in recordings), default=0),
                num_captures=self._num_captures,
                num_replays=self._counts.num_replays,
                num_padded=self._counts.num_padded,
                without_graph=dict(self._without_graph),
                failures=tuple(dict.fromkeys(self._failures.values())),
            )

    def describe(self) -> str:
        """Returns every recording as text."""
        return "\n".join(one.recording.describe() for found in self._by_key.values() for one in found)

    # Without a graph

    def _run_without_graph(
        self, key: Any, args: tuple[Any, ...], reason: str | None, size: int | None
    ) -> Sequence[Any]:
        """Runs the forward as it is, or captures it on the way."""
        with self._tables:
            decided = self._reason(key, args, reason, size)
            self._without_graph[decided] += 1
            is_first = self._without_graph[decided] == 1
        if is_first and decided not in (WARM_UP, CAPTURING):
            _logger.info("%s: ran without a graph, reason %s", self._name, decided)
        if decided is CAPTURING:
            return self._capture(key, args, size)
        return self._forward(*args)

    def _reason(self, key: Any, args: tuple[Any, ...], reason: str | None, size: int | None) -> str:
        """Says why this call has no graph; counts the shape."""
        if active_capture() is not None or is_session_open() or self._is_capturing():
            return INSIDE_CAPTURE
        if self._pool is not None and self._pool.is_held():
            return IN_USE
        if self._facts.refusal is not None:
            return self._facts.refusal
        if reason is CONFLICT or reason is ALIASED_INPUTS:
            return reason
        if key in self._failures:
            return FAILED
        if key in self._in_progress:
            return WARM_UP
        if self._padding is not None:
            refused = self._why_not_padded(key, args, self._padding, size)
            if refused is not None:
                return refused
        elif self._sizes and not any(value in self._sizes for value in self._sizes_of(args)):
            return self._no_padding
        count = self._counted.pop(key, 0) + 1
        num_captures, first = self._captures_of[key], self._policy.capture_after
        if count <= min(first << min(num_captures, 16), max(first, _MOST_CALLS_BEFORE_RECAPTURE)):
            self._counted[key] = count
            if len(self._counted) > _MAX_COUNTED_SHAPES:
                self._counted.popitem(last=False)
            return MOVED if num_captures else WARM_UP
        if sum(map(len, self._by_key.values())) >= self._policy.max_graphs and not self._make_room(key):
            self._counted[key] = count
            return GRAPH_LIMIT
        self._in_progress[key] = count
        return CAPTURING

    def _why_not_padded(
        self, key: Any, args: tuple[Any, ...], padding: CallPadding, size: int | None
    ) -> str | None:
        """Says why a call cannot run at a capture size; None where it can, or is of that size."""
        if size is None:
            return SIZE_OVER_LARGEST
        if args[padding.size] == size:
            return None
        if share_memory(self._facts, args):
            return ALIASED_INPUTS
        if key not in self._not_admitted and not padding.admits(args, size):
            if len(self._not_admitted) >= _MAX_COUNTED_SHAPES:
                self._not_admitted.clear()
            self._not_admitted.add(key)
        return GUARDED if key in self._not_admitted else None

    def _sizes_of(self, args: tuple[Any, ...]) -> set[int]:
        sizes = {args[index] for index in self._facts.keyed if type(args[index]) is int}
        shown = self._facts.varying
        if not sizes and not shown:
            shown = self._facts.copied  # Compiled for one size.
        for index in shown:
            sizes.update(args[index].shape)
        return sizes

    def _make_room(self, key: Any) -> bool:
        """Frees the oldest recording of a shape that has others, if there is one."""
        found = self._by_key.get(key, ())
        if not found:
            return False
        self._drop(found[-1])
        return True

    # Capturing

    def _capture(self, key: Any, args: tuple[Any, ...], size: int | None) -> Sequence[Any]:
        """Runs the call and records its shape; what cannot be recorded runs as it is from now on."""
        pool, num_forgets = self._pool_for_capture(), self._num_forgets
        is_done = False
        try:
            with pool.exclusive("capture"):
                pool.order_after_last_use()
                self._free_dead(pool)
                outputs, padded = run_before_capture(
                    pool, self._forward, self._facts, args, padding=self._padding, size=size
                )
            try:
                captured = self._record(pool, args, padded, outputs)
            except Exception as error:  # noqa: BLE001 - the call itself went well, and its effects are applied
                self._note_failure(key, error)
            else:
                self._add(key, captured, num_forgets)
            is_done = True
        finally:
            with self._tables:
                count = self._in_progress.pop(key)
                if not is_done:  # The forward raised: another call captures.
                    self._counted[key] = count - 1
        return outputs

    def _pool_for_capture(self) -> GraphPool:
        with self._tables:
            if self._pool is None:
                self._pool = self.device.new_pool()
            return self._pool

    def _note_failure(self, key: Any, error: Exception) -> None:
        self.device.release_cached_memory()
        message = f"{type(error).__name__}: {error}"
        _logger.warning("%s: cannot be captured, runs without a graph. %s", self._name, message)
        with self._tables:
            self._failures[key] = message

    def _add(self, key: Any, captured: CapturedCall, num_forgets: int) -> None:
        with self._tables:
            self._num_captures += 1
            if num_forgets != self._num_forgets:  # Begun before another thread had all forgotten.
                self._dead.append(captured)
                return
            self._captures_of[key] += 1
            for surplus in self._by_key.get(key, ())[_MAX_PER_SHAPE - 1 :]:
                self._drop(surplus)
            self._by_key[key] = (captured, *self._by_key.get(key, ()))

    def _record(
        self,
        pool: GraphPool,
        args: tuple[Any, ...],
        padded: FlatInputs | None,
        outputs_of_call: Sequence[Any],
    ) -> CapturedCall:
        """Records the forward at the shape of a call, or on buffers that there are; nothing is executed."""
        inputs = FlatInputs(self._facts, args) if padded is None else padded
        session = CaptureSession(
            pool,
            mode=self._mode,
            launch_segments=False,
            is_borrowed=self._is_borrowed,
            restores_objects=True,
        )
        copies_in = copies_out = None
        if pool.edits_graphs and inputs.plain_copies is not None:
            copies_in = CopiesIn(inputs.plain_copies)
        with session:
            if copies_in is not None:
                copies_in.record(session)
            outputs = list(self._forward(*inputs.views))
            inputs.refuse_reshaped()
            plan = FlatOutputs(
                outputs,
                inputs.views,
                inputs.aliases,
                pool.owns,
                is_copied=self._is_copied,
                padding=None if padded is None else self._padding,
                detached=detached_outputs(args, outputs_of_call),
            )
            session.set_outputs(outputs)
            if pool.edits_graphs and plan.are_clones and all(output.numel() for output in outputs):
                copies_out = CopiesOut(session, outputs)
            del outputs
        assert session.recording is not None
        for place, tensor in enumerate(self._held, start=len(args)):
            inputs.addresses[place] = tensor.data_ptr()
        inputs.forget_caller()
        captured = CapturedCall(
            inputs, session.recording, plan, self._counts, copies_in=copies_in, copies_out=copies_out
        )
        forget = partial(_forget, weakref.ref(self), weakref.ref(captured))
        captured.owners = [weakref.ref(args[index], forget) for index in self._facts.static]
        return captured

    # Freeing

    def forget_recordings(self) -> None:
        """Takes every recording out of use, begun ones too: what they hold is no longer what the forward does."""
        with self._tables:
            self._num_forgets += 1
            for found in list(self._by_key.values()):
                for captured in found:
                    self._drop(captured)

    def _drop(self, captured: CapturedCall) -> None:
        """Takes a recording out of use and frees it, now or with the next capture."""
        with self._tables:
            for key, found in list(self._by_key.items()):
                if captured in found:
                    rest = tuple(one for one in found if one is not captured)
                    if rest:
                        self._by_key[key] = rest
                    else:
                        del self._by_key[key]
                    self._dead.append(captured)
            if not self._by_key and not self._in_progress:
                self._pool = None
        self._free_dead()

    def _free_dead(self, held: GraphPool | None = None) -> None:
        """Frees what was taken out of use, unless it is being replayed: by another thread, or around this very call.

        Args:
            held: A pool that this thread holds, and replays nothing on.
        """
        for _ in range(len(self._dead)):
            try:
                captured = self._dead.popleft()
            except IndexError:
                return  # Another thread has it.
            pool = captured.recording.pool
            if (pool is held or not pool.is_held()) and pool.try_acquire():
                try:
                    captured.recording.reset()
                finally:
                    pool.release()
            else:
                self._dead.append(captured)


def _forget(forward: Any, captured: Any, _: Any) -> None:
    """A static tensor of a recording is gone: so is the use of the recording."""
    alive, recorded = forward(), captured()
    if alive is not None and recorded is not None:
        alive._drop(recorded)
