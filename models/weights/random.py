"""Seeded random weights, made where they will live.

For measuring speed on a published shape without its checkpoint. The scale keeps every activation
near one, so logits stay finite and varied in bfloat16 at any depth.
"""

from __future__ import annotations

import math

import torch

from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet

from ..config import DecoderConfig
from ..decoder import Decoder


def random_decoder(
    config: DecoderConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    kernels: KernelSet = TORCH_KERNELS,
) -> Decoder:
    """Returns a model with random weights.

    Args:
        config: Its shape.
        device: Where it is made; nothing passes through host memory.
        dtype: Of its parameters.
        seed: The same seed gives the same weights on the same kind of device and dtype.
        kernels: What the model is built with.
    """
    model = Decoder(config, device=device, dtype=dtype, kernels=kernels)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.normal_(mean, _standard_deviation(name, parameter, config), generator=generator)
    return model


def _standard_deviation(name: str, parameter: torch.Tensor, config: DecoderConfig) -> float:
    """Returns the spread that keeps the output of the parameter's layer near one."""
    if parameter.dim() == 1:
        return 0.1  # biases, and norm weights around one: small, but a lost one shows
    fan_in = parameter.shape[-1]
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        # Each layer adds to the residual stream twice; without this it would grow with depth.
        return 1.0 / math.sqrt(fan_in * 2 * config.num_layers)
    return 1.0 / math.sqrt(fan_in)
