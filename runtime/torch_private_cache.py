"""Private PyTorch APIs of compile caches: where Inductor keeps its artefacts, and whether it found them.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13. Importing Inductor takes seconds: only what runs while something is compiled
imports this file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.utils import clear_caches
from torch.utils._triton import has_triton_package

_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_TRITON_FOLDER = "TRITON_CACHE_DIR"
# Of `CppPythonBindingsCodeCache` and the classes below it.
_LIBRARY_FUNCTIONS = ("kernel", "inductor_entry_cpp")


@contextlib.contextmanager
def artefacts_in(folder: Path) -> Iterator[None]:
    """Makes Inductor and Triton keep what the block compiles in a folder of its own, and look for it there.

    What Inductor remembers in this process is forgotten first, so that the folder holds all that is needed.
    Triton's folder follows Inductor's only where its variable is not set, and Inductor sets it for the whole
    process when it first loads a kernel: so it is taken out, and put back as it was.
    """
    before = {name: os.environ.get(name) for name in (_INDUCTOR_FOLDER, _TRITON_FOLDER)}
    _forget_compiled()
    os.environ[_INDUCTOR_FOLDER] = str(folder)
    os.environ.pop(_TRITON_FOLDER, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _forget_compiled()


def _forget_compiled() -> None:
    """Makes Inductor read files again that this process has read before; what is in use stays in use.

    Libraries of C++ kernels are modules named ``KEY.FUNCTION``. PyTorch 2.13 forgets them with its caches; 2.11 would
    find a library by its key and not look at the file, which may be damaged by now.
    """
    clear_caches()
    for name, module in list(sys.modules.items()):
        key, _, function = name.partition(".")
        if function in _LIBRARY_FUNCTIONS and str(getattr(module, "__file__", "")).endswith(
            f"/{key}.main.so"
        ):
            del sys.modules[name]


def probe_host_compiler() -> None:
    """Makes Inductor find out which vector instructions the CPU has; once a process.

    It compiles a dozen small files, and keeps them where it keeps artefacts at that moment.
    """
    cpu_vec_isa.valid_vec_isa_list()


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """How often Inductor's caches on disk were asked, since the process began or since other counts.

    Attributes:
        num_hits: Artefacts found.
        num_misses: Artefacts that had to be compiled.
        num_bypasses: Graphs that no cache can hold.
    """

    num_hits: int
    num_misses: int
    num_bypasses: int

    def since(self, earlier: CacheCounts) -> CacheCounts:
        """Returns the counts that came after others."""
        return CacheCounts(
            num_hits=self.num_hits - earlier.num_hits,
            num_misses=self.num_misses - earlier.num_misses,
            num_bypasses=self.num_bypasses - earlier.num_bypasses,
        )


def cache_counts() -> CacheCounts:
    """Returns what Inductor counted so far.

    One artefact may be counted by two caches, the one of AOTAutograd and the one of FX graphs below it.
    """

    def total(outcome: str) -> int:
        return (
            counters["inductor"][f"fxgraph_cache_{outcome}"]
            + counters["aot_autograd"][f"autograd_cache_{outcome}"]
        )

    return CacheCounts(num_hits=total("hit"), num_misses=total("miss"), num_bypasses=total("bypass"))


def triton_version() -> str | None:
    """Returns the version of Triton, or None where it is not installed."""
    if not has_triton_package():
        return None
    return str(importlib.import_module("triton").__version__)


def cpu_capability() -> str:
    """Returns the vector instructions that PyTorch uses on this CPU."""
    return str(torch.backends.cpu.get_cpu_capability())
