"""Trains several optimizers side by side in an elastic run; tests/failures/test_elastic.py starts it.

Gradients depend on the step and the rank alone, and the optimizers are plain SGD. So what error
feedback promises can be checked to rounding: the weights, less the learning rate times the mean over
the ranks of what was not sent yet, are those of the optimizer that sends everything.

Usage: elastic_training.py FOLDER. Ends at a commit after FOLDER/end exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

import hvd_adaptive as hva
from hvd_adaptive.comm.world import current

FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()  # the tests import the options
RATE = 0.01
COMMIT_EVERY = 5
SECONDS_A_STEP = 0.05
SWITCH_AT = 10
"""The step before which `switched` gets another compression."""

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "topk": {"compression": "topk:density=0.02,values=fp32"},
    "two shots": {"compression": "topk:density=0.02,values=fp32", "scheme": "two_shot"},
    "powersgd": {"compression": "powersgd:rank=2"},
    "accordion": {"compression": "topk:density=0.02,values=fp32", "planner": "accordion:period=15"},
    "lgreco": {"compression": "topk:density=0.02,values=fp32", "planner": "lgreco:period=15"},
    "ef21": {"compression": "topk:density=0.02,values=fp32", "feedback": "ef21"},
    "ef21-sgdm": {"compression": "topk:density=0.02,values=fp32", "feedback": "ef21-sgdm"},
    "dgc": {"compression": "topk:density=0.02", "feedback": "dgc"},
    "alq": {"compression": "alq:bits=4,updates=5/20"},
    "switched": {"compression": "topk:density=0.02"},
}
EXACT = ("topk", "two shots", "powersgd", "accordion", "lgreco")
"""Those whose error feedback sends everything in the end."""
ESTIMATING = ("ef21", "ef21-sgdm")
"""Those that step with the mean of the ranks' estimates."""


def build() -> dict[str, tuple[torch.nn.Module, Any]]:
    """A model and its optimizer by name."""
    built = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 64)
        optimizer = hva.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE),
            named_parameters=[(f"{name}.{key}", each) for key, each in model.named_parameters()],
            telemetry=hva.Telemetry(str(FOLDER / name), every=2),
            **options,
        )
        built[name] = model, optimizer
    return built


def gradients(step: int) -> list[Tensor]:
    """Of this rank in this step."""
    generator = torch.Generator().manual_seed(1_000 * step + hvd.rank())
    return [torch.randn(64, 64, generator=generator), torch.randn(64, generator=generator)]


def flat(tensors: Any) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def kept(model: torch.nn.Module, optimizer: Any, name: str, slot: str) -> Tensor:
    """What this rank has kept of the model; zeros where it has nothing."""
    state = optimizer.compression_state_dict()
    found = []
    for key, each in model.named_parameters():
        slots, pieces = state["kept"].get(f"{name}.{key}", {}), state["owned"].get(f"{name}.{key}", ())
        held = slots.get(slot, torch.zeros_like(each)).detach().float().reshape(-1).clone()
        for start, piece in pieces if slot == "residual" else ():
            held[start : start + piece.numel()] += piece
        found.append(held)
    return flat(found)


def mean(tensor: Tensor, name: str) -> Tensor:
    result: Tensor = hvd.allreduce(tensor, op=hvd.Average, name=name)
    return result


def ledger(built: dict[str, tuple[torch.nn.Module, Any]]) -> dict[str, float]:
    """How far each optimizer is from what it promises; collective."""
    dense = flat(built["none"][0].parameters())
    off = {}
    for name in EXACT:
        model, optimizer = built[name]
        unsent = mean(kept(model, optimizer, name, "residual"), f"unsent.{name}")
        off[name] = float((flat(model.parameters()) - RATE * unsent - dense).abs().max())
    for name in ESTIMATING:
        model, optimizer = built[name]
        estimates = mean(kept(model, optimizer, name, "estimate"), f"estimates.{name}")
        off[name] = float((kept(model, optimizer, name, "mean") + estimates).abs().max())
    return off


def learned(optimizer: Any) -> list[float]:
    """The tables of ALQ and the factors of PowerSGD, as numbers."""
    codecs = optimizer.compression_state_dict()["codecs"].values()
    values = [each.get("levels", each).values() for each in codecs]
    return [float(tensor.double().sum()) for some in values for tensor in some]


def write(what: str, **fields: Any) -> None:
    place = {"host": os.environ["HOROVOD_HOSTNAME"], "rank": hvd.rank(), "size": hvd.size()}
    line = {"what": what, **place, **fields}
    with (FOLDER / f"rank-{os.getpid()}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def train(state: Any, built: dict[str, tuple[torch.nn.Module, Any]]) -> None:
    # a checkpoint here must not wait for what was under way among the ranks of before
    rounds = {optimizer.compression_state_dict()["rounds"] for _, optimizer in built.values()}
    write("begin", step=state.step, rounds=sorted(rounds))
    while True:
        grads = gradients(state.step)
        if state.step == SWITCH_AT:
            built["switched"][1].set_compression("qsgd:bits=4")
        for model, optimizer in built.values():
            optimizer.zero_grad()
            parameters = list(model.parameters())
            loss = sum((each * grad).sum() for each, grad in zip(parameters, grads, strict=True))
            assert isinstance(loss, Tensor)
            loss.backward()
            optimizer.step()
        state.step += 1
        time.sleep(SECONDS_A_STEP)
        fail = FOLDER / "fail"
        if state.step % COMMIT_EVERY == 3 and hvd.broadcast_object(fail.exists(), 0, name="fail"):
            fail.unlink(missing_ok=True)
            write("fails", step=state.step)
            raise hvd.HorovodInternalError("as if the network had failed")
        if state.step % COMMIT_EVERY:
            continue
        write("commit", step=state.step, off=ledger(built))
        if hvd.broadcast_object((FOLDER / "end").exists(), 0, name="end"):
            return
        state.commit()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    assert current().is_elastic
    built = build()
    models = {f"{name}_model": model for name, (model, _) in built.items()}
    optimizers = {f"{name}_optimizer": optimizer for name, (_, optimizer) in built.items()}
    state = hvd.elastic.TorchState(**models, **optimizers, step=0)
    write("built", step=0)
    hvd.elastic.run(train)(state, built)
    for name, (model, optimizer) in built.items():
        mine = flat([*model.parameters(), torch.tensor(learned(optimizer))])
        everyone = hvd.allgather(mine[None], name=f"end.{name}")
        plans = hvd.allgather_object(optimizer.plan.digest, name=f"plan.{name}")
        equal = bool((everyone == everyone[0]).all()) and len(set(plans)) == 1
        moved = float((everyone[0][:10]).abs().sum())
        write("end", step=state.step, name=name, equal=equal, moved=moved)


if __name__ == "__main__":
    main()
