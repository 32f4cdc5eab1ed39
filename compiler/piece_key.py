"""The name of a piece on disk: the same in every process for the same piece, device, options and versions.

The key finds an entry; it decides no more than that. Whether compiled code fits a piece is decided by Inductor's
own keys, which hash the whole graph and every setting: two pieces under one key would cost time, never values.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from sgl_piecewise.passes.deduplicate import piece_text
from sgl_piecewise.runtime import torch_private_cache

# What is only true of this process: identities of objects and their addresses.
_OF_THIS_PROCESS = re.compile(r" #\d+| at 0x[0-9a-f]+")


def piece_key(piece: GraphModule, options_text: str) -> str:
    """Returns the name of a piece: 32 hexadecimal digits.

    Args:
        piece: As it goes to the compiler.
        options_text: What else decides how it is compiled.
    """
    lines = [_OF_THIS_PROCESS.sub("", piece_text(piece, options_text))]
    for name, part in piece.named_modules():
        if name and isinstance(part, GraphModule):
            lines += [name, str(part.graph)]
    return _digest("\n".join(lines))


def environment_of(example_inputs: Sequence[Any]) -> dict[str, str]:
    """Returns what compiled code depends on beside the piece: versions, the host, and the devices of its inputs."""
    facts = dict(_host_facts())
    devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor)}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            facts[str(device)] = _cuda_device(device)
    return facts


def environment_key(environment: dict[str, str]) -> str:
    """Returns the name of an environment: 16 hexadecimal digits."""
    return _digest(json.dumps(environment, sort_keys=True))[:16]


@functools.cache
def _host_facts() -> tuple[tuple[str, str], ...]:
    return (
        ("sgl-piecewise", metadata.version("sgl-piecewise")),
        ("torch", f"{torch.__version__} {torch.version.git_version}"),
        ("triton", str(torch_private_cache.triton_version())),
        ("python", platform.python_version()),
        ("cuda", str(torch.version.cuda)),
        ("host", f"{platform.system()} {platform.machine()} {torch_private_cache.cpu_capability()}"),
        ("cpu flags", _cpu_flags()),
    )


def _cpu_flags() -> str:
    """A digest of the CPU's instructions: code for the CPU is made with all that the host has."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    return _digest(flags[1] if flags else "")[:16]


@functools.cache
def _cuda_device(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
