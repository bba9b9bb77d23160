"""Four ranks on two nodes, of which the last runs out of data: ``joining_rank.py STEPS``."""

from __future__ import annotations

import os
import sys


def train(steps: int) -> None:
    """Steps of all ranks, and then one of all but the last, which joins."""
    import horovod.torch as hvd
    import torch

    import hvd_adaptive as hva
    from hvd_adaptive.comm.topology import NODE_VARIABLE
    from tests.harness.eager import without_compiler

    without_compiler()
    os.environ[NODE_VARIABLE] = f"node{int(os.environ['OMPI_COMM_WORLD_RANK']) // 2}"
    hva.init(hierarchical=True)
    model = torch.nn.Linear(64, 64)
    optimizer = hva.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression="topk:density=0.1",
        scheme="hierarchical",
    )
    last = hvd.rank() == hvd.size() - 1
    for _ in range(steps + (not last)):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    hvd.join()


if __name__ == "__main__":
    train(int(sys.argv[1]))
