"""What needs the machine for itself, where workers of xdist run tests side by side.

Several ranks that talk to each other thousands of times wait at each of them for a core: beside another
file of tests they take three times as long, which is more than the other file gains.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOM = pytest.StashKey["Room"]()


class Room:
    """Locks that all workers of one run share: many may be in the room, or one who is alone.

    Args:
        folder: in which the locks are; without one nothing is locked.
    """

    def __init__(self, folder: Path | None) -> None:
        names = () if folder is None else (folder / "door", folder / "room")
        self._files = {name.name: os.open(name, os.O_RDWR | os.O_CREAT) for name in names}

    @classmethod
    def of(cls, config: pytest.Config) -> Room:
        """Of the workers of this run."""
        return cls(
            Path(config.getoption("basetemp")).parent if hasattr(config, "workerinput") else None
        )

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Beside tests of other workers; one that asks to be alone goes first."""
        self._lock("door", fcntl.LOCK_EX)
        self._lock("room", fcntl.LOCK_SH)
        self._lock("door", fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._lock("room", fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within :meth:`shared`: begins when the others have ended the test they are at."""
        # Who waits for the room must not hold it; who holds the door lets nobody else in.
        self._lock("room", fcntl.LOCK_UN)
        self._lock("door", fcntl.LOCK_EX)
        self._lock("room", fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock("room", fcntl.LOCK_SH)
            self._lock("door", fcntl.LOCK_UN)

    def _lock(self, name: str, how: int) -> None:
        if name in self._files:
            fcntl.flock(self._files[name], how)
