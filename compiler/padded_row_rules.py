"""Operators that keep rows apart, and on which terms: data for `padded_rows`.

Of each operator a rule says which arguments may be a size, and what else has to hold. Operators that PyTorch tags
as pointwise have a rule without terms. What has no rule is not known to keep rows apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from sgl_piecewise.runtime import torch_private_sizes

UNKNOWN = "it is not known to keep rows apart"

SHOWN_WHOLE = frozenset(
    f"aten::{name}" for name in ("linear", "matmul", "einsum", "scaled_dot_product_attention")
)
"""Composite operators with a rule of their own: what they are made of depends on device and shapes."""


class OperatorCall:
    """One call of an operator, its arguments by name.

    Args:
        func: The overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
        results: Tensors that it gave.
        symbol: The size that rows follow.
    """

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[torch.Tensor],
        symbol: Any,
    ) -> None:
        self.arguments: dict[str, Any] = {}
        for index, argument in enumerate(func._schema.arguments):
            default = argument.default_value if argument.has_default_value() else None
            given = args[index] if index < len(args) else kwargs.get(argument.name, default)
            self.arguments[argument.name] = given
        self.results = results
        self._symbol = symbol

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def dims(self, tensor: Any) -> set[int]:
        """Returns the dimensions of a tensor that are the size; none of what is no tensor."""
        if not isinstance(tensor, torch.Tensor):
            return set()
        return {
            dim
            for dim, size in enumerate(tensor.shape)
            if torch_private_sizes.symbol_of(size) == self._symbol
        }

    def follows(self, number: Any) -> bool:
        """Whether a number depends on the size."""
        return self._symbol in torch_private_sizes.free_symbols(number)

    def has_dim(self, tensor: Any, dim: int) -> bool:
        """Whether one dimension of a tensor is the size; negative ones count from the end."""
        return isinstance(tensor, torch.Tensor) and dim % max(tensor.dim(), 1) in self.dims(tensor)


Check = Callable[[OperatorCall], str | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When an operator keeps rows apart.

    Attributes:
        check: Returns why it does not in a call; None where it always does.
        sizes: Arguments that may be, or hold, the size.
    """

    check: Check | None = None
    sizes: frozenset[str] = frozenset()


def rule_of(func: Any) -> Rule | None:
    """Returns the rule of an operator; None where there is none."""
    name = func._schema.name.removeprefix("aten::")
    found = _RULES.get(name) or _RULES.get(re.sub(r"(?<=\w)_$", "", name))
    if found is None and torch.Tag.pointwise in func.tags:
        return _ALWAYS
    return found


# Terms -----------------------------------------------------------------------------------------------


def _mixes(dims: str = "dim") -> Check:
    """The operator mixes what stands along some dimensions of ``self``; along all where none is given."""

    def check(call: OperatorCall) -> str | None:
        tensor, given = call["self"], call[dims]
        along = given if isinstance(given, list | tuple) else () if given is None else (given,)
        found = call.dims(tensor)
        mixed = {dim % max(tensor.dim(), 1) for dim in along} if along else found
        return "it works along the padded dimension" if mixed & found else None

    return check


def _contracts(*pairs: tuple[str, int]) -> Check:
    """The operator sums over a dimension of each of these arguments."""

    def check(call: OperatorCall) -> str | None:
        if any(call.has_dim(call[name], dim) for name, dim in pairs):
            return "it sums over the padded dimension"
        return None

    return check


def _matmul(call: OperatorCall) -> str | None:
    other = call["other"]
    return _contracts(("self", -1), ("other", -1 if other.dim() == 1 else -2))(call)


def _einsum(call: OperatorCall) -> str | None:
    sides = call["equation"].replace(" ", "").split("->")
    for term, tensor in zip(sides[0].split(","), call["tensors"], strict=True):
        # Letters before dots count from the front, those after from the end.
        front, _, back = term.partition("...")
        letters = dict(enumerate(front)) | {tensor.dim() - len(back) + i: one for i, one in enumerate(back)}
        for dim in call.dims(tensor):
            letter = letters.get(dim)
            if len(sides) == 1 or (letter is not None and letter not in sides[1]):
                return "it sums over the padded dimension"
    return None


def _attention(call: OperatorCall) -> str | None:
    query, key, value = call["query"], call["key"], call["value"]
    if any(call.has_dim(one, -1) for one in (query, key)):
        return "it sums over the padded dimension"
    if not call.has_dim(key, -2) and not call.has_dim(value, -2):
        return None
    if call["is_causal"] is True and call["attn_mask"] is None and call.has_dim(query, -2):
        return None  # A token looks at tokens before it, and padding comes after all.
    return "padded tokens are attended to, unless its mask says otherwise"


def _view(call: OperatorCall) -> str | None:
    before, after = _places(call, call["self"]), _places(call, call.results[0])
    return None if before == after else "it takes the padded dimension apart or joins it with another"


def _places(call: OperatorCall, tensor: torch.Tensor) -> list[Any]:
    """Returns of each padded dimension the product of the sizes before it."""
    sizes = [torch_private_sizes.size_expression(size) for size in tensor.shape]
    return [sympy.prod(sizes[:dim]) for dim in sorted(call.dims(tensor))]


def _select(call: OperatorCall) -> str | None:
    index = call["index"]
    if not call.has_dim(call["self"], call["dim"]) or (type(index) is int and index >= 0):
        return None
    return "it takes a row counted from the end"


def _slice(call: OperatorCall) -> str | None:
    start, step = call["start"], call["step"]
    if not call.has_dim(call["self"], call["dim"]):
        # From memory that does not follow the size as many rows as there are.
        is_first = start is None or (type(start) is int and start == 0)
        return (
            None
            if (is_first and type(step) is int and step == 1) or not call.follows(call["end"])
            else UNKNOWN
        )
    end = call["end"]
    is_plain = type(step) is int and step == 1 and (start is None or (type(start) is int and start >= 0))
    if is_plain and not (type(end) is int and end < 0):
        return None
    return "it takes rows counted from the end, or not all"


def _concatenates(call: OperatorCall) -> str | None:
    tensors = [one for one in call["tensors"] if 0 not in map(torch_private_sizes.size_expression, one.shape)]
    if sum(call.has_dim(one, call["dim"]) for one in tensors) > 0 and len(tensors) > 1:
        return "it puts rows behind the padded ones"
    return None


def _embedding(call: OperatorCall) -> str | None:
    return "it looks rows up among padded ones" if call.dims(call["weight"]) else None


def _index(call: OperatorCall) -> str | None:
    indices = call["indices"]
    tensors = [one for one in (call["self"], *indices) if isinstance(one, torch.Tensor)]
    if any(one.dtype in (torch.bool, torch.uint8) for one in tensors[1:]):
        return "a mask as an index takes rows by value"
    if any(index is not None and call.has_dim(call["self"], dim) for dim, index in enumerate(indices)):
        return "it looks rows up among padded ones"
    return None


def _index_put(call: OperatorCall) -> str | None:
    if not call.dims(call["self"]):
        return "padded rows are written where their indices say"
    if any(call.dims(index) for index in call["indices"]):
        return "it writes among padded rows by index"
    return _index(call)


def _gather(call: OperatorCall) -> str | None:
    if call.has_dim(call["self"], call["dim"]):
        return "it looks rows up among padded ones"
    index = call["index"]
    return None if not call.dims(call["self"]) - call.dims(index) else UNKNOWN


def _scatter(call: OperatorCall) -> str | None:
    rows = call.dims(call["self"])
    others = [call[name] for name in ("index", "src") if isinstance(call[name], torch.Tensor)]
    if not rows:
        return "padded rows are written where their indices say"
    if call.has_dim(call["self"], call["dim"]) or any(call.dims(one) != rows for one in others):
        return "it writes among padded rows by index"
    return None


def _index_select(call: OperatorCall) -> str | None:
    return "it looks rows up among padded ones" if call.has_dim(call["self"], call["dim"]) else None


def _convolution(call: OperatorCall) -> str | None:
    only_batch = call.dims(call["input"]) <= {0} and not call.dims(call["weight"])
    return None if only_batch else "it works along the padded dimension"


def _batch_norm(call: OperatorCall) -> str | None:
    if call["training"] or call["train"]:
        return "it takes means over the batch (training mode)"
    return "it works along the padded dimension" if call.has_dim(call["input"], 1) else None


def _normalizes_last(call: OperatorCall) -> str | None:
    tensor, num_dims = call["input"], len(call["normalized_shape"])
    mixed = set(range(tensor.dim() - num_dims, tensor.dim()))
    return "it works along the padded dimension" if mixed & call.dims(tensor) else None


def _only_dims_before(num_last: int, name: str = "self") -> Check:
    """The operator works along the last dimensions."""

    def check(call: OperatorCall) -> str | None:
        tensor = call[name]
        is_apart = all(dim < tensor.dim() - num_last for dim in call.dims(tensor))
        return None if is_apart else "it works along the padded dimension"

    return check


def _group_norm(call: OperatorCall) -> str | None:
    return None if call.dims(call["input"]) <= {0} else "it works along the padded dimension"


def _pad(call: OperatorCall) -> str | None:
    tensor, pads = call["self"], call["pad"]
    for dim in call.dims(tensor):
        place = 2 * (tensor.dim() - 1 - dim)
        if any(pads[place : place + 2]):
            return "it shifts rows"
    return None


def _arange(call: OperatorCall) -> str | None:
    return None if call["step"] in (None, 1) else UNKNOWN


def _repeats(call: OperatorCall) -> str | None:
    tensor, repeats = call["self"], call["repeats"]
    along = repeats[len(repeats) - tensor.dim() :]
    if any(along[dim] != 1 for dim in call.dims(tensor)):
        return "it puts rows behind the padded ones"
    return None


# The rules --------------------------------------------------------------------------------------------

_ALWAYS = Rule()
_SIZED = Rule(sizes=frozenset({"size", "stride"}))


def _rules() -> dict[str, Rule]:
    """Returns every rule by the operator's name, without the underscore of its in-place version."""
    rules: dict[str, Rule] = {}

    def add(names: str, rule: Rule) -> None:
        rules.update(dict.fromkeys(names.split(), rule))

    add(
        "copy fill zero masked_fill alias detach clone contiguous lift lift_fresh lift_fresh_copy _to_copy",
        _ALWAYS,
    )
    add(
        "permute transpose t unsqueeze squeeze stack view_as_real view_as_complex tril triu bucketize",
        _ALWAYS,
    )
    add("cumsum cumprod cummax cummin logcumsumexp _conj _neg_view resolve_conj resolve_neg", _ALWAYS)
    add("zeros_like ones_like full_like empty_like rand_like randn_like randint_like", _ALWAYS)
    rules["_assert_tensor_metadata"] = Rule(sizes=frozenset({"size", "stride"}))
    add("native_dropout bernoulli normal uniform exponential random", _ALWAYS)
    add(
        "zeros ones empty full rand randn new_zeros new_ones new_empty new_full empty_strided expand eye",
        _SIZED,
    )
    rules["eye"] = Rule(sizes=frozenset({"n", "m"}))
    rules["arange"] = Rule(check=_arange, sizes=frozenset({"end"}))
    add("view _unsafe_view reshape _reshape_alias", Rule(check=_view, sizes=frozenset({"size", "stride"})))
    rules["repeat"] = Rule(check=_repeats, sizes=frozenset({"repeats"}))
    rules["select"] = Rule(check=_select)
    rules["slice"] = Rule(check=_slice, sizes=frozenset({"end"}))
    rules["cat"] = Rule(check=_concatenates)
    rules["constant_pad_nd"] = Rule(check=_pad)
    add(
        "sum nansum mean amax amin aminmax max min prod var std var_mean std_mean any all argmax argmin norm "
        "linalg_vector_norm logsumexp median nanmedian mode kthvalue count_nonzero topk sort argsort _softmax "
        "_log_softmax _safe_softmax softmax log_softmax glu unbind split split_with_sizes unsafe_split chunk",
        Rule(check=_mixes()),
    )
    add("flip roll", Rule(check=_mixes("dims")))
    rules["linear"] = Rule(check=_contracts(("input", -1), ("weight", -1)))
    rules["matmul"] = Rule(check=_matmul)
    rules["einsum"] = Rule(check=_einsum)
    add("mm bmm", Rule(check=_contracts(("self", -1), ("mat2", -2))))
    rules["addmm"] = Rule(check=_contracts(("mat1", -1), ("mat2", -2)))
    rules["baddbmm"] = Rule(check=_contracts(("batch1", -1), ("batch2", -2)))
    rules["mv"] = Rule(check=_contracts(("self", -1), ("vec", -1)))
    rules["addmv"] = Rule(check=_contracts(("mat", -1), ("vec", -1)))
    rules["dot"] = Rule(check=_contracts(("self", -1), ("tensor", -1)))
    rules["scaled_dot_product_attention"] = Rule(check=_attention)
    rules["embedding"] = Rule(check=_embedding)
    rules["index"] = Rule(check=_index)
    rules["index_put"] = Rule(check=_index_put)
    rules["gather"] = Rule(check=_gather)
    rules["index_select"] = Rule(check=_index_select)
    add("scatter scatter_add scatter_reduce", Rule(check=_scatter))
    rules["convolution"] = Rule(check=_convolution)
    add(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "_batch_norm_with_update batch_norm",
        Rule(check=_batch_norm),
    )
    add("native_layer_norm _fused_rms_norm", Rule(check=_normalizes_last))
    rules["native_group_norm"] = Rule(check=_group_norm)
    for number in (1, 2, 3):
        names = (
            f"max_pool{number}d_with_indices avg_pool{number}d adaptive_max_pool{number}d "
            f"_adaptive_avg_pool{number}d adaptive_avg_pool{number}d upsample_nearest{number}d"
        )
        add(names, Rule(check=_only_dims_before(number)))
    add("upsample_bilinear2d upsample_bicubic2d", Rule(check=_only_dims_before(2)))
    return rules


_RULES = _rules()
