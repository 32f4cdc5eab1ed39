"""Inductor's compile workers: they come up ready to compile, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import concurrent.futures
from sgl_piecewise.runtime import torch_private_workers
from sgl_piecewise.runtime.torch_private_warm_up import num_compiled

pool = torch_private_workers.make_pool()
assert torch_private_workers.make_pool() is pool
assert not torch_private_workers.are_workers_ready()
concurrent.futures.wait(torch_private_workers._warm_ups, 100)
assert torch_private_workers.are_workers_ready()
print("here", num_compiled(), "in workers", *{pool.submit(num_compiled).result(60) for _ in range(4)})
"""


_EARLY_END = """
from sgl_piecewise.runtime import torch_private_workers

torch_private_workers.make_pool()
assert not torch_private_workers.are_workers_ready()
print("made", flush=True)
"""


def test_workers_have_compiled_a_kernel_before_their_first() -> None:
    found = run(_SCRIPT)
    assert found.stdout.split("\n")[0] == "here 0 in workers 1", found.stderr[-2000:]


def test_a_process_that_ends_early_says_nothing_of_its_workers() -> None:
    found = run(_EARLY_END)
    assert (found.returncode, found.stdout, found.stderr) == (0, "made\n", "")


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script where kernels can be compiled, by two workers."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # There is no pool for one.
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
