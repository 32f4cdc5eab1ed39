"""The repository itself: packaging, names in the documentation, docstrings, forbidden spellings."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
with open(ROOT / "pyproject.toml", "rb") as _file:
    PYPROJECT = tomllib.load(_file)
PACKAGE_DIR: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]

MODULES = sorted(
    path
    for folder in PACKAGE_DIR.values()
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
MODULE_IDS = [str(path.relative_to(ROOT)) for path in MODULES]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOCUMENT_IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def installed_name(path: Path) -> str:
    """Returns the dotted name by which a module installs."""
    for name, folder in PACKAGE_DIR.items():
        if path.is_relative_to(ROOT / folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            return ".".join([name, *(part for part in parts if part != "__init__")])
    raise AssertionError(path)


def tracked_files() -> list[Path]:
    """Returns the files under version control, or all files where this is no checkout."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0 and listing.stdout:
        return [path for line in listing.stdout.splitlines() if (path := ROOT / line).is_file()]
    hidden = {"build", "dist", ".git", ".venv", "__pycache__", "shared"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not hidden.intersection(path.relative_to(ROOT).parts)
    ]


# Packaging ---------------------------------------------------------------------------------------


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without ``__init__.py`` would be left out of the wheel, and found only there."""
    for path in MODULES:
        assert (path.parent / "__init__.py").is_file(), f"{path.parent.relative_to(ROOT)} has no __init__.py"


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_module_is_found_under_its_installed_name(path: Path) -> None:
    if path.name == "__main__.py":
        pytest.skip("importing it runs the command")
    spec = importlib.util.find_spec(installed_name(path))
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == path


@pytest.mark.slow
def test_wheel_holds_every_module_and_the_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {installed_name(path).replace(".", "/") for path in MODULES}
    held = {name.removesuffix("/__init__.py").removesuffix(".py") for name in names if name.endswith(".py")}
    assert held == expected
    data = {
        f"sgl_piecewise/data/{path.name}"
        for path in (ROOT / "sgl_piecewise" / "data").glob("*")
        if path.is_file()
    }
    assert data | {"sgl_piecewise/py.typed"} <= names


def test_constraints_pin_every_declared_dependency() -> None:
    """An unpinned dependency would make ``make test`` mean something else every week."""
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    project = PYPROJECT["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in [
        item for group in declared for item in ([group] if isinstance(group, str) else group)
    ]:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)
        assert name is not None
        assert name[0].lower().replace("_", "-") in pinned, f"{requirement} is not pinned in constraints.txt"
    assert not [version for version in pinned.values() if "+" in version], (
        "local versions resolve nowhere else"
    )
    assert not [name for name in pinned if name.startswith(("nvidia-", "cuda-", "triton"))]


# Documentation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=DOCUMENT_IDS)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        path = (document.parent / target.split("#")[0]).resolve()
        assert path.exists(), f"{document.relative_to(ROOT)} links to {target}"


FILE_NAME = re.compile(r"`([\w./-]+/[\w.-]*|[\w./-]+\.(?:py|md|toml|txt|json))`")


def named_files(text: str) -> Iterator[str]:
    """Yields what stands in backquotes and looks like a path of this repository."""
    for name in FILE_NAME.findall(text):
        if name.split("/")[0] not in {"build", "dist", ".venv"} and not name.startswith(("/", "http")):
            yield name


@pytest.mark.parametrize("document", DOCUMENTS, ids=DOCUMENT_IDS)
def test_files_named_in_documents_exist(document: Path) -> None:
    """In backquotes, from the root or from the document's own folder."""
    for name in named_files(document.read_text()):
        exists = (ROOT / name).exists() or (document.parent / name).exists()
        assert exists, f"{document.relative_to(ROOT)} names {name}, which does not exist"


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_files_named_in_module_docstrings_exist(path: Path) -> None:
    for name in named_files(ast.get_docstring(ast.parse(path.read_text())) or ""):
        assert (ROOT / name).exists() or (path.parent / name).exists(), (
            f"{path.relative_to(ROOT)} names {name}"
        )


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_module_says_what_it_holds(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    assert "placeholder" not in docstring.lower()


# Spellings ---------------------------------------------------------------------------------------


def test_no_test_is_silently_uncollected() -> None:
    """pytest collects ``test_*.py`` only, and runs one of two equal names in a module."""
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            names = [node.name for node in scope.body if isinstance(node, ast.FunctionDef)]
            tests = [name for name in names if name.startswith("test")]
            assert len(tests) == len(set(tests)), f"{path.name} defines a test twice: {sorted(tests)}"
            if tests:
                assert path.name.startswith("test_"), f"{path.name} has tests and is not collected"
            if tests and isinstance(scope, ast.ClassDef):
                assert scope.name.startswith("Test"), f"{path.name}: {scope.name} is not collected"


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    """What stands in the repository holds on every machine."""
    # The patterns are split so that this file does not match itself.
    forbidden = re.compile(
        "|".join(["/" + "work/", "/" + "root/", "/" + "home/", "pypi" + r"\.org", "file:" + "//"])
    )
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        match = forbidden.search(text)
        assert match is None, f"{path.relative_to(ROOT)} contains {match[0] if match else ''!r}"


def _private_torch_names(tree: ast.AST) -> Iterator[str]:
    """Yields dotted names under torch with a part that begins with one underscore."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            if re.match(r"torch(\.\w+)*\._[a-z]", name):
                yield name


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_private_torch_names_stay_in_one_file(path: Path) -> None:
    """PyTorch changes them between versions: `runtime/torch_private.py` is where to look then."""
    if path.name == "torch_private.py":
        return
    names = sorted(set(_private_torch_names(ast.parse(path.read_text()))))
    assert not names, f"{path.relative_to(ROOT)} uses {names}: add a function to runtime/torch_private.py"
