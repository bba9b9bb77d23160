"""A test that hangs between two that pass, for tests/harness/test_harness.py."""

from __future__ import annotations

import horovod.torch as hvd
import torch


def test_before() -> None:
    hvd.allreduce(torch.ones(1), name="before")


def test_rank_0_waits_for_a_collective_that_the_others_never_join() -> None:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1), name="alone")
    else:
        raise AssertionError("did not join")


def test_after() -> None:
    hvd.allreduce(torch.ones(1), name="after")
