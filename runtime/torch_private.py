"""The one file that touches PyTorch APIs without a stability promise; tried on 2.11 and 2.13.

Each function is small and says what it does in words that outlive the API that it stands on. No
other file of the library names such an API. Nothing here knows what the rest of the library does.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


def alias_without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor over the same bytes that does not keep them alive.

    The caller must know what else keeps the memory mapped, and say so where it calls this.

    Args:
        tensor: A dense tensor on CPU or CUDA.

    Returns:
        A tensor of the same address, shape, strides, dtype, conjugate and negative bits. Version
        counters are not shared.
    """
    storage = tensor.untyped_storage()
    raw = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    if torch.is_inference_mode_enabled():
        # An inference tensor could not be written outside inference mode, where replays may run.
        with torch.inference_mode(False):
            alias = _over_storage(raw, tensor)
    else:
        alias = _over_storage(raw, tensor)
    return with_lazy_bits_of(tensor, alias)


def _over_storage(storage: Any, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    return tensor.set_(storage, like.storage_offset(), like.shape, like.stride())


def with_lazy_bits_of(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of ``tensor`` that is lazily conjugated and negated where ``like`` is."""
    return with_lazy_bits(tensor, like.is_conj(), like.is_neg())


def with_lazy_bits(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """Returns the tensor, or a view of it that is lazily conjugated, negated or both."""
    if is_conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if is_neg else tensor


def as_normal_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors that were not made in inference mode over the same storages, which they keep alive."""
    if not any(map(torch.Tensor.is_inference, tensors)):
        return list(tensors)
    with torch.inference_mode(False), torch.no_grad():
        return [
            with_lazy_bits_of(tensor, _over_storage(tensor.untyped_storage(), tensor))
            if tensor.is_inference()
            else tensor
            for tensor in tensors
        ]


def storage_key(tensor: torch.Tensor) -> int:
    """Returns an identity of the tensor's storage, valid while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_weak_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Returns a weak reference to the tensor's storage; ``expired()`` tells whether it died."""
    return StorageWeakRef(tensor.untyped_storage())


def key_of_weak_ref(ref: StorageWeakRef) -> int:
    """Returns the ``storage_key`` of what a weak reference refers to, alive or not."""
    key: int = ref.cdata
    return key


def begin_allocating_to_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Routes this thread's CUDA allocations to a graph pool until ``end_allocating_to_pool``.

    As ``torch.cuda.use_mem_pool`` does, which only takes a ``MemPool`` (whose destructor asserts
    that no graph uses the pool any more).
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool_id)


def end_allocating_to_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Undoes ``begin_allocating_to_pool``; the pool lives on while something uses it."""
    torch._C._cuda_endAllocateToPool(device_index, pool_id)
    torch._C._cuda_releasePool(device_index, pool_id)


def hold_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Counts one more user of a graph pool.

    A pool whose users fell to zero cannot be used again: the allocator asserts (2.11).
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool_id)
    torch._C._cuda_endAllocateToPool(device_index, pool_id)


def release_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Undoes ``hold_pool``; with the last user gone the memory may go back to the device."""
    torch._C._cuda_releasePool(device_index, pool_id)


def stop_routing_to_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Ends the allocation routing, and the use of the pool, that a failed ``capture_end`` left behind.

    2.11 leaves both. Later versions end the routing themselves (pytorch#180395) and keep the use, which
    cannot be told from here: there the pool's memory stays reserved until the process ends.
    """
    try:
        torch._C._cuda_endAllocateToPool(device_index, pool_id)
    except RuntimeError:
        return
    torch._C._cuda_releasePool(device_index, pool_id)


_SNAPSHOT_KWARGS: dict[str, Any] = (
    {"include_traces": False}
    if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
    else {}
)


def pool_segments(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """Lists the allocator's segments of one pool: ``address``, ``total_size``, ``allocated_size``.

    The C++ side takes the numbers of the id out of their tuple and gives away references that it never
    had. Numbers to 256 live for ever; a process that made more pools would see a number freed under its
    feet, and crash somewhere else. So the numbers are private to the call and own a reference to lose
    (64 bytes a call stay allocated where nothing takes them).
    """
    numbers = [int.from_bytes(number.to_bytes(8, "little"), "little") for number in pool_id]
    for number in numbers:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    segments = torch.cuda.memory_snapshot(tuple(numbers), **_SNAPSHOT_KWARGS)
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool_id)]


# Operators that write arguments which their schemas do not say they write: running statistics.
_UNDECLARED_WRITES = dict.fromkeys(
    ("aten::native_batch_norm", "aten::_batch_norm_impl_index", "aten::cudnn_batch_norm"),
    ("running_mean", "running_var"),
)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Lists the tensor arguments that an operator call writes to, by its schema and known omissions."""
    written: list[torch.Tensor] = []
    undeclared = _UNDECLARED_WRITES.get(func._schema.name, ())
    for index, argument in enumerate(func._schema.arguments):
        is_declared = argument.alias_info is not None and argument.alias_info.is_write
        if not is_declared and argument.name not in undeclared:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else (value,)
        written.extend(item for item in values if isinstance(item, torch.Tensor))
    return written


def without_dispatch_modes() -> Any:
    """Returns a context in which operators of this thread reach no ``TorchDispatchMode``."""
    return torch._C._DisableTorchDispatch()


def without_autocast() -> Any:
    """Returns a context in which operators of this thread are not autocast."""
    return torch._C._DisableAutocast()


@contextlib.contextmanager
def reentered(mode: TorchDispatchMode) -> Iterator[None]:
    """Activates a mode again inside its own ``__torch_dispatch__``.

    Other than ``with mode``, it takes out the mode itself at the end, also where the block has pushed
    another one that stays.
    """
    mode.__enter__()
    try:
        yield
    finally:
        above = []
        while _python_dispatch._get_current_dispatch_mode() is not mode:
            above.append(_python_dispatch._pop_mode())
        mode.__exit__(None, None, None)
        for other in reversed(above):
            _python_dispatch._push_mode(other)


def is_composite(func: Any) -> bool:
    """Tells whether an operator is only made of others (and may hide a host sync among them)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def call_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the body of a composite operator; the operators in it are dispatched."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def has_python_kernel(func: Any) -> bool:
    """Tells whether an operator's CPU kernel is Python, registered with ``torch.library``."""
    name = func._schema.name.replace("::", "/")
    overload = func._overloadname
    names = (name, f"{name}.{overload}") if overload != "default" else (name,)
    return any(
        f"{full}/{key}" in torch.library._impls
        for full in names
        for key in ("CPU", "CompositeExplicitAutograd")
    )


def call_cpu_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator's CPU kernel below all dispatch modes; what it calls is dispatched."""
    return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def higher_order_cpu_kernel(func: Any) -> Any | None:
    """Returns the eager body of a higher-order operator, or None where it has none."""
    if not isinstance(func, torch._ops.HigherOrderOperator):
        return None
    return func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def is_overload(func: Any) -> bool:
    """Tells whether ``func`` is one overload of an operator, which has a schema and tags."""
    return isinstance(func, torch._ops.OpOverload)


def is_higher_order(func: Any) -> bool:
    """Tells whether ``func`` is a higher-order operator (it has no schema and no tags)."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def is_compiling_now() -> bool:
    """Tells whether this thread is inside Dynamo's or a backend's compilation."""
    return torch._guards.CompileContext.try_get() is not None


def compiled_graph_types() -> list[type]:
    """Returns the classes whose calls run code made by Inductor, which does not dispatch."""
    from torch._inductor import output_code  # Takes a second to import, so only when needed.

    return [output_code.CompiledFxGraph, output_code.CompiledAOTI]


def mutated_inputs(compiled: Any) -> set[int] | None:
    """Returns which inputs one of `compiled_graph_types` writes, or None where it does not say."""
    indices = getattr(compiled, "mutated_input_idxs", None)
    return None if indices is None else set(indices)


def graph_launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Returns the C++ launch of a graph; the Python method looks for a liveness tracker each time."""
    launch: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
    return launch


def keep_device_busy(seconds: float) -> None:
    """Queues a kernel on the current CUDA stream that spins for about ``seconds``; it writes nothing."""
    torch.cuda._sleep(int(seconds * 2e9))  # Clock cycles: at 2 GHz.


def pool_token(handle: tuple[int, int]) -> Any:
    """Returns a pool handle as ``capture_begin`` wants it (a type of its own in the annotations only)."""
    return handle


def is_fake_type(kind: type) -> bool:
    """Tells whether a type is (a subclass of) the fake tensor of tracing."""
    return issubclass(kind, FakeTensor)


def takes_part_in_dispatch(kind: type) -> bool:
    """Tells whether a kind of tensor has code of its own for operators, which parameters, for one, have not."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def is_default_cpu_stream(stream: Any) -> bool:
    """Tells whether ``stream`` is the one that ``torch.cpu.current_stream()`` gives at start."""
    return stream is torch.cpu._default_cpu_stream


def raw_stream_getter() -> Callable[[int], int]:
    """Returns the C function that gives the address of a CUDA device's current stream."""
    getter: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return getter


def current_device_getter() -> Callable[[], int]:
    """Returns the C function behind ``torch.cuda.current_device``, for who knows that CUDA is initialized."""
    getter: Callable[[], int] = torch._C._cuda_getDevice
    return getter


def stream_capture_check(device: torch.device) -> Callable[[], bool]:
    """Returns a C function that tells whether a capture, by whatever code, is under way on the current stream.

    Args:
        device: One that CUDA is initialized for, or one without captures.
    """
    if device.type != "cuda":
        return bool
    check: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return check


def host_int64(number: int) -> torch.Tensor:
    """Returns a new host tensor (int64[]), whatever modes and default devices are on."""
    with torch.inference_mode(False), without_dispatch_modes():
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def read_host_int64(tensor: torch.Tensor) -> int:
    """Returns the value of a host tensor (int64[]) unseen by dispatch modes: it is no data, but a name."""
    return ctypes.c_int64.from_address(tensor.data_ptr()).value


def is_same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors, fake ones too, have one storage object."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one is other
    return storage_key(one) == storage_key(other)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two strided tensors have one storage."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one is other
    return (
        one.device == other.device and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def memory_of(tensors: Iterable[torch.Tensor]) -> frozenset[Any]:
    """Names the memory of tensors: two of them have a name in common where `shares_memory` says so."""
    return frozenset(
        [
            (one.device, one.untyped_storage().data_ptr()) if one.layout is torch.strided else id(one)
            for one in tensors
        ]
    )


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors are the same elements of the same memory."""
    return (
        shares_memory(one, other)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies into the first of each pair the second; on CUDA one launch for all of a dtype, not one each."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for destination, source in pairs:
        destinations, sources = by_dtype.setdefault(destination.dtype, ([], []))
        destinations.append(destination)
        sources.append(source)
    for group in by_dtype.values():
        torch._foreach_copy_(*group)


copy_each: Callable[..., None] = torch._foreach_copy_
"""Copies into each tensor of a first sequence that of a second; it costs the host less than a call for each."""


AddressCheck = Callable[[list[Any], list[int | None], list[int]], bool]


def address_check() -> AddressCheck:
    """Returns ``check(values, addresses, indices)``: whether the tensors at some places of a list lie where they did.

    Addresses are by place too. In CUDA builds it is one C function, which takes a few nanoseconds a tensor.
    """
    in_one_call: AddressCheck | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    return _lie_at if in_one_call is None else in_one_call


def _lie_at(values: list[Any], addresses: list[int | None], indices: list[int]) -> bool:
    found = map(torch.Tensor.data_ptr, map(values.__getitem__, indices))
    return all(map(operator.eq, found, map(addresses.__getitem__, indices)))
