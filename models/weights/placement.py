"""Where each tensor of a checkpoint goes in a `Decoder`, and the check that all of them fit.

The model merges some projections into one linear layer; a checkpoint names them apart. Here a
checkpoint's name leads to a view of the parameter's rows, so filling the views fills the model.
Everything is checked by name and shape before the first byte is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from sgl_piecewise.runtime.errors import CheckpointError

from ..decoder import Decoder

_MAX_NAMES = 8
"""Names that an error lists of each kind before it only counts."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a checkpoint, not read yet.

    Attributes:
        shape: Its shape, rows first.
        read: Reads it to the host, in any floating dtype.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def checkpoint_views(model: Decoder, *, has_stacked_experts: bool = False) -> dict[str, torch.Tensor]:
    """Returns the model's parameters under the names of a Hugging Face checkpoint.

    Args:
        model: To be filled.
        has_stacked_experts: The checkpoint holds one tensor for all experts of a layer, not one each.

    Returns:
        Name to a view of the parameter, or of its rows where the model merges several tensors into
        one. Tied embeddings appear once, as ``model.embed_tokens.weight``.

    Source: transformers, parameter names of ``LlamaForCausalLM`` and its kin.
    """
    config = model.config
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    views: dict[str, torch.Tensor] = {}
    for own_name, parameter in model.named_parameters():
        name = own_name if own_name.startswith("lm_head.") else f"model.{own_name}"
        if parameter.dim() == 3:
            views |= _views_of_experts(name, parameter, has_stacked_experts)
            continue
        *parents, layer, kind = name.split(".")
        half = parameter.shape[0] // 2
        merged = {
            "qkv_proj": {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows},
            "gate_up_proj": {"gate_proj": half, "up_proj": half},
        }
        rows = merged.get(layer, {layer: parameter.shape[0]})
        parts = parameter.split(list(rows.values()))
        for part_layer, part in zip(rows, parts, strict=True):
            views[".".join((*parents, part_layer, kind))] = part
    return views


def _views_of_experts(name: str, parameter: torch.Tensor, is_stacked: bool) -> dict[str, torch.Tensor]:
    """Returns the views of one kind of weight of all experts of a layer."""
    parent, _, own_layer = name.rpartition(".")
    layers = ("gate_proj", "up_proj") if own_layer == "gate_up_proj" else (own_layer,)
    parts = dict(zip(layers, parameter.chunk(len(layers), dim=1), strict=True))
    if is_stacked:
        return {f"{parent}.{layer}.weight": part for layer, part in parts.items()}
    return {
        f"{parent}.{expert}.{layer}.weight": weight
        for layer, part in parts.items()
        for expert, weight in enumerate(part)
    }


def fill_parameters(
    views: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
    *,
    origin: str,
    is_ignored: Callable[[str], bool],
) -> None:
    """Copies a checkpoint into a model, or raises before anything is copied.

    Args:
        views: What has to be filled, by the checkpoint's names.
        stored: What the checkpoint holds.
        origin: Its path, for errors.
        is_ignored: Tells which tensors, by name, may be there although the model has no place for
            them.

    Raises:
        CheckpointError: Tensors are missing, have no place in the model, or have another shape.
    """
    problems = [
        *_listed("missing", (f"{name} {_shape(views[name])}" for name in views if name not in stored)),
        *_listed(
            "without a place in the model",
            (
                f"{name} {tensor.shape}"
                for name, tensor in stored.items()
                if name not in views and not is_ignored(name)
            ),
        ),
        *_listed(
            "of another shape",
            (
                f"{name}: {stored[name].shape} in the checkpoint, {_shape(view)} in the model"
                for name, view in views.items()
                if name in stored and stored[name].shape != _shape(view)
            ),
        ),
    ]
    if problems:
        raise CheckpointError(
            f"{origin} does not fit the model that its own configuration describes. Tensors "
            + "; tensors ".join(problems)
            + ". The configuration belongs to another checkpoint, or files are missing: get both again."
        )
    for name, view in views.items():
        view.copy_(stored[name].read())


def _shape(view: torch.Tensor) -> tuple[int, ...]:
    return tuple(view.shape)


def _listed(what: str, descriptions: Iterable[str]) -> list[str]:
    """Returns one sentence part that counts and lists, or nothing where there is nothing."""
    found = list(descriptions)
    if not found:
        return []
    more = f", and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return [f"{what} ({len(found)}): " + ", ".join(found[:_MAX_NAMES]) + more]
