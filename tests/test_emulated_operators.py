"""Operators captured on the emulated device replay bit-equal to eager, with fresh inputs.

Each case gets a fresh set of tensors and gives a function; it is captured once, then inputs are
filled anew and replay is compared with an eager run on copies, results and written memory alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_support import capture, is_same

F = torch.nn.functional
Tensors = dict[str, torch.Tensor]


def _kv_write(t: Tensors) -> Any:
    t["kv"].index_put_((t["slots"],), t["x"])
    return t["kv"].index_select(0, t["slots"]).sum(0)


def _kv_assign(t: Tensors) -> Any:
    t["kv"][t["slots"]] = t["x"] * 2
    return t["kv"][t["slots"]]


def _views(t: Tensors) -> Any:
    y = t["x"] + 1
    return y, y.t(), y[1:, ::2], y.view(-1)[3:], y.unsqueeze(0).expand(3, -1, -1)


def _views_of_another_type(t: Tensors) -> Any:
    y = t["x"] * 2
    return y.view(torch.int32), t["x"].view(torch.int16)


def _view_of_input(t: Tensors) -> Any:
    return t["x"].t(), t["x"][1:]


def _inplace_on_view(t: Tensors) -> Any:
    y = t["x"].clone()
    y[:, 0].mul_(3)
    y.t()[1].add_(1)
    return y


def _inplace_metadata(t: Tensors) -> Any:
    y = t["x"] * 2
    y.t_().unsqueeze_(0)
    y += 1
    return y


def _out(t: Tensors) -> Any:
    y = torch.empty(4, 8)
    torch.add(t["x"], 1, out=y)
    torch.mul(y, 2, out=t["kv"][:4])
    return y


def _out_that_grows(t: Tensors) -> Any:
    y = torch.empty(0)
    torch.add(t["x"], 1, out=y)
    return y, y * 2


def _two_results_out(t: Tensors) -> Any:
    values, indices = torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64)
    torch.topk(t["x"], 2, out=(values, indices))
    return values, indices


def _gru(t: Tensors) -> Any:
    weights = [t["w"].repeat(3, 1), t["w"].repeat(3, 1), t["x"][0].repeat(3), t["x"][1].repeat(3)]
    return torch.gru(t["x"][None], torch.zeros(1, 1, 8), weights, True, 1, 0.0, False, False, True)


def _lstm(t: Tensors) -> Any:
    weights = [t["w"].repeat(4, 1), t["w"].repeat(4, 1), t["x"][0].repeat(4), t["x"][1].repeat(4)]
    state = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    return torch.lstm(t["x"][None], state, weights, True, 1, 0.0, False, False, True)


def _attention(t: Tensors) -> Any:
    q = t["x"].view(1, 2, 4, 4)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def _masked_attention(t: Tensors) -> Any:
    q = t["x"].view(1, 2, 4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def _rope(t: Tensors) -> Any:
    angle = t["slots"][:, None] * torch.arange(4)[None] * 0.1
    left, right = t["x"].chunk(2, dim=-1)
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)


def _rms_norm(t: Tensors) -> Any:
    x = t["x"]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * t["w"][0]


def _foreach(t: Tensors) -> Any:
    parts = [t["x"].clone(), t["w"].clone()]
    torch._foreach_add_(parts, 1.0)
    return torch._foreach_mul(parts, 2.0)


def _foreach_outside(t: Tensors) -> Any:
    torch._foreach_mul_([t["kv"], t["x"]], 0.5)
    return t["kv"] + 0


def _scatter(t: Tensors) -> Any:
    index = t["slots"][:, None].expand(4, 8)
    return torch.zeros(12, 8).scatter(0, index, t["x"]), t["kv"].scatter_add_(0, index, t["x"])


def _autocast(t: Tensors) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return t["x"] @ t["w"], F.linear(t["x"], t["w"], t["w"][0])


def _complex(t: Tensors) -> Any:
    z = torch.complex(t["x"], t["x"] * 2)
    return z.conj(), z.conj().clone(), z.conj() * z, torch.view_as_real(z), z.conj().imag, z.resolve_conj()


def _bools(t: Tensors) -> Any:
    mask = t["x"] > 0
    return mask, ~mask, mask.any(-1), torch.where(mask, t["x"], 0.0), mask.to(torch.int32)


def _split(t: Tensors) -> Any:
    a, b = t["x"].split(4, dim=-1)
    return torch.stack((b, a)), torch.cat((b, a), 0), a.contiguous()


def _random(t: Tensors) -> Any:
    y = t["x"].clone().uniform_()
    return torch.rand(3), torch.randn_like(t["x"]), y, F.dropout(t["x"], 0.5), torch.randint(0, 9, (4,))


def _module(t: Tensors) -> Any:
    layer = F.layer_norm(F.gelu(F.linear(t["x"], t["w"])), (8,), t["w"][0], t["w"][1])
    return F.silu(layer) * t["x"], F.softmax(layer, -1), F.log_softmax(layer, -1)


def _reuse(t: Tensors) -> Any:
    y = t["x"]
    for _ in range(6):  # Freed memory is handed out again within the graph.
        y = (y @ t["w"]).tanh() + y
    return y


CASES: dict[str, Callable[[Tensors], Any]] = {
    "kv index_put_": _kv_write,
    "kv assignment": _kv_assign,
    "views": _views,
    "views of another type": _views_of_another_type,
    "views of an input": _view_of_input,
    "in-place on views": _inplace_on_view,
    "in-place metadata": _inplace_metadata,
    "out=": _out,
    "out= that grows": _out_that_grows,
    "out= with two results": _two_results_out,
    "gru": _gru,
    "lstm": _lstm,
    "attention": _attention,
    "masked attention": _masked_attention,
    "rope": _rope,
    "rms norm": _rms_norm,
    "foreach": _foreach,
    "foreach on outside memory": _foreach_outside,
    "scatter": _scatter,
    "autocast": _autocast,
    "complex and conj": _complex,
    "bools": _bools,
    "split and cat": _split,
    "random": _random,
    "module": _module,
    "memory reuse": _reuse,
    "matmul": lambda t: t["x"] @ t["w"],
    "linear with bias": lambda t: F.linear(t["x"], t["w"], t["w"][0]),
    "addmm": lambda t: torch.addmm(t["w"][0], t["x"], t["w"]),
    "bmm": lambda t: torch.bmm(t["x"].view(2, 2, 8), t["w"].view(2, 8, 4)),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t["x"], t["w"]),
    "sort": lambda t: t["x"].sort(dim=-1, descending=True, stable=True),
    "topk": lambda t: t["x"].topk(3),
    "argmax": lambda t: (t["x"].argmax(-1), t["x"].max(-1), t["x"].amin(0)),
    "cumsum": lambda t: (t["x"].cumsum(0), t["slots"].cumsum(0)),
    "embedding": lambda t: F.embedding(t["slots"], t["kv"]),
    "gather": lambda t: t["kv"].gather(0, t["slots"][:, None].expand(4, 8)),
    "index_select": lambda t: t["kv"].index_select(0, t["slots"]),
    "index with integers": lambda t: t["kv"][t["slots"], 1:3],
    "conv1d": lambda t: F.conv1d(t["x"][None], t["w"][:, :4, None], padding=1),
    "conv2d": lambda t: F.conv2d(t["x"][None, None], t["w"][None, None, :2, :2]),
    "pooling": lambda t: F.max_pool1d(t["x"][None], 2, return_indices=True),
    "group norm": lambda t: F.group_norm(t["x"][None], 2),
    "batch norm in eval": lambda t: F.batch_norm(t["x"], t["w"][0], t["w"][1].abs() + 1),
    "batch norm in training": lambda t: F.batch_norm(t["x"], t["kv"][0], t["kv"][1], training=True),
    "cross entropy": lambda t: F.cross_entropy(t["x"], t["slots"] % 8),
    "type changes": lambda t: (
        t["x"].to(torch.float16),
        t["x"].long(),
        t["slots"].float(),
        t["x"].bfloat16(),
    ),
    "float8": lambda t: t["x"].to(torch.float8_e4m3fn).to(torch.float32),
    "arange and full": lambda t: (torch.arange(4) + t["slots"], torch.full((2, 2), 3.0), torch.ones(3).int()),
    "scalar tensor": lambda t: t["x"] * torch.tensor(2.5),
    "zero elements": lambda t: (t["x"][:0] + 1, torch.cat((t["x"][:0], t["x"]))),
    "zero dimensions": lambda t: (t["x"].sum(), t["x"].mean() + 1),
    "permuted strides": lambda t: (t["x"].t() + 1, torch.empty_like(t["x"].t()).copy_(t["x"].t())),
    "as_strided with overlap": lambda t: (t["x"] + 1).as_strided((3, 4), (1, 1)),
    "tril and masked_fill": lambda t: (t["x"].tril(), t["x"].masked_fill(t["x"] > 0, -1.0)),
    "one_hot": lambda t: F.one_hot(t["slots"] % 5, 5),
    "roll flip and pad": lambda t: (t["x"].roll(1, 0), t["x"].flip(-1), F.pad(t["x"], (1, 2))),
    "fft": lambda t: torch.fft.rfft(t["x"]),
    "bitwise": lambda t: (t["slots"] ^ 3, t["slots"] << 1, t["slots"] // 2, -t["slots"]),
    "copy_ into outside memory": lambda t: t["kv"][:4].copy_(t["x"]),
    "unbind": lambda t: [row * 2 for row in t["x"].unbind(0)],
    "deepcopy": lambda t: copy.deepcopy(t["x"] + 1),
}


def _fresh(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(4, 8, generator=generator),
        "w": torch.randn(8, 8, generator=generator) * 0.3,
        "kv": torch.randn(12, 8, generator=generator),
        "slots": torch.randperm(12, generator=generator)[:4],
    }


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_replay_equals_eager(name: str, mode: Callable[[], Any]) -> None:
    case, static = CASES[name], _fresh(0)
    with mode():
        before = {key: tensor.clone() for key, tensor in static.items()}
        graph, captured = capture(lambda: case(static))
        assert all(is_same(before[key], static[key]) for key in static), "recording executed something"
        for seed in (1, 2, 3):
            fresh = _fresh(seed)
            for key in static:
                static[key].copy_(fresh[key])
            torch.manual_seed(seed)
            expected = _leaves(case(fresh))
            torch.manual_seed(seed)
            graph.replay()
            found = _leaves(captured)
            assert len(found) == len(expected)
            for index, (left, right) in enumerate(zip(found, expected, strict=True)):
                assert is_same(left, right), f"result {index} of replay {seed}"
                assert left.is_conj() == right.is_conj()
            for key in static:
                assert is_same(static[key], fresh[key]), f"{key} after replay {seed}"
