"""The models, data and update rules of launch/train.py's presets, for benchmarks that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.resume import Position, StopVote
from launch.training import data, loop, models
from launch.training import options as command_line

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Preset:
    """What a training needs; Horovod must have started.

    Args:
        options: of train.py.
        model: initialized alike on all ranks.
        rule: the torch optimizer.
        task: the data.
        batches: of this rank.
    """

    options: command_line.TrainingOptions
    model: nn.Module
    rule: torch.optim.Optimizer
    task: data.Task
    batches: loop.Batches

    def forever(self) -> Iterator[Batch]:
        """This rank's batch of each step, without end."""
        for _, [batch] in self.batches.forever(Position()):
            yield batch

    def forever_of_all(self, ranks: int) -> Iterator[tuple[Batch, ...]]:
        """Each of ``ranks`` virtual ranks' batch of each step, without end."""
        size, seed = self.options.batch_size, self.options.seed
        shares = [loop.Batches(self.task.train, size, 1, seed, (rank, ranks)) for rank in range(ranks)]
        for every in zip(*(share.forever(Position()) for share in shares), strict=True):
            yield tuple(batch for _, [batch] in every)

    def set_rate(self, step: int, steps: int, ranks: int = 1, floor: float = 0.0) -> None:
        """The learning rate of a step, in a training of so many: warm-up, then the preset's schedule.

        As train.py does, more virtual ranks have a higher one where the preset says so.

        Args:
            step: from 0 on.
            steps: of the training.
            ranks: that are virtual.
            floor: share of the highest rate at which the schedule ends.
        """
        peak = self.options.lr * loop.learning_rate_scale(self.options.lr_scaling, ranks, 1, True)
        warmup = steps // 20
        rate = loop.learning_rate(step, steps, warmup, peak, self.options.lr_schedule)
        if step >= warmup:
            rate = floor * peak + (1.0 - floor) * rate
        for group in self.rule.param_groups:
            group["lr"] = rate

    def backward(self, batch: Batch) -> float:
        """Forward and backward pass; the loss."""
        inputs, targets = batch
        loss = loop.loss_of(self.model(inputs), targets)
        loss.backward()
        return loss.item()

    def score(self) -> dict[str, float]:
        """How good the model is on held-out data."""
        found = loop.evaluate(self.model, self.task, self.options.eval_examples, StopVote())
        assert found is not None, "the run was stopped"
        return found.scalars()

    def step(self, optimizer: Any, batch: Batch) -> None:
        """A step of Horovod's optimizer, or ours."""
        loop.train_step(self.model, optimizer, [batch], self.options.clip)

    def clip(self) -> None:
        """Clip the gradients, if the preset does."""
        if self.options.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)


def prepare(arguments: Sequence[str]) -> Preset:
    """Build what these arguments of train.py mean, without compression; ``--seed`` is 0 by default."""
    options = command_line.parse(["--seed", "0", *arguments])
    task = data.load(
        options.data,
        data.data_root(None),
        tokens=options.tokens,
        vocabulary=options.vocabulary,
        length=options.sequence_length,
    )
    torch.manual_seed(options.seed)
    sizes = models.Sizes(options.width, options.layers, options.heads, options.dropout)
    model = models.build(options.model, task.shape, task.classes, sizes)
    batches = loop.Batches(task.train, options.batch_size, 1, options.seed)
    rule = loop.make_update_rule(options, model)
    for group in rule.param_groups:
        group["lr"] = options.lr
    return Preset(options, model, rule, task, batches)
