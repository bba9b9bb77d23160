"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

# A shell that starts the tests in its background makes them, and all that they start, deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These wait for other programs more than they compute.
_WAITING = ("slurm", "test_failure.py", "test_harness.py", "test_launch.py", "test_train.py")


@pytest.hookimpl(tryfirst=True)  # before the names of groups become part of the tests' names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two groups, for ``-n 2 --dist loadgroup``: of each, one test runs at a time, in their order.

    So fixtures that many tests share are made once, and no two tests that compute disturb each other.
    """
    for item in items:
        waits = any(part in _WAITING for part in item.path.parts)
        item.add_marker(pytest.mark.xdist_group("waits" if waits else "computes"))
