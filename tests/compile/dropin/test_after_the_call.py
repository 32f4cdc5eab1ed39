"""What a caller has after a call: results as autograd sees them, and what was written before something raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_piecewise import capture, eager_on_graph

from .support import drop_in, total


def test_views_of_inputs_are_to_autograd_what_they_are_in_eager() -> None:
    """A view as another type was a tensor of inference mode at replays, which autograd refuses to save."""

    def views(x: torch.Tensor, z: torch.Tensor) -> Any:
        return x[1:], torch.view_as_complex(x), torch.view_as_real(z)[:, 1:], x.view(torch.int32)

    compiled = drop_in(views)
    for _ in range(4):
        x, z = torch.randn(4, 2), torch.randn(4, 2, dtype=torch.complex64)
        with torch.inference_mode():
            expected, found = views(x, z), compiled(x, z)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert one.data_ptr() == other.data_ptr()
            assert one.is_inference() == other.is_inference()
    assert total("num_replays") == 2


def test_a_detached_view_of_what_requires_a_gradient_stays_detached() -> None:
    """Buffers require no gradient, so a replay took it for a view and returned one that does."""
    weight = torch.nn.Parameter(torch.ones(4))

    def views(x: torch.Tensor) -> Any:
        return x.detach(), x[1:], weight.detach(), weight[1:], (x * weight).detach()

    compiled = drop_in(views)
    for _ in range(4):
        x = torch.randn(4, requires_grad=True)
        with torch.no_grad():
            found = compiled(x)
            assert [one.requires_grad for one in found] == [one.requires_grad for one in views(x)]
        found[0].mul_(2)
        found[2].add_(1)
        assert found[0].data_ptr() == x.data_ptr()
    assert total("num_replays") == 2
    assert torch.equal(weight, torch.full((4,), 5.0))


def _padded(fn: Callable[..., Any]) -> Any:
    options = {"capture_sizes": [4], "dynamic_dims": {"kept": 0, "x": 0}, "padded_rows": "trusted"}
    return drop_in(fn, dynamic=True, **options)


def _captured(fn: Callable[..., Any]) -> Any:
    return capture(fn, (torch.randn(3, 2), torch.randn(3, 2)))


@pytest.mark.parametrize("make", [drop_in, _padded, _captured])
def test_what_was_written_before_a_marked_function_raised_stays_written(make: Any) -> None:
    """A graph writes a buffer that stands for the input: the error left the caller's tensor as it was."""
    has_failed = False

    @eager_on_graph(fake=torch.empty_like)
    def failing(x: torch.Tensor) -> torch.Tensor:
        if has_failed:
            raise KeyError("on purpose")
        return x * 2

    def forward(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kept.add_(x)
        y = failing(x)
        kept.mul_(2)
        return y + kept

    with torch.inference_mode():
        compiled = make(forward)
        ours = torch.randn(3, 2)
        eager = ours.clone()
        for number in range(8):
            has_failed = number in (1, 4, 5)
            x = torch.randn(3, 2)
            if has_failed:
                for fn, kept in ((forward, eager), (compiled, ours)):
                    with pytest.raises(KeyError, match="on purpose"):
                        fn(kept, x)
            else:
                torch.testing.assert_close(compiled(ours, x), forward(eager, x), rtol=0, atol=0)
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert make is _captured or total("num_replays") >= 3
