"""What the bandwidth monitor is told, over real ranks: times of collectives, not of waiting."""

from __future__ import annotations

import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from hvd_adaptive.adaptation.timing import CollectiveTiming, rank_times, with_transfers
from hvd_adaptive.planning import Planner, StepMeasurements
from tests.distributed.workloads import make_model, ours

STEPS = 12
LATE = 0.3


@pytest.mark.ranks(2, 4)
def test_the_time_for_which_ranks_wait_for_a_slow_one_is_its_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observed: list[StepMeasurements] = []
    monkeypatch.setattr(Planner, "observe", lambda planner, facts: observed.append(facts))
    model = make_model(lambda: nn.Linear(256, 256))
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.05",
        planner="kimad:seconds=0.5",
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 256)).square().mean()
        if hvd.rank() == hvd.size() - 1:
            time.sleep(LATE)
        loss.backward()
        optimizer.step()
    if hvd.rank():
        assert not observed  # rank 0 plans for all
        return
    warm = observed[3:]
    computing = [facts.compute_seconds for facts in warm if facts.compute_seconds is not None]
    waited = [facts.seconds for facts in warm if facts.seconds is not None]
    # a collective that is over before the slow rank waits for it is not known
    known = [transfer.seconds for facts in warm for transfer in facts.transfers]
    assert len(computing) == len(waited) == len(warm) > 4
    assert np.median(waited) > LATE
    assert np.median(computing) > 0.9 * LATE
    assert np.median(known or [0.0]) < 0.5 * LATE


@pytest.mark.ranks(2)
def test_what_only_the_waiting_ranks_know_is_not_known() -> None:
    def told(*ranks: tuple[float, list[CollectiveTiming]]) -> StepMeasurements:
        vectors = [rank_times(computing, timings) for computing, timings in ranks]
        return with_transfers(StepMeasurements(0), [100, 50], np.min(vectors, axis=0))

    early = [CollectiveTiming(0, 100, 0.0, 1.0, 0.9), CollectiveTiming(1, 50, 0.1, 1.2, 0.2)]
    late = [CollectiveTiming(0, 100, 0.7, 1.0, 0.25), CollectiveTiming(1, 50, 0.8, 1.2, 0.2)]
    busy = [CollectiveTiming(0, 100, 0.7, 1.0, 0.05), CollectiveTiming(1, 50, 0.8, 1.2, 0.05)]
    known = told((0.1, early), (0.7, late))
    assert known.compute_seconds == 0.7
    assert [(each.nbytes, each.seconds) for each in known.transfers] == [(150, pytest.approx(0.5))]
    # the first was waiting for the late rank, the second was not
    rest = told((0.1, early), (0.7, busy)).transfers
    assert [(each.nbytes, each.seconds) for each in rest] == [(50, pytest.approx(0.2))]
    assert not told((0.1, []), (0.7, [])).transfers
