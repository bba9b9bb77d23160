"""A rank that dies in a test, for tests/harness/test_harness.py."""

from __future__ import annotations

import os
import signal

import horovod.torch as hvd
import torch


def test_rank_1_is_killed() -> None:
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(1), name="alone")


def test_after() -> None:
    hvd.allreduce(torch.ones(1), name="after")
