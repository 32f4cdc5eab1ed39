"""The operators of random programs: one table, from which programs are inferred, printed and run.

An operator's ``text`` is Python; the runner compiles exactly what a failure message shows. ``{0}``, ``{1}`` stand
for operands, ``{a}``, ``{b}`` for literals, ``self`` for the module and ``state`` for what lives outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal as Choice

from .kinds import LARGEST, SIZE, IllegalError, Kind, broadcast, const, fresh, num_elements

Literal = int | float
Kinds = tuple[Kind, ...]
Infer = Callable[[Kinds, tuple[Literal, ...]], Kinds]
Test = Callable[[Kind], bool]
Effect = Choice["fresh", "view", "write", "random", "held"]

FACTORS = (0.5, -1.25, 2.0)
WIDTH = const(4)
ROWS = const(LARGEST)


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


def _require(condition: bool) -> None:
    if not condition:
        raise IllegalError("operands do not fit")


# Quick tests ---------------------------------------------------------------------------------------


def _any(kind: Kind) -> bool:
    return True


def _f32(kind: Kind) -> bool:
    return kind.dtype == "f32"


def _float(kind: Kind) -> bool:
    return kind.is_float


def _complex(kind: Kind) -> bool:
    return kind.dtype == "c64"


def _index(kind: Kind) -> bool:
    return kind.dtype == "i64"


def _index_1d(kind: Kind) -> bool:
    return kind.dtype == "i64" and kind.rank == 1


def _unique_index(kind: Kind) -> bool:
    return _index_1d(kind) and kind.is_unique


def _mask(kind: Kind) -> bool:
    return kind.dtype == "bool"


def _rank(least: int, dtype: Test = _any) -> Test:
    return lambda kind: kind.rank >= least and dtype(kind)


def _filled(least: int, dtype: Test = _any) -> Test:
    return lambda kind: kind.rank >= least and kind.is_never_empty and dtype(kind)


def _wide(kind: Kind) -> bool:
    return kind.dtype == "f32" and kind.rank >= 1 and kind.shape[-1] == WIDTH


def _constant_rows(kind: Kind) -> bool:
    return kind.rank >= 1 and kind.shape[0].is_constant and kind.shape[0].constant >= 2


def _constant_last(kind: Kind) -> bool:
    return kind.rank >= 1 and kind.shape[-1].is_constant and kind.shape[-1].constant >= 2


def _writable(dtype: Test = _any) -> Test:
    return lambda kind: not kind.overlaps and dtype(kind)


# Rules -----------------------------------------------------------------------------------------------


def _same(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh(kinds[0].shape, kinds[0].dtype, bound=kinds[0].bound, is_unique=kinds[0].is_unique),)


def _elementwise(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    first, second = kinds[-2:]
    _require(first.dtype == second.dtype)
    return (fresh(broadcast(first.shape, second.shape), first.dtype),)


def _where(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (both,) = _elementwise(kinds, ())
    _require(kinds[1].dtype == "f32")
    return (fresh(broadcast(kinds[0].shape, both.shape)),)


def _compare(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (both,) = _elementwise(kinds, ())
    return (fresh(both.shape, "bool"),)


def _cast(dtype: str, bound: int | None = None) -> Infer:
    return lambda kinds, _: (fresh(kinds[0].shape, dtype, bound=None if bound is None else const(bound)),)


def _reduce_last(dtype: str | None = None) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        bound = x.shape[-1] if dtype == "i64" else x.bound
        return (fresh(x.shape[:-1], dtype or x.dtype, bound=bound),)

    return infer


def _sort(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        order = fresh(x.shape, "i64", bound=x.shape[dim], is_unique=x.rank == 1)
        return fresh(x.shape), order

    return infer


def _topk(kinds: Kinds, literals: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    shape = (*x.shape[:-1], const(int(literals[0])))
    _require(shape[-1].fits_in(x.shape[-1]))
    return fresh(shape), fresh(shape, "i64", bound=x.shape[-1], is_unique=x.rank == 1)


def _cat(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        first, second = kinds
        _require(first.rank == second.rank and first.dtype == second.dtype)
        axis = dim % first.rank
        rest = [one for index, one in enumerate(zip(first.shape, second.shape, strict=True)) if index != axis]
        _require(all(one == other for one, other in rest))
        one, other = first.shape[axis], second.shape[axis]
        total = fresh((one, other)).shape[0]
        total = type(total)(one.per_size + other.per_size, one.constant + other.constant)
        _require(total.at(LARGEST) <= 32)
        shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
        bound = None
        if first.bound is not None and second.bound is not None:
            bound = second.bound if first.bound.fits_in(second.bound) else first.bound
            _require(first.bound.fits_in(bound) and second.bound.fits_in(bound))
        return (fresh(shape, first.dtype, bound=bound),)

    return infer


def _stack(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    first, second = kinds
    _require(first.shape == second.shape and first.dtype == second.dtype == "f32")
    return (fresh((first.shape[0], const(2), *first.shape[1:])),)


def _attend(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    query, key = kinds
    _require(query.rank == 2 and key.rank == 2 and query.is_never_empty and key.is_never_empty)
    return (fresh(query.shape),)


def _take_rows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    table, index = kinds
    assert index.bound is not None
    _require(index.bound.fits_in(table.shape[0]))
    unique = table.is_unique and index.is_unique
    return (fresh((*index.shape, *table.shape[1:]), table.dtype, bound=table.bound, is_unique=unique),)


def _gather(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    source, index = kinds
    assert index.bound is not None
    _require(source.rank == index.rank and source.shape[:-1] == index.shape[:-1])
    _require(index.bound.fits_in(source.shape[-1]))
    return (fresh(index.shape),)


def _embedding(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (index,) = kinds
    assert index.bound is not None
    _require(index.bound.fits_in(ROWS) and index.rank <= 2)
    return (fresh((*index.shape, WIDTH)),)


def _next_index(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh(kinds[0].shape, "i64", bound=const(4)),)


def _arange(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh((kinds[0].shape[0],), "i64", bound=kinds[0].shape[0], is_unique=True),)


def _scalar(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh(()),)


def _times_weight(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh((*kinds[0].shape[:-1], WIDTH)),)


# Views


def _transpose(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape[:-2], x.shape[-1], x.shape[-2]),)


def _skip_rows(kinds: Kinds, literals: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(x.shape[0].plus(-int(literals[0])), *x.shape[1:], is_unique=x.is_unique),)


def _nothing(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const(0), *x.shape[1:]),)


def _first_row(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const(1), *x.shape[1:], is_unique=x.is_unique),)


def _columns(kinds: Kinds, literals: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    start, end = (int(literal) for literal in literals)
    _require(start < end <= x.shape[-1].constant)
    return (x.view(*x.shape[:-1], const(end - start)),)


def _every_second(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const((x.shape[0].constant + 1) // 2), *x.shape[1:], is_unique=x.is_unique),)


def _rows_of(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    held, like = kinds
    _require(like.rank >= 1 and like.shape[0] == SIZE and held.shape[0] == ROWS)
    return (held.view(SIZE, *held.shape[1:], is_unique=held.is_unique),)


def _expand(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const(2), *x.shape, overlaps=True),)


def _expand_rows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    row, like = kinds
    _require(row.rank == 1 and like.rank >= 1 and like.shape[0] == SIZE)
    return (row.view(SIZE, *row.shape, overlaps=True),)


def _windows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape[:-1], x.shape[-1].plus(-1), const(2), overlaps=True),)


def _halves(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    half = x.view(*x.shape[:-1], const(2))
    return half, half


def _pairs(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    _require(x.shape[-1].constant % 2 == 0)
    return (x.view(*x.shape[:-1], const(x.shape[-1].constant // 2), const(2)),)


def _flat(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(num_elements(x.shape), is_exact=False),)


def _select(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        return (x.view(*(x.shape[1:] if dim == 0 else x.shape[:-1])),)

    return infer


def _rotate(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape[1:], x.shape[0]),)


def _unsqueeze(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        return (x.view(*((const(1), *x.shape) if dim == 0 else (*x.shape, const(1)))),)

    return infer


def _alias(is_exact: bool = True) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        return (x.view(*x.shape, is_unique=x.is_unique, is_exact=x.is_exact and is_exact),)

    return infer


def _part(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape, dtype="f32"),)


# Writes


def _write(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, *sources = kinds
    for source in sources:
        _require(broadcast(target.shape, source.shape) == target.shape)
    return ()


def _copy(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, source = kinds
    _require(target.dtype == source.dtype)
    if target.bound is not None and source.bound is not None:
        _require(source.bound.fits_in(target.bound))
    return _write(kinds, _)


def _write_rows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, index, source = kinds
    assert index.bound is not None
    _require(index.bound.fits_in(target.shape[0]))
    _require(source.shape == (*index.shape, *target.shape[1:]) and source.dtype == target.dtype)
    _require(target.roots.isdisjoint(source.roots))
    return ()


def _scatter(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    _gather(kinds, _)
    return ()


def _out(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, first, second = kinds
    _require(broadcast(first.shape, second.shape) == target.shape)
    return ()


def _held(root: str, shape: Sequence[object], dtype: str = "f32", bound: int | None = None) -> Infer:
    kind = Kind(
        shape=tuple(shape),  # type: ignore[arg-type]
        dtype=dtype,
        bound=None if bound is None else const(bound),
        roots=frozenset(root.split()),
    )
    return lambda kinds, _: (kind,)


def _fresh_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer = _same, *choices: tuple) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, choices=choices)

    return [
        op("tanh", "torch.tanh({0})", (_float,)),
        op("relu", "torch.relu({0})", (_float,)),
        op("neg", "-{0}", (_float,)),
        op("scale", "{0} * {a}", (_float,), _same, FACTORS),
        op("shift", "{0} + {a}", (_float,), _same, FACTORS),
        op("add", "{0} + {1}", (_float, _float), _elementwise),
        op("sub", "{0} - {1}", (_float, _float), _elementwise),
        op("mul", "{0} * torch.sigmoid({1})", (_float, _float), _elementwise),
        op("maximum", "torch.maximum({0}, {1})", (_f32, _f32), _elementwise),
        op("where", "torch.where({0}, {1}, {2})", (_mask, _f32, _f32), _where),
        op("greater", "{0} > {1}", (_f32, _f32), _compare),
        op("positive", "{0} > 0", (_float,), _cast("bool")),
        op("not", "~{0}", (_mask,)),
        op("to_bf16", "{0}.to(torch.bfloat16)", (_f32,), _cast("bf16")),
        op("to_f32", "{0}.float()", (lambda k: k.dtype in {"bf16", "i64", "bool"},), _cast("f32")),
        op("mask_to_index", "{0}.long()", (_mask,), _cast("i64", 2)),
        op("linear", "{0} @ self.weight", (_wide,), _times_weight),
        op("affine", "F.linear({0}, self.weight, self.gain)", (_wide,), _times_weight),
        op("layer_norm", "F.layer_norm({0}, (4,), self.gain)", (_wide,)),
        op("softmax", "{0}.softmax(-1)", (_filled(1, _f32),)),
        op("cumsum", "{0}.cumsum(0)", (_filled(1, _f32),)),
        op("attend", "({0} @ {1}.transpose(0, 1)).softmax(-1) @ {1}", (_wide, _wide), _attend),
        op("sum", "{0}.sum(-1)", (_rank(1, _f32),), _reduce_last()),
        op("amax", "{0}.amax(-1)", (_filled(1, _float),), _reduce_last()),
        op("mean", "{0}.mean()", (_filled(1, _f32),), _scalar),
        op("argmax", "{0}.argmax(-1)", (_filled(1, _f32),), _reduce_last("i64")),
        op("sort", "{0}.sort(stable=True, dim=-1)", (_filled(1, _f32),), _sort(-1)),
        op("sort_rows", "{0}.sort(stable=True, dim=0)", (_filled(1, _f32),), _sort(0)),
        op("topk", "{0}.topk({a})", (_filled(1, _f32),), _topk, (1, 2)),
        op("cat", "torch.cat([{0}, {1}], -1)", (_rank(1), _rank(1)), _cat(-1)),
        op("cat_rows", "torch.cat([{0}, {1}])", (_rank(1), _rank(1)), _cat(0)),
        op("stack", "torch.stack([{0}, {1}], 1)", (_rank(1, _f32), _rank(1, _f32)), _stack),
        op("index_select", "{0}.index_select(0, {1})", (_filled(1), _index_1d), _take_rows),
        op("index", "{0}[{1}]", (_filled(1), _index_1d), _take_rows),
        op("gather", "{0}.gather(-1, {1})", (_filled(1, _f32), _rank(1, _index)), _gather),
        op("embedding", "F.embedding({0}, self.table)", (_rank(1, _index),), _embedding),
        op("next_index", "({0} + 1) % 4", (_index,), _next_index),
        op("arange", "torch.arange({0}.shape[0], device={0}.device)", (_rank(1),), _arange),
        op("zeros_like", "torch.zeros_like({0})", (_f32,)),
        op("clone", "{0}.clone()", (_any,)),
        op("empty_filled", "torch.empty_like({0}).copy_({0})", (_float,)),
        op("complex", "torch.complex({0}, torch.tanh({0}))", (_f32,), _cast("c64")),
        op("scale_complex", "{0} * {a}", (_complex,), _same, FACTORS),
    ]


def _view_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer, *choices: tuple) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, effect="view", choices=choices)

    return [
        op("transpose", "{0}.transpose(-1, -2)", (_rank(2),), _transpose),
        op("rotate", "{0}.movedim(0, -1)", (_rank(2),), _rotate),
        op("skip_rows", "{0}[{a}:]", (_rank(1),), _skip_rows, (1, 2)),
        op("first_row", "{0}[:1]", (_filled(1),), _first_row),
        op("columns", "{0}[..., {a}:{b}]", (_constant_last,), _columns, (0, 1), (2, 3)),
        op("nothing", "{0}[:0]", (_rank(1),), _nothing),
        op("every_second", "{0}[::2]", (_constant_rows,), _every_second),
        op("rows_of", "{0}.narrow(0, 0, {1}.shape[0])", (_constant_rows, _rank(1)), _rows_of),
        op("rows_of_again", "{0}[: {1}.shape[0]]", (_constant_rows, _rank(1)), _rows_of),
        op("expand", "{0}.expand(2, *{0}.shape)", (_any,), _expand),
        op("expand_rows", "{0}.expand({1}.shape[0], -1)", (_rank(1), _rank(1)), _expand_rows),
        op("windows", "{0}.unfold(-1, 2, 1)", (_constant_last,), _windows),
        op("halves", "{0}.split(2, -1)", (lambda k: k.rank >= 1 and k.shape[-1] == WIDTH,), _halves),
        op("pairs", "{0}.unflatten(-1, (-1, 2))", (_constant_last,), _pairs),
        op("flat", "{0}.reshape(-1)", (_filled(2),), _flat),
        op("select", "{0}.select(0, 0)", (_filled(1),), _select(0)),
        op("select_last", "{0}[..., 0]", (_filled(1),), _select(-1)),
        op("unsqueeze", "{0}.unsqueeze(0)", (_any,), _unsqueeze(0)),
        op("unsqueeze_last", "{0}.unsqueeze(-1)", (_any,), _unsqueeze(-1)),
        op("detach", "{0}.detach()", (_any,), _alias()),
        op("contiguous", "{0}.contiguous()", (_any,), _alias(is_exact=False)),
        op("conj", "{0}.conj()", (_complex,), _alias()),
        op("real", "{0}.real", (_complex,), _part),
        op("imag", "{0}.imag", (_complex,), _part),
    ]


def _write_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer, *choices: tuple) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, effect="write", choices=choices)

    return [
        op("add_", "{0}.add_({1})", (_writable(_f32), _f32), _write),
        op("mul_", "{0}.mul_({a})", (_writable(_float),), _write, FACTORS),
        op("tanh_", "{0}.tanh_()", (_writable(_float),), _write),
        op("zero_", "{0}.zero_()", (_writable(),), _write),
        op("fill_", "{0}.fill_({a})", (_writable(_float),), _write, FACTORS),
        op("copy_", "{0}.copy_({1})", (_writable(), _any), _copy),
        op("copy_again_", "{0}.copy_({1})", (_writable(), _any), _copy),
        op("masked_fill_", "{0}.masked_fill_({1}, {a})", (_writable(_float), _mask), _write, FACTORS),
        op(
            "index_copy_",
            "{0}.index_copy_(0, {1}, {2})",
            (_writable(_filled(1, _f32)), _unique_index, _f32),
            _write_rows,
        ),
        op("index_put_", "{0}[{1}] = {2}", (_writable(_filled(1, _f32)), _unique_index, _f32), _write_rows),
        op(
            "index_add_",
            "{0}.index_add_(0, {1}, {2})",
            (_writable(_filled(1, _f32)), _unique_index, _f32),
            _write_rows,
        ),
        op(
            "scatter_",
            "{0}.scatter_(-1, {1}, {a})",
            (_writable(_filled(1, _f32)), _rank(1, _index)),
            _scatter,
            FACTORS,
        ),
        op("out", "torch.add({1}, {2}, out={0})", (_writable(_f32), _f32, _f32), _out),
    ]


def _random_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer = _same) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, effect="random")

    return [
        op("rand_like", "torch.rand_like({0})", (_f32,)),
        op("randn_like", "torch.randn_like({0})", (_f32,)),
        op("dropout", "F.dropout({0}, 0.5)", (_f32,)),
        op("noise", "{0} + torch.randn_like({0}) * 0.5", (_f32,)),
        op("random_index", "torch.randint_like({0}, 0, 4)", (_index,), _next_index),
    ]


def _held_ops() -> list[Operator]:
    def op(name: str, text: str, infer: Infer, **rest: bool) -> Operator:
        return Operator(name=name, text=text, infer=infer, effect="held", **rest)

    table = (ROWS, WIDTH)
    return [
        op("table", "self.table", _held("buffer:table", table)),
        op("gain", "self.gain", _held("buffer:gain", (WIDTH,))),
        op("counts", "self.counts", _held("buffer:counts", (ROWS,), "i64", LARGEST)),
        op("cache", "state.cache", _held("static:cache", table)),
        op("slots", "state.slots", _held("static:slots", (ROWS,), "i64", LARGEST)),
        op("outside", "state.outside", _held("outside:tensor", table), is_body_only=True),
        op(
            "flip",
            "state.flip()",
            _held("outside:flip_0 outside:flip_1", table),
            is_body_only=True,
            is_live=True,
        ),
    ]


def _live_ops() -> list[Operator]:
    def op(name: str, text: str, tests: tuple[Test, ...], infer: Infer = _same, **rest: bool) -> Operator:
        return Operator(name=name, text=text, tests=tests, infer=infer, is_body_only=True, **rest)

    return [
        op("live_scale", "{0} * state.live.scale", (_f32,), is_live=True),
        op("live_shift", "{0} + state.live.shift", (_wide,), is_live=True),
        op("host_read", "{0} * (1.5 if {0}.sum().item() > 0 else 0.5)", (_filled(1, _f32),), reads_host=True),
        op("compress", "{0}[{0} > 0].cumsum(0).sum()", (_filled(1, _f32),), _scalar, reads_host=True),
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
TAKES = _some("index_select", "index", "gather")
