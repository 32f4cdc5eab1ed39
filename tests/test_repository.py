"""The repository itself: packaging, names in the documentation, docstrings, forbidden spellings."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_piecewise.runtime import errors

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
    """Built from a copy: what an earlier build left in ``build/`` would end up in the wheel."""
    source = tmp_path / "source"
    for path in tracked_files():
        copied = source / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, cwd=tmp_path)
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
        if name[0] == "triton":  # Each CUDA build of torch asks for one version, a CPU build for none.
            continue
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


def is_in_repository(name: str, named_by: Path) -> bool:
    """Looks from the root and from the folder of the naming file; a bare file name may lie anywhere."""
    if (ROOT / name).exists() or (named_by.parent / name).exists():
        return True
    return "/" not in name and any(path.name == name for path in [*MODULES, *DOCUMENTS])


@pytest.mark.parametrize("document", DOCUMENTS, ids=DOCUMENT_IDS)
def test_files_named_in_documents_exist(document: Path) -> None:
    for name in named_files(document.read_text()):
        assert is_in_repository(name, document), (
            f"{document.relative_to(ROOT)} names {name}, which does not exist"
        )


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_files_named_in_module_docstrings_exist(path: Path) -> None:
    """Paths that begin with one of our folders; others are files of other projects."""
    for name in named_files(ast.get_docstring(ast.parse(path.read_text())) or ""):
        if "/" in name and (ROOT / name.split("/")[0]).is_dir():
            assert is_in_repository(name, path), (
                f"{path.relative_to(ROOT)} names {name}, which does not exist"
            )


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_module_says_what_it_holds(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path.relative_to(ROOT)} has no docstring"
    assert "placeholder" not in docstring.lower()


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_public_methods_say_what_they_do(path: Path) -> None:
    """Themselves, or by the docstring of the method that they override."""
    if path.name == "__main__.py":
        return
    if re.search(r"^(import|from) (triton|\.triton\w*)\b", path.read_text(), re.MULTILINE):
        pytest.importorskip("triton")
    module = importlib.import_module(installed_name(path))
    for cls in vars(module).values():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__ or cls.__name__.startswith("_"):
            continue
        for name, method in vars(cls).items():
            if name.startswith("_") or not (inspect.isfunction(method) or isinstance(method, property)):
                continue
            assert inspect.getdoc(getattr(cls, name)), (
                f"{module.__name__}.{cls.__name__}.{name} has no docstring"
            )


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
    """Yields dotted names under torch with a part that begins with one underscore.

    The base class of dispatch modes is let through: it has kept its name and has no public one.
    """
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            is_private = re.match(r"torch(\.\w+)*\._[a-zA-Z]", name)
            if is_private and name != "torch.utils._python_dispatch.TorchDispatchMode":
                yield name


@pytest.mark.parametrize("path", MODULES, ids=MODULE_IDS)
def test_private_torch_names_stay_in_their_file(path: Path) -> None:
    """PyTorch changes them between versions: `runtime/torch_private.py` is where to look then.

    What tracing and compiling need stands in files beside it, since importing Dynamo takes seconds.
    """
    if path.parent.name == "runtime" and path.name.startswith("torch_private"):
        return
    names = sorted(set(_private_torch_names(ast.parse(path.read_text()))))
    assert not names, f"{path.relative_to(ROOT)} uses {names}: add a function to runtime/torch_private.py"


# Examples ----------------------------------------------------------------------------------------


def python_blocks(document: str) -> list[str]:
    """Returns the fenced Python blocks of a document."""
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE
    )


@pytest.fixture
def fresh_torch_state() -> Iterator[None]:
    """Undoes what an example sets for the whole process."""
    was_enabled = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(was_enabled)


def test_readme_example_is_short_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = python_blocks("README.md")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})  # noqa: S102
    description = capsys.readouterr().out
    assert "break clip_outliers" in description


@pytest.mark.slow
def test_all_of_the_readmes_python_is_one_program_that_runs() -> None:
    """The lines that compile had no import and recorded autograd."""
    program = "\n".join(python_blocks("README.md"))
    exec(compile(program, "README.md", "exec"), {"__name__": "example"})  # noqa: S102


@pytest.mark.usefixtures("fresh_torch_state")
def test_examples_of_capture_semantics_do_what_they_say() -> None:
    """A statement that ends in ``# raises X`` raises X, every other one does not raise."""
    namespace: dict[str, object] = {"__name__": "example"}
    num_raising = 0
    for block in python_blocks("docs/capture-semantics.md"):
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            code = compile(ast.Module([statement], []), "docs/capture-semantics.md", "exec")
            expected = re.search(r"# raises (\w+)$", lines[(statement.end_lineno or 0) - 1])
            if expected is None:
                exec(code, namespace)  # noqa: S102
                continue
            error = getattr(errors, expected[1])
            with pytest.raises(error):
                exec(code, namespace)  # noqa: S102
            num_raising += 1
    assert num_raising >= 4


def test_file_trees_of_documents_are_up_to_date() -> None:
    """`make format` writes it."""
    spec = importlib.util.spec_from_file_location("file_tree", ROOT / "scripts" / "file_tree.py")
    assert spec is not None
    assert spec.loader is not None
    file_tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file_tree)
    for document, names_files in file_tree.DOCUMENTS.items():
        text = document.read_text(encoding="utf-8")
        assert file_tree.updated(text, has_files=names_files) == text, "run `make format`"
