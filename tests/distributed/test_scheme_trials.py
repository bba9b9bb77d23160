"""scheme="auto" over real ranks: schemes are tried in turn, and all ranks keep the same one."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from hvd_adaptive.engine import scheme_choice
from hvd_adaptive.engine.scheme_trial import SchemeTrial
from tests.distributed.workloads import make_model, ours

STEPS = 24


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("spec", ["qsgd:bits=8", "topk:density=0.1"])
def test_all_ranks_try_alike_and_keep_what_rank_0_found_faster(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheme_choice, "CLOSE", 1e9)  # whatever this machine's network is like
    found = (
        {"allgather": 0.0, "two_shot": 1.0} if hvd.rank() == 0 else {"allgather": 1.0, "two_shot": 0.0}
    )
    monkeypatch.setattr(SchemeTrial, "excess", lambda self: found)
    model = make_model(lambda: nn.Linear(64, 512, bias=False))
    optimizer = ours(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=spec,
        scheme="auto",
    )
    start, sent = model.weight.detach().clone(), torch.zeros_like(model.weight)
    schemes = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        gradient = torch.randn(model.weight.shape, generator=generator)
        sent += gradient
        model.weight.grad = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
        schemes.append(next(iter(optimizer.plan)).scheme)
    reasons = hvd.allgather_object((schemes, optimizer.plan.reasons))
    assert all(each[0] == schemes for each in reasons)
    assert schemes == ["allgather"] * 3 + ["two_shot"] * 8 + ["allgather"] * 13
    assert any("tried here: allgather" in reason for reason in reasons[0][1])
    # nothing was lost from one scheme to the next: what has not arrived waits in residuals
    moved = hvd.allreduce(sent, op=hvd.Average, name="sent") - (start - model.weight.detach())
    kept = optimizer.compression_state_dict()["kept"]
    waiting = sum(slots.get("residual", torch.zeros(1)) for slots in kept.values())
    if spec.startswith("topk"):
        mean = hvd.allreduce(waiting.reshape_as(moved), op=hvd.Average, name="waiting")
        torch.testing.assert_close(moved, mean, atol=1e-3, rtol=0.0)
    else:
        assert moved.norm() < 0.1 * sent.norm()
