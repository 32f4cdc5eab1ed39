"""Writes the trees of README.md (folders) and docs/files.md (every file) from the first line of each docstring.

A tree kept by hand is wrong after a week. ``make format`` runs this; a test compares.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sgl_piecewise", "runtime", "models", "passes", "compiler", "scripts")
OTHERS = {
    "benchmarks/": "figures of capture, compiled builds, attention, serving and calls on one GPU, as JSON",
    "tests/": "contract tests, written once for both graph devices; random programs; known faults",
    "docs/": "architecture, capture semantics, glossary, reading order, decisions, faults covered, lab notes, results",
    "constraints.txt": "the pinned versions that `make` installs",
}
BEGIN = "<!-- file tree: `make format` writes what stands between these marks -->\n```text\n"
END = "```\n<!-- end of file tree -->"


def phrase(path: Path) -> str:
    """Returns the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", first)[0].replace("``", "")


def tree_lines(folder: Path, indent: str = "", *, has_files: bool) -> list[str]:
    """Returns one line per folder and, if asked, per module; a folder's phrase is that of its ``__init__.py``."""
    init = folder / "__init__.py"
    lines = [_line(f"{indent}{folder.name}/", phrase(init) if init.exists() else "")]
    indent += "  "
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += tree_lines(path, indent, has_files=has_files)
        elif has_files and path.suffix == ".py" and path.name != "__init__.py":
            lines.append(_line(indent + path.name, phrase(path)))
    return lines


def _line(name: str, what: str) -> str:
    return f"{name:<28} {what}".rstrip()


def updated(text: str, *, has_files: bool) -> str:
    """Returns a document with the tree between its marks as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [line for folder in FOLDERS for line in tree_lines(ROOT / folder, has_files=has_files)]
    lines += [_line(name, what) for name, what in OTHERS.items()]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


DOCUMENTS = {ROOT / "README.md": False, ROOT / "docs" / "files.md": True}
"""Each document, and whether its tree names files."""

if __name__ == "__main__":
    for document, names_files in DOCUMENTS.items():
        old = document.read_text(encoding="utf-8")
        document.write_text(updated(old, has_files=names_files), encoding="utf-8")
