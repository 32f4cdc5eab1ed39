"""Writes the file tree of README.md from the first line of each module's docstring.

A tree kept by hand is wrong after a week. ``make format`` runs this; a test compares.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sgl_piecewise", "runtime", "models", "passes", "compiler", "scripts")
OTHERS = {
    "benchmarks/": "figures of the capture engine and of attention on one GPU, from scripts that write JSON",
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


def tree_lines(folder: Path, indent: str = "") -> list[str]:
    """Returns one line per folder and module; a folder's phrase is that of its ``__init__.py``."""
    init = folder / "__init__.py"
    lines = [_line(f"{indent}{folder.name}/", phrase(init) if init.exists() else "")]
    indent += "  "
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += tree_lines(path, indent)
        elif path.suffix == ".py" and path.name != "__init__.py":
            lines.append(_line(indent + path.name, phrase(path)))
    return lines


def _line(name: str, what: str) -> str:
    return f"{name:<28} {what}".rstrip()


def updated_readme(text: str) -> str:
    """Returns the README with the tree as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [line for folder in FOLDERS for line in tree_lines(ROOT / folder)]
    lines += [_line(name, what) for name, what in OTHERS.items()]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated_readme(readme.read_text(encoding="utf-8")), encoding="utf-8")
