"""Accelerate's loop with compressed gradients, as docs/torchrun.md shows it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

import hvd_adaptive as hva
from tests.torch_distributed.trainers.report import report


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(128, 64), 8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    hook = hva.ddp_comm_hook(model, "topk:density=0.05", optimizer=optimizer)
    for inputs in data:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    report(model, hook)


if __name__ == "__main__":
    main()
