"""Files that appear with all of their contents, or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file that readers, and a process that ends half-way, never leave half written.

    The file has the permissions of any new file: what the umask leaves. Through a link, the file that it
    points to is replaced; what is no file, a pipe or a terminal, is written as it is.

    Args:
        path: The file; its folder must exist.
        text: All of its contents.

    Raises:
        OSError: The file cannot be written; the old one, if any, is as it was.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    scratch = path.with_name(f".writing-{uuid.uuid4().hex}.tmp")
    try:
        with open(scratch, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        raise
