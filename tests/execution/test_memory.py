"""What memory the host has for pools: what its caches would give up counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.model_runner import memory


def test_memory_of_cached_files_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint that was just read fills the cache, and must not leave a pool without memory."""
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable: 3000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", path)
    assert memory.free_bytes(torch.device("cpu")) == 3000 * 1024


def test_a_host_that_does_not_tell_is_asked_for_its_free_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert memory.free_bytes(torch.device("cpu")) > 0


def test_a_model_without_attention_has_no_pool() -> None:
    with pytest.raises(ConfigError, match="no attention layers"):
        memory.sub_pool_specs([], torch.float32)
