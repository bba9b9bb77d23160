"""The models, data and update rules of launch/train.py's presets, for benchmarks that train."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report  # noqa: F401 - before launch/, which has another module of this name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

import torch
from torch import Tensor, nn

import data
import models
import options as command_line
import training
from checkpoint import Position

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Preset:
    """What a training needs; Horovod must have started.

    Args:
        options: of train.py.
        model: initialised alike on all ranks.
        rule: the torch optimizer.
        batches: of this rank.
    """

    options: command_line.Options
    model: nn.Module
    rule: torch.optim.Optimizer
    batches: training.Batches

    def forever(self) -> Iterator[Batch]:
        """This rank's batch of each step, without end."""
        for _, [batch] in self.batches.forever(Position()):
            yield batch

    def set_rate(self, step: int, steps: int) -> None:
        """The learning rate of a step, in a training of so many: warm-up, then a cosine."""
        rate = training.learning_rate(step, steps, steps // 20, self.options.lr, "cosine")
        for group in self.rule.param_groups:
            group["lr"] = rate

    def backward(self, batch: Batch) -> None:
        """Forward and backward pass."""
        inputs, targets = batch
        training.loss_of(self.model(inputs), targets).backward()

    def clip(self) -> None:
        """Clip the gradients, if the preset does."""
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)


def prepare(arguments: Sequence[str], seed: int = 0) -> Preset:
    """Build what these arguments of train.py mean, without compression."""
    options = command_line.parse([*arguments, "--seed", str(seed)])
    task = data.load(
        options.data,
        None,
        tokens=options.tokens,
        vocabulary=options.vocabulary,
        length=options.sequence_length,
    )
    torch.manual_seed(seed)
    sizes = models.Sizes(options.width, options.layers, options.heads, options.dropout)
    model = models.build(options.model, task.shape, task.classes, sizes)
    batches = training.Batches(task.train, options.batch_size, 1, seed)
    return Preset(options, model, _rule(options, model), batches)


def _rule(options: command_line.Options, model: nn.Module) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.update == "adamw":
        return torch.optim.AdamW(model.parameters(), betas=(options.momentum, 0.999), **common)
    return torch.optim.SGD(model.parameters(), momentum=options.momentum, **common)
