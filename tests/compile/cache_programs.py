"""A program that compiles one small model in a process of its own and says what the cache did."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .conftest import KEPT_BETWEEN_RUNS

_PROGRAM = """
import json, os, sys, warnings
import torch
import torch._inductor.compile_fx
from sgl_piecewise import eager_on_graph
from sgl_piecewise.compiler.piece_builds import watch_piece_builds

@eager_on_graph(fake=torch.empty_like)
def mix(x):
    return torch.softmax(x, -1)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.second(mix(self.first(x))) * 2 + 1)

def run():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(), Layer(), Layer()).eval()
    with torch.inference_mode(), watch_piece_builds() as builds:
        x = torch.randn(4, 8)
        torch._dynamo.mark_dynamic(x, 0)
        compiled = torch.compile(model, backend="sgl_piecewise", options={"cache_folder": sys.argv[1]})
        torch.testing.assert_close(compiled(x), model(x))
    return [(one.key, one.cache) for one in builds]

num_processes = int(sys.argv[2])
if num_processes == 1:
    print(json.dumps([run()]))
else:
    gate_out, gate_in = os.pipe()
    children = []
    for _ in range(num_processes):
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gate_in)
            os.read(gate_out, 1)  # all begin when the parent closes the gate
            os.write(into, json.dumps(run()).encode())
            os._exit(0)
        os.close(into)
        children.append((child, out))
    os.close(gate_in)
    answers = [json.loads(os.fdopen(out).read()) for _, out in children]
    assert all(os.waitpid(child, 0)[1] == 0 for child, _ in children)
    print(json.dumps(answers))
"""


def start(folder: Path, num_processes: int = 1) -> tuple[list[list[tuple[str, str]]], str]:
    """Compiles the model in fresh processes that begin together.

    Returns:
        For each process the key and the outcome of each piece, and what was written to stderr.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, str(folder), str(num_processes)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return [[(key, outcome) for key, outcome in answer] for answer in answers], done.stderr


def outcomes(answers: Sequence[Sequence[tuple[str, str]]]) -> list[list[str]]:
    """Returns what the cache did for each piece of each process."""
    return [[outcome for _, outcome in answer] for answer in answers]


def empty_cache(folder: Path) -> Path:
    """Returns a cache folder without pieces, but with what is known of the host: finding that out takes long."""
    for host in KEPT_BETWEEN_RUNS.glob("compiled/*/host"):
        copied = folder / host.relative_to(KEPT_BETWEEN_RUNS)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(host, copied)
    return folder
