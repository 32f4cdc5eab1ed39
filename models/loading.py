"""One name to one ready model: what the command and the scripts call.

A name is that of a packaged model (the default one), that of a shape (random weights), the path of
a Hugging Face folder, or that of a GGUF file, looked up in this order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_piecewise.runtime.errors import CheckpointError, ConfigError, DeviceUnavailableError, nearest
from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet

from .config import DecoderConfig
from .decoder import Decoder
from .gguf_tokenizer import tokenizer_from_gguf
from .packaged_gguf import packaged_gguf_path
from .packaged_models import DEFAULT_MODEL, PACKAGED_MODELS, default_gguf_path
from .shapes import SHAPES, named_shape
from .tokenizer import Tokenizer, tokenizer_from_huggingface
from .weights.gguf import load_gguf, open_gguf
from .weights.huggingface import load_huggingface
from .weights.random import random_decoder

__all__ = ["DEFAULT_MODEL", "LoadedModel", "default_gguf_path", "load_model"]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, and what came with it.

    Attributes:
        model: Filled, on its device, without gradients.
        config: What it is made of.
        tokenizer: None where there is no vocabulary, as with random weights.
        description: One line for reports: where it comes from, its size, its dtype.
    """

    model: Decoder
    config: DecoderConfig
    tokenizer: Tokenizer | None
    description: str


def load_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    num_layers: int | None = None,
    download: bool = True,
    kernels: KernelSet = TORCH_KERNELS,
) -> LoadedModel:
    """Loads, or makes, a model.

    Args:
        name_or_path: The name of a packaged model or of a shape, a folder or a ``.gguf`` file. A folder
            that is named like a shape is reached as ``./name``.
        device: Where it is made.
        dtype: Of its parameters and activations.
        seed: Of random weights.
        num_layers: Another depth, for random weights only.
        download: Whether a packaged model may be downloaded where it is not in the cache.
        kernels: Fused kernels that the model is built with, from ``runtime.kernels.kernel_set``.

    Raises:
        CheckpointError: What the path leads to is missing, damaged, or does not fit.
        ConfigError: No shape has this name, or ``num_layers`` is given for a checkpoint.
        DeviceUnavailableError: The device is not on this machine.
        MissingExtraError: A package of the extra ``models`` is needed and not installed.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"The model was to be put on {device}, but PyTorch {torch.__version__} finds no CUDA device. "
            "Use the device cpu, or a machine and a PyTorch build with CUDA."
        )
    name = os.fspath(name_or_path)
    if name in SHAPES:
        return _random(name, device=device, dtype=dtype, seed=seed, num_layers=num_layers, kernels=kernels)
    if num_layers is not None:
        raise ConfigError(
            f"num_layers={num_layers} is for random weights; {name} is a checkpoint with its own depth. "
            f"Named shapes: {', '.join(sorted(SHAPES))}."
        )
    packaged = PACKAGED_MODELS.get(name)
    path = Path(name) if packaged is None else packaged_gguf_path(packaged, download=download)
    if name and path.is_dir():  # An empty name would be the current folder.
        model = load_huggingface(path, device=device, dtype=dtype, kernels=kernels)
        return _loaded(model, tokenizer_from_huggingface(path), path.resolve().name)
    if path.is_file() or path.suffix == ".gguf":
        file = open_gguf(path)
        tokenizer = tokenizer_from_gguf(file.metadata, origin=str(path))
        return _loaded(load_gguf(file, device=device, dtype=dtype, kernels=kernels), tokenizer, path.name)
    if len(path.parts) > 1:
        raise CheckpointError(f"There is no file or folder {path}. Check the path, or give a model's name.")
    raise ConfigError(
        f"{name!r} is neither a file or folder here nor a model's name. "
        + nearest(name, [*PACKAGED_MODELS, *SHAPES])
    )


def _random(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    num_layers: int | None,
    kernels: KernelSet,
) -> LoadedModel:
    config = named_shape(name)
    if num_layers is not None:
        config = config.with_num_layers(num_layers)
    model = random_decoder(config, device=device, dtype=dtype, seed=seed, kernels=kernels)
    return _loaded(model, None, f"{name} shape with random weights (seed {seed})")


def _loaded(model: Decoder, tokenizer: Tokenizer | None, origin: str) -> LoadedModel:
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    description = (
        f"{origin}: {config.architecture}, {config.num_layers} layers, "
        f"{num_parameters / 1e6:,.1f}M parameters, {str(model.norm.weight.dtype).removeprefix('torch.')}"
    )
    return LoadedModel(model=model, config=config, tokenizer=tokenizer, description=description)
