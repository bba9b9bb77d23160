"""What rank 0 shows: progress while the training runs, and a table at its end."""

from __future__ import annotations

import errno
import io
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TextIO

import horovod.torch as hvd
import numpy as np
import torch
from tqdm import tqdm

from hvd_adaptive.collectives.measured_costs import dense_step
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.planning.explanation import chosen_by, in_ms
from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry import Placement
from hvd_adaptive.telemetry.verdict import verdict

from .loop import Score

# Between two lines where no terminal shows a moving bar: a log file should stay readable.
LINE_SECONDS = 5.0


class _Unheard(io.FileIO):
    """A standard stream that goes silent, instead of failing, once its terminal or reader is gone."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """From here on, this process's output may lose its terminal, or the program that reads it.

    What is printed then is lost. Otherwise the first line that nobody can read any more would end its
    rank with an error, before a checkpoint is saved.
    """
    sys.stdout = _unheard(sys.stdout)
    sys.stderr = _unheard(sys.stderr)


def _unheard(stream: TextIO | Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # none, or somebody else's
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Unheard(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class Progress:
    """A bar where standard error is a terminal, and a line now and then where it is not.

    Only rank 0 shows anything.

    Args:
        done: steps that an earlier run has done.
        total: steps in all.
        shown: whether this rank shows it.
    """

    def __init__(self, done: int, total: int, shown: bool) -> None:
        self.total = total
        self.shown = shown
        self._next_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def report(self, step: int, loss: float, samples_per_second: float, ratio: float) -> None:
        """Shows figures after `step` steps; the ratio is NaN where nothing is known of it."""
        ratio_text = "" if math.isnan(ratio) else f", compression {ratio:.1f}x"
        text = f"loss {loss:.4f}, {samples_per_second:,.0f} samples/s{ratio_text}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif self.shown and (time.monotonic() >= self._next_line or step == self.total):
            self._next_line = time.monotonic() + LINE_SECONDS
            self.say(f"step {step}/{self.total}: {text}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self.shown:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Notices(logging.Handler):
    """Lines of a training's progress."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.say(record.getMessage())


@contextmanager
def library_notices(progress: Progress) -> Iterator[None]:
    """Shows meanwhile what the library logs: what `auto` decides, and why."""
    logger, handler = logging.getLogger("hvd_adaptive"), _Notices(progress)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # once is enough
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@dataclass(frozen=True)
class Costs:
    """Of one step: means over the steps and the ranks, in seconds and bytes; NaN means unknown."""

    total: float
    compress: float = math.nan
    communicate: float = math.nan
    decompress: float = math.nan
    payload_bytes: float = math.nan
    traffic_bytes: float = math.nan
    ratio_traffic: float = math.nan
    least_exposed: float = math.nan
    """The exposed communication of the rank that has least of it."""

    @property
    def compute(self) -> float:
        return self.total - self.compress - self.communicate - self.decompress


def gather_costs(total: float, meter: Any | None) -> Costs:
    """Averages what each rank has measured; all ranks must call it.

    Args:
        total: this rank's mean seconds per step, evaluations and checkpoints left out.
        meter: the optimizer's; None for Horovod's own optimizer, which has none.
    """
    values = {"total": total}
    if meter is not None:
        summary = meter.summary()
        known = [field.name for field in fields(Costs) if hasattr(summary, field.name)]
        values |= {name: getattr(summary, name) for name in known} | values
    mine = torch.tensor(list(values.values()), dtype=torch.float64)
    mean = hvd.allreduce(mine, op=hvd.Average, name="costs").tolist()
    costs = Costs(**dict(zip(values, mean, strict=True)))
    exposed = torch.tensor(values.get("communicate", math.nan), dtype=torch.float64)
    least = float(hvd.allreduce(exposed, op=hvd.Min, name="costs.least_exposed"))
    return replace(costs, least_exposed=least)


def table(
    costs: Costs,
    dense_bytes: int,
    samples_per_step: int,
    train_loss: float,
    score: Score,
    placement: Placement | None = None,
) -> str:
    """The result of a run as aligned lines, and what bounded its steps where that is known."""
    rows = [
        ("samples per second", _number(samples_per_step / costs.total, "{:,.1f}")),
        ("step time: total", _share(costs.total, costs.total)),
        ("  = compute", _share(costs.compute, costs.total)),
        ("  + compress", _share(costs.compress, costs.total)),
        ("  + exposed communication", _share(costs.communicate, costs.total)),
        ("  + decompress", _share(costs.decompress, costs.total)),
        ("gradients, dense", f"{dense_bytes:,} bytes per step and rank"),
        ("  payload sent", _sent(costs.payload_bytes, dense_bytes / (costs.payload_bytes or 1))),
        ("  traffic on this link", _sent(costs.traffic_bytes, costs.ratio_traffic)),
        ("train loss, last", _number(train_loss, "{:.4f}")),
        ("held-out loss", f"{score.loss:.4f}"),
        ("held-out accuracy", f"{score.accuracy:.2%} of {score.examples:,} examples"),
    ]
    if score.is_text:
        rows[-1] = ("held-out perplexity", f"{score.perplexity:.2f} on {score.examples:,} sequences")
        rows.append(("held-out accuracy", f"{score.accuracy:.2%} of the next tokens"))
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}" for label, value in rows]
    if placement is not None:
        works = costs.compress + costs.decompress
        lines.append(verdict(costs.total, costs.communicate, works, placement, costs.least_exposed))
    return "\n".join(line for line in lines if line)


def since_decided(plan: Plan, done: int, seconds: Sequence[float]) -> str:
    """What steps have taken since `auto` decided last, to hold against what it foresaw.

    Args:
        plan: where none of its reasons is of `auto`, nothing is said.
        done: steps so far.
        seconds: of this run's last ones.
    """
    since = seconds[-(done - plan.decided) :] if done > plan.decided else []
    if not since or not chosen_by(plan.reasons):
        return ""
    took = f"a step took {in_ms(statistics.median(since))} (median of {len(since):,})"
    return f"since step {plan.decided:,}, when that was decided, {took}"


def at_gigabit(numel: Sequence[int], compute: float, ranks: int) -> str:
    """What a dense step would take on links of 1 Gbit/s, as the model foresees it.

    Args:
        numel: elements of each parameter, in the model's order: gradients arrive in the reverse one.
        compute: seconds of forward and backward pass; where it is NaN, nothing is foreseen.
        ranks: how many train, each on a host of its own.
    """
    if ranks == 1 or math.isnan(compute):
        return ""
    order, link = np.array(numel[::-1]), LinkCosts.of_gigabit()
    fp32, fp16 = (dense_step(order, compute, ranks, link, itemsize=itemsize) for itemsize in (4, 2))
    return (
        f"at 1 Gbit/s between {ranks} hosts, by the model: dense {1e3 * fp32.total:.1f} ms per step, "
        f"{fp32.exposed / fp32.total:.0%} exposed; in fp16 {1e3 * fp16.total:.1f} ms, "
        f"{fp16.exposed / fp16.total:.0%} exposed"
    )


def _number(value: float, form: str) -> str:
    return "not measured" if math.isnan(value) else form.format(value)


def _share(seconds: float, total: float) -> str:
    return _number(seconds * 1e3, "{:9.3f} ms" + f" {seconds / total:7.1%}")


def _sent(sent: float, ratio: float) -> str:
    if math.isnan(sent):
        return "not measured"
    return f"{sent:,.0f} bytes per step and rank, compression ratio {ratio:.1f}" if sent else "0 bytes"
