"""Other libraries' trainers with our hook, as docs/torchrun.md shows them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.documents import ROOT
from tests.torch_distributed.launching import torchrun

TRAINERS = ("lightning", "accelerate", "transformers")
FOLDER = ROOT / "tests" / "torch_distributed" / "trainers"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_trains_with_compressed_gradients(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: 'pip install {name}' lets this test run")
    done = torchrun(2, FOLDER / f"{name}_rank.py")
    assert done.returncode == 0, done.stderr[-6000:]
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("trained:")]
    (mine, ratio), (theirs, _) = said
    assert mine == theirs
    assert float(ratio) > 3


@pytest.mark.parametrize("name", TRAINERS)
def test_the_page_shows_what_is_tested(name: str) -> None:
    page = (ROOT / "docs" / "torchrun.md").read_text()
    section = page.partition(f"<!-- {name} -->")[2]
    shown = section.partition("```python\n")[2].partition("```")[0].strip()
    assert shown
    tested = (FOLDER / f"{name}_rank.py").read_text()
    for line in filter(None, map(str.strip, shown.splitlines())):
        assert line in tested
