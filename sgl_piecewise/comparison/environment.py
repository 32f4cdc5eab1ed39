"""Where a measurement was made: versions, device, and the clocks that the device reports.

Everything here is asked of the system and may be missing; a missing fact is None or left out,
never guessed.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.versions import installed_versions

from .report import Clocks, Environment

_CLOCK_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def seen_environment(device: GraphDevice, clocks: tuple[Clocks, ...]) -> Environment:
    """Returns the facts about this process and ``device``.

    Args:
        device: The graph device of the comparison.
        clocks: What `seen_clocks` returned around the measurement.
    """
    return Environment(
        device=device.name,
        torch_device=str(device.torch_device),
        is_emulated=device.is_emulated,
        platform=f"{platform.system()} {platform.machine()}, {_processor_name()}",
        num_cpu_threads=torch.get_num_threads(),
        versions=_versions(device.torch_device),
        clocks=clocks,
    )


def seen_clocks(device: torch.device, when: str) -> tuple[Clocks, ...]:
    """Asks a CUDA device for its clocks, power and temperature; empty elsewhere."""
    if device.type != "cuda":
        return ()
    answer = _nvidia_smi(device, _CLOCK_FIELDS)
    if answer is None:
        return ()
    sm_mhz, memory_mhz, power_w, temperature_c = map(_number, answer)
    return (
        Clocks(when=when, sm_mhz=sm_mhz, memory_mhz=memory_mhz, power_w=power_w, temperature_c=temperature_c),
    )


def _versions(device: torch.device) -> dict[str, str]:
    versions = installed_versions()
    if device.type == "cuda":
        driver = _nvidia_smi(device, ("driver_version",))
        if driver is not None:
            versions["driver"] = driver[0]
    return versions


def _nvidia_smi(device: torch.device, fields: tuple[str, ...]) -> list[str] | None:
    """Asks the driver's tool about one device; None where there is no tool or no answer.

    The device goes by its UUID: CUDA_VISIBLE_DEVICES renumbers devices for us, not for the tool.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [*command, f"--id=GPU-{uuid}"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    return values if len(values) == len(fields) else None


def _number(text: str) -> float | None:
    """The tool writes ``[N/A]`` for what it does not know."""
    try:
        return float(text)
    except ValueError:
        return None


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
