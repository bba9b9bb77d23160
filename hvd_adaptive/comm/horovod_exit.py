"""Lets other ranks finish their last step before Horovod ends for all.

Horovod ends on all ranks as soon as one leaves, and MPI with it. Its operation among all of them ends
for all at about the same time, but one inside a node says nothing of the others: the first node that
has its last step may leave while another one still gathers its own. And so may a rank that has a mean
or a message of mpi4py's while another one, held up, has not looked for its own.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import Final

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_adaptive.comm.failure import has_failed

SECONDS: Final = 10.0
"""For all ranks to leave. What they still gather takes less; a rank that trains on never comes, and
waits for this one meanwhile."""
NAP: Final = 1e-3
"""Seconds between two looks at whether all are there."""
NAME: Final = "hvd_adaptive: ranks that leave wait for the others"
"""Of the operation: where a rank is missing, Horovod's report of stalls shows it."""


def leave_together() -> None:
    """When this process ends, wait for the other ranks first; all ranks of Horovod call it.

    Not after an uncaught exception, which ends all ranks at once, and not after ``hvd.shutdown()``.
    Called again, it still waits once.
    """
    # Called before what was registered before it: while Horovod runs, and the watchdog looks after it.
    atexit.unregister(wait_for_all)
    atexit.register(wait_for_all, os.getpid())


def wait_for_all(process: int) -> None:
    """Wait until all ranks leave, but no longer than :data:`SECONDS`.

    Args:
        process: that is a rank; one that was forked from it waits for nobody.
    """
    if has_failed() or os.getpid() != process or not hvd.is_initialized():
        return
    try:
        handle = hvd.allreduce_async(torch.zeros(1), name=NAME)
        last = time.monotonic() + SECONDS
        while not hvd.poll(handle) and time.monotonic() < last:
            time.sleep(NAP)
    except HorovodInternalError:
        pass  # another rank ended all of them; that one, or the launcher, says why
