"""Calls between capture sizes: padded where it is sound and was asked for, and told why not elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sgl_piecewise import eager_on_graph
from sgl_piecewise.compiler.options import options_from
from sgl_piecewise.runtime.errors import ConfigError

from .support import assert_same, drop_in, failures, only_stats, tensors, total, without_graph

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

SIZES = [4, 8, 16]


@eager_on_graph(fake=torch.empty_like)
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def rows(size: int, seed: int = 0) -> torch.Tensor:
    return tensors((size, 6), seed=seed)[0]


def padded(x: torch.Tensor, size: int, value: float = 0.0) -> torch.Tensor:
    return torch.cat([x, x.new_full((size - x.shape[0], *x.shape[1:]), value)])


def padding(fn: Any, **options: Any) -> Any:
    options = {"capture_sizes": SIZES, "dynamic_dims": {"x": 0}, **options}
    return drop_in(fn, **{"dynamic": True, **options})


class Model(nn.Module):
    """Two linear layers around a mark, a residual, and a result that does not follow the size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(doubled(torch.relu(self.up(x)))), self.up.weight * 2


@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("capture", ["breakable", "full"])
@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_sizes_between_run_on_the_next_larger_graph(
    piece_compiler: str, capture: str, outputs: str, device: torch.device
) -> None:
    """Bit for bit what the padded shape gives in eager, and within rounding what the call's own gives."""
    model = Model().eval().to(device)
    compiled = padding(
        model, piece_compiler=piece_compiler, capture=capture, outputs=outputs, padded_rows="trusted"
    )
    tolerance = 0.0 if piece_compiler == "fx" else 1e-5
    for number, size in enumerate([5, 7, 3, 6, 16, 2, 13, 4, 8, 5, 9, 3]):
        x = rows(size, number).to(device)
        num_replays = total("num_replays")
        actual, weight = compiled(x)
        at = next(one for one in SIZES if one >= size)
        assert actual.shape == (size, 6)
        torch.testing.assert_close(actual, model(x)[0])
        if total("num_replays") > num_replays:
            assert_same(actual.clone(), model(padded(x, at))[0][:size].clone(), tolerance=tolerance)
        assert_same(weight.clone(), model.up.weight * 2, tolerance=tolerance)
    assert not failures()
    stats = only_stats()
    assert stats.num_graphs == 3
    assert stats.num_padded == 4  # 6, 9, 3 and 5: after a warm-up and a capture of their size.
    assert stats.num_replays == 6
    assert set(stats.without_graph) == {"shape_is_new", "captured_by_this_call"}


def test_exact_sizes_are_the_default() -> None:
    compiled = padding(Model(), dynamic_dims=None)
    for _ in range(3):
        for size in (4, 5):
            compiled(rows(size))
    assert only_stats().num_padded == 0
    assert without_graph()["not_in_capture_sizes"] == 3


def test_larger_calls_run_as_they_are() -> None:
    compiled = padding(lambda x: x * 2 + 1)
    for _ in range(3):
        assert_same(compiled(rows(17)), rows(17) * 2 + 1)
    assert without_graph() == {"size_over_largest": 3}


def test_nothing_of_an_earlier_call_is_left_in_padded_rows() -> None:
    """sglang#10892; the sum sees every row."""
    compiled = padding(lambda x: (x * 2, x.sum(0)), capture_sizes=[8], padded_rows="trusted")
    for size in (7, 8, 8, 3, 6, 2, 8):
        x = rows(size, size)
        doubled_rows, total_ = compiled(x)
        assert_same(doubled_rows, x * 2)
        torch.testing.assert_close(total_, x.sum(0))
    assert total("num_padded") == 3


def test_pad_values() -> None:
    def fn(x: torch.Tensor, ids: torch.Tensor) -> Any:
        return x.amax(0), ids + 1, ids.amin()

    compiled = padding(
        fn,
        dynamic_dims={"x": 0, "ids": 0},
        pad_values={"x": -1e9, "ids": 99},
        capture_sizes=[8],
        padded_rows="trusted",
    )
    for size in (5, 6, 7, 3):
        x, ids = -rows(size).abs() - 1, torch.arange(size) + 5
        assert_same(compiled(x, ids), fn(x, ids))
    assert total("num_padded") == 2


def test_written_inputs_and_buffers(device: torch.device) -> None:
    """Real rows are written back; a cache takes padded rows at slot 0, as everywhere."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(32, 6))

        def forward(self, x: torch.Tensor, slots: torch.Tensor) -> Any:
            self.cache[slots] = x
            x.mul_(2)
            return doubled(self.cache[slots]), x

    model, plain = Cache().to(device), Cache().to(device)
    compiled = padding(model, dynamic_dims={"x": 0, "slots": 0}, padded_rows="trusted")
    for number in range(8):
        size = 3 + number % 4
        slots = (torch.randperm(31)[:size] + 1).to(device)
        ours, eager = rows(size, number).to(device), rows(size, number).to(device)
        result, same = compiled(ours, slots)
        expected, _ = plain(eager, slots)
        assert same is ours
        assert_same(result, expected)
        assert_same(ours, eager)
        assert_same(model.cache[1:], plain.cache[1:])
    assert total("num_padded") >= 3


def test_other_dimensions_and_layouts() -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor) -> Any:
        y = (x * 2).masked_fill(mask.unsqueeze(1), 0.0)
        return y, y.transpose(1, 2), y[:, 0], y.sum(2)

    compiled = padding(fn, dynamic_dims={"x": -1, "mask": 1}, capture_sizes=[8], padded_rows="trusted")
    for number, size in enumerate((4, 7, 6, 3, 8, 6, 7, 2)):
        x = tensors((5, 9, size), seed=number)[0]
        x = x if number % 2 else x.transpose(0, 1).contiguous().transpose(0, 1)
        mask = x[:, 0] > 0
        actual = compiled(x, mask)
        expected = fn(x, mask)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.shape == other.shape
    assert not failures()
    assert total("num_padded") >= 2


def test_inputs_that_share_memory_and_are_written_are_not_padded() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x * 2 + y

    compiled = padding(fn, dynamic_dims={"x": 0, "y": 0})
    for number in range(10):
        ours, eager = rows(10, number), rows(10, number)
        start = 2 if number % 2 == 0 else 5
        actual = compiled(ours[:5], ours[start : start + 5] if start == 2 else ours[5:].clone())
        assert_same(actual, fn(eager[:5], eager[start : start + 5]))
        assert_same(ours, eager)
    assert without_graph()["written_inputs_share_memory"] >= 3
    assert total("num_padded") >= 2


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] <= 6 else x * 3


def test_size_that_the_code_was_not_compiled_for_is_not_run() -> None:
    """Six rows take one branch, eight the other."""
    compiled = padding(branches, capture_sizes=[6, 8])
    for size in (5, 6, 7, 8, 3, 5, 7, 6, 7, 3) * 2:
        assert_same(compiled(rows(size)), branches(rows(size)))
    compiled = padding(branches, capture_sizes=[8])
    for _ in range(3):
        assert_same(compiled(rows(5)), branches(rows(5)))
    assert without_graph()["compiled_code_is_not_for_the_padded_size"] == 3


def follows_elsewhere(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def flattens(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1) * 2


def returns_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[:, 1:], x * 2


def returns_size(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.shape[0] * 3, x * 2


@pytest.mark.parametrize(
    ("fn", "other", "options", "reason"),
    [
        (follows_elsewhere, lambda size: torch.ones(6, size), {}, "another_input_follows_the_size"),
        (follows_elsewhere, lambda size: torch.ones(6, 3), {"dynamic": False}, "size_is_not_symbolic"),
        (flattens, lambda size: torch.ones(1), {}, "output_cannot_be_cut"),
        (returns_view, lambda size: torch.ones(1), {}, "output_is_a_view_of_a_padded_input"),
        (
            flattens,
            lambda size: torch.ones(1),
            {"dynamic_dims": {"z": 0}},
            "no_input_is_named_by_dynamic_dims",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_sound_runs_at_exact_sizes_and_says_why(
    fn: Callable[..., Any], other: Callable[[int], torch.Tensor], options: dict[str, Any], reason: str
) -> None:
    compiled = padding(fn, **options)
    for size in (5, 8, 5, 8, 5, 8):
        x, y = rows(size), other(size)
        assert_same(compiled(x, y), fn(x, y))
    assert without_graph()[reason] == 3
    assert total("num_padded") == 0
    assert total("num_replays") == 1, "a size of the list has its graph"


def test_sizes_that_dynamo_finds_out_are_dynamic() -> None:
    """The first call is compiled for its size alone, the next size for all."""
    compiled = padding(Model(), dynamic=None, padded_rows="trusted")
    for size in (5, 6, 7, 5, 6):
        assert compiled(rows(size))[0].shape == (size, 6)
    assert total("num_padded") >= 1
    assert without_graph()["size_is_not_symbolic"] >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_dims": {"x": 0}}, "dynamic_dims needs capture_sizes"),
        ({"dynamic_dims": {}, "capture_sizes": [4]}, "dynamic_dims is empty"),
        ({"dynamic_dims": ["x"], "capture_sizes": [4]}, "must map argument names"),
        ({"dynamic_dims": {"x": "0"}, "capture_sizes": [4]}, "to an integer"),
        ({"dynamic_dims": {"x": 0}, "pad_values": {"y": 1}, "capture_sizes": [4]}, "pad_values"),
        ({"dynamic_dims": {"x": 0}, "capture_sizes": [4], "padded_rows": "trust"}, "did you mean 'trusted'"),
        ({"padded_rows": "trusted"}, "padded_rows needs dynamic_dims"),
        ({"dynamic_dim": {"x": 0}}, "did you mean 'dynamic_dims'"),
        ({"dynamic_dims": {"x": 0}, "capture_sizes": [4], "capture": "none"}, "capture is 'none'"),
    ],
)
def test_options_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_from(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_dims": {"x": 2}}, r"dynamic_dims\['x'\] is 2"),
        ({"pad_values": {"x": 0.5}}, "cannot hold"),
    ],
)
def test_options_that_the_input_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        padding(lambda x: x + 1, **options)(torch.ones(5, 4, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_models_of_transformers_by_the_names_of_their_arguments(family: str) -> None:
    """They come as ``**kwargs`` of a wrapper; BERT has two sizes that are one, and a mask that has to be trusted."""
    import transformers

    torch.manual_seed(0)
    tiny = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.inference_mode(False):
        if family == "llama":
            model: Any = transformers.LlamaModel(
                transformers.LlamaConfig(intermediate_size=24, **tiny)
            ).eval()
        else:
            model = transformers.BertModel(transformers.BertConfig(intermediate_size=24, **tiny)).eval()
    names = {"input_ids": 1} if family == "llama" else {"input_ids": 1, "attention_mask": 1}
    # Before 2.13 transformers gives Llama a mask as well when it is traced.
    has_mask = family == "bert" or torch.__version__ < "2.13"
    rows_are = "trusted" if has_mask else "checked"
    compiled = padding(model, dynamic=None, dynamic_dims=names, padded_rows=rows_are)
    for size in (5, 6, 7, 8, 6, 7):
        kwargs = {"input_ids": torch.randint(3, 32, (2, size))}
        if family == "bert":
            kwargs["attention_mask"] = torch.ones(2, size, dtype=torch.int64)
        actual, expected = compiled(**kwargs)[0], model(**kwargs)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert total("num_padded") == 2
    assert not failures()
