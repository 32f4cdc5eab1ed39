"""Files that are written whole or not at all: reports, profiles and entries of the cache."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sgl_piecewise.runtime.atomic_file import write_atomically


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text("old")
    return path


def test_the_new_text_replaces_the_old_and_nothing_else_is_left(old: Path) -> None:
    write_atomically(old, "neu: ä")
    assert old.read_text(encoding="utf-8") == "neu: ä"
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_are_what_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o666 & ~umask


def test_a_failure_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(old, "half \udc80")
    monkeypatch.setattr(os, "replace", lambda source, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(old, "new")
    assert old.read_text() == "old"
    assert list(old.parent.iterdir()) == [old]


def test_a_link_stays_a_link(old: Path) -> None:
    link = old.with_name("link.json")
    link.symlink_to(old.name)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert old.read_text() == "new"


def test_what_is_no_file_is_written_as_it_is() -> None:
    """For example ``--json /dev/stdout``."""
    write_atomically(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()
