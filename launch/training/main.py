"""A training run from its command line to its table: see ``launch/train.py``."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvd_adaptive as hva
from hvd_adaptive.collectives import reduces_in_nodes
from hvd_adaptive.resume import (
    Checkpoints,
    Position,
    RunError,
    StopVote,
    require_equal,
    run_on_all_ranks,
)
from hvd_adaptive.telemetry import Meter

from . import data, models, result
from . import options as command_line
from .display import (
    Progress,
    at_gigabit,
    gather_costs,
    library_notices,
    since_decided,
    table,
)
from .loop import (
    Batches,
    Score,
    StepClock,
    evaluate,
    learning_rate,
    learning_rate_scale,
    make_update_rule,
    spared_from_collection,
    train_step,
)
from .options import TrainingOptions
from .result import Evaluation


@dataclass(frozen=True)
class Schedule:
    """How long a run is, and how fast it learns."""

    steps: int
    warmup: int
    peak_rate: float
    shape: str

    def rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.warmup, self.peak_rate, self.shape)


@dataclass(frozen=True)
class TrainingRun:
    """What the training loop works with."""

    options: TrainingOptions
    task: data.Task
    model: nn.Module
    optimizer: Any
    meter: Meter
    batches: Batches
    schedule: Schedule
    checkpoints: Checkpoints | None
    progress: Progress
    vote: StopVote


@dataclass(frozen=True)
class End:
    """How the training loop ended."""

    position: Position
    train_loss: float
    clock: StepClock
    evaluations: list[Evaluation]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.parse(arguments)
    # One process may train several times.
    if not hvd.is_initialized():
        hva.init(niceness=options.niceness, hierarchical=reduces_in_nodes(options.scheme))
    vote = StopVote()
    try:
        return run(options, vote)
    except RunError as error:
        # All ranks are here; one of them is enough to say why.
        say(f"train.py: {error}", file=sys.stderr)
        return 1


def run(options: TrainingOptions, vote: StopVote) -> int:
    """Everything from the data to the table.

    Returns:
        The process's exit status.
    """
    require_equal("command line", options.as_text())
    threads = set_threads(options.threads)
    task = load_data(options)
    model = make_model(options, task)
    optimizer, meter = make_optimizer(options, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    batches = make_batches(options, task)
    schedule = make_schedule(options, batches.steps_per_epoch)
    if options.distributed == "adaptive":
        optimizer.set_horizon(schedule.steps)
    checkpoints = make_checkpoints(options, task, model, optimizer)
    start = find_start(options, checkpoints, batches.steps_per_epoch)
    introduce(options, task, model, schedule, threads)

    progress = Progress(start.step, schedule.steps, shown=hvd.rank() == 0)
    setup = TrainingRun(
        options, task, model, optimizer, meter, batches, schedule, checkpoints, progress, vote
    )
    try:
        with spared_from_collection(), library_notices(progress):
            end = train(setup, start)
        score = None if vote.outcome else evaluate(model, task, options.eval_examples, vote)
    finally:
        progress.close()
    if score is None:
        return stopped(setup, end.position)
    finish(setup, end, score)
    vote.close()
    return 0


def say(text: str, file: Any = None) -> None:
    if hvd.rank() == 0:
        print(text, file=file or sys.stdout, flush=True)


# ----------------------------------------------------------------------------------- preparation


def set_threads(wanted: int | None) -> int:
    """This rank's threads: as asked, or its share of the cores that it may use."""
    threads = wanted or max(1, len(os.sched_getaffinity(0)) // int(hvd.local_size()))
    torch.set_num_threads(threads)
    return threads


def load_data(options: TrainingOptions) -> data.Task:
    task = run_on_all_ranks(
        "data",
        lambda: data.load(
            options.data,
            data.data_root(options.data_dir),
            tokens=options.tokens,
            vocabulary=options.vocabulary,
            length=options.sequence_length,
        ),
    )
    # A host without Fashion-MNIST would train on the digits while the others do not.
    require_equal("data", {"name": task.name, "content": task.fingerprint})
    if task.note:
        say(f"*** {task.note} ***")
    return task


def make_model(options: TrainingOptions, task: data.Task) -> nn.Module:
    torch.manual_seed(options.seed)
    sizes = models.Sizes(options.width, options.layers, options.heads, options.dropout)
    model = models.build(options.model, task.shape, task.classes, sizes)
    # From here on the ranks draw apart, or all of them would drop out the same activations.
    torch.manual_seed(options.seed * 1_000_003 + int(hvd.rank()) + 1)
    return model


def make_optimizer(options: TrainingOptions, model: nn.Module) -> tuple[Any, Meter]:
    """The wrapped optimizer, and where the run's figures go."""
    run_on_all_ranks("--logdir and --result", lambda: check_writable(options))
    samples = options.batch_size * options.accumulate * hvd.size()
    logdir = str(options.logdir) if options.logdir else None
    telemetry = hva.Telemetry(logdir=logdir, samples_per_step=samples)
    base = make_update_rule(options, model)
    shared: dict[str, Any] = {
        "named_parameters": model.named_parameters(),
        "backward_passes_per_step": options.accumulate,
        "op": hvd.Average if options.op == "average" else hvd.Sum,
        "gradient_predivide_factor": options.gradient_predivide_factor,
        "num_groups": options.num_groups,
        "groups": options.groups,
        "sparse_as_dense": options.sparse_as_dense,
    }
    if options.distributed == "horovod":
        compression = getattr(hvd.Compression, options.compression)
        stock = hvd.DistributedOptimizer(base, compression=compression, **shared)
        return stock, Meter(telemetry, rank=hvd.rank())
    try:
        # Typed as a torch optimizer, but it has more.
        optimizer: Any = hva.DistributedOptimizer(
            base,
            compression=options.compression,
            overrides=dict(options.overrides),
            feedback=options.feedback,
            scheme=options.scheme,
            planner=options.planner,
            candidates=options.candidates,
            dense_steps=options.dense_steps,
            bucket_cap_mb=options.bucket_cap_mb,
            seed=options.seed,
            telemetry=telemetry,
            **shared,
        )
    except ValueError as error:
        # It judges its arguments on all ranks together, so all of them are here.
        raise RunError(str(error)) from error
    return optimizer, optimizer.meter


def check_writable(options: TrainingOptions) -> None:
    """Before rank 0 alone finds that it cannot write, and leaves the others waiting."""
    if hvd.rank() != 0:
        return
    if options.logdir is not None:
        options.logdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.logdir):
            pass
    if options.result is not None:
        result.check_writable(options.result)


def make_batches(options: TrainingOptions, task: data.Task) -> Batches:
    batches = Batches(task.train, options.batch_size, options.accumulate, options.seed)
    if batches.steps_per_epoch == 0:
        raise RunError(
            f"{task.name} has {len(task.train)} training examples, fewer than the"
            f" {options.batch_size} x {options.accumulate} x {hvd.size()} of one step (batch size x"
            " accumulated passes x ranks): make --batch-size smaller"
        )
    return batches


def make_schedule(options: TrainingOptions, steps_per_epoch: int) -> Schedule:
    steps = options.steps or max(1, round(options.epochs * steps_per_epoch))
    warmup = steps // 20 if options.lr_warmup_steps is None else options.lr_warmup_steps
    scale = learning_rate_scale(
        options.lr_scaling, hvd.size(), options.accumulate, options.op == "average"
    )
    return Schedule(steps, warmup, options.lr * scale, options.lr_schedule)


def make_checkpoints(
    options: TrainingOptions, task: data.Task, model: nn.Module, optimizer: Any
) -> Checkpoints | None:
    if options.checkpoint_dir is None:
        return None
    identity = options.identity() | {"data_content": task.fingerprint}
    return Checkpoints(
        options.checkpoint_dir, identity, model, optimizer, renamed=command_line.renamed_identity
    )


def find_start(
    options: TrainingOptions, checkpoints: Checkpoints | None, steps_per_epoch: int
) -> Position:
    if checkpoints is None:
        return Position()
    if options.resume == "never":
        checkpoints.refuse_to_mix()
        return Position()
    start = checkpoints.restore(required=options.resume == "must")
    if start is None:
        say("no checkpoint yet: starting at step 0")
        return Position()
    if not options.steps:
        # With another number of ranks an epoch has another number of steps.
        start = start.with_steps_of(steps_per_epoch)
    say(f"resumed at step {start.step}")
    return start


def introduce(
    options: TrainingOptions, task: data.Task, model: nn.Module, schedule: Schedule, threads: int
) -> None:
    how = "Horovod's own optimizer" if options.distributed == "horovod" else "hvd_adaptive"
    say(
        f"{options.model} with {models.count_parameters(model):,} parameters on {task.name}"
        f" ({len(task.train):,} examples, {len(task.held_out):,} held out; {task.source})\n"
        f"{hvd.size()} rank(s) of {threads} thread(s), {options.batch_size} x {options.accumulate}"
        f" examples per step each, {schedule.steps} steps, learning rate up to {schedule.peak_rate:g}\n"
        f"{how}, compression {options.compression}"
    )


# -------------------------------------------------------------------------------------- training


def train(run: TrainingRun, start: Position) -> End:
    """Steps until the run is done or the ranks vote to stop; then, too, a checkpoint is saved."""
    every = run.options.checkpoint_every
    clock = StepClock()
    losses: list[float] = []
    evaluations: list[Evaluation] = []
    saved, train_loss = start, math.nan
    position = start
    for position, parts in run.batches.forever(start):
        if position.step > start.step and every and position.step % every == 0:
            saved = save(run, position, clock)
        if run.vote.poll() or position.step >= run.schedule.steps:
            break
        rate = run.schedule.rate(position.step)
        set_rate(run.optimizer, rate)
        losses.append(train_step(run.model, run.optimizer, parts, run.options.clip))
        clock.lap()
        run.progress.step()
        done = position.step + 1
        if done % run.options.log_every == 0 or done == run.schedule.steps:
            train_loss = log(run, done, rate, losses, clock)
            losses.clear()
        # After the last step, it is done at the end of all.
        if run.options.eval_every and done % run.options.eval_every == 0 and done < run.schedule.steps:
            evaluations += evaluate_between(run, done, clock)
    if run.checkpoints is not None and position != saved:
        save(run, position, clock)
    return End(position, train_loss, clock, evaluations)


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def save(run: TrainingRun, position: Position, clock: StepClock) -> Position:
    if run.checkpoints is not None:
        with run.meter.paused():
            path = run.checkpoints.save(position)
        run.progress.say(f"step {position.step}: saved {path}")
    clock.restart()
    return position


def log(run: TrainingRun, step: int, rate: float, losses: list[float], clock: StepClock) -> float:
    """Averages the losses since the last report over the ranks, and reports them.

    Raises:
        RunError: on all ranks, if the mean is no number.
    """
    mine = torch.tensor(math.fsum(losses) / len(losses), dtype=torch.float64)
    loss = float(hvd.allreduce(mine, op=hvd.Average, name="train.loss"))
    if not math.isfinite(loss):
        raise RunError(
            f"the training loss is {loss} at step {step}: try a smaller --lr, a longer"
            " --lr-warmup-steps, or --clip 1"
        )
    run.meter.scalar("train/loss", loss, step)
    run.meter.scalar("train/learning_rate", rate, step)
    if run.progress.shown:
        ratio = run.meter.summary().ratio_payload
        run.progress.report(step, loss, samples_per_step(run) / clock.mean(), ratio)
    return loss


def evaluate_between(run: TrainingRun, step: int, clock: StepClock) -> list[Evaluation]:
    """An evaluation during the training; none if the ranks vote to stop, which the loop then sees."""
    with run.meter.paused():
        score = evaluate(run.model, run.task, run.options.eval_examples, run.vote)
    clock.restart()
    if score is None:
        return []
    run.progress.say(f"step {step}: held out: {score}")
    report_score(run.meter, score, step)
    return [Evaluation(step, math.fsum(clock.seconds), score)]


def report_score(meter: Meter, score: Score, step: int) -> None:
    for name, value in score.scalars().items():
        meter.scalar(f"held_out/{name}", value, step)


def samples_per_step(run: TrainingRun) -> int:
    return run.options.batch_size * run.options.accumulate * int(hvd.size())


# --------------------------------------------------------------------------------------- the end


def stopped(run: TrainingRun, position: Position) -> int:
    number, saved = run.vote.outcome, ""
    if run.checkpoints is not None:
        saved = f"; the checkpoint is in {run.checkpoints.folder}, --resume continues from it"
    say(f"stopped by {signal.Signals(number).name} at step {position.step}{saved}")
    return run.vote.exit_code


def finish(run: TrainingRun, end: End, score: Score) -> None:
    """Shows the table, writes the file of --result, and says where the logs are."""
    report_score(run.meter, score, end.position.step)
    metered = run.meter if run.options.distributed == "adaptive" else None
    costs = gather_costs(end.clock.mean(), metered)
    gradients = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    dense_bytes = sum(each.numel() * each.element_size() for each in gradients)
    placement = metered.placement if metered is not None else None
    say("\n" + table(costs, dense_bytes, samples_per_step(run), end.train_loss, score, placement))
    if metered is not None:
        plan = run.optimizer.plan
        since = since_decided(plan, end.position.step, end.clock.seconds)
        elsewhere = at_gigabit([each.numel() for each in gradients], costs.compute, hvd.size())
        for line in filter(None, (*plan.reasons, since, elsewhere)):
            say(line)
    if run.options.result is not None and hvd.rank() == 0:
        last = Evaluation(end.position.step, math.fsum(end.clock.seconds), score)
        run_and_costs = result.describe(run.options, hvd.size(), dense_bytes, costs)
        course = result.course(end.clock, end.train_loss, [*end.evaluations, last])
        result.write(run.options.result, run_and_costs | course)
    if run.options.logdir is not None:
        say(
            f"\nlogs in {run.options.logdir}; to look at them:"
            f" tensorboard --logdir {shlex.quote(str(run.options.logdir))}, or one page:"
            f" python -m hvd_adaptive.commands.report {shlex.quote(str(run.options.logdir))}"
        )
