"""One rank of a run that tests start: trains small models, and says how it went.

Usage: training_rank.py LIBRARY FOLDER CASE [CASE ...], under torchrun (``torch``: without Horovod and
mpi4py, which cannot be imported) or horovodrun (``horovod``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

LIBRARY, FOLDER = sys.argv[1], Path(sys.argv[2])
if LIBRARY == "torch":
    sys.modules["horovod"] = sys.modules["mpi4py"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import hvd_adaptive as hva  # noqa: E402
from hvd_adaptive.comm.request import Request  # noqa: E402
from hvd_adaptive.comm.topology import NODE_VARIABLE  # noqa: E402
from tests.harness.eager import without_compiler  # noqa: E402

STEPS = 5
SPECS = {
    "none": {"compression": "none"},
    "fp16": {"compression": "fp16"},
    "predivided": {"compression": "none", "gradient_predivide_factor": 3.0},
    "sum": {"compression": "topk:density=0.05", "op": 1},
    "topk": {"compression": "topk:density=0.05"},
    "huffman": {"compression": "qsgd:bits=4,coding=huffman"},
    "two_shot": {"compression": "qsgd:bits=4", "scheme": "two_shot"},
    "two_shot_sparse": {"compression": "topk:density=0.05", "scheme": "two_shot"},
    "hierarchical": {"compression": "qsgd:bits=4", "scheme": "hierarchical"},
    "cast_two_shot": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd:rank=2"},
    "randomk": {"compression": "randomk:density=0.2"},
    "ef21": {"compression": "topk:density=0.05", "feedback": "ef21"},
    "sparse": {"compression": "topk:density=0.05", "sparse": True},
}
PLANNED: dict[str, dict[str, Any]] = {
    "lgreco": {"compression": "topk:density=0.05", "planner": "lgreco:period=3"},
    "kimad": {"compression": "topk:density=0.05", "planner": "kimad:seconds=0.001"},
    "auto": {"compression": "auto"},
}


class Model(nn.Module):
    """Layers of several buckets; those under 1,024 elements, which are summed, only with two ranks."""

    def __init__(self, biases: bool, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 64, sparse=sparse)
        self.layers = nn.Sequential(
            nn.Linear(64, 96, bias=biases), nn.Tanh(), nn.Linear(96, 64, bias=biases)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(self.words(words))
        return result


def build(ranks: int, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    options = dict(options)
    sparse = options.pop("sparse", False)
    torch.manual_seed(0)
    model = Model(ranks == 2, sparse)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if sparse else 0.9)
    optimizer = hva.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), bucket_cap_mb=0.02, **options
    )
    return model, optimizer


def step(model: nn.Module, optimizer: Any, words: torch.Tensor, spoiled: bool = False) -> None:
    optimizer.zero_grad()
    loss = model(words).square().mean()
    (loss * float("nan") if spoiled else loss).backward()
    optimizer.step()


def words_of(rank: int, number: int) -> torch.Tensor:
    return torch.randint(64, (16,), generator=torch.Generator().manual_seed(100 * rank + number))


def digest(model: nn.Module) -> str:
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()


def parity(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """The weights after some steps."""
    model, optimizer = build(ranks, options)
    for number in range(STEPS):
        if LIBRARY == "horovod" and number == STEPS - 1 and rank == ranks - 1:
            gather_late_in_the_node()
        step(model, optimizer, words_of(rank, number))
    return digest(model)


def gather_late_in_the_node() -> None:
    """The other node has its last step before: Horovod must not end with it."""
    from hvd_adaptive.comm.horovod_transport import HorovodTransport

    submit = HorovodTransport.submit

    def late(self: HorovodTransport, request: Request, name: str, number: int) -> Any:
        if (request.group, request.operation) == ("node", "allgather"):
            time.sleep(0.2)
        return submit(self, request, name, number)

    HorovodTransport.submit = late  # type: ignore[method-assign]


def planned(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """The weights, and which version of the plan they ended with."""
    model, optimizer = build(ranks, options)
    for number in range(24):
        step(model, optimizer, words_of(rank, number))
    return [digest(model), optimizer.plan.version, str(optimizer.plan)]


def resumed(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """The weights of a run, and of one that was continued from its middle."""
    model, optimizer = build(ranks, options)
    for number in range(3):
        step(model, optimizer, words_of(rank, number))
    states = model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()
    torch.save(states, FOLDER / f"checkpoint{rank}.pt")
    for number in range(3, 6):
        step(model, optimizer, words_of(rank, number))
    whole = digest(model)
    model, optimizer = build(ranks, options)
    weights, of_sgd, of_compression = torch.load(FOLDER / f"checkpoint{rank}.pt")
    model.load_state_dict(weights)
    optimizer.load_state_dict(of_sgd)
    optimizer.load_compression_state_dict(of_compression)
    for number in range(3, 6):
        step(model, optimizer, words_of(rank, number))
    return [whole, digest(model)]


def spoiled(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """Whether gradients are finite in a step in which rank 1's are not, and in the next one."""
    model, optimizer = build(ranks, options)
    found = []
    for number in range(3):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        step(model, optimizer, words_of(rank, number), number == 1 and rank == 1)
        found.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))  # type: ignore[union-attr]
        if not found[-1]:
            for parameter, before in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(before)
            optimizer.state.clear()
    return [found, digest(model)]


def subset(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """The weights of ranks that reduce among the first two only."""
    import torch.distributed as dist

    return parity(rank, 2, {**options, "process_set": dist.new_group([0, 1])})


def hooked(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """The weights of DDP with our hook, and of our optimizer; and what the hook kept."""
    model, optimizer = build(ranks, options)
    for number in range(STEPS):
        step(model, optimizer, words_of(rank, number))
    torch.manual_seed(0)
    other = Model(ranks == 2, sparse=False)
    ddp = nn.parallel.DistributedDataParallel(other, bucket_cap_mb=0.02)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    hook = hva.ddp_comm_hook(ddp, optimizer=sgd, bucket_cap_mb=0.02, **options)
    for number in range(STEPS):
        step(ddp, sgd, words_of(rank, number))
    return [digest(model), digest(other), hook.feedback_bytes, hook.meter.summary().steps > 0]


def refused(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """What is said of arguments that differ, or that torch.distributed has not."""
    wrong = [{"compression": ("topk", "qsgd")[rank % 2]}, {"op": 2}, {"process_set": [0]}]
    said = []
    for each in wrong:
        try:
            build(ranks, each)
        except (ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def channel(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """What planners tell each other."""
    from hvd_adaptive.comm.torch_channel import TorchChannel
    from hvd_adaptive.comm.torch_ranks import TorchRanks

    numbers = TorchChannel("test", TorchRanks.everyone())
    mine = np.array([rank, -rank, 1e-3])
    pending = [numbers.mean(mine), numbers.least(mine), numbers.gather(mine)]
    mine[:] = 9.0  # what is under way does not look at what became of the input
    nothing = numbers.gather(np.empty(0))().shape
    texts = numbers.exchange("é\n" * (1 + 1000 * rank)), numbers.broadcast("first" if rank == 0 else "")
    return [*(each().tolist() for each in pending), list(nothing), *texts]


def without_store(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """What ranks gather by groups that find each other as where MPI has started the ranks."""
    from hvd_adaptive.comm import torch_ranks
    from hvd_adaptive.comm.torch_operations import Groups

    c10d: Any = torch_ranks.distributed_c10d
    found, c10d._get_default_store = c10d._get_default_store, lambda: None
    try:
        torch_ranks.meet()
        everyone = torch_ranks.TorchRanks.everyone()
        return Groups(ranks, everyone.group("test")).gather(torch.full((rank,), rank)).tolist()
    finally:
        c10d._get_default_store = found


def dies(rank: int, ranks: int, options: dict[str, Any]) -> Any:
    """Rank 1 ends in the middle of training; the others must not wait for it."""
    model, optimizer = build(ranks, options)
    for number in range(4):
        if rank == 1 and number == 2:
            raise ZeroDivisionError("as if a disk had failed")
        step(model, optimizer, words_of(rank, number))
    raise AssertionError("training went on without rank 1")


KINDS = {
    each.__name__: each
    for each in (
        parity, planned, resumed, spoiled, subset, hooked, refused, channel, without_store, dies,
    )
}  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
    os.environ[NODE_VARIABLE] = f"node{local // 2}"
    hva.init(**({"hierarchical": True} if LIBRARY == "horovod" else {}))
    if LIBRARY == "torch":
        import torch.distributed as ranks

        rank, size = ranks.get_rank(), ranks.get_world_size()
    else:
        import horovod.torch as hvd

        without_compiler()
        rank, size = hvd.rank(), hvd.size()
    results = {}
    for case in sys.argv[3:]:
        kind, _, name = case.partition(":")
        results[case] = KINDS[kind](rank, size, {**SPECS, **PLANNED}.get(name, {}))
    (FOLDER / f"{LIBRARY}{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
