"""The pieces of a training loop: batches of this rank, the learning rate, one step, one evaluation."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from hvd_adaptive.resume import Position, StopVote

from .data import Batch, Images, Task, Windows
from .options import TrainingOptions

# Steps that a mean leaves out: kernels compile and buffers are allocated in them.
WARM_UP_STEPS = 6


@contextmanager
def spared_from_collection() -> Iterator[None]:
    """Python's garbage collector does not look at what has been made by now.

    Modules, model and optimizer live to the end; looking through them takes 0.1 to 0.2 s of some step,
    for which all ranks wait. In a script of your own: gc.collect(); gc.freeze() before the loop.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Batches:
    """This rank's share of the training data, shuffled again in each epoch, alike in each run.

    Args:
        dataset: all of the training data.
        batch_size: examples of one backward pass.
        passes: backward passes in one step.
        seed: of the order; the same on all ranks.
        place: whose share it is: rank and number of ranks; None for this process's among Horovod's.
    """

    def __init__(
        self,
        dataset: Images | Windows,
        batch_size: int,
        passes: int,
        seed: int,
        place: tuple[int, int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.passes = passes
        rank, ranks = (hvd.rank(), hvd.size()) if place is None else place
        # Equal shares: every rank must take part in every step.
        self.sampler: DistributedSampler[int] = DistributedSampler(
            dataset,
            num_replicas=ranks,
            rank=rank,
            seed=seed,
            drop_last=True,
        )
        self.order = BatchSampler(self.sampler, batch_size, drop_last=True)
        self.steps_per_epoch = len(self.order) // passes

    def forever(self, position: Position) -> Iterator[tuple[Position, list[Batch]]]:
        """Where the run stands, and the batches of its next step; from `position` on, without end.

        No DataLoader: it draws from the default generator whenever it starts an epoch, and a run that
        resumes within an epoch would then drop out other activations than one that never stopped.
        """
        step, epoch, done = position.step, position.epoch, position.step_in_epoch
        while True:
            self.sampler.set_epoch(epoch)
            order = list(self.order)
            for number in range(done, self.steps_per_epoch):
                first = number * self.passes
                parts = [self.dataset[chosen] for chosen in order[first : first + self.passes]]
                yield Position(step, epoch, number), parts
                step += 1
            epoch, done = epoch + 1, 0


def learning_rate(step: int, total: int, warmup: int, peak: float, schedule: str) -> float:
    """Of step `step` (from 0): a linear rise to `peak`, then as the schedule says.

    ``cosine`` falls to 0; ``step`` is a tenth of the peak from half of the steps on, and a hundredth
    from three quarters; ``constant`` stays.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "step":
        return peak * 0.1 ** ((2 * step >= total) + (4 * step >= 3 * total))
    done = (step - warmup) / max(1, total - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def learning_rate_scale(rule: str, ranks: int, passes: int, averaged: bool) -> float:
    """How much larger the learning rate is than for one rank and one pass.

    Where gradients are summed and not averaged, they have grown by the number of ranks already.
    """
    batches = passes * (ranks if averaged else 1)
    return {"linear": float(batches), "sqrt": math.sqrt(batches), "none": 1.0}[rule]


def make_update_rule(options: TrainingOptions, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer. Its rate is 0 until the first step sets it: to give each rank the same
    state, broadcast_optimizer_state takes a step with zero gradients, which must move nothing."""
    if options.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(),
            lr=0.0,
            betas=(options.momentum, 0.999),
            weight_decay=options.weight_decay,
        )
    return torch.optim.SGD(
        model.parameters(), lr=0.0, momentum=options.momentum, weight_decay=options.weight_decay
    )


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def train_step(model: nn.Module, optimizer: Any, parts: Sequence[Batch], clip: float) -> float:
    """One optimizer step on this rank's batches.

    Returns:
        Their mean loss, on this rank alone.
    """
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in parts:
        # Horovod adds up the gradients of several passes and does not divide.
        loss = loss_of(model(inputs), targets) / len(parts)
        loss.backward()
        total += loss.item()
    if clip:
        # The norm that counts is that of the averaged gradient, so it must have arrived.
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
    return total


@dataclass(frozen=True)
class Score:
    """How good a model is on held-out examples: means over all that all ranks saw."""

    loss: float
    accuracy: float
    examples: int
    is_text: bool

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def scalars(self) -> dict[str, float]:
        last = {"perplexity": self.perplexity} if self.is_text else {}
        return {"loss": self.loss, "accuracy": self.accuracy} | last

    def __str__(self) -> str:
        what = f"perplexity {self.perplexity:.2f}" if self.is_text else f"accuracy {self.accuracy:.2%}"
        return f"loss {self.loss:.4f}, {what}"


def held_out_share(examples: int, limit: int, rank: int, ranks: int) -> list[int]:
    """This rank's held-out examples: the ranks' shares meet nowhere and leave nothing out.

    Args:
        examples: how many there are.
        limit: how many to take, evenly spread; 0 takes all.
        rank: this rank.
        ranks: how many share.
    """
    count = min(limit, examples) if limit else examples
    return [number * examples // count for number in range(rank, count, ranks)]


def evaluate(model: nn.Module, task: Task, limit: int, vote: StopVote) -> Score | None:
    """Scores the model on the held-out data, each example on one rank; all ranks must call it.

    Returns:
        The score, the same on all ranks; None if the ranks voted to stop.
    """
    share = held_out_share(len(task.held_out), limit, hvd.rank(), hvd.size())
    batch = 64 if task.is_text else 256
    # Rank 0 has the largest share: all ranks go round as often, so that all vote as often.
    largest = len(held_out_share(len(task.held_out), limit, 0, hvd.size()))
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    with torch.inference_mode():
        for start in range(0, largest, batch):
            if vote.poll():
                model.train()
                return None
            sums += _sums(model, task.held_out, share[start : start + batch])
    model.train()
    loss, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="evaluate").tolist()
    examples = min(limit or len(task.held_out), len(task.held_out))
    return Score(loss / count, correct / count, examples, task.is_text)


def _sums(model: nn.Module, dataset: Images | Windows, indices: list[int]) -> Tensor:
    """Of the losses, of the right answers, and of what was counted."""
    if not indices:
        return torch.zeros(3, dtype=torch.float64)
    inputs, targets = dataset[indices]
    logits = model(inputs)
    loss = loss_of(logits, targets, reduction="sum").item()
    correct = (logits.argmax(-1) == targets).sum().item()
    return torch.tensor([loss, correct, targets.numel()], dtype=torch.float64)


class StepClock:
    """Seconds of each step; what happens between `lap` and `restart` counts for none."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def restart(self) -> None:
        self._last = time.perf_counter()

    def warm(self) -> list[float]:
        """Of the steps after the warm-up, or of all where there are few."""
        return self.seconds[WARM_UP_STEPS:] if len(self.seconds) >= 2 * WARM_UP_STEPS else self.seconds

    def mean(self) -> float:
        """Of the warm steps; NaN without any."""
        warm = self.warm()
        return math.fsum(warm) / len(warm) if warm else math.nan
