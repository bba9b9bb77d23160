"""One process compiles a kernel, and those that wait for it load what it compiled.

Many ranks that start without a cache would all compile the same kernels at once, on the cores of one
host. So a process that does not find a kernel in the cache takes the kernel's lock and looks
again: another process may have compiled it meanwhile. Other kernels have locks of their own, so that
processes can share the work. Who compiles a kernel takes the locks of those that it calls, too, and
kernels do not call each other in circles: nobody waits for a process that waits for it. The operating
system holds the locks (``flock``): when an owner ends, however it does, the next one has it.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

LONGEST_WAIT: Final = 600.0
"""Seconds after which a process compiles itself: what holds the lock may be stopped."""
NAP: Final = 0.02
SAID_FOR: Final = 600.0
"""Seconds for which one line about compiling is enough."""


class FileLock:
    """A lock that one process has, in all its threads one at a time; the same thread may nest.

    Args:
        path: the lock's file. Where it cannot be locked, everyone has the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.RLock()
        self._depth = 0
        self._file: int | None = None

    def acquire(self) -> None:
        """Wait for the lock."""
        self._thread.acquire()
        self._depth += 1
        if self._depth == 1:
            self._file = self._locked_file()

    def release(self) -> None:
        """As often as it was acquired, by the same thread."""
        self._depth -= 1
        if self._depth == 0 and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked process may have the file, too
            os.close(self._file)
            self._file = None
        self._thread.release()

    def say_once(self, text: str) -> None:
        """Print a line, unless a process has done so lately; only while the lock is held."""
        if self._file is None:
            return
        try:
            lately = time.time() - float(os.pread(self._file, 32, 0) or 0) < SAID_FOR
            if not lately:
                os.pwrite(self._file, f"{time.time():.1f}".encode(), 0)
        except (OSError, ValueError):
            lately = False
        if not lately:
            print(text, file=sys.stderr, flush=True)

    def _locked_file(self) -> int | None:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        latest = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < latest:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(NAP)
            except OSError:  # a file system without locks
                break
            else:
                return file
        os.close(file)
        return None


class _SharedCache:
    """Numba's cache of one function, which lets one process compile.

    Args:
        cache: Numba's.
        lock: the function's.
        said: whose holder may say that kernels are compiled.
    """

    def __init__(self, cache: Any, lock: FileLock, said: FileLock) -> None:
        self._cache = cache
        self._lock = lock
        self._said = said
        self._held = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """What the cache holds, if need be after another process has compiled it; None: compile it."""
        found = self._cache.load_overload(signature, target)
        if found is not None:
            return found
        self._lock.acquire()
        found = self._cache.load_overload(signature, target)
        if found is not None:
            self._lock.release()
            return found
        self._held.count = getattr(self._held, "count", 0) + 1
        self._said.acquire()
        self._said.say_once(
            "hvd_adaptive: compiling kernels, once for all processes of this host, which takes a "
            "minute or two; 'hva precompile' does it beforehand, on several cores"
        )
        self._said.release()
        return None

    @contextmanager
    def released(self) -> Iterator[None]:
        """What was locked in this block is unlocked at its end, whether compiling succeeds or not."""
        before = getattr(self._held, "count", 0)
        try:
            yield
        finally:
            while getattr(self._held, "count", 0) > before:
                self._held.count -= 1
                self._lock.release()


def compile_once(dispatcher: Any, folder: Path, name: str) -> Any:
    """Have one process compile this function at a time; the others load it.

    Args:
        dispatcher: what ``numba.njit(cache=True)`` returns.
        folder: where its cache is.
        name: the function's, with its module's.
    """
    lock, said = (_lock_at(folder / f"{each}.lock") for each in (name, "said"))
    cache = _SharedCache(dispatcher._cache, lock, said)
    compile_it = dispatcher.compile

    def compile_or_load(signature: Any) -> Any:
        with cache.released():
            return compile_it(signature)

    dispatcher._cache = cache
    dispatcher.compile = compile_or_load
    return leave_terminal_alone(dispatcher)


def leave_terminal_alone(dispatcher: Any) -> Any:
    """What :func:`compile_once` does where there is no cache: see :func:`terminal_left_alone`."""
    dispatcher.compile = terminal_left_alone()(dispatcher.compile)
    return dispatcher


@functools.cache
def _lock_at(path: Path) -> FileLock:
    """One per file and process: functions of one name, which closures have, can then nest."""
    return FileLock(path)


@contextmanager
def terminal_left_alone() -> Iterator[None]:
    """Undo what Numba does to the end of the process while it compiles or loads.

    Numba makes the texts of errors that it handles itself, in color. With the first of them colorama
    arranges that the terminal's colors are reset at exit: a launcher gives each rank a terminal of its
    own, so every rank would end with ``ESC[0m``, in log files, too.
    """
    before = _resets_terminal()
    try:
        yield
    finally:
        if _resets_terminal() and not before:
            colorama: Any = sys.modules["colorama.initialise"]
            atexit.unregister(colorama.reset_all)
            colorama.atexit_done = False


def _resets_terminal() -> bool:
    return bool(getattr(sys.modules.get("colorama.initialise"), "atexit_done", False))
