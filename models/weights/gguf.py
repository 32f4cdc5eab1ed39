"""Weights and metadata from a GGUF file, with every quantisation that the package ``gguf`` knows.

Tensors are dequantised one by one to float32 on the host and copied to their place; the file is
mapped. GGUF names are translated to checkpoint names, and what the converter did to the rows of
Llama's queries and keys is undone.

Source: llama.cpp ``gguf-py`` (tensor names) and ``convert_hf_to_gguf.py`` (row order of Llama).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_piecewise.runtime.errors import CheckpointError
from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet

from ..config import DecoderConfig
from ..decoder import Decoder
from ..extras import import_extra
from .gguf_config import config_from_gguf
from .placement import StoredTensor, checkpoint_views, fill_parameters

_ROPE_DIVISORS = "rope_freqs.weight"
_WHOLE_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    # Of mixtures of experts
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_OUTPUT_NORMED_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """An opened GGUF file: metadata read, tensors still on disk.

    Attributes:
        path: Where it is.
        metadata: Key to value; arrays are lists.
        tensors: GGUF name to tensor, dequantised when read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def config(self) -> DecoderConfig:
        """The model that the file describes; raises as `config_from_gguf` does."""
        divisors = None
        if _ROPE_DIVISORS in self.tensors:
            divisors = tuple(self.tensors[_ROPE_DIVISORS].read().tolist())
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return config_from_gguf(self.metadata, shapes, rope_divisors=divisors, origin=str(self.path))


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file.

    Raises:
        CheckpointError: There is no such file, it is not GGUF, or it is truncated or damaged.
        MissingExtraError: The package gguf is not installed.
    """
    gguf = import_extra("gguf", purpose="read GGUF files")
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}. Check the path.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise CheckpointError(
            f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'. Give a .gguf file, or the "
            "folder of a Hugging Face checkpoint."
        )
    try:
        reader = _plain_array_reader(gguf)(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    # What a cut or overwritten file makes the reader do depends on where it was cut.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as err:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header cannot be read to the end "
            f"({type(err).__name__}: {err}). It has {path.stat().st_size} bytes; download it again."
        ) from err
    if metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts. Join them with llama.cpp's "
            "gguf-split --merge."
        )
    tensors = {tensor.name: _stored_tensor(gguf, tensor, path) for tensor in reader.tensors}
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def load_gguf(
    file: GgufFile, *, device: torch.device | str, dtype: torch.dtype, kernels: KernelSet = TORCH_KERNELS
) -> Decoder:
    """Builds the model of a GGUF file and fills it.

    Args:
        file: From `open_gguf`.
        device: Where the model is made.
        dtype: Of its parameters; dequantisation is in float32.
        kernels: What the model is built with.

    Raises:
        CheckpointError: The architecture is unknown, tensors do not fit, or a quantisation is one
            that the installed gguf cannot read.
    """
    model = Decoder(file.config, device=device, dtype=dtype, kernels=kernels)
    stored = dict(file.tensors)
    if model.config.architecture == "llama":
        for name, tensor in file.tensors.items():
            if ".attn_q." in name:
                stored[name] = _with_halves_apart(tensor, model.config.num_heads)
            elif ".attn_k." in name:
                stored[name] = _with_halves_apart(tensor, model.config.num_kv_heads)
    names = _OUTPUT_NORMED_NAMES if model.config.has_output_norms else _LAYER_NAMES
    views = checkpoint_views(model, has_stacked_experts=True)
    fill_parameters(
        {_gguf_name(name, names): view for name, view in views.items()},
        stored,
        origin=str(file.path),
        is_ignored=lambda name: name == _ROPE_DIVISORS,
    )
    return model


def _plain_array_reader(gguf: Any) -> Any:
    """Returns gguf's reader class, made to slice plain arrays.

    It slices the mapped file some hundred thousand times, and numpy spends most of that time on
    keeping each slice a ``memmap``: a vocabulary of 49,000 tokens takes 3.3 seconds, plain 1.3.
    """

    class PlainArrayReader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainArrayReader


def _gguf_name(checkpoint_name: str, layer_names: Mapping[str, str]) -> str:
    """Returns the name that a checkpoint's tensor has in a GGUF file."""
    layer, _, kind = checkpoint_name.rpartition(".")
    if layer in _WHOLE_MODEL_NAMES:
        return f"{_WHOLE_MODEL_NAMES[layer]}.{kind}"
    index, _, part = layer.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{layer_names[part]}.{kind}"


def _stored_tensor(gguf: Any, tensor: Any, path: Path) -> StoredTensor:
    def read() -> torch.Tensor:
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as err:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which the "
                "installed gguf package cannot read. Update it, or convert the file to another quantisation."
            ) from err
        return torch.from_numpy(values.copy())  # the mapped file is read-only

    return StoredTensor(shape=tuple(int(size) for size in reversed(tensor.shape)), read=read)


def _with_halves_apart(tensor: StoredTensor, num_heads: int) -> StoredTensor:
    """Undoes the row order of Llama's queries and keys.

    GGUF stores the two rows that RoPE rotates together beside each other; the model here, like
    transformers', has them half a head apart.
    """

    def read() -> torch.Tensor:
        rows = tensor.read()
        return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)

    return StoredTensor(shape=tensor.shape, read=read)
