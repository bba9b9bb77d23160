"""Runs tests/distributed under a real launcher, with 1, 2, 4 and (the smoke tests) 16 ranks.

Each function there is one test here for each number of ranks; one launch runs all of a number.
"""

from __future__ import annotations

import pytest

from tests.harness.alone import ROOM
from tests.harness.rank_launcher import (
    DISTRIBUTED,
    MOST_SECONDS,
    Function,
    Verdict,
    functions_in,
    run,
    warm_kernels,
)

pytest.importorskip("horovod.torch", reason="Horovod is not installed")
pytest.importorskip("mpi4py", reason="mpi4py is not installed")

SIZES = (1, 2, 4)
SMOKE_SIZE = 16

# The first test waits for all of them, whose ranks have time limits of their own.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout((len(SIZES) + 1) * MOST_SECONDS),
]

FUNCTIONS = [
    function for file in sorted(DISTRIBUTED.glob("test_*.py")) for function in functions_in(file)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [
        pytest.param(size, function, id=f"{size}-{function.short_id}")
        for size in (*SIZES, SMOKE_SIZE)
        for function in FUNCTIONS
        if function.runs_at(size) and (size != SMOKE_SIZE or function.smoke)
    ]
    if "function" in metafunc.fixturenames:
        metafunc.parametrize(("size", "function"), cases)


class Launches:
    """Starts the ranks when the first test asks, with all the tests of this session.

    One number of ranks after the other, and all together alone on the machine: for each the other
    worker's test would have to end first, while nothing else runs.
    """

    def __init__(self, session: pytest.Session, factory: pytest.TempPathFactory) -> None:
        self._selected: dict[int, list[Function]] = {}
        for item in session.items:
            if isinstance(item, pytest.Function) and item.path.name == "test_distributed.py":
                size, function = item.callspec.params["size"], item.callspec.params["function"]
                assert isinstance(size, int)
                assert isinstance(function, Function)
                self._selected.setdefault(size, []).append(function)
        self._factory = factory
        self._room = session.config.stash[ROOM]
        self._verdicts: dict[int, dict[str, Verdict]] = {}
        warm_kernels()

    def verdict(self, size: int, function: Function) -> Verdict:
        if size not in self._verdicts:
            with self._room.alone():
                # what failed to start is tried again, and says why to each test of its size
                for each in sorted(self._selected.keys() - self._verdicts.keys()):
                    self._launch(each, self._selected[each])
        return self._verdicts[size][function.id]

    def _launch(self, size: int, functions: list[Function]) -> None:
        found, launches = run(size, functions, self._factory.mktemp(f"ranks{size}"))
        self._verdicts[size] = found
        seconds = ", ".join(f"{launch.seconds:.0f}" for launch in launches)
        slowest = sorted(found, key=lambda each: -found[each].seconds)[:5]
        told = ", ".join(f"{each.partition('::')[2]} {found[each].seconds:.0f}" for each in slowest)
        print(f"{size} ranks: {len(launches)} launch(es), {seconds} s; slowest: {told} s")


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(request.session, tmp_path_factory)


def test_distributed(launches: Launches, size: int, function: Function) -> None:
    verdict = launches.verdict(size, function)
    if verdict.skipped is not None:
        pytest.skip(verdict.skipped)
    if verdict.problems:
        pytest.fail("\n\n".join(verdict.problems), pytrace=False)
