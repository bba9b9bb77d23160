"""The last words of a rank: which one failed, and which ones only ended with it.

Launchers name the rank that they saw end first. When one rank raises, Horovod shuts down, the others
raise too, and any of them may be first. Sometimes they then wait for each other in MPI's own shutdown:
an alarm ends that.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import TracebackType

from horovod.common.exceptions import HorovodInternalError

SECONDS_TO_END = 10
"""For what runs at a process's exit, after an uncaught exception."""


def name_this_rank(rank: int) -> None:
    """Add a line with the rank to what Python prints of an uncaught exception; once a process.

    The process then has :data:`SECONDS_TO_END` to end by itself.
    """
    before = sys.excepthook
    if getattr(before, "names_rank", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        if not issubclass(kind, KeyboardInterrupt):
            print(last_words(rank, error), file=sys.stderr, flush=True)
            _end_soon()

    hook.names_rank = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _end_soon() -> None:
    """By the kernel, because Python may be gone while MPI still waits."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS_TO_END)


def last_words(rank: int, error: BaseException) -> str:
    """One line.

    Example:
        >>> last_words(1, ValueError("bad data"))
        'hvd_adaptive: rank 1 failed, and the others end with it: ValueError: bad data'
    """
    if isinstance(error, HorovodInternalError):
        return (
            f"hvd_adaptive: rank {rank} ends because another rank failed, ended or stalled: look for "
            'the line of the rank that "failed", for the launcher\'s "exited on signal", or for '
            'Horovod\'s "Missing ranks"'
        )
    return (
        f"hvd_adaptive: rank {rank} failed, and the others end with it: {type(error).__name__}: {error}"
    )
