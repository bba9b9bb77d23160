"""Hugging Face's Trainer with compressed gradients, as docs/torchrun.md shows it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hvd_adaptive as hva
from tests.torch_distributed.trainers.report import report


class CompressedGradients(TrainerCallback):
    def __init__(self, trainer, compression):
        self.trainer, self.compression = trainer, compression

    def on_train_begin(self, args, state, control, **kwargs):
        self.hook = hva.ddp_comm_hook(
            self.trainer.model_wrapped, self.compression, optimizer=self.trainer.optimizer
        )


def rows() -> list[dict[str, Any]]:
    words = torch.randint(100, (64, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": int(row[0]) % 2} for row in words]


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", max_steps=4, per_device_train_batch_size=8,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows())
        callback = CompressedGradients(trainer, "topk:density=0.05")
        trainer.add_callback(callback)
        trainer.train()
        report(trainer.model, callback.hook)


if __name__ == "__main__":
    main()
