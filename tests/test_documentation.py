"""What README and docstrings say is so."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# optimizer.py's example needs Horovod: tests/distributed runs it
MODULES = (
    "hvd_adaptive.compressors",
    "hvd_adaptive.compressors.base",
    "hvd_adaptive.compressors.candidates",
    "hvd_adaptive.compressors.dense",
    "hvd_adaptive.compressors.distributions",
    "hvd_adaptive.compressors.levels",
    "hvd_adaptive.compressors.lowrank",
    "hvd_adaptive.compressors.quantized",
    "hvd_adaptive.compressors.randomk",
    "hvd_adaptive.compressors.sparse",
    "hvd_adaptive.feedback",
    "hvd_adaptive.kernels.reference",
    "hvd_adaptive.kernels.subset",
    "hvd_adaptive.keys",
    "hvd_adaptive.picture",
    "hvd_adaptive.specs",
    "hvd_adaptive.states",
    "hvd_adaptive.telemetry",
    "hvd_adaptive.wire",
)


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
