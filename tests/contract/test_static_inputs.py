"""Static input buffers: what goes in, what pads it, what is written back, what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.support import WAYS, assert_equal, assert_like_eager, ramp
from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.capture import copiers, static_inputs
from sgl_piecewise.runtime.capture.captured import ALIASED_INPUTS
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import ConfigError, InputMismatchError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    scale: torch.Tensor


def _padded_view(device: GraphDevice, seen: list[torch.Tensor], **options: Any) -> Any:
    """Captures a forward whose break looks at its whole, padded input."""

    @eager_on_graph
    def look(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.clone())
        return t * 2

    return capture(lambda x: look(x) + 1, (ramp(device, 8),), capture_sizes=[4, 8], device=device, **options)


@pytest.mark.parametrize("pad", [None, 7, -1.5, float("nan"), float("inf")])
def test_rows_past_the_real_ones_hold_the_pad_value(graph_device: GraphDevice, pad: float | None) -> None:
    seen: list[torch.Tensor] = []
    options = {} if pad is None else {"pad_values": {"x": pad}}
    captured = _padded_view(graph_device, seen, **options)
    seen.clear()
    captured(ramp(graph_device, 3))
    expected = torch.cat(
        [ramp(graph_device, 3), torch.full((1,), pad or 0.0, device=graph_device.torch_device)]
    )
    assert_equal(seen, [expected])


def stale_tail(device: GraphDevice) -> None:
    """Nothing of a larger batch is left in the padded rows of a smaller one (a seeded defect's check)."""
    seen: list[torch.Tensor] = []
    captured = _padded_view(device, seen)
    captured(ramp(device, 8, start=100.0))
    seen.clear()
    captured(ramp(device, 5))
    captured(ramp(device, 2))
    zeros = torch.zeros(3, device=device.torch_device)
    assert_equal(seen, [torch.cat([ramp(device, 5), zeros]), torch.cat([ramp(device, 2), zeros[:2]])])


def test_nothing_of_a_larger_batch_is_left_in_the_tail(graph_device: GraphDevice) -> None:
    stale_tail(graph_device)


def test_integer_and_boolean_inputs_are_padded_too(graph_device: GraphDevice) -> None:
    seen: list[Any] = []

    @eager_on_graph
    def look(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append((ids.clone(), mask.clone()))
        return torch.where(mask, ids, -ids)

    ids, mask = ramp(graph_device, 8, dtype=torch.int64), ramp(graph_device, 8) > 0
    captured = capture(
        lambda ids, mask: look(ids, mask) + 1,
        (ids, mask),
        capture_sizes=[8],
        pad_values={"ids": 42, "mask": False},
        device=graph_device,
    )
    seen.clear()
    assert_equal(captured(ids[:6], mask[:6]), ids[:6] + 1)
    assert_equal(seen[0][0][6:], torch.full_like(ids[6:], 42))
    assert not seen[0][1][6:].any()


@pytest.mark.parametrize("way", WAYS)
def test_inputs_written_in_place_are_written_back(graph_device: GraphDevice, way: str) -> None:
    """A captured function changes its caller's tensor as the function itself would."""

    def forward(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(double(x))
        return state * 2

    captured = capture(
        forward, (ramp(graph_device, 4), ramp(graph_device, 4)), device=graph_device, **WAYS[way]
    )
    ours, theirs = ramp(graph_device, 4, start=3.0), ramp(graph_device, 4, start=3.0)
    for n in range(3):
        x = ramp(graph_device, 4, start=float(n))
        assert_equal(captured(x, ours), forward(x, theirs))
        assert_equal(ours, theirs)


def test_only_the_real_rows_are_written_back(graph_device: GraphDevice) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x[:, 1:].mul_(3)
        return x + 1

    captured = capture(forward, (ramp(graph_device, 8, 2),), capture_sizes=[4, 8], device=graph_device)
    buffer = ramp(graph_device, 6, 2)
    ours, theirs = buffer[1:4], buffer[1:4].clone()
    assert_equal(captured(ours), forward(theirs))
    assert_equal(ours, theirs)
    assert_equal(buffer[4:], ramp(graph_device, 6, 2)[4:])


def test_input_written_in_a_body_is_written_back(graph_device: GraphDevice) -> None:
    @eager_on_graph
    def bump(t: torch.Tensor) -> None:
        t.add_(10)

    def forward(x: torch.Tensor) -> torch.Tensor:
        bump(x)
        return x * 2

    captured = capture(forward, (ramp(graph_device, 4),), device=graph_device)
    ours = ramp(graph_device, 4)
    assert_equal(captured(ours), (ramp(graph_device, 4) + 10) * 2)
    assert_equal(ours, ramp(graph_device, 4) + 10)


def test_inputs_that_are_not_written_are_left_alone(graph_device: GraphDevice) -> None:
    captured = capture(lambda x: double(x) + 1, (ramp(graph_device, 4),), device=graph_device)
    x = ramp(graph_device, 1).expand(4)  # A write into it would be an error.
    assert_equal(captured(x), x * 2 + 1)


def test_written_inputs_that_share_memory_run_eager(graph_device: GraphDevice) -> None:
    """Apart in two buffers, the write would not show in the other."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    captured = capture(forward, (ramp(graph_device, 4), ramp(graph_device, 4)), device=graph_device)
    same = ramp(graph_device, 4)
    assert_equal(captured(same, same), (ramp(graph_device, 4) + 1) * 2)
    assert captured.fallbacks == {ALIASED_INPUTS: 1}
    whole = ramp(graph_device, 6)
    assert_equal(
        captured(whole[:4], whole[2:]),
        (ramp(graph_device, 4) + 1) + torch.tensor([4.0, 5, 5, 6], device=same.device),
    )
    assert captured.fallbacks == {ALIASED_INPUTS: 2}


def test_read_inputs_may_share_memory(graph_device: GraphDevice) -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return double(x) + y

    captured = capture(forward, (ramp(graph_device, 4), ramp(graph_device, 4)), device=graph_device)
    same = ramp(graph_device, 4, start=5.0)
    assert_equal(captured(same, same), same * 3)
    assert not captured.fallbacks


def test_keyword_default_and_nested_arguments(graph_device: GraphDevice) -> None:
    def forward(
        x: torch.Tensor,
        batch: Batch,
        more: dict[str, Any],
        factor: float = 2.0,
        *,
        extra: torch.Tensor | None = None,
        flag: bool = True,
    ) -> torch.Tensor:
        y = double(x) * factor + batch.tokens * batch.scale + more["pair"][1]
        if extra is not None:
            y = y + extra
        return y if flag else -y

    def arguments(n: int) -> tuple[torch.Tensor, Batch, dict[str, Any]]:
        x = ramp(graph_device, n)
        return x, Batch(x + 1, ramp(graph_device)), {"pair": (None, x * 3)}

    x = ramp(graph_device, 8)
    captured = capture(forward, arguments(8), {"extra": x}, capture_sizes=[4, 8], device=graph_device)
    for n in (8, 3):
        extra = ramp(graph_device, n, start=50.0)
        a, b, c = arguments(n)
        want = forward(a, b, c, extra=extra)
        # However a parameter is passed, it is the same parameter.
        assert_equal(captured(a, b, c, extra=extra), want)
        assert_equal(captured(a, b, extra=extra, more=c), want)
        assert_equal(captured(batch=b, extra=extra, x=a, more=c), want)


def test_variadic_arguments(graph_device: GraphDevice) -> None:
    def forward(*tensors: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return double(sum(tensors)) + named["z"]

    x = ramp(graph_device, 4)
    captured = capture(forward, (x, x + 1), {"z": x}, device=graph_device)
    assert_equal(captured(x + 2, x, z=x + 5), forward(x + 2, x, z=x + 5))
    with pytest.raises(InputMismatchError):
        captured(x, x, x, z=x)


def test_host_values_and_none_pass_through_and_are_baked(graph_device: GraphDevice) -> None:
    def forward(x: torch.Tensor, factor: float, nothing: None, word: str) -> torch.Tensor:
        assert nothing is None
        return double(x) * factor + len(word)

    x = ramp(graph_device, 4)
    captured = assert_like_eager(graph_device, forward, [(x, 2.5, None, "ab")])
    with pytest.raises(InputMismatchError, match=r"factor.*3\.5.*2\.5"):
        captured(x, 3.5, None, "ab")
    with pytest.raises(InputMismatchError, match="nothing"):
        captured(x, 2.5, x, "ab")
    with pytest.raises(InputMismatchError, match=r"word.*'ab'"):
        captured(x, 2.5, None, "abc")


@pytest.mark.gpu
def test_host_scalar_tensor_is_baked_on_cuda() -> None:
    """A zero-dimensional host tensor is a scalar to a kernel, and as baked as one."""
    from sgl_piecewise.runtime.capture.cuda_device import CudaDevice

    device = CudaDevice()
    x = ramp(device, 4)
    captured = capture(lambda x, s: double(x) * s, (x, torch.tensor(2.0)), device=device)
    assert_equal(captured(x, torch.tensor(2.0)), x * 4)
    with pytest.raises(InputMismatchError, match="s"):
        captured(x, torch.tensor(3.0))


def test_dynamic_dimension_need_not_be_the_first(graph_device: GraphDevice) -> None:
    """Positions of shape [3, n] beside tokens of shape [n]."""

    def forward(tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return double(tokens) + positions[1], double(positions) + tokens

    captured = capture(
        forward,
        (ramp(graph_device, 8), ramp(graph_device, 3, 8)),
        capture_sizes=[2, 8],
        dynamic_dims={"tokens": 0, "positions": -1},
        device=graph_device,
    )
    for n in (8, 2, 1, 5):
        args = (ramp(graph_device, n), ramp(graph_device, 3, n, start=9.0))
        assert_equal(captured(*args), forward(*args))
    assert not captured.fallbacks


def test_strided_inputs_are_copied_by_value(graph_device: GraphDevice) -> None:
    captured = capture(lambda x: double(x) + 1, (ramp(graph_device, 4, 6).t(),), device=graph_device)
    for x in (ramp(graph_device, 4, 6).t(), ramp(graph_device, 6, 4), ramp(graph_device, 12, 4)[::2]):
        assert_equal(captured(x), x * 2 + 1)


def test_example_arguments_are_neither_kept_nor_changed(graph_device: GraphDevice) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return double(x)

    example = ramp(graph_device, 4)
    captured = capture(forward, (example,), device=graph_device)
    assert_equal(example, ramp(graph_device, 4))
    x = ramp(graph_device, 4, start=20.0)
    assert_equal(captured(x), (ramp(graph_device, 4, start=20.0) + 1) * 2)
    assert_equal(example, ramp(graph_device, 4))


MISFITS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "other_fixed_dimension": (lambda x: (x[:, :2],), r"x has shape \(4, 2\).*\(\*, 3\)"),
    "fewer_dimensions": (lambda x: (x[:, 0],), "x has shape"),
    "other_dtype": (lambda x: (x.double(),), "float64.*float32"),
    "not_a_tensor": (lambda x: (3.0,), "x is a float"),
    "none": (lambda x: (None,), "x is a NoneType"),
    "list": (lambda x: ([x],), "structure"),
    "too_many": (lambda x: (x, x, x), "does not fit"),
    "missing": (lambda x: (), "does not fit"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_arguments_that_do_not_fit_are_named(graph_device: GraphDevice, kind: str) -> None:
    make, message = MISFITS[kind]
    x = ramp(graph_device, 4, 3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return double(x)

    captured = capture(forward, (ramp(graph_device, 8, 3),), capture_sizes=[4, 8], device=graph_device)
    with pytest.raises(InputMismatchError, match=message):
        captured(*make(x))
    assert_equal(captured(x), x * 2)


def test_options_that_name_no_argument_are_refused(graph_device: GraphDevice) -> None:
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return double(tokens)

    x = ramp(graph_device, 4)
    for options, message in (
        ({"pad_values": {"token": 1}}, "tokens"),
        ({"dynamic_dims": {"token": 0}}, "tokens"),
        ({"dynamic_dims": {"tokens": 3}}, "shape"),
        ({"capture_sizes": [2, 5]}, "5"),
        ({"strategy": "ful"}, "full"),
        ({"outputs": "copies"}, "copy"),
        ({"num_warm_ups": 0}, "at least one"),
    ):
        with pytest.raises(ConfigError, match=message):
            capture(forward, (x,), device=graph_device, **{"capture_sizes": [2, 4], **options})


def test_dynamic_dims_that_would_be_ignored_are_refused(graph_device: GraphDevice) -> None:
    """A dimension that follows no size, and one of an argument that is baked, were accepted in silence."""

    def forward(tokens: torch.Tensor, factor: float) -> torch.Tensor:
        return double(tokens) * factor

    example = (ramp(graph_device, 4), 2.0)
    with pytest.raises(ConfigError, match=r"dynamic_dims needs capture_sizes"):
        capture(forward, example, dynamic_dims={"tokens": 0}, device=graph_device)
    with pytest.raises(ConfigError, match=r"'factor'.*not a tensor"):
        capture(
            forward,
            example,
            capture_sizes=[2, 4],
            dynamic_dims={"tokens": 0, "factor": 0},
            device=graph_device,
        )


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.int64, float("nan")), (torch.int64, 1.5), (torch.uint8, -1), (torch.int8, 200), (torch.bool, 2)],
)
def test_pad_value_that_the_dtype_cannot_hold_is_refused(
    graph_device: GraphDevice, dtype: torch.dtype, pad: float
) -> None:
    ids = ramp(graph_device, 4).to(dtype)
    with pytest.raises(ConfigError, match=r"pad_values\['x'\]"):
        capture(lambda x: x, (ids,), capture_sizes=[2, 4], pad_values={"x": pad}, device=graph_device)


def test_rows_past_the_real_ones_hold_their_pad_value_in_any_order_of_sizes(
    graph_device: GraphDevice,
) -> None:
    """Rows that hold it from an earlier call are left alone, so every order must be tried."""
    x, y = torch.ones(16, 3), torch.ones(16, dtype=torch.int64)
    captured = capture(
        lambda x, y: (x.sum(), y.sum()),
        tuple(t.to(graph_device.torch_device) for t in (x, y)),
        capture_sizes=[2, 4, 8, 16],
        pad_values={"x": 7.0, "y": -1},
        device=graph_device,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        size = int(torch.randint(1, 17, (), generator=generator))
        padded = captured.padded_size(size)
        assert padded is not None
        x = torch.randn(size, 3, device=graph_device.torch_device).round()
        y = torch.randint(-9, 9, (size,), device=graph_device.torch_device)
        found = captured(x, y)
        assert found[0] == x.sum() + 7.0 * 3 * (padded - size)
        assert found[1] == y.sum() - (padded - size)


def test_what_a_marked_function_writes_past_the_real_rows_is_gone_at_the_next_call(
    graph_device: GraphDevice,
) -> None:
    """However it writes: PyTorch does not count what numpy or a library's kernel does."""
    is_writing = [False]

    @eager_on_graph(fake=lambda x: None, capture_stub=lambda x: None)
    def scribbles(x: torch.Tensor) -> None:
        if is_writing[0]:
            # Under a version counter of its own, as memory that others wrote to.
            x[2:].data.fill_(100.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        scribbles(x)
        return total

    x = torch.zeros(4, 2, device=graph_device.torch_device)
    captured = capture(fn, (x,), capture_sizes=[2, 4], device=graph_device)
    for written in (False, True, False, True, True, False):
        is_writing[0] = written
        assert captured(x[:3] + 1) == 6.0
        assert captured(x[:1] + 1) == 2.0


def test_padding_that_is_there_is_not_filled_again(
    graph_device: GraphDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    fills: list[int] = []
    fill = static_inputs.fill_tail

    def note(tail: torch.Tensor, pad_value: float) -> None:
        fills.append(len(tail))
        fill(tail, pad_value)

    monkeypatch.setattr(static_inputs, "fill_tail", note)
    x = torch.ones(8, 2, device=graph_device.torch_device)
    captured = capture(lambda x: x.sum(), (x,), capture_sizes=[4, 8], device=graph_device)
    for size, expected in (
        (3, [5]),
        (3, []),
        (2, [1]),
        (5, []),
        (5, []),
        (3, [2]),
        (8, []),
        (7, [1]),
        (4, []),
    ):
        fills.clear()
        assert captured(x[:size]) == 2 * size
        assert fills == expected, size


@pytest.mark.parametrize("place", ["captured", "marked"])
def test_writes_that_raise_no_version_are_written_back_and_padded_over(
    graph_device: GraphDevice, place: str
) -> None:
    """As a kernel of another library writes: nothing tells PyTorch of it."""

    def scribbles(x: torch.Tensor) -> None:
        x.data.add_(100)

    marked = eager_on_graph(fake=lambda x: None, capture_stub=lambda x: None)(scribbles)

    def fn(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        total = x.sum() + bias.sum()
        (scribbles if place == "captured" else marked)(x)
        return total

    x, bias = (
        torch.zeros(8, 2, device=graph_device.torch_device),
        torch.ones(3, device=graph_device.torch_device),
    )
    captured = capture(fn, (x, bias), capture_sizes=[4, 8], device=graph_device)
    for size in (8, 3, 3, 2, 5, 3):
        x = torch.randn(size, 2, device=graph_device.torch_device).round()
        expected = x + 100
        assert captured(x.clone(), bias) == x.sum() + 3
        captured(x, bias)
        assert torch.equal(x, expected)
    assert torch.equal(bias, torch.ones_like(bias))


def test_views_of_inputs_come_back_as_other_inputs(graph_device: GraphDevice) -> None:
    """They lie in the buffers that the next call's inputs go to."""
    captured = capture(
        lambda x, y: (x, y, x - y),
        tuple(torch.zeros(2, 4, 4, device=graph_device.torch_device)),
        outputs="view",
        device=graph_device,
    )
    x, y = torch.randn(2, 4, 4, device=graph_device.torch_device)
    first, second, _ = captured(x, y)
    first, second, difference = captured(second, first)
    assert torch.equal(difference, y - x)
    first, second, difference = captured(first.t(), second.t())
    assert torch.equal(difference, (y - x).t())
    first, second, difference = captured(second, second)
    assert not difference.any()
    assert torch.equal(captured(first, second)[0], x.t())


def test_rows_of_an_input_view_come_back_moved(graph_device: GraphDevice) -> None:
    x = torch.randn(8, 3, device=graph_device.torch_device)
    captured = capture(lambda x: (x, x * 2), (x,), outputs="view", capture_sizes=[4, 8], device=graph_device)
    for start in (1, 2, 3):
        x, (view, _) = x[1:], captured(x)
        found, doubled = captured(view[1:])
        assert torch.equal(found, x), start
        assert torch.equal(doubled, x * 2), start


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.int16]
)
def test_inputs_of_every_type_are_copied(graph_device: GraphDevice, dtype: torch.dtype) -> None:
    """CUDA's copy of a list has no kernel for some of them."""
    captured = capture(
        lambda x, y: (x.clone(), y.clone()),
        tuple(ramp(graph_device, 4).to(dtype) for _ in range(2)),
        device=graph_device,
    )
    x, y = (ramp(graph_device, 4, start=start).to(dtype) for start in (2.0, 5.0))
    for found, expected in zip(captured(x, y), (x, y), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_types_without_a_kernel_for_lists_are_copied_one_by_one() -> None:
    plain, unsigned = torch.ones(3), torch.ones(3, dtype=torch.uint16)
    assert copiers.copier_for([plain, plain.bool()]) is torch_private.copy_each
    copy_each = copiers.copier_for([plain, unsigned])
    assert copy_each is not torch_private.copy_each
    targets = [torch.zeros(3), torch.zeros(3, dtype=torch.uint16)]
    copy_each(targets, [plain, unsigned])
    assert torch.equal(targets[0], plain)
    assert torch.equal(targets[1].int(), unsigned.int())
