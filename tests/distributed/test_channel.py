"""The decision path's own messages, over MPI and over Horovod."""

from __future__ import annotations

import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import Channel, HorovodChannel, MpiChannel, open_channel

KINDS = ["mpi", "horovod"]


def make(kind: str, process_set: hvd.ProcessSet = hvd.global_process_set) -> Channel:
    return MpiChannel(process_set) if kind == "mpi" else HorovodChannel("test.channel", process_set)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_means_and_minima_are_over_all_ranks(kind: str) -> None:
    channel, size, rank = make(kind), hvd.size(), hvd.rank()
    mine = np.array([rank, -rank, 1e-3], np.float64)
    mean, least = channel.mean(mine), channel.least(mine)
    # what is under way does not look at what became of the input
    np.testing.assert_allclose(mean(), [(size - 1) / 2, -(size - 1) / 2, 1e-3])
    np.testing.assert_allclose(least(), [0, 1 - size, 1e-3])
    assert mine.tolist() == [rank, -rank, 1e-3]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_rank_gets_the_rows_of_all(kind: str, count: int) -> None:
    pending = make(kind).gather(np.full(count, hvd.rank(), np.float64))
    assert pending().tolist() == [[rank] * count for rank in range(hvd.size())]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("message", ["", "a plan", "é" * 100_000])
def test_rank_0s_message_reaches_all(kind: str, message: str) -> None:
    channel = make(kind)
    assert channel.broadcast(message if hvd.rank() == 0 else "not this") == message


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_reductions_continue_while_gradients_travel(kind: str) -> None:
    channel = make(kind)
    for step in range(30):
        handle = hvd.allreduce_async(torch.ones(1000), op=hvd.Sum, name=f"test.gradient.{step}")
        pending = channel.mean(np.full(50, hvd.rank() + step, np.float64))
        if hvd.rank() == step % hvd.size():
            time.sleep(0.002)
        assert hvd.synchronize(handle)[0] == hvd.size()
        np.testing.assert_allclose(pending(), (hvd.size() - 1) / 2 + step)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_some_ranks_can_have_one_of_their_own(kind: str) -> None:
    mine = [0, 2] if hvd.rank() % 2 == 0 else [1, 3]
    even, odd = (hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3]))
    try:
        channel = make(kind, even if hvd.rank() % 2 == 0 else odd)
        assert channel.mean(np.array([float(hvd.rank())]))()[0] == sum(mine) / 2
        assert channel.broadcast(str(hvd.rank())) == str(mine[0])
    finally:
        hvd.remove_process_set(even)
        hvd.remove_process_set(odd)


@pytest.mark.ranks(2)
def test_mpi_is_used_where_all_ranks_have_it() -> None:
    channel = open_channel("test.open", Control("test.open.control"))
    assert channel.name == ("mpi4py" if hvd.mpi_enabled() else "horovod")
