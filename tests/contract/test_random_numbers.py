"""Point 10: random numbers differ from replay to replay and follow the seed as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from contract.support import WAYS, assert_equal, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def noisy(t: torch.Tensor) -> torch.Tensor:
    return t + torch.rand_like(t)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=True),
    "two_draws": lambda x: torch.rand_like(x) - torch.randn_like(x),
    "integers": lambda x: x + torch.randint(0, 1000, x.shape, device=x.device),
    "in_place": lambda x: torch.empty_like(x).uniform_(),
    "only_in_a_body": lambda x: noisy(x + 1),
    "before_in_and_after_a_body": lambda x: noisy(x + torch.rand_like(x)) + torch.rand_like(x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_differ_per_replay_and_follow_the_seed(graph_device: GraphDevice, kind: str, way: str) -> None:
    fn, x = DRAWS[kind], ramp(graph_device, 64)
    captured = capture(fn, (x,), device=graph_device, **WAYS[way])
    torch.manual_seed(11)
    expected = [fn(x) for _ in range(4)]
    torch.manual_seed(11)
    drawn = [captured(x) for _ in range(4)]
    assert_equal(drawn, expected)
    for first in range(4):
        for second in range(first):
            assert not torch.equal(drawn[first], drawn[second])
    torch.manual_seed(12)
    assert not torch.equal(captured(x), drawn[0])


def test_eager_draws_between_replays_are_counted(graph_device: GraphDevice) -> None:
    fn, x = DRAWS["before_in_and_after_a_body"], ramp(graph_device, 64)
    captured = capture(fn, (x,), device=graph_device)

    def mixed(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(4)
        return [call(x), torch.rand_like(x), call(x), torch.rand_like(x)]

    assert_equal(mixed(captured), mixed(fn))


def test_sizes_draw_from_one_sequence(graph_device: GraphDevice) -> None:
    fn, x = DRAWS["before_in_and_after_a_body"], ramp(graph_device, 64)
    captured = capture(fn, (x,), capture_sizes=[16, 64], device=graph_device)

    def mixed(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(4)
        return [call(x), call(x[:16]), call(x), call(x[:16])]

    assert_equal(mixed(captured), mixed(fn))
