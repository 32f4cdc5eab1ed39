"""Inductor's compile workers: they come up ready to compile, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
from torch._inductor.async_compile import AsyncCompile
from sgl_piecewise.runtime import torch_private_workers
from sgl_piecewise.runtime.triton_warm_up import num_compiled

pool = torch_private_workers.make_pool()
assert torch_private_workers.make_pool() is pool
AsyncCompile.wait_pool_ready(100)
print("here", num_compiled(), "in a worker", pool.submit(num_compiled).result(60))
pool.shutdown()
"""


def test_workers_have_compiled_a_kernel_before_their_first() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # There is no pool for one.
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert found.stdout.split("\n")[0] == "here 0 in a worker 1", found.stderr[-2000:]
