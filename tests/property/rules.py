"""Rules of operators: which operands fit, and what kinds come out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal as Choice

from .kinds import LARGEST, SIZE, IllegalError, Kind, broadcast, const, fresh, num_elements

Literal = int | float
Kinds = tuple[Kind, ...]
Infer = Callable[[Kinds, tuple[Literal, ...]], Kinds]
Test = Callable[[Kind], bool]
Effect = Choice["fresh", "view", "write", "random", "held"]

WIDTH = const(4)
ROWS = const(LARGEST)


def require(condition: bool) -> None:
    if not condition:
        raise IllegalError("operands do not fit")


# Quick tests ---------------------------------------------------------------------------------------


def is_any(kind: Kind) -> bool:
    return True


def is_f32(kind: Kind) -> bool:
    return kind.dtype == "f32"


def is_float(kind: Kind) -> bool:
    return kind.is_float


def is_complex(kind: Kind) -> bool:
    return kind.dtype == "c64"


def is_index(kind: Kind) -> bool:
    return kind.dtype == "i64"


def is_index_1d(kind: Kind) -> bool:
    return kind.dtype == "i64" and kind.rank == 1


def is_unique_index(kind: Kind) -> bool:
    return is_index_1d(kind) and kind.is_unique


def is_mask(kind: Kind) -> bool:
    return kind.dtype == "bool"


def has_rank(least: int, dtype: Test = is_any) -> Test:
    return lambda kind: kind.rank >= least and dtype(kind)


def is_filled(least: int, dtype: Test = is_any) -> Test:
    return lambda kind: kind.rank >= least and kind.is_never_empty and dtype(kind)


def is_wide(kind: Kind) -> bool:
    return kind.dtype == "f32" and kind.rank >= 1 and kind.shape[-1] == WIDTH


def has_constant_rows(kind: Kind) -> bool:
    return kind.rank >= 1 and kind.shape[0].is_constant and kind.shape[0].constant >= 2


def has_constant_last(kind: Kind) -> bool:
    return kind.rank >= 1 and kind.shape[-1].is_constant and kind.shape[-1].constant >= 2


def is_writable(dtype: Test = is_any) -> Test:
    return lambda kind: not kind.overlaps and dtype(kind)


# Rules -----------------------------------------------------------------------------------------------


def infer_same(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh(kinds[0].shape, kinds[0].dtype, bound=kinds[0].bound, is_unique=kinds[0].is_unique),)


def infer_elementwise(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    first, second = kinds[-2:]
    require(first.dtype == second.dtype)
    return (fresh(broadcast(first.shape, second.shape), first.dtype),)


def infer_where(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (both,) = infer_elementwise(kinds, ())
    require(kinds[1].dtype == "f32")
    return (fresh(broadcast(kinds[0].shape, both.shape)),)


def infer_compare(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (both,) = infer_elementwise(kinds, ())
    return (fresh(both.shape, "bool"),)


def infer_cast(dtype: str, bound: int | None = None) -> Infer:
    return lambda kinds, _: (fresh(kinds[0].shape, dtype, bound=None if bound is None else const(bound)),)


def infer_reduce_last(dtype: str | None = None) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        bound = x.shape[-1] if dtype == "i64" else x.bound
        return (fresh(x.shape[:-1], dtype or x.dtype, bound=bound),)

    return infer


def infer_sort(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        order = fresh(x.shape, "i64", bound=x.shape[dim], is_unique=x.rank == 1)
        return fresh(x.shape), order

    return infer


def infer_topk(kinds: Kinds, literals: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    shape = (*x.shape[:-1], const(int(literals[0])))
    require(shape[-1].fits_in(x.shape[-1]))
    return fresh(shape), fresh(shape, "i64", bound=x.shape[-1], is_unique=x.rank == 1)


def infer_cat(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        first, second = kinds
        require(first.rank == second.rank and first.dtype == second.dtype)
        axis = dim % first.rank
        rest = [one for index, one in enumerate(zip(first.shape, second.shape, strict=True)) if index != axis]
        require(all(one == other for one, other in rest))
        one, other = first.shape[axis], second.shape[axis]
        total = fresh((one, other)).shape[0]
        total = type(total)(one.per_size + other.per_size, one.constant + other.constant)
        require(total.at(LARGEST) <= 32)
        shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
        bound = None
        if first.bound is not None and second.bound is not None:
            bound = second.bound if first.bound.fits_in(second.bound) else first.bound
            require(first.bound.fits_in(bound) and second.bound.fits_in(bound))
        return (fresh(shape, first.dtype, bound=bound),)

    return infer


def infer_stack(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    first, second = kinds
    require(first.shape == second.shape and first.dtype == second.dtype == "f32")
    return (fresh((first.shape[0], const(2), *first.shape[1:])),)


def infer_attend(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    query, key = kinds
    require(query.rank == 2 and key.rank == 2 and query.is_never_empty and key.is_never_empty)
    return (fresh(query.shape),)


def infer_take_rows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    table, index = kinds
    assert index.bound is not None
    require(index.bound.fits_in(table.shape[0]))
    unique = table.is_unique and index.is_unique
    return (fresh((*index.shape, *table.shape[1:]), table.dtype, bound=table.bound, is_unique=unique),)


def infer_gather(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    source, index = kinds
    assert index.bound is not None
    require(source.rank == index.rank and source.shape[:-1] == index.shape[:-1])
    require(index.bound.fits_in(source.shape[-1]))
    return (fresh(index.shape),)


def infer_embedding(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (index,) = kinds
    assert index.bound is not None
    require(index.bound.fits_in(ROWS) and index.rank <= 2)
    return (fresh((*index.shape, WIDTH)),)


def infer_next_index(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh(kinds[0].shape, "i64", bound=const(4)),)


def infer_arange(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh((kinds[0].shape[0],), "i64", bound=kinds[0].shape[0], is_unique=True),)


def infer_scalar(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh(()),)


def infer_times_weight(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    return (fresh((*kinds[0].shape[:-1], WIDTH)),)


# Views


def infer_transpose(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape[:-2], x.shape[-1], x.shape[-2]),)


def infer_skip_rows(kinds: Kinds, literals: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(x.shape[0].plus(-int(literals[0])), *x.shape[1:], is_unique=x.is_unique),)


def infer_nothing(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const(0), *x.shape[1:]),)


def infer_first_row(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const(1), *x.shape[1:], is_unique=x.is_unique),)


def infer_columns(kinds: Kinds, literals: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    start, end = (int(literal) for literal in literals)
    require(start < end <= x.shape[-1].constant)
    return (x.view(*x.shape[:-1], const(end - start)),)


def infer_every_second(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const((x.shape[0].constant + 1) // 2), *x.shape[1:], is_unique=x.is_unique),)


def infer_rows_of(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    held, like = kinds
    require(like.rank >= 1 and like.shape[0] == SIZE and held.shape[0] == ROWS)
    return (held.view(SIZE, *held.shape[1:], is_unique=held.is_unique),)


def infer_expand(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(const(2), *x.shape, overlaps=True),)


def infer_expand_rows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    row, like = kinds
    require(row.rank == 1 and like.rank >= 1 and like.shape[0] == SIZE)
    return (row.view(SIZE, *row.shape, overlaps=True),)


def infer_windows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape[:-1], x.shape[-1].plus(-1), const(2), overlaps=True),)


def infer_halves(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    half = x.view(*x.shape[:-1], const(2))
    return half, half


def infer_pairs(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    require(x.shape[-1].constant % 2 == 0)
    return (x.view(*x.shape[:-1], const(x.shape[-1].constant // 2), const(2)),)


def infer_flat(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(num_elements(x.shape), is_exact=False),)


def infer_select(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        return (x.view(*(x.shape[1:] if dim == 0 else x.shape[:-1])),)

    return infer


def infer_rotate(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape[1:], x.shape[0]),)


def infer_unsqueeze(dim: int) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        return (x.view(*((const(1), *x.shape) if dim == 0 else (*x.shape, const(1)))),)

    return infer


def infer_alias(is_exact: bool = True) -> Infer:
    def infer(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
        (x,) = kinds
        return (x.view(*x.shape, is_unique=x.is_unique, is_exact=x.is_exact and is_exact),)

    return infer


def infer_conj(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape, is_conj=not x.is_conj),)


def infer_real(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape, dtype="f32", is_conj=False),)


def infer_imag(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    (x,) = kinds
    return (x.view(*x.shape, dtype="f32"),)


# Writes


def infer_write(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, *sources = kinds
    for source in sources:
        require(broadcast(target.shape, source.shape) == target.shape)
    return ()


def infer_copy(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, source = kinds
    require(target.dtype == source.dtype)
    if target.bound is not None and source.bound is not None:
        require(source.bound.fits_in(target.bound))
    return infer_write(kinds, _)


def infer_write_rows(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, index, source = kinds
    assert index.bound is not None
    require(index.bound.fits_in(target.shape[0]))
    require(source.shape == (*index.shape, *target.shape[1:]) and source.dtype == target.dtype)
    require(target.roots.isdisjoint(source.roots))
    return ()


def infer_scatter(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    infer_gather(kinds, _)
    return ()


def infer_out(kinds: Kinds, _: tuple[Literal, ...]) -> Kinds:
    target, first, second = kinds
    require(broadcast(first.shape, second.shape) == target.shape)
    return ()


def infer_held(root: str, shape: Sequence[object], dtype: str = "f32", bound: int | None = None) -> Infer:
    kind = Kind(
        shape=tuple(shape),  # type: ignore[arg-type]
        dtype=dtype,
        bound=None if bound is None else const(bound),
        roots=frozenset(root.split()),
    )
    return lambda kinds, _: (kind,)
