"""The shape of the scripts: no edited search path of modules, and nothing too long to be read."""

from __future__ import annotations

import ast
import re

import pytest

from tests.harness.rank_launcher import ROOT

SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("launch", "benchmarks", "tests", "hvd_adaptive", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
SCRIPTS = [name for name in SOURCES if name.startswith(("launch/", "benchmarks/"))]
MOST_LINES = {ast.FunctionDef: 60, ast.ClassDef: 400}


def test_nobody_edits_where_modules_are_found() -> None:
    edited = re.compile(r"\bsys\s*\.\s*" + "path")
    assert [name for name, path in SOURCES.items() if edited.search(path.read_text())] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_files_functions_and_classes_are_short(name: str) -> None:
    text = SOURCES[name].read_text()
    assert len(text.splitlines()) <= 900
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MOST_LINES[type(node)], node.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_private_name_of_another_module_is_imported(name: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            assert not [each.name for each in node.names if each.name.startswith("_")]
