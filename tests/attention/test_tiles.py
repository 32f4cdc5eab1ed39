"""The table of query tiles: every row once, as many tiles as were counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_piecewise.runtime.attention.plan import NO_REQUEST, num_tiles, tile_table

LENS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), min_size=1, max_size=6)


@given(lens=LENS, padding=st.integers(0, 70), rows=st.sampled_from([16, 32]))
def test_tiles_hold_every_row_once_and_no_more_than_counted(
    lens: list[tuple[int, int]], padding: int, rows: int
) -> None:
    new = [one for one, _ in lens]
    totals = [one + prefix for one, prefix in lens]
    num_tokens = sum(new) + padding
    length = num_tiles(num_tokens, len(lens), rows)
    tiles = tile_table(new, totals, num_tokens=num_tokens, rows=rows)
    assert len(tiles) <= length
    starts = [sum(new[:index]) for index in range(len(new))]
    covered: list[int] = []
    for request, first in tiles:
        begin = first if request == NO_REQUEST else starts[request] + first
        end = num_tokens if request == NO_REQUEST else starts[request] + new[request]
        covered.extend(range(begin, min(begin + rows, end)))
    assert sorted(covered) == list(range(num_tokens))


def test_the_tile_that_reads_most_comes_first() -> None:
    tiles = tile_table([64, 32], [64, 500], num_tokens=96, rows=32)
    assert tiles == [(1, 0), (0, 32), (0, 0)]
