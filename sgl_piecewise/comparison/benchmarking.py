"""What the scripts in ``benchmarks/`` share: where a report was made, how it is written, a clean start, counts.

In the package, so that scripts find it wherever the package is found; nothing that is timed is here.
"""

from __future__ import annotations

import collections
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_piecewise.runtime.atomic_file import write_atomically
from sgl_piecewise.runtime.versions import installed_versions


def default_device() -> torch.device:
    """Returns the GPU where there is one, else the CPU, on which everything is emulated."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """Returns what models are measured in: bf16 on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def report_head(schema: str) -> dict[str, Any]:
    """Returns what every report begins with: its schema, the command, the device, versions."""
    is_cuda = torch.cuda.is_available()
    return {
        "schema": schema,
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if is_cuda else "emulated: times say nothing about a GPU",
        "versions": installed_versions(),
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes a report; the file is there whole or not at all."""
    write_atomically(path, json.dumps(report, indent=1) + "\n")


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; nothing else needs it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(device: torch.device) -> None:
    """Lets go of what is no longer used, so that one arm's memory is not another's."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


class CountedOperators(TorchDispatchMode):
    """Counts the operators of a block by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))
