"""Every Triton kernel compiles for a GPU, where there is none: what the interpreter runs may not compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
PROGRAM = Path(__file__).with_name("cuda_compiling.py")


def compiled(which: str) -> dict[str, Any]:
    # Unset, Triton 3.9 warns that its default will change.
    environment = {"TRITON_DEFAULT_FP_FUSION": "1", **os.environ}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), which],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check(answer: dict[str, Any]) -> None:
    assert answer["failures"] == []
    assert answer["defined"], "no kernel was found"
    assert answer["compiled"] == answer["defined"], "a launcher of every kernel is called"


@pytest.mark.timeout(300)
def test_every_kernel_compiles_as_a_model_launches_it() -> None:
    check(compiled("some"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_kernel_compiles_in_every_head_size_and_special_case(dtype: str) -> None:
    answer = compiled(dtype)
    check(answer)
    assert answer["num_variants"] > 50
