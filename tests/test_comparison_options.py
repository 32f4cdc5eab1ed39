"""What a comparison can be asked for, and how it refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_piecewise.comparison.inputs import (
    cut_to,
    group_by_tokens,
    padded_to,
    random_tokens,
    read_text,
    tokens_of_text,
    windows_of_tokens,
)
from sgl_piecewise.comparison.options import (
    CompareOptions,
    checked_strategies,
    default_sizes,
    parse_names,
    parse_sizes,
    resolve_device,
    resolve_dtype,
    token_counts_for,
)
from sgl_piecewise.runtime.errors import ConfigError, DeviceUnavailableError

CPU = torch.device("cpu")


def test_sizes_are_read_from_a_list_a_range_or_both() -> None:
    assert parse_sizes("16,32, 64") == (16, 32, 64)
    assert parse_sizes("4..16") == (4, 8, 12, 16)
    assert parse_sizes("1,8..16") == (1, 8, 12, 16)
    assert len(parse_sizes("4..4096")) == 42 == len(default_sizes(torch.device("cuda")))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "''"),
        ("16,,32", "''"),
        ("many", "'many'"),
        ("4..", "'4..'"),
        ("16.5", "'16.5'"),
        ("0,16", "0"),
        ("-4,16", "-4"),
        ("32,16", "ascend"),
        ("16,16", "more than once"),
        ("64..16", "64..16"),
        ("0..16", "0..16"),
    ],
)
def test_sizes_that_cannot_be_used_are_named(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word.replace(".", r"\.")):
        parse_sizes(text)


def test_eager_is_always_the_first_strategy() -> None:
    assert checked_strategies(["breakable", "eager"]) == ("eager", "breakable")
    assert checked_strategies(["full"]) == ("eager", "full")


def test_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'breakable'"):
        checked_strategies(["eager", "braekable"])


@pytest.mark.parametrize("names", [[], ["full", "full"]])
def test_no_strategy_or_one_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError):
        checked_strategies(names)


@pytest.mark.parametrize(
    "option",
    [
        {"num_rounds": 0},
        {"num_inputs": 0},
        {"num_warm_ups": -1},
        {"num_rounds": 2.5},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_counts_out_of_range_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        CompareOptions(**option)


def test_names_are_split_at_commas() -> None:
    assert parse_names(" eager, full ,") == ("eager", "full")


def test_token_counts_are_every_size_and_an_odd_one_between() -> None:
    assert token_counts_for((16, 32)) == (9, 16, 25, 32)
    assert token_counts_for((1, 2, 3)) == (1, 2, 3)


def test_devices_and_dtypes_have_names() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for name in ("gpu", "cuda:x", "cpu:1", "tpu"):
        with pytest.raises(ConfigError, match="Unknown device"):
            resolve_device(name)
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        resolve_dtype("bfloat", CPU)


def test_cuda_where_there_is_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(DeviceUnavailableError, match="--device cpu"):
        resolve_device("cuda")


def test_padding_adds_zero_rows_to_what_follows_the_token_count() -> None:
    ids, table = torch.tensor([1, 2, 3]), torch.ones(5, 2)
    padded_ids, same_table, number = padded_to((ids, table, 7), 5)
    assert padded_ids.tolist() == [1, 2, 3, 0, 0]
    assert same_table is table
    assert number == 7
    assert cut_to((ids,), 2)[0].tolist() == [1, 2]


def test_inputs_are_grouped_by_token_count() -> None:
    sets = group_by_tokens([torch.zeros(3), (torch.zeros(2),), torch.ones(3)])
    assert [(inputs.num_tokens, len(inputs.inputs)) for inputs in sets] == [(2, 1), (3, 2)]


@pytest.mark.parametrize("inputs", [[], [("no tensor",)], torch.zeros(3)])
def test_inputs_without_a_token_dimension_are_refused(inputs: Any) -> None:
    with pytest.raises(ConfigError):
        group_by_tokens(inputs)


def test_windows_of_one_count_differ_and_need_no_repeat_where_the_text_is_long_enough() -> None:
    sets, is_repeated = windows_of_tokens(list(range(100)), [4, 98], 3, CPU)
    assert not is_repeated
    for inputs in sets:
        starts = [int(ids[0]) for ids, _ in inputs.inputs]
        assert len(set(starts)) == 3
        assert all(len(ids) == len(positions) == inputs.num_tokens for ids, positions in inputs.inputs)


def test_a_short_text_is_repeated_and_the_report_can_say_so() -> None:
    sets, is_repeated = windows_of_tokens([1, 2, 3], [7], 1, CPU)
    assert is_repeated
    assert sets[0].inputs[0][0].tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_random_tokens_follow_the_seed() -> None:
    ids, facts = random_tokens(20, 50, seed=3)
    assert facts.is_random
    assert ids == random_tokens(20, 50, seed=3)[0] != random_tokens(20, 50, seed=4)[0]
    assert max(ids) < 50


def test_shipped_text_fills_the_largest_default_size() -> None:
    """At four characters and a bit a token it has more than 4096; measured: 4230 for SmolLM2."""
    text = read_text(None)
    assert len(text.content) > 4.2 * 4096
    assert "1865" in text.source


def test_tokenizer_without_tokens_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        tokens_of_text(read_text(None), lambda text: [])


def test_text_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"ab\xff")
    for path, word in ((tmp_path / "none.txt", "No such file"), (tmp_path, "directory"), (empty, "empty")):
        with pytest.raises(ConfigError, match=word):
            read_text(path)
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 2 is 0xff\)"):
        read_text(binary)
