"""What a CUDA graph refuses and accepts, as cases that run on both devices.

Each case is a function of a device that returns captured code; the same table is checked against
the emulated device here and against CUDA where there is one.
"""

# ruff: noqa: PLW0108 - a function must be looked up when it is called: capture replaces some.

from __future__ import annotations

from collections.abc import Callable

import torch

F = torch.nn.functional
Code = Callable[[], object]


def _x(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.rand(shape or (4, 4), device=device) + 0.1


def _spd(device: torch.device) -> torch.Tensor:
    return torch.eye(4, device=device) * 2


def _case(make: Callable[[torch.Tensor], object]) -> Callable[[torch.device], Code]:
    """A case over one 4x4 matrix."""

    def build(device: torch.device) -> Code:
        x = _x(device)
        return lambda: make(x)

    return build


def _case_long(make: Callable[[torch.Tensor], object]) -> Callable[[torch.device], Code]:
    """A case over the integers 0..3."""

    def build(device: torch.device) -> Code:
        x = torch.arange(4, device=device)
        return lambda: make(x)

    return build


def _case_spd(make: Callable[[torch.Tensor], object]) -> Callable[[torch.device], Code]:
    def build(device: torch.device) -> Code:
        x = _spd(device)
        return lambda: make(x)

    return build


def _set_mask(x: torch.Tensor, value: object) -> None:
    x[x > 0.5] = value


def _mask_cases(device: torch.device) -> Code:
    x, values = _x(device, 4), _x(device, 4)
    mask = x > 0
    return lambda: x.__setitem__(mask, values)


REFUSED: dict[str, Callable[[torch.device], Code]] = {
    "item": _case(lambda x: x[0, 0].item()),
    "bool": _case(lambda x: bool(x[0, 0] > 0)),
    "if": _case(lambda x: 1 if x.sum() > 0 else 2),
    "int": _case_long(lambda x: int(x[1])),
    "float": _case(lambda x: float(x[0, 0])),
    "index protocol": _case_long(lambda x: range(9)[x[1]]),
    "in": _case(lambda x: 1.0 in x),
    "format": _case(lambda x: f"{x[0, 0]:.2f}"),
    "print": _case(lambda x: repr(x)),
    "tolist": _case(lambda x: x.tolist()),
    "cpu": _case(lambda x: x.cpu()),
    "to cpu": _case(lambda x: x.to("cpu")),
    "to cpu by keyword": _case(lambda x: x.to(device="cpu")),
    "numpy": _case(lambda x: x.cpu().numpy()),
    "equal": _case(lambda x: torch.equal(x, x + 1)),
    "allclose": _case(lambda x: torch.allclose(x, x + 1)),
    "nonzero": _case(lambda x: x.nonzero()),
    "where with one argument": _case(lambda x: torch.where(x > 0.5)),
    "argwhere": _case(lambda x: torch.argwhere(x)),
    "masked_select": _case(lambda x: x.masked_select(x > 0.5)),
    "mask index": _case(lambda x: x[x > 0.5]),
    "mask assignment of a tensor": _mask_cases,
    "unique": _case_long(lambda x: x.unique()),
    "unique_consecutive": _case_long(lambda x: x.unique_consecutive()),
    "repeat_interleave by tensor": _case_long(lambda x: x.repeat_interleave(x)),
    "bincount": _case_long(lambda x: x.bincount()),
    "one_hot without classes": _case_long(lambda x: F.one_hot(x)),
    "host list": _case(lambda x: torch.tensor([1.0, 2.0], device=x.device)),
    "host list as index": _case(lambda x: x[[0, 1]]),
    "inv": _case_spd(lambda x: torch.linalg.inv(x)),
    "cholesky": _case_spd(lambda x: torch.linalg.cholesky(x)),
    "solve": _case_spd(lambda x: torch.linalg.solve(x, x)),
    "eigh": _case_spd(lambda x: torch.linalg.eigh(x)),
    "svd": _case_spd(lambda x: torch.linalg.svd(x)),
    "arange to a tensor": _case_long(lambda x: torch.arange(x[1])),
    "histc without bounds": _case(lambda x: x.histc(4)),
    "lstsq": _case_spd(lambda x: torch.linalg.lstsq(x, x)),
    "matrix_rank": _case_spd(lambda x: torch.linalg.matrix_rank(x)),
    "combinations": _case_long(lambda x: torch.combinations(x)),
    "ctc_loss": _case(
        lambda x: F.ctc_loss(
            x[:, None].log_softmax(-1),
            torch.ones(1, 2, dtype=torch.int64, device=x.device),
            torch.full((1,), 4, device=x.device),
            torch.full((1,), 2, device=x.device),
        )
    ),
    "normal with tensors": _case(lambda x: torch.normal(x, x)),
}

# CUDA lets these pass, and replays do not repeat them: captured code that seeds is stale from the second replay on.
REFUSED_HERE_ONLY: dict[str, Callable[[torch.device], Code]] = {
    "manual_seed": _case(lambda x: torch.manual_seed(1)),
}

ACCEPTED: dict[str, Callable[[torch.device], Code]] = {
    "multinomial": _case(lambda x: torch.multinomial(x, 1)),
    "embedding with max_norm": _case_long(
        lambda x: F.embedding(x, torch.ones(4, 4, device=x.device), max_norm=1.0)
    ),
    "integer index": _case_long(lambda x: x[x]),
    "integer index assignment": _case_long(lambda x: x.__setitem__((x.clone(),), x.clone())),
    "mask assignment of a number": _case(lambda x: _set_mask(x, 0.0)),
    "masked_fill": _case(lambda x: x.masked_fill(x > 0.5, 0.0)),
    "masked_scatter": _case(lambda x: x.masked_scatter(x > 0.5, x)),
    "where": _case(lambda x: torch.where(x > 0.5, x, 0.0)),
    "empty host list": _case(lambda x: torch.cat([torch.tensor([], device=x.device), x.flatten()])),
    "repeat_interleave by number": _case(lambda x: x.repeat_interleave(2, dim=0)),
    "repeat_interleave with output_size": _case_long(lambda x: x.repeat_interleave(x, output_size=6)),
    "nonzero_static": _case(lambda x: torch.nonzero_static(x, size=4)),
    "one_hot with classes": _case_long(lambda x: F.one_hot(x, 4)),
    "to the same device": _case(lambda x: x.to(x.device)),
    "to a type": _case(lambda x: x.to(torch.float16)),
    "python scalar": _case(lambda x: x + 1.5),
    "full": _case(lambda x: torch.full((3,), 2.0, device=x.device)),
    "arange": _case(lambda x: torch.arange(3, device=x.device)),
    "zero-dimensional host tensor": _case(lambda x: x * torch.tensor(2.0)),
    "rand": _case(lambda x: torch.rand_like(x)),
    "dropout": _case(lambda x: F.dropout(x, 0.5)),
    "multinomial with replacement": _case(lambda x: torch.multinomial(x, 3, replacement=True)),
    "randperm": _case(lambda x: torch.randperm(16, device=x.device)),
    "bernoulli": _case(lambda x: torch.bernoulli(x.clamp(0, 1))),
    "exponential_": _case(lambda x: torch.empty_like(x).exponential_()),
    "topk": _case(lambda x: x.topk(2)),
    "sort": _case(lambda x: x.sort(stable=True)),
    "median": _case(lambda x: x.median()),
    "mode": _case(lambda x: x.mode()),
    "kthvalue": _case(lambda x: x.kthvalue(2)),
    "isin": _case_long(lambda x: torch.isin(x, x)),
    "searchsorted": _case(lambda x: torch.searchsorted(x[0].sort()[0], x)),
    "histc with bounds": _case(lambda x: x.histc(4, 0.0, 1.0)),
    "inv_ex": _case_spd(lambda x: torch.linalg.inv_ex(x)),
    "det": _case_spd(lambda x: torch.linalg.det(x)),
    "qr": _case_spd(lambda x: torch.linalg.qr(x)),
    "cross_entropy": _case(lambda x: F.cross_entropy(x, torch.arange(4, device=x.device))),
    "embedding": _case_long(lambda x: F.embedding(x, torch.ones(4, 4, device=x.device))),
    "index_add": _case(lambda x: x.index_add(0, torch.arange(4, device=x.device), x)),
    "scatter_add": _case(lambda x: x.scatter_add(0, torch.zeros_like(x, dtype=torch.int64), x)),
    "cumsum": _case(lambda x: x.cumsum(0)),
    "stft": _case(lambda x: torch.stft(x.flatten(), 8, window=x[0].repeat(2), return_complex=True)),
    "put_": _case_long(lambda x: torch.zeros_like(x).put_(x, x)),
    "take": _case_long(lambda x: x.take(x)),
    "unflatten and chunk": _case(lambda x: x.view(-1).unflatten(0, (2, 8)).chunk(2)),
    "tensor_split by numbers": _case(lambda x: torch.tensor_split(x, (1, 2))),
    "cartesian_prod": _case_long(lambda x: torch.cartesian_prod(x, x)),
    "tril_indices": _case(lambda x: torch.tril_indices(3, 3, device=x.device)),
    "deepcopy": _case(lambda x: __import__("copy").deepcopy(x)),
    "addmm": _case(lambda x: torch.addmm(x, x, x)),
    "interpolate": _case(lambda x: F.interpolate(x[None, None], scale_factor=2.0)),
    "pad_sequence": _case(lambda x: torch.nn.utils.rnn.pad_sequence([x, x[:2]])),
    "multi_head_attention": _case(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
}
