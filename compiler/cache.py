"""Compiled pieces on disk: one folder a piece, with an entry that lists its files and what they must hold.

    FOLDER/compiled/ENVIRONMENT/environment.json    versions, host and devices, for a reader
    FOLDER/compiled/ENVIRONMENT/host/               what Inductor found out about the host's compiler
    FOLDER/compiled/ENVIRONMENT/KEY/                where Inductor keeps, and looks for, one piece's artefacts
    FOLDER/compiled/ENVIRONMENT/KEY/entry.json      the entry: written last

One invariant: what is used was listed by an entry and is unchanged, or is written anew. Several processes may
work on one piece: Inductor writes each file under its content's name, by rename or under a lock, and an entry
appears by rename. This module must not know what compiles a piece.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sgl_piecewise.runtime.atomic_file import write_atomically

_logger = logging.getLogger(__name__)

SCHEMA = "sgl-piecewise.cache-entry"
SCHEMA_VERSION = 1
_COMPILED = "compiled"
_ENTRY = "entry.json"
_ENVIRONMENT = "environment.json"
_HOST = "host"
_SET_ASIDE = ".set-aside-"
# Files that come and go, or that change after the piece was compiled: nothing is lost with them.
_UNLISTED_SUFFIXES = (".lock", ".tmp", ".best_config", ".pyc")


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """What an entry says of one piece.

    Attributes:
        key: Name of the piece.
        environment: Name of the environment that it was compiled in.
        options: The options that decided how.
        operators: What the piece computes: names of its operators in order, cut off after a few.
        num_operators: How many there are.
        compile_s: Wall seconds that compiling took.
        files: Path inside the folder to the SHA-256 of the contents.
    """

    key: str
    environment: str
    options: str
    operators: list[str]
    num_operators: int
    compile_s: float
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """One piece's folder, for a listing.

    Attributes:
        folder: Where it is.
        entry: What its entry says; None where it has none that can be read.
        environment: Versions, host and devices; empty where that file cannot be read.
        num_bytes: Size of all its files.
        modified_s: When it last changed, in seconds since 1970.
    """

    folder: Path
    entry: CacheEntry | None
    environment: dict[str, str]
    num_bytes: int
    modified_s: float


class _DamagedError(Exception):
    """Why an entry cannot be used; the message names the file."""


class CompileCache:
    """The compiled pieces under one folder.

    Args:
        folder: Need not exist. Other things may stand in it; only ``compiled`` in it is the cache's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / _COMPILED

    def can_hold(self, environment: str, facts: dict[str, str]) -> bool:
        """Tells whether pieces of an environment can be kept here; a warning says so once where they cannot.

        Args:
            environment: Its name.
            facts: What the name stands for; written down for readers.
        """
        folder = self.folder / environment
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
                pass
            if not (folder / _ENVIRONMENT).exists():
                write_atomically(folder / _ENVIRONMENT, json.dumps(facts, indent=2, sort_keys=True))
        except OSError as err:
            _warn_once(
                f"Nothing is cached on disk: {self.folder} cannot be written ({err}). Pieces are compiled in each "
                "process. Choose another folder with the option cache_folder or with SGL_PIECEWISE_CACHE."
            )
            return False
        return True

    def folder_of(self, environment: str, key: str) -> Path:
        """Returns the folder of one piece; it need not exist."""
        return self.folder / environment / key

    def host_folder(self, environment: str) -> Path:
        """Returns the folder for what depends on the host alone."""
        return self.folder / environment / _HOST

    def is_whole(self, environment: str, key: str) -> bool:
        """Tells whether a piece is there as its entry says; sets it aside, with a warning, where it is damaged.

        A folder without an entry is left alone: another process may be at work in it.
        """
        folder = self.folder_of(environment, key)
        if not (folder / _ENTRY).exists():
            return False
        try:
            _check(_read_entry(folder), folder, environment, key)
        except _DamagedError as damage:
            _logger.warning("Cache entry %s: it is compiled anew.", damage)
            self.set_aside(environment, key)
            return False
        return True

    def set_aside(self, environment: str, key: str) -> None:
        """Deletes a piece's folder; processes that have its files open can go on."""
        folder = self.folder_of(environment, key)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, self.folder / f"{_SET_ASIDE}{uuid.uuid4().hex}")
        _delete_set_aside(self.folder)

    def store(self, entry: CacheEntry) -> None:
        """Writes a piece's entry, with the files that its folder now holds in place of ``entry.files``."""
        folder = self.folder_of(entry.environment, entry.key)
        files = {name: _digest_of(folder / name) for name in _listed_files(folder)}
        content = {**asdict(entry), "files": files}
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "checksum": _checksum(content),
            **content,
        }
        write_atomically(folder / _ENTRY, json.dumps(document, indent=1))

    def pieces(self) -> list[StoredPiece]:
        """Lists what is on disk, the newest first."""
        found = []
        for folder in self._piece_folders():
            try:
                entry = _read_entry(folder)
            except (_DamagedError, FileNotFoundError):
                entry = None
            found.append(
                StoredPiece(
                    folder=folder,
                    entry=entry,
                    environment=_read_environment(folder.parent / _ENVIRONMENT),
                    num_bytes=_num_bytes(folder),
                    modified_s=_modified_s(folder),
                )
            )
        return sorted(found, key=lambda piece: -piece.modified_s)

    def clear(self) -> int:
        """Deletes every piece; returns the bytes that were freed. What else stands in the folder stays."""
        freed = _num_bytes(self.folder)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder, self.folder.parent / f"{_SET_ASIDE}{uuid.uuid4().hex}")
        _delete_set_aside(self.folder.parent)
        return freed

    def _piece_folders(self) -> Iterator[Path]:
        if not self.folder.is_dir():
            return
        for environment in sorted(self.folder.iterdir()):
            if environment.name.startswith(".") or not environment.is_dir():
                continue
            yield from (
                folder for folder in sorted(environment.iterdir()) if folder.is_dir() and folder.name != _HOST
            )


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _logger.warning("%s", message)


def _read_entry(folder: Path) -> CacheEntry:
    path = folder / _ENTRY
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as err:
        raise _DamagedError(f"{path} cannot be read ({err})") from err
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _DamagedError(f"{path} was not written by this cache")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise _DamagedError(
            f"{path} has version {document.get('schema_version')!r} of its form, and this cache reads {SCHEMA_VERSION}"
        )
    names = [one.name for one in fields(CacheEntry)]
    content: dict[str, Any] = {name: document.get(name) for name in names}
    if document.get("checksum") != _checksum(content):
        raise _DamagedError(f"{path} is damaged: its checksum is another")
    return CacheEntry(**content)


def _check(entry: CacheEntry, folder: Path, environment: str, key: str) -> None:
    """Raises for the first thing that is not as the entry says."""
    if (entry.environment, entry.key) != (environment, key):
        raise _DamagedError(
            f"{folder / _ENTRY} belongs to piece {entry.key} of environment {entry.environment}, not to the folder "
            "that it is in"
        )
    for name, expected in entry.files.items():
        path = folder / name
        try:
            actual = _digest_of(path)
        except OSError as err:
            raise _DamagedError(f"{path} cannot be read ({err})") from err
        if actual != expected:
            raise _DamagedError(f"{path} is damaged: its contents are not those that were written")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed_files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
        and path.name != _ENTRY
        and not path.name.startswith(".")
        and not path.name.endswith(_UNLISTED_SUFFIXES)
    )


def _read_environment(path: Path) -> dict[str, str]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def _delete_set_aside(folder: Path) -> None:
    """Deletes what was set aside here, also by a process that was ended before it could."""
    for path in folder.glob(f"{_SET_ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may clear the folder meanwhile
            total += path.lstat().st_size if path.is_file() else 0
    return total


def _modified_s(folder: Path) -> float:
    for path in (folder / _ENTRY, folder):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime
    return 0.0
