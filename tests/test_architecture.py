"""The shape of the package: sizes, the direction of imports, and what imports without Horovod."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hvd_adaptive"

MAX_CLASS, MAX_FUNCTION, MAX_FILE = 400, 60, 900
"""Lines; docstrings do not count for functions, which document every argument."""

ROOMS = (
    ("arrays", "compile_once", "deprecation", "kernel_cache", "layers", "rng", "specs"),
    ("wire",),
    ("kernels",),
    ("compressors", "planning", "telemetry"),
    ("buckets",),
    ("feedback", "comm"),
    ("collectives",),
    ("adaptation",),
    ("config",),
    ("checkpoint", "engine"),
    ("resume",),
    ("arguments",),
    ("optimizer",),
    ("ddp_hook",),
    ("commands",),
    ("__main__", "warm"),
)
"""Modules and packages from the lowest up: a room imports those of its own row and of rows before."""

WITHOUT_HOROVOD = (
    "adaptation.candidates",
    "collectives",
    "compressors",
    "config",
    "feedback",
    "kernels",
    "planning",
    "telemetry",
    "wire",
)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


EVERYTHING = sources("hvd_adaptive", "launch", "benchmarks", "tests")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def too_long(path: Path) -> Iterator[str]:
    count = len(path.read_text().splitlines())
    if count > MAX_FILE:
        yield f"{relative(path)} has {count} lines, more than {MAX_FILE}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MAX_CLASS:
                yield f"class {node.name} in {relative(path)} has {size} lines, more than {MAX_CLASS}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = lines_without_docstring(node)
            if size > MAX_FUNCTION:
                yield f"{node.name}() in {relative(path)} has {size} lines, more than {MAX_FUNCTION}"


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in sources(PACKAGE)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(module: str, at_import_only: bool, for_types: bool = False) -> set[str]:
    """Modules of the package that a module imports; with the package's own name for a package."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if (is_type_checking(child) and not for_types) or (inner and at_import_only):
                continue
            yield child
            yield from visit(child)

    found: set[str] = set()
    for node in visit(tree(MODULES[module])):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                found.add(deeper if deeper in MODULES else node.module)
    return {name for name in found if name in MODULES and name != module}


def room_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", EVERYTHING, ids=relative)
def test_nothing_is_too_long(path: Path) -> None:
    assert list(too_long(path)) == []


def test_every_module_has_a_room() -> None:
    known = {room for row in ROOMS for room in row}
    assert {room_of(name) for name in MODULES if name != PACKAGE} <= known


def test_no_arrow_goes_up() -> None:
    height = {room: number for number, row in enumerate(ROOMS) for room in row}
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        if module != PACKAGE
        for other in imported(module, at_import_only=False) - {PACKAGE}
        if height[room_of(other)] > height[room_of(module)]
    ]
    assert upward == []


def test_no_import_goes_round_in_a_circle() -> None:
    after: dict[str, set[str]] = {}
    for module in MODULES:
        # importing a module runs the packages that hold it, but those import their own members
        after[module] = imported(module, at_import_only=True, for_types=True)
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(after[module]):
                walk(other, (*path, module))
            done.add(module)

    for module in MODULES:
        walk(module, ())


def test_no_private_name_is_imported_from_another_module() -> None:
    private = [
        f"{relative(path)}: {node.module}.{alias.name}"
        for path in EVERYTHING
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert private == []


def test_nobody_edits_the_path_of_modules() -> None:
    edited = "sys" + ".path"
    found = [
        relative(path)
        for path in ROOT.rglob("*")
        if path.suffix in {".py", ".sh", ".sbatch"}
        and not {".venv", "build", "data", "site"} & set(path.relative_to(ROOT).parts)
        and edited in path.read_text(errors="replace")
    ]
    assert found == []


IMPORTING = f"""
import importlib, json, os, sys, traceback
import torch  # once for all rooms, each of which is imported in a process of its own

sys.modules["horovod"] = sys.modules["mpi4py"] = None
failed = []
for room in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            importlib.import_module("{PACKAGE}." + room)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(room)
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def imports() -> tuple[list[str], str]:
    """The rooms that cannot be imported without Horovod and MPI, and why."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, *WITHOUT_HOROVOD],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("room", WITHOUT_HOROVOD)
def test_a_room_imports_without_horovod_and_mpi(imports: tuple[list[str], str], room: str) -> None:
    failed, why = imports
    assert room not in failed, why


def test_the_package_imports_without_numba() -> None:
    """Which takes longer than all of the package: kernels load it where they are first used."""
    program = f"import sys\nsys.modules['numba'] = None\nimport {PACKAGE}\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_planning_imports_without_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['horovod'] = None\n"
        "import importlib.util, types\n"
        f"package = types.ModuleType({PACKAGE!r})\n"
        f"package.__path__ = importlib.util.find_spec({PACKAGE!r}).submodule_search_locations\n"
        f"sys.modules[{PACKAGE!r}] = package\n"
        f"import {PACKAGE}.planning\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
