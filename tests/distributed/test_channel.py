"""The decision path's own messages, over MPI and over Horovod."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvd_adaptive.comm.control_channel import Channel, ChannelControl
from hvd_adaptive.comm.horovod_channel import (
    HorovodChannel,
    MpiChannel,
    open_channel,
)
from hvd_adaptive.comm.process_set_control import ProcessSetControl
from tests.distributed.workloads import ours

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


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_any_length_reach_all(kind: str) -> None:
    texts = ["é" * 70_000, "", "short", "{}"][: hvd.size()]
    channel = make(kind)
    for _ in range(3):
        assert channel.exchange(texts[hvd.rank()]) == texts
    agreement = ChannelControl(ProcessSetControl("test.agreement"), lambda: channel)
    assert agreement.allgather({"rank": hvd.rank()}) == [{"rank": rank} for rank in range(hvd.size())]
    assert agreement.decide(lambda: [hvd.rank(), "built"]) == [0, "built"]
    with pytest.raises(ValueError, match="nothing there" if hvd.rank() == 0 else "") as caught:
        agreement.agree("a test", lambda: refuse() if hvd.rank() == 0 else 1, lambda _: {})
    assert "nothing there" in str(caught.value)


def refuse() -> int:
    raise ValueError("nothing there")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "alq:bits=3,updates=2/4"},
        {"compression": "topk:density=0.05", "planner": "lgreco:period=4"},
    ],
    ids=["levels", "plans"],
)
def test_what_is_learned_and_planned_takes_no_place_in_horovods_order(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    gather = hvd.allgather

    def watched(tensor: torch.Tensor, name: str | None = None, **more: Any) -> torch.Tensor:
        names.append(str(name))
        return gather(tensor, name=name, **more)

    model = torch.nn.Linear(64, 64)
    optimizer = ours(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    said: list[str] = []
    exchange = MpiChannel.exchange

    def listened(self: MpiChannel, message: str) -> list[str]:
        said.append(message)
        return exchange(self, message)

    monkeypatch.setattr(MpiChannel, "exchange", listened)
    least = 1 if "planner" in options else 2
    for step in range(2000):
        if step == 1:  # layers are agreed upon in the first step, and the channel is opened in one
            monkeypatch.setattr(hvd, "allgather", watched)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        # a plan is made beside the steps: where these take a millisecond, it comes some dozens later
        heard = hvd.allreduce(
            torch.tensor(float(len(said) >= least)), op=hvd.Sum, name=f"test.heard.{step}"
        )
        if step >= 11 and heard == hvd.size():
            break
    opened = [name for name in names if name.endswith(".control")]
    assert len(said) >= least
    assert len(opened) <= ("planner" not in options)


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
    channel = open_channel("test.open", ProcessSetControl("test.open.control"))
    assert channel.name == ("mpi4py" if hvd.mpi_enabled() else "horovod")
