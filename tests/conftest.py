"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

from tests.harness.eager import make_programs_light

# A shell that starts the tests in its background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Programs that tests start are light; workers of xdist, which are programs too, are not."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        make_programs_light()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest: where files run side by side, it must not be the last."""
    items.sort(key=lambda item: item.path.name != "test_distributed.py")
