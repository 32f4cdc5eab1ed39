"""The operators of random programs: one table, from which programs are inferred, printed and run.

An operator's ``text`` is Python; the runner compiles exactly what a failure message shows. ``{0}``, ``{1}`` stand
for operands, ``{a}``, ``{b}`` for literals, ``self`` for the module and ``state`` for what lives outside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kinds import LARGEST
from .rules import (
    ROWS,
    WIDTH,
    Effect,
    Infer,
    Literal,
    Test,
    has_constant_last,
    has_constant_rows,
    has_rank,
    infer_alias,
    infer_arange,
    infer_attend,
    infer_cast,
    infer_cat,
    infer_columns,
    infer_compare,
    infer_conj,
    infer_copy,
    infer_elementwise,
    infer_embedding,
    infer_every_second,
    infer_expand,
    infer_expand_rows,
    infer_first_row,
    infer_flat,
    infer_gather,
    infer_halves,
    infer_held,
    infer_imag,
    infer_next_index,
    infer_nothing,
    infer_out,
    infer_pairs,
    infer_real,
    infer_reduce_last,
    infer_rotate,
    infer_rows_of,
    infer_same,
    infer_scalar,
    infer_scatter,
    infer_select,
    infer_skip_rows,
    infer_sort,
    infer_stack,
    infer_take_rows,
    infer_times_weight,
    infer_topk,
    infer_transpose,
    infer_unsqueeze,
    infer_where,
    infer_windows,
    infer_write,
    infer_write_rows,
    is_any,
    is_complex,
    is_f32,
    is_filled,
    is_float,
    is_index,
    is_index_1d,
    is_mask,
    is_unique_index,
    is_wide,
    is_writable,
)

FACTORS = (0.5, -1.25, 2.0)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row.

    Attributes:
        name: Key.
        text: Python expression or statement.
        tests: One per operand: a quick "may it stand here?".
        infer: Result kinds; raises IllegalError. An in-place operator has none.
        effect: ``write`` changes operand 0; ``held`` reads something that outlives the call.
        choices: Values of each literal.
        is_body_only: Only inside marked functions: a graph cannot hold it, or may not reach it.
        is_live: Python reads it anew at each call, so full capture bakes it.
        reads_host: A graph cannot hold it.
    """

    name: str
    text: str
    tests: tuple[Test, ...] = ()
    infer: Infer
    effect: Effect = "fresh"
    choices: tuple[tuple[Literal, ...], ...] = ()
    is_body_only: bool = False
    is_live: bool = False
    reads_host: bool = False


def _fresh_ops() -> list[Operator]:
    def op(
        name: str, text: str, tests: tuple[Test, ...], infer: Infer = infer_same, *choices: tuple
    ) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, choices=choices)

    return [
        op("tanh", "torch.tanh({0})", (is_float,)),
        op("relu", "torch.relu({0})", (is_float,)),
        op("neg", "-{0}", (is_float,)),
        op("scale", "{0} * {a}", (is_float,), infer_same, FACTORS),
        op("shift", "{0} + {a}", (is_float,), infer_same, FACTORS),
        op("add", "{0} + {1}", (is_float, is_float), infer_elementwise),
        op("sub", "{0} - {1}", (is_float, is_float), infer_elementwise),
        op("mul", "{0} * torch.sigmoid({1})", (is_float, is_float), infer_elementwise),
        op("maximum", "torch.maximum({0}, {1})", (is_f32, is_f32), infer_elementwise),
        op("where", "torch.where({0}, {1}, {2})", (is_mask, is_f32, is_f32), infer_where),
        op("greater", "{0} > {1}", (is_f32, is_f32), infer_compare),
        op("positive", "{0} > 0", (is_float,), infer_cast("bool")),
        op("not", "~{0}", (is_mask,)),
        op("to_bf16", "{0}.to(torch.bfloat16)", (is_f32,), infer_cast("bf16")),
        op("to_f32", "{0}.float()", (lambda k: k.dtype in {"bf16", "i64", "bool"},), infer_cast("f32")),
        op("mask_to_index", "{0}.long()", (is_mask,), infer_cast("i64", 2)),
        op("linear", "{0} @ self.weight", (is_wide,), infer_times_weight),
        op("affine", "F.linear({0}, self.weight, self.gain)", (is_wide,), infer_times_weight),
        op("layer_norm", "F.layer_norm({0}, (4,), self.gain)", (is_wide,)),
        op("softmax", "{0}.softmax(-1)", (is_filled(1, is_f32),)),
        op("cumsum", "{0}.cumsum(0)", (is_filled(1, is_f32),)),
        op("attend", "({0} @ {1}.transpose(0, 1)).softmax(-1) @ {1}", (is_wide, is_wide), infer_attend),
        op("sum", "{0}.sum(-1)", (has_rank(1, is_f32),), infer_reduce_last()),
        op("amax", "{0}.amax(-1)", (is_filled(1, is_float),), infer_reduce_last()),
        op("mean", "{0}.mean()", (is_filled(1, is_f32),), infer_scalar),
        op("argmax", "{0}.argmax(-1)", (is_filled(1, is_f32),), infer_reduce_last("i64")),
        op("sort", "{0}.sort(stable=True, dim=-1)", (is_filled(1, is_f32),), infer_sort(-1)),
        op("sort_rows", "{0}.sort(stable=True, dim=0)", (is_filled(1, is_f32),), infer_sort(0)),
        op("topk", "{0}.topk({a})", (is_filled(1, is_f32),), infer_topk, (1, 2)),
        op("cat", "torch.cat([{0}, {1}], -1)", (has_rank(1), has_rank(1)), infer_cat(-1)),
        op("cat_rows", "torch.cat([{0}, {1}])", (has_rank(1), has_rank(1)), infer_cat(0)),
        op("stack", "torch.stack([{0}, {1}], 1)", (has_rank(1, is_f32), has_rank(1, is_f32)), infer_stack),
        op("index_select", "{0}.index_select(0, {1})", (is_filled(1), is_index_1d), infer_take_rows),
        op("index", "{0}[{1}]", (is_filled(1), is_index_1d), infer_take_rows),
        op("gather", "{0}.gather(-1, {1})", (is_filled(1, is_f32), has_rank(1, is_index)), infer_gather),
        op("embedding", "F.embedding({0}, self.table)", (has_rank(1, is_index),), infer_embedding),
        op("next_index", "({0} + 1) % 4", (is_index,), infer_next_index),
        op("arange", "torch.arange({0}.shape[0], device={0}.device)", (has_rank(1),), infer_arange),
        op("zeros_like", "torch.zeros_like({0})", (is_f32,)),
        op("clone", "{0}.clone()", (is_any,)),
        op("empty_filled", "torch.empty_like({0}).copy_({0})", (is_float,)),
        op("complex", "torch.complex({0}, torch.tanh({0}))", (is_f32,), infer_cast("c64")),
        op("scale_complex", "{0} * {a}", (is_complex,), infer_same, FACTORS),
    ]


def _view_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer, *choices: tuple) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, effect="view", choices=choices)

    return [
        op("transpose", "{0}.transpose(-1, -2)", (has_rank(2),), infer_transpose),
        op("rotate", "{0}.movedim(0, -1)", (has_rank(2),), infer_rotate),
        op("skip_rows", "{0}[{a}:]", (has_rank(1),), infer_skip_rows, (1, 2)),
        op("first_row", "{0}[:1]", (is_filled(1),), infer_first_row),
        op("columns", "{0}[..., {a}:{b}]", (has_constant_last,), infer_columns, (0, 1), (2, 3)),
        op("nothing", "{0}[:0]", (has_rank(1),), infer_nothing),
        op("every_second", "{0}[::2]", (has_constant_rows,), infer_every_second),
        op("rows_of", "{0}.narrow(0, 0, {1}.shape[0])", (has_constant_rows, has_rank(1)), infer_rows_of),
        op("rows_of_again", "{0}[: {1}.shape[0]]", (has_constant_rows, has_rank(1)), infer_rows_of),
        op("expand", "{0}.expand(2, *{0}.shape)", (is_any,), infer_expand),
        op("expand_rows", "{0}.expand({1}.shape[0], -1)", (has_rank(1), has_rank(1)), infer_expand_rows),
        op("windows", "{0}.unfold(-1, 2, 1)", (has_constant_last,), infer_windows),
        op("halves", "{0}.split(2, -1)", (lambda k: k.rank >= 1 and k.shape[-1] == WIDTH,), infer_halves),
        op("pairs", "{0}.unflatten(-1, (-1, 2))", (has_constant_last,), infer_pairs),
        op("flat", "{0}.reshape(-1)", (is_filled(2),), infer_flat),
        op("select", "{0}.select(0, 0)", (is_filled(1),), infer_select(0)),
        op("select_last", "{0}[..., 0]", (is_filled(1),), infer_select(-1)),
        op("unsqueeze", "{0}.unsqueeze(0)", (is_any,), infer_unsqueeze(0)),
        op("unsqueeze_last", "{0}.unsqueeze(-1)", (is_any,), infer_unsqueeze(-1)),
        op("detach", "{0}.detach()", (is_any,), infer_alias()),
        op("contiguous", "{0}.contiguous()", (is_any,), infer_alias(is_exact=False)),
        op("conj", "{0}.conj()", (is_complex,), infer_conj),
        op("real", "{0}.real", (is_complex,), infer_real),
        op("imag", "{0}.imag", (is_complex,), infer_imag),
    ]


def _write_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer, *choices: tuple) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, effect="write", choices=choices)

    return [
        op("add_", "{0}.add_({1})", (is_writable(is_f32), is_f32), infer_write),
        op("mul_", "{0}.mul_({a})", (is_writable(is_float),), infer_write, FACTORS),
        op("tanh_", "{0}.tanh_()", (is_writable(is_float),), infer_write),
        op("zero_", "{0}.zero_()", (is_writable(),), infer_write),
        op("fill_", "{0}.fill_({a})", (is_writable(is_float),), infer_write, FACTORS),
        op("copy_", "{0}.copy_({1})", (is_writable(), is_any), infer_copy),
        op("copy_again_", "{0}.copy_({1})", (is_writable(), is_any), infer_copy),
        op(
            "masked_fill_",
            "{0}.masked_fill_({1}, {a})",
            (is_writable(is_float), is_mask),
            infer_write,
            FACTORS,
        ),
        op(
            "index_copy_",
            "{0}.index_copy_(0, {1}, {2})",
            (is_writable(is_filled(1, is_f32)), is_unique_index, is_f32),
            infer_write_rows,
        ),
        op(
            "index_put_",
            "{0}[{1}] = {2}",
            (is_writable(is_filled(1, is_f32)), is_unique_index, is_f32),
            infer_write_rows,
        ),
        op(
            "index_add_",
            "{0}.index_add_(0, {1}, {2})",
            (is_writable(is_filled(1, is_f32)), is_unique_index, is_f32),
            infer_write_rows,
        ),
        op(
            "scatter_",
            "{0}.scatter_(-1, {1}, {a})",
            (is_writable(is_filled(1, is_f32)), has_rank(1, is_index)),
            infer_scatter,
            FACTORS,
        ),
        op("out", "torch.add({1}, {2}, out={0})", (is_writable(is_f32), is_f32, is_f32), infer_out),
    ]


def _random_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer = infer_same) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, effect="random")

    return [
        op("rand_like", "torch.rand_like({0})", (is_f32,)),
        op("randn_like", "torch.randn_like({0})", (is_f32,)),
        op("dropout", "F.dropout({0}, 0.5)", (is_f32,)),
        op("noise", "{0} + torch.randn_like({0}) * 0.5", (is_f32,)),
        op("random_index", "torch.randint_like({0}, 0, 4)", (is_index,), infer_next_index),
    ]


def _held_ops() -> list[Operator]:
    def op(name: str, text: str, infer: Infer, **rest: bool) -> Operator:
        return Operator(name=name, text=text, infer=infer, effect="held", **rest)

    table = (ROWS, WIDTH)
    return [
        op("table", "self.table", infer_held("buffer:table", table)),
        op("gain", "self.gain", infer_held("buffer:gain", (WIDTH,))),
        op("counts", "self.counts", infer_held("buffer:counts", (ROWS,), "i64", LARGEST)),
        op("cache", "state.cache", infer_held("static:cache", table)),
        op("slots", "state.slots", infer_held("static:slots", (ROWS,), "i64", LARGEST)),
        op("outside", "state.outside", infer_held("outside:tensor", table), is_body_only=True),
        op(
            "flip",
            "state.flip()",
            infer_held("outside:flip_0 outside:flip_1", table),
            is_body_only=True,
            is_live=True,
        ),
    ]


def _live_ops() -> list[Operator]:
    def op(
        name: str, text: str, tests: tuple[Test, ...], infer: Infer = infer_same, **rest: bool
    ) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, is_body_only=True, **rest)

    return [
        op("live_scale", "{0} * state.live.scale", (is_f32,), is_live=True),
        op("live_shift", "{0} + state.live.shift", (is_wide,), is_live=True),
        op(
            "host_read",
            "{0} * (1.5 if {0}.sum().item() > 0 else 0.5)",
            (is_filled(1, is_f32),),
            reads_host=True,
        ),
        op(
            "compress", "{0}[{0} > 0].cumsum(0).sum()", (is_filled(1, is_f32),), infer_scalar, reads_host=True
        ),
    ]


def _by_name(*groups: list[Operator]) -> dict[str, Operator]:
    return {operator.name: operator for group in groups for operator in group}


OPERATORS = _by_name(_fresh_ops(), _view_ops(), _write_ops(), _random_ops(), _held_ops(), _live_ops())


def _some(*names: str) -> tuple[Operator, ...]:
    return tuple(OPERATORS[name] for name in names)


def _all(effect: Effect, *less: tuple[Operator, ...]) -> tuple[Operator, ...]:
    left_out = {op.name for group in less for op in group}
    return tuple(op for op in OPERATORS.values() if op.effect == effect and op.name not in left_out)


_INDICES = _some(
    *(
        "argmax",
        "sort",
        "sort_rows",
        "topk",
        "index_select",
        "index",
        "gather",
        "embedding",
        "next_index",
        "arange",
    )
)
_CASTS = _some("to_bf16", "to_f32", "complex", "scale_complex", "mask_to_index", "positive", "greater")
_MATRICES = _some("linear", "affine", "attend", "layer_norm", "softmax", "cumsum", "sum", "amax", "mean")
_OVERLAPS = _some("expand", "expand_rows", "windows")
_COMPLEX_VIEWS = _some("conj", "real", "imag")
_INDEX_WRITES = _some("index_copy_", "index_put_", "index_add_", "scatter_", "masked_fill_")
_LIVE = _some("live_scale", "live_shift", "host_read", "compress")
_OUTSIDE = _some("outside", "flip")
_STATIC = _some("cache", "slots")

GROUPS: dict[str, tuple[Operator, ...]] = {
    "arithmetic": _all("fresh", _INDICES, _CASTS, _MATRICES, _LIVE),
    "index": _INDICES,
    "cast": _CASTS,
    "matrix": _MATRICES,
    "view": _all("view", _OVERLAPS, _COMPLEX_VIEWS),
    "overlap": _OVERLAPS,
    "half": _some("to_bf16"),
    "complex": _some("complex"),
    "complex_view": _COMPLEX_VIEWS,
    "write": _all("write", _INDEX_WRITES),
    "index_write": _INDEX_WRITES,
    "random": _all("random"),
    "buffer": _all("held", _OUTSIDE, _STATIC),
    "static": _STATIC,
    "outside": _OUTSIDE,
    "live": _LIVE,
}
"""Operators by what the generator chooses among first, so that rare kinds come up as often as common ones."""

ROWS_OF = _some("rows_of")
CONJ = _some("conj", "conj", "imag")
CACHES = _some("cache", "table", "cache")
ROW_WRITES = _some("index_copy_", "index_put_", "index_add_")
TAKES = _some("index_select", "index", "gather")
