"""What README and docstrings say is so."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NEED_HOROVOD_STARTED = {"hvd_adaptive.optimizer", "hvd_adaptive.start"}
"""tests/distributed runs their examples."""


def modules_with_examples() -> list[str]:
    """Read from the sources: importing them all would take the kernels along."""
    found = []
    for path in sorted((ROOT / "hvd_adaptive").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if ">>> " in path.read_text() and name not in NEED_HOROVOD_STARTED:
            found.append(name)
    return found


MODULES = modules_with_examples()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_the_example_of_ones_own_compressor_in_readme_runs_and_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hvd_adaptive.compressors import REGISTRY

    monkeypatch.setitem(REGISTRY, "means", REGISTRY["none"])  # undone afterwards
    outcome = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert (outcome.attempted > 8, outcome.failed) == (True, 0)
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "class Means" in line)
    stop = next(number for number, line in enumerate(lines) if "REGISTRY[" in line)
    assert stop - start <= 40


def test_readmes_figures_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    readme = importlib.import_module("readme")
    try:
        assert readme.section((ROOT / "README.md").read_text()) == readme.render(), (
            "run: python benchmarks/readme.py"
        )
    finally:
        sys.modules.pop("readme")
