"""What the bandwidth monitor is told, over real ranks: times of collectives, not of waiting."""

from __future__ import annotations

import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn
from workloads import make_model, ours

from hvd_adaptive.planning import Planner, StepFacts

STEPS = 12
LATE = 0.3


@pytest.mark.ranks(2, 4)
def test_the_time_for_which_ranks_wait_for_a_slow_one_is_its_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    observed: list[StepFacts] = []
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
        assert not observed  # the first rank plans for all
        return
    warm = observed[3:]
    computing = [facts.compute_seconds for facts in warm if facts.compute_seconds is not None]
    waited = [facts.seconds for facts in warm if facts.seconds is not None]
    slowest = [max(each.seconds for each in facts.transfers) for facts in warm if facts.transfers]
    assert len(computing) == len(waited) == len(slowest) == len(warm) > 4
    assert np.median(waited) > LATE
    assert np.median(computing) > 0.9 * LATE
    assert np.median(slowest) < 0.5 * LATE
