"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

# A shell that starts the tests in its background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FIRST = (
    "test_distributed.py",
    "test_launch.py",
    "test_netlab.py",
    "test_failure.py",
    "test_slurm_jobs.py",
    "test_elastic.py",
)
"""Files that take minutes. Where files run side by side, the last one should not be one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; the others keep their order."""
    order = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
