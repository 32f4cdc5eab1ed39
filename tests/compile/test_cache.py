"""The cache on disk: what a second start finds, and what is done about files that are not as they were written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sgl_piecewise.compiler.cache import CompileCache
from sgl_piecewise.compiler.options import options_from
from sgl_piecewise.compiler.piece_builds import watch_piece_builds
from sgl_piecewise.compiler.piece_key import environment_key, environment_of
from sgl_piecewise.runtime.errors import ConfigError

from .cache_programs import empty_cache, outcomes, start
from .support import compiled

# Inductor's own imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return empty_cache(tmp_path / "cache")


def product(x: torch.Tensor) -> torch.Tensor:
    """Calls a library: no C++ is generated, so that compiling it is quick."""
    return x @ x


def wave(x: torch.Tensor) -> torch.Tensor:
    """One kernel in generated C++."""
    return torch.sin(x) * 2


def build(folder: Path, fn: Callable[[torch.Tensor], torch.Tensor] = product, **options: object) -> list[str]:
    """Compiles one piece anew in this process; returns what the cache did."""
    torch.compiler.reset()
    x = torch.ones(4, 4)
    with watch_piece_builds() as builds:
        torch.testing.assert_close(compiled(fn, cache_folder=folder, **options)(x), fn(x))
    return [one.cache for one in builds]


def entry_file(folder: Path) -> Path:
    (found,) = folder.glob("compiled/*/*/entry.json")
    return found


@pytest.mark.slow
def test_second_start_compiles_nothing(folder: Path) -> None:
    first, _ = start(folder)
    second, errors = start(folder)
    assert outcomes(first) == [["miss", "miss", "miss"]]
    assert outcomes(second) == [["hit", "hit", "hit"]]
    assert [key for key, _ in first[0]] == [key for key, _ in second[0]], (
        "keys are those of the process before"
    )
    assert "damaged" not in errors


@pytest.mark.slow
def test_eight_processes_on_an_empty_cache_leave_it_whole(folder: Path) -> None:
    answers, errors = start(folder, num_processes=8)
    assert len(answers) == 8
    assert "damaged" not in errors
    assert "could not be used" not in errors
    after, errors = start(folder)
    assert outcomes(after) == [["hit", "hit", "hit"]]
    assert errors == ""
    cache = CompileCache(folder)
    pieces = cache.pieces()
    assert len(pieces) == 3
    for piece in pieces:
        assert piece.entry is not None
        assert cache.is_whole(piece.entry.environment, piece.entry.key)
    assert not list(folder.rglob(".writing-*"))


def test_a_piece_is_found_again(folder: Path) -> None:
    assert build(folder) == ["miss"]
    assert build(folder) == ["hit"]


@pytest.mark.gpu
def test_kernels_for_a_gpu_are_found_again(folder: Path) -> None:
    x = torch.ones(4, 4, device="cuda")
    outcomes_seen = []
    for _ in range(2):
        torch.compiler.reset()
        with watch_piece_builds() as builds:
            torch.testing.assert_close(compiled(wave, cache_folder=folder)(x), wave(x))
        outcomes_seen += [one.cache for one in builds]
    assert outcomes_seen == ["miss", "hit"]
    (piece,) = CompileCache(folder).pieces()
    assert piece.entry is not None
    assert any(name.startswith("triton/") for name in piece.entry.files)


def test_other_options_are_another_piece(folder: Path) -> None:
    assert build(folder) == ["miss"]
    assert build(folder, inductor_config={"max_autotune_pointwise": True}) == ["miss"]
    assert len(CompileCache(folder).pieces()) == 2


def test_switched_off_caches_of_inductor_are_no_hits(folder: Path) -> None:
    for _ in range(2):
        assert build(folder, inductor_config={"force_disable_caches": True}) == ["uncached"]


def replace(path: Path, contents: bytes) -> None:
    """Another file under the name: this process may have the old one mapped, and would crash."""
    path.unlink()
    path.write_bytes(contents)


def cut(path: Path) -> None:
    replace(path, path.read_bytes()[:-20])


def empty(path: Path) -> None:
    replace(path, b"")


def newer(path: Path) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "schema_version": 99}))


def foreign(path: Path) -> None:
    path.write_text(json.dumps({"schema": "something else"}))


def moved(path: Path) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "key": "0" * 32}))


@pytest.mark.parametrize("damage", [cut, empty, newer, foreign, moved])
def test_a_bad_entry_is_compiled_anew_with_a_warning_that_names_it(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    build(folder)
    damage(entry_file(folder))
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise"):
        assert build(folder) == ["miss"]
    assert str(entry_file(folder)) in caplog.text
    assert build(folder) == ["hit"]


@pytest.mark.parametrize(
    ("fn", "pattern", "damage"),
    [
        (wave, "**/*.so", cut),
        (product, "fxgraph/**/*", cut),
        (product, "fxgraph/**/*", Path.unlink),
        (product, "aotautograd/**/*", empty),
        (product, "*/*.py", cut),
    ],
)
def test_a_bad_artefact_is_compiled_anew_with_a_warning_that_names_it(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    fn: Callable[[torch.Tensor], torch.Tensor],
    pattern: str,
    damage: Callable[[Path], None],
) -> None:
    build(folder, fn)
    artefact = next(path for path in entry_file(folder).parent.glob(pattern) if path.is_file())
    damage(artefact)
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise"):
        assert build(folder, fn) == ["miss"]
    assert str(artefact) in caplog.text
    assert build(folder, fn) == ["hit"]


def test_half_written_files_of_a_process_that_was_ended_are_compiled_anew(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It wrote no entry, and Inductor trusts a library that is there.

    In another folder, since this process would find the library that it has loaded by its path.
    """
    build(folder, wave)
    folder = folder.rename(tmp_path / "moved")
    piece = entry_file(folder).parent
    entry_file(folder).unlink()
    (library,) = piece.glob("**/*.so")
    empty(library)
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise"):
        assert build(folder, wave) == ["miss"]
    assert str(piece) in caplog.text
    assert build(folder, wave) == ["hit"]


def test_an_entry_that_is_missing_is_written_again(folder: Path) -> None:
    build(folder)
    entry_file(folder).unlink()
    assert build(folder) == ["hit"]
    assert entry_file(folder).is_file()


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, logger="sgl_piecewise"):
        build(blocked)
        build(blocked)
    warnings = [record for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(warnings) == 1
    assert str(blocked) in warnings[0].getMessage()
    assert "SGL_PIECEWISE_CACHE" in warnings[0].getMessage()


def test_variables_of_the_process_are_as_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other compiles of the process keep their folders."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/else")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    build(folder)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/else"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_listing_and_clearing(folder: Path) -> None:
    cache = CompileCache(folder)
    assert cache.pieces() == []
    build(folder)
    beside = folder / "models" / "weights"
    beside.parent.mkdir()
    beside.write_text("not the cache's")
    (piece,) = cache.pieces()
    assert piece.entry is not None
    assert piece.entry.operators == ["matmul"]
    assert piece.num_bytes > 1000
    assert piece.environment["torch"].startswith(torch.__version__)
    assert cache.clear() > 1000
    assert cache.pieces() == []
    assert [path.name for path in folder.iterdir()] == ["models"]
    assert beside.is_file()
    assert cache.clear() == 0


def test_the_environment_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment_of([torch.ones(1)])
    assert {"torch", "triton", "python", "cuda", "sgl-piecewise"} <= set(here)
    assert environment_key(here) == environment_key(dict(reversed(here.items())))
    assert environment_key(here) != environment_key({**here, "torch": "another"})


@pytest.mark.parametrize("value", [3, "", b""])
def test_a_cache_folder_that_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="cache_folder"):
        options_from({"cache_folder": value})
