"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

# A shell that starts the tests in its background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest: where files run side by side, it must not be the last."""
    items.sort(key=lambda item: item.path.name != "test_distributed.py")
