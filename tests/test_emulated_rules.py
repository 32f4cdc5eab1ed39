"""The emulated device refuses what CUDA refuses, says where and why, and accepts the rest."""

# ruff: noqa: PLW0108 - a function must be looked up when it is called: capture replaces some.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from capture_rules import ACCEPTED, REFUSED, REFUSED_HERE_ONLY
from emulated_support import capture, recording
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_piecewise.runtime.capture.emulated import EmulatedDevice
from sgl_piecewise.runtime.errors import CaptureError, CaptureForbiddenError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def keep_seed() -> Iterator[None]:
    """Cases that seed must not change the seed of other tests."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_HERE_ONLY])
def test_refused(name: str, mode: type[contextlib.ContextDecorator]) -> None:
    with mode():
        code = (REFUSED | REFUSED_HERE_ONLY)[name](CPU)
        code()  # It is fine outside capture,
        with pytest.raises(CaptureForbiddenError, match=r"capture_rules\.py:\d+"):
            capture(code)
        code()  # and after a refusal.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str, mode: type[contextlib.ContextDecorator]) -> None:
    with mode():
        graph, _ = capture(ACCEPTED[name](CPU))
        graph.replay()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*REFUSED, *ACCEPTED])
def test_cuda_agrees(name: str) -> None:
    """Where a GPU is present the same table must hold there; a difference is a bug of the emulator."""
    from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

    build = REFUSED.get(name) or ACCEPTED[name]
    code, pool = build(torch.device("cuda")), CudaDevice().new_pool()
    with torch.no_grad():
        try:
            with pool.on_capture_stream():
                code()
        except RuntimeError as error:
            pytest.skip(f"fails outside capture on this machine: {error}")
        torch.cuda.synchronize()
        is_refused = False
        with pool.capture_scope():
            graph = pool.new_graph()
            graph.begin()
            try:
                code()
                graph.end()
            except RuntimeError:
                is_refused = True
                graph.abort()
        torch.cuda.synchronize()
        torch.rand(2, device="cuda")  # The generator is usable after a refusal.
    assert is_refused == (name in REFUSED)


def test_error_says_what_why_where_and_what_to_do() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureForbiddenError) as caught:
        capture(lambda: x.sum().item())
    message = str(caught.value)
    assert "_local_scalar_dense" in message
    assert "gives a value to the host" in message
    assert "test_emulated_rules.py:" in message
    assert "@eager_on_graph" in message


def test_swallowed_error_still_invalidates_the_graph() -> None:
    """On CUDA the capture is invalid after a refused call; code that goes on must not succeed."""

    def code(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(CaptureError):
            x.tolist()
        return x + 1

    with pytest.raises(CaptureForbiddenError, match=r"invalid.*tolist"):
        capture(lambda: code(torch.ones(2)))


@pytest.mark.parametrize(
    "code",
    [
        lambda: numpy.asarray(torch.ones(2)),
        lambda: torch.from_numpy(numpy.ones(2)),
        lambda: torch.as_tensor(numpy.ones(2)),
        lambda: torch.ones(2).__dlpack__(),
        lambda: torch.from_dlpack(torch.ones(2)),
        lambda: f"{torch.ones(2)}",
        lambda: torch.save(torch.ones(2), "unused"),
        lambda: torch.ones(2).pin_memory(),
        lambda: torch.get_rng_state(),
        lambda: torch.random.manual_seed(1),
        lambda: torch.seed(),
    ],
)
def test_refused_on_the_host(code: object, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never dispatches an operator, so that only the host side can tell."""
    monkeypatch.chdir(str(tmp_path))
    with pytest.raises(CaptureForbiddenError):
        capture(code)  # type: ignore[arg-type]


def test_seeding_a_generator_object_is_found_out() -> None:
    generator = torch.Generator().manual_seed(5)

    def code() -> torch.Tensor:
        first = torch.rand(2, generator=generator)
        generator.manual_seed(7)
        return first + torch.rand(2, generator=generator)

    state = generator.get_state()
    with pytest.raises(CaptureForbiddenError, match="seeded"):
        capture(code)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("draws", [0, 3])
def test_default_generator_seeded_directly_is_found_out(draws: int) -> None:
    def code() -> None:
        torch.rand(draws)
        torch.default_generator.manual_seed(8123)
        torch.rand(draws)

    torch.manual_seed(1)
    with pytest.raises(CaptureForbiddenError, match="seeded"):
        capture(code)


def test_default_generator_seeded_anew_with_its_seed_is_found_out() -> None:
    def code() -> None:
        torch.rand(3)
        torch.default_generator.manual_seed(1)

    torch.manual_seed(1)
    with pytest.raises(CaptureForbiddenError, match="seeded"):
        capture(code)


def test_break_may_do_anything() -> None:
    """Between two graphs nothing is refused and nothing stays patched."""
    x, pool = torch.ones(3), EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope():
        with recording(pool):
            y = x + 1
        assert x.tolist() == [1, 1, 1]
        assert x.nonzero().shape == (3, 1)
        assert x.cpu() is x
        assert torch.tensor([1.0, 2.0]).sum().item() == 3
        assert "tensor" in repr(x)
        with recording(pool):
            y += 1


def test_patches_are_gone_after_a_capture() -> None:
    names = ("tolist", "numpy", "cpu", "to", "__repr__", "__array__")
    before = [getattr(torch.Tensor, name) for name in names]
    with pytest.raises(CaptureForbiddenError):
        capture(lambda: torch.ones(2).tolist())
    assert [getattr(torch.Tensor, name) for name in names] == before
    assert "tolist" not in vars(torch.Tensor)


def test_python_operator_is_looked_into() -> None:
    """A custom operator in Python is recorded by what it runs, and its host syncs are refused."""

    @torch.library.custom_op("emulated_test::scale", mutates_args=())
    def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by + 1

    @torch.library.custom_op("emulated_test::peek", mutates_args=())
    def peek(x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()

    x = torch.ones(3)
    graph, y = capture(lambda: torch.ops.emulated_test.scale(x, 2.0))
    assert graph.op_names() == ["aten.mul.Tensor", "aten.add.Tensor"]
    x.fill_(5)
    graph.replay()
    assert torch.equal(y, torch.full((3,), 11.0))
    with pytest.raises(CaptureForbiddenError):
        capture(lambda: torch.ops.emulated_test.peek(x))


def test_sparse_results_are_refused() -> None:
    x = torch.eye(3)
    with pytest.raises(CaptureForbiddenError, match="dense"):
        capture(lambda: torch.sparse_coo_tensor(torch.zeros(2, 3).long(), x[0], (3, 3)))


def test_mode_pushed_inside_an_operator_stays() -> None:
    """A break inside a dispatched operator may install a guard that outlives the operator."""

    class Counter(TorchDispatchMode):
        num_calls = 0

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    counter = Counter()

    @torch.library.custom_op("emulated_test::install", mutates_args=())
    def install(x: torch.Tensor) -> torch.Tensor:
        counter.__enter__()
        return x + 1

    pool, x = EmulatedDevice().new_pool(), torch.ones(3)
    with torch.no_grad(), pool.capture_scope():
        with recording(pool) as graph:
            y = torch.ops.emulated_test.install(x) * 2
        counter.__exit__(None, None, None)
    graph.replay()
    assert torch.equal(y, torch.full((3,), 4.0))
    assert graph.op_names() == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert counter.num_calls


def test_meta_tensors_are_let_through() -> None:
    _, y = capture(lambda: torch.ones(3, device="meta") + 1)
    assert y.is_meta
