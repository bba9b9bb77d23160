"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

from tests.harness.alone import ROOM, Room
from tests.harness.eager import make_programs_light

# A shell that starts the tests in its background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Programs that tests start are light; workers of xdist, which are programs too, are not."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        make_programs_light()
    config.stash[ROOM] = Room.of(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait while another worker must be alone, before the test's own time limit begins."""
    with item.config.stash[ROOM].shared():
        return (yield)


# Those that take longest: where files run side by side, none must be left for the end.
FIRST = (
    "test_slurm_jobs.py",
    "test_triton.py",
    "test_failure.py",
    "test_launch.py",
    "test_train.py",
    "test_parity.py",
)
# It needs the machine for itself, so that others would wait for it, and it for their tests.
LAST = "test_distributed.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, and keep the order of the others."""
    places = {name: place for place, name in enumerate(FIRST)} | {LAST: len(FIRST) + 1}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))
