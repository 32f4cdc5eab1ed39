"""Weights from a Hugging Face folder: ``config.json`` and safetensors, in one file or sharded.

Files are mapped, not read: a tensor's bytes are touched once, when it is copied to its place.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from sgl_piecewise.runtime.errors import CheckpointError
from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet

from ..config import DecoderConfig
from ..decoder import Decoder
from ..extras import import_extra
from .huggingface_config import config_from_hf
from .placement import StoredTensor, checkpoint_views, fill_parameters

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        CheckpointError: The file is missing, or is not JSON, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise CheckpointError(
            f"{path} is missing. A Hugging Face folder holds it beside the weights."
        ) from err
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise CheckpointError(f"{path} is not valid JSON ({err}). Download it again.") from err
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a JSON object.")
    return content


def read_huggingface_config(folder: Path) -> DecoderConfig:
    """Reads the ``config.json`` of a folder; raises as `config_from_hf` does."""
    path = folder / "config.json"
    return config_from_hf(read_json(path), origin=str(path))


def load_huggingface(
    folder: Path, *, device: torch.device | str, dtype: torch.dtype, kernels: KernelSet = TORCH_KERNELS
) -> Decoder:
    """Builds the model of a folder and fills it.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``, or shards with their index.
        device: Where the model is made.
        dtype: Of its parameters, whatever the files hold.
        kernels: What the model is built with.

    Raises:
        CheckpointError: Files are missing or damaged, the architecture is unknown, or tensors do not
            fit.
        MissingExtraError: The package safetensors is not installed.
    """
    model = Decoder(read_huggingface_config(folder), device=device, dtype=dtype, kernels=kernels)
    is_tied = model.config.has_tied_embeddings
    stored: dict[str, StoredTensor] = {}
    with contextlib.ExitStack() as stack:
        for path in _weight_files(folder):
            stored.update(_stored_tensors(path, stack))
        if model.config.has_unit_offset_norms:
            stored = {
                name: _plus_one(tensor) if name.endswith("norm.weight") else tensor
                for name, tensor in stored.items()
            }
        fill_parameters(
            checkpoint_views(model),
            stored,
            origin=str(folder),
            # Older files hold the RoPE frequencies; some hold a tied output layer a second time.
            is_ignored=lambda name: (
                name.endswith(".rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
            ),
        )
    return model


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder.

    Raises:
        CheckpointError: There is none, or one that the index names is missing.
    """
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}. Weights are read from safetensors only: save "
            "the model again with transformers' save_pretrained if it is in another format."
        )
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / _INDEX} has no weight_map. Download it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{folder / _INDEX}: weight_map[{tensor!r}] must name a file, got {name!r}. Download it again."
            )
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(paths)} shards that {_INDEX} names: "
            f"{', '.join(missing)}. Download them."
        )
    return paths


def _stored_tensors(path: Path, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Maps one file, until ``stack`` closes, and returns what it holds."""
    safetensors = import_extra("safetensors", purpose="read Hugging Face weights")
    try:
        opened = stack.enter_context(safetensors.safe_open(str(path), framework="pt", device="cpu"))
    except safetensors.SafetensorError as err:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({err}). Download it again."
        ) from err

    def stored(name: str) -> StoredTensor:
        shape = tuple(opened.get_slice(name).get_shape())
        return StoredTensor(shape=shape, read=lambda: _floating(opened.get_tensor(name), name, path))

    return {name: stored(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def _plus_one(tensor: StoredTensor) -> StoredTensor:
    """Adds what a family leaves out of its norms' weights, so that norms are alike for all."""
    return StoredTensor(shape=tensor.shape, read=lambda: tensor.read().float() + 1.0)


def _floating(tensor: torch.Tensor, name: str, path: Path) -> torch.Tensor:
    """Refuses integers, which are quantised weights: copied as they are they would be wrong values."""
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{path}: {name} holds {tensor.dtype}, as quantised weights do; only floating weights are read here. "
            "Give the unquantised checkpoint, or a GGUF file."
        )
    return tensor
