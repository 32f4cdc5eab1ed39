"""While capturing: streams, the allocator, garbage collection, random numbers and host work."""

from __future__ import annotations

import gc

import pytest
import torch
from contract.support import assert_equal, assert_like_eager, ramp, record, stream_api, untouched

from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureForbiddenError, UnjoinedStreamError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def test_row_054_side_stream_started_before_a_break_and_joined_after_it(graph_device: GraphDevice) -> None:
    """pytorch#191351: ending a capture while a forked stream is open is error 904, "unjoined work"."""
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(api.current_stream())
        with api.stream(side):
            a = x * 3
        b = double(x + 1)
        api.current_stream().wait_stream(side)
        return a + b

    calls = [(ramp(graph_device, 64, start=float(n)),) for n in range(5)]
    captured = assert_like_eager(graph_device, forward, calls)
    assert captured.recordings.popitem()[1].num_breaks == 1


def test_row_055_wait_on_a_prefetch_stream_is_not_dropped(graph_device: GraphDevice) -> None:
    """TRT-LLM#16609: a wait on a non-captured stream was dropped silently, and values were corrupt at times."""
    api = stream_api(graph_device)
    prefetch = api.Stream()
    source, staged = ramp(graph_device, 64), ramp(graph_device, 64)
    with api.stream(prefetch):
        staged.copy_(source)

    def forward() -> torch.Tensor:
        api.current_stream().wait_stream(prefetch)
        return staged * 2

    pool = graph_device.new_pool()
    with untouched(graph_device, pool), pytest.raises(UnjoinedStreamError, match="@eager_on_graph"):
        record(forward, pool=pool)

    # The cure that the error names.
    @eager_on_graph
    def wait() -> None:
        api.current_stream().wait_stream(prefetch)

    def cured(x: torch.Tensor) -> torch.Tensor:
        wait()
        return staged * x

    assert_like_eager(graph_device, cured, [(source,)])


@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_row_056_fork_and_join_in_user_code(graph_device: GraphDevice, strategy: str) -> None:
    """pytorch#180396: a fork in user code failed under CUDA-graph compilation."""
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        fork, join = api.Event(), api.Event()
        fork.record(api.current_stream())
        with api.stream(side):
            side.wait_event(fork)
            a = x * 3
            join.record(side)
        b = x + 1
        api.current_stream().wait_event(join)
        return a + b

    calls = [(ramp(graph_device, 64, start=float(n)),) for n in range(5)]
    assert_like_eager(graph_device, forward, calls, strategy=strategy)


def test_row_057_warm_up_is_ordered_before_capture_and_the_build_ends_synchronised(
    graph_device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#34286: the capture began before the last warm-up had ended, on another stream."""
    events: list[str] = []
    synchronize = graph_device.synchronize
    monkeypatch.setattr(graph_device, "synchronize", lambda: (events.append("wait"), synchronize())[1])
    streams: list[object] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        events.append("forward")
        if not graph_device.is_emulated:
            streams.append(torch.cuda.current_stream())
        return double(x + 1)

    capture(forward, (ramp(graph_device, 4),), device=graph_device)
    assert events == ["forward", "forward", "wait"]
    # One stream orders them; only with several would a wait between them be needed.
    assert len(set(streams)) <= 1


def test_row_058_garbage_collector_is_restored_and_nothing_frozen(graph_device: GraphDevice) -> None:
    """vllm#24128: the collector was frozen at capture, garbage was kept, and throughput fell."""
    num_frozen = gc.get_freeze_count()
    for was_enabled in (True, False):
        if not was_enabled:
            gc.disable()
        try:
            with untouched(graph_device):
                capture(lambda x: double(x + 1), (ramp(graph_device, 4),), device=graph_device)
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()
    assert gc.get_freeze_count() == num_frozen


def _reserved_after(num_captures: int, make: object, device: GraphDevice) -> int:
    pool = device.new_pool()
    kept: list[CapturedCallable] = []
    x = ramp(device, 64, 64)
    for _ in range(num_captures):
        kept.append(capture(make, (x,), pool=pool))  # type: ignore[arg-type]
        assert_equal(kept[-1](x), make(x))  # type: ignore[operator]
    return pool.memory().reserved_bytes


def test_row_059_record_stream_does_not_grow_the_pool(graph_device: GraphDevice) -> None:
    """pytorch#155398: memory of tensors with ``record_stream`` was never given back within captures."""
    api = stream_api(graph_device)
    side = api.Stream()

    x = ramp(graph_device, 64, 64)

    def forward() -> torch.Tensor:
        y = x + 1
        side.wait_stream(api.current_stream())
        with api.stream(side):
            z = y * 2
            y.record_stream(side)
        api.current_stream().wait_stream(side)
        z.record_stream(api.current_stream())
        return double(z) + 1

    def reserved_after(num_captures: int) -> int:
        pool = graph_device.new_pool()
        kept = []
        for _ in range(num_captures):  # Without a warm-up: outside capture the CPU has no record_stream.
            graph, result = record(forward, pool=pool)
            graph.replay()
            assert_equal(result, (x + 1) * 4 + 1)
            del result
            kept.append(graph)
        return pool.memory().reserved_bytes

    assert reserved_after(8) <= 1.15 * reserved_after(2)


def test_row_060_every_graphed_linear_does_not_grow_the_pool(graph_device: GraphDevice) -> None:
    """pytorch#99196: a cuBLAS workspace was allocated into the pool of each graph."""
    linear = torch.nn.Linear(64, 64, device=graph_device.torch_device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return double(linear(x)) + 1

    pool = graph_device.new_pool()
    x = ramp(graph_device, 64, 64)
    captured = capture(forward, (x,), pool=pool)
    assert pool.memory().allocated_bytes == 0  # No workspace stayed in the pool.
    assert_equal(captured(x), forward(x))
    assert _reserved_after(8, forward, graph_device) <= 1.15 * _reserved_after(1, forward, graph_device)


def test_row_061_dropout_in_captured_code(graph_device: GraphDevice) -> None:
    """pytorch#83148: "cannot call current_seed during capture"; drawing is fine, and differs per replay."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(x, 0.5, training=True)
        return double(y) + torch.rand_like(y)

    x = ramp(graph_device, 64)
    captured = capture(forward, (x,), device=graph_device)
    torch.manual_seed(1)
    expected = [forward(x), forward(x)]
    torch.manual_seed(1)
    drawn = [captured(x), captured(x)]
    assert_equal(drawn, expected)
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("call", [torch.seed, lambda: torch.manual_seed(3)])
def test_row_061_seeding_in_captured_code_is_refused(call: object) -> None:
    """sglang#6033: the seed was queried in the forward; the emulated device finds it before CUDA does."""
    from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice

    def forward() -> torch.Tensor:
        call()  # type: ignore[operator]
        return torch.rand(4)

    with pytest.raises(CaptureForbiddenError, match="seed"):
        record(forward, device=EmulatedDevice())


def test_row_062_tensor_from_a_host_list_is_refused_not_run_eager(graph_device: GraphDevice) -> None:
    """sglang#36658: one host list in the region, and the whole signature ran eager without a word."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)

    with untouched(graph_device), pytest.raises(CaptureForbiddenError) as caught:
        capture(forward, (ramp(graph_device, 4),), device=graph_device)
    assert "test_capture_time.py" in str(caught.value)


@pytest.mark.gpu
def test_row_063_capture_on_the_second_gpu_while_the_first_is_current() -> None:
    """pytorch#87794: "not permitted while capturing", since the current device was another."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

    device = CudaDevice("cuda:1")
    with torch.cuda.device(0):
        calls = [(ramp(device, 64),), (ramp(device, 64, start=7.0),)]
        captured = assert_like_eager(device, lambda x: double(x + 1) - 1, calls)
        assert torch.cuda.current_device() == 0
        found = capture(lambda x: double(x + 1) - 1, calls[0])  # The arguments tell the device.
        assert found.pool.device.torch_device == captured.pool.device.torch_device == torch.device("cuda:1")
        assert_equal(found(*calls[1]), double(calls[1][0] + 1) - 1)


@torch.library.custom_op("sgl_piecewise_tests::reads_host", mutates_args=())
def reads_host(x: torch.Tensor) -> torch.Tensor:
    """An operator that waits for the device inside its kernel."""
    return x * float(x.max().item())


def test_row_065_operator_that_waits_for_the_device_is_refused(graph_device: GraphDevice) -> None:
    """DeepEP#62: prefill expert kernels synchronise inside and cannot be captured; a mark is the cure."""
    x = ramp(graph_device, 4)
    with untouched(graph_device), pytest.raises(CaptureForbiddenError, match="@eager_on_graph"):
        capture(lambda t: reads_host(t + 1), (x,), device=graph_device)
    marked = eager_on_graph(reads_host)
    assert_like_eager(graph_device, lambda t: marked(t + 1) - 1, [(x,), (x * 2,)])
