"""Lightning's trainer with compressed gradients, as docs/torchrun.md shows it."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_adaptive as hva
from tests.torch_distributed.trainers.report import report


class CompressedDDP(DDPStrategy):
    def __init__(self, compression, **options):
        super().__init__(**options)
        self.compression = compression

    def setup(self, trainer):
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel):  # while it fits
            self.hook = hva.ddp_comm_hook(self.model, self.compression, optimizer=self.optimizers[0])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = (self.layers(batch[0]) - batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(128, 64))
    strategy = CompressedDDP("topk:density=0.05", process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, 8))
    report(module, strategy.hook)


if __name__ == "__main__":
    main()
