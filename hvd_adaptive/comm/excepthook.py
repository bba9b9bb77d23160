"""The last words of a rank: which one failed, and which ones only ended with it.

Launchers name the rank that they saw end first. When one rank raises, Horovod shuts down or connections
close, the others raise too, and any of them may be first. So the rank that failed prints its traceback
and says that it failed; the others print one line. Sometimes ranks then wait for each other in MPI's
own shutdown: timers end that.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from hvd_adaptive.comm import watchdog
from hvd_adaptive.comm.failure import LostRankError, means_lost_rank, teller_of

SECONDS_TO_END: Final = 10
"""For what runs at a process's exit, after an uncaught exception."""
CONSEQUENCE: Final = re.compile("Horovod has been shut down|gloo/transport")
"""What Horovod says where another rank is gone; else it says what was wrong."""


def name_this_rank(rank: int) -> None:
    """Let what Python prints of an uncaught exception say which rank failed.

    One rank prints a traceback, in one piece, and then a line; the others a line. The process then has
    :data:`SECONDS_TO_END` to end by itself.
    """
    if isinstance(sys.excepthook, _LastWords):
        sys.excepthook.rank = rank
    else:
        sys.excepthook = _LastWords(sys.excepthook, rank)


class _LastWords:
    """Python calls it with an exception that nobody caught."""

    def __init__(self, before: Callable[..., Any], rank: int) -> None:
        self._before = before
        self.rank = rank

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            self._before(kind, error, trace)
            return
        words, in_full = last_words(self.rank, error)
        if self._before is not sys.__excepthook__ and not _is_torchs(self._before):
            self._before(kind, error, trace)  # somebody else's, who wants to know of every one
        elif in_full:
            words = "".join(traceback.format_exception(kind, error, trace)) + words
        watchdog.say(words)
        if threading.current_thread() is threading.main_thread():
            _end_soon()


def _is_torchs(hook: Callable[..., Any]) -> bool:
    """Whether torch.distributed set it, to write the rank before each line of a traceback."""
    return getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d"


def last_words(rank: int, error: BaseException) -> tuple[str, bool]:
    """What a rank that fails says, and whether its traceback is worth to be seen.

    Example:
        >>> last_words(1, ValueError("bad data"))
        ('hvd_adaptive: rank 1 failed, and the others end with it: ValueError: bad data\\n', True)
    """
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    this = f"hvd_adaptive: rank {rank}"
    if means_lost_rank(error):
        event = watchdog.why()
        if event is not None and event.rank != rank:
            return f"{this} ends because rank {event.rank} {event.what}\n", False
        if isinstance(error, LostRankError):
            return (
                f"{this} ends because another rank failed, ended or was killed, or did not answer in "
                'time: look for the line of the rank that "failed", or for torchrun\'s "Root Cause". '
                f"torch.distributed only says: {error.__cause__}\n"
            ), False
        if CONSEQUENCE.search(str(error)):
            return (
                f"{this} ends because another rank failed, ended, stalled or was killed: look for the "
                'line of the rank that "failed", for the launcher\'s "exited on signal", or for '
                f'Horovod\'s "Missing ranks". Horovod only says: {what}\n'
            ), False
    teller = teller_of(error)
    event = watchdog.failed(what)
    if teller is None and event is not None and event.rank != rank:
        teller = f"rank {event.rank}"
    if teller:
        return f"{this} failed as well as {teller}, which says more: {what}\n", False
    return f"{this} failed, and the others end with it: {what}\n", True


def _end_soon() -> None:
    """As a failure, also where Python is held up, or gone while MPI still waits."""
    sys.stdout.flush()
    gc.freeze()  # to look through all that lives, once more, takes seconds where cores are busy
    # No thread of Python's, so it continues while Python ends; after that the kernel's alarm is left.
    faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS_TO_END + 2)
