"""Kimad's budget: as many bytes as fit into a step's time."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions
from hvd_adaptive.planning.costs import BandwidthMonitor, robust_line
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements
from hvd_adaptive.planning.table import CandidateTable, Limits, Prices

__all__ = ["Bandwidth", "BandwidthBudget"]


@dataclass(frozen=True)
class Bandwidth(BudgetOptions):
    """As many bytes as the network carries in the time that computing leaves of a step.

    With ``t`` the wanted seconds of a step: ``t - T_comp`` is shared by all transfers of a step. Every
    direction that is seen has its own latency and bandwidth: where a scheme compresses sums again
    (``two_shot``), what ranks send and what comes back are priced apart, and get levels of their own.
    Errors are those of what is compressed: of ``g - h`` under EF21, with the residual under error
    feedback. Source: Kimad, section 3.1. Beyond the paper, ``T_comp`` is a line of the bytes, because
    compressing and decompressing more takes longer.

    Bytes that follow the bandwidth make all transfers take as long, from which latency and bandwidth
    cannot be separated. So the second plan, and then every ``probe``-th one, gets half as much.

    The paper's workers choose each for itself, because each has a link of its own to a server, and
    gradients of its own. Here every link carries the payloads of all ranks, so a collective takes as
    long as its slowest link takes for the sum, however that is shared out: all ranks get as many bytes
    as fit the slowest link. Fewer for the rank behind it would not help: with four hosts, one of them
    at a quarter of the others' rate, the same sum takes 1.3 times as long where that one sends only a
    quarter of its share, because it must receive what the others send instead. What is left of the
    paper's choice is how a rank shares out its bytes: ``per_worker`` lets each do so by its own errors.
    On four ranks that draw from the same data, the mean error was then 0 to 4 % lower (LSTM), or less
    than 0.2 % (MLP, transformer); it is for ranks whose data differ.

    An estimate is as often too high as too low, and a rate falls on between a plan and its steps, so
    bytes that need all of the time would miss it in half of the steps. Therefore part of it is kept
    free, and this margin follows what happens: a step that takes longer than ``t`` widens it, one that
    does not narrows it, in the proportion at which the wanted share of the steps keeps the time
    (Gibbs and Candes, "Adaptive Conformal Inference Under Distribution Shift", 2021).

    Args:
        seconds: wanted for a step (``t``), above 0; must be given.
        warmup: ``T_comp`` is the median computing time of this many last steps, at least 1; the first
            plan waits for them.
        caution: standard errors by which the time of a byte is taken longer than estimated.
        share: of the steps that are to keep the time, in [0, 1); 0 keeps nothing free, as the paper.
        probe: every ``probe``-th plan gets half of the bytes; at least 2, or 0 for none, as the paper.
        per_worker: per-rank levels: each rank's by its own errors, within the same bytes. For
            compressors whose payloads are gathered; rank 0 then gathers and plans for each.
            One label for all layers (``kimad``) differs only where bytes depend on the data.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> from hvd_adaptive.planning.measurements import Transfer
        >>> budget = Bandwidth(seconds=0.5, warmup=2).budget()
        >>> transfers = [Transfer(100, 0.2)]
        >>> for step in range(2):
        ...     budget.observe(StepMeasurements(step, compute_seconds=0.1, transfers=transfers))
        >>> table = CandidateTable.of(["w"], [[0]], [[40]], [["all"]], [0], [1000])
        >>> round(budget.allow(table).max_bytes)
        200
    """

    seconds: float = 0.0
    warmup: int = 20
    caution: float = 0.0
    share: float = 0.95
    probe: int = 5
    per_worker: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds}: write the wanted time of a step, above 0")
        if self.warmup < 1 or not 0 <= self.caution < math.inf:
            raise ValueError(
                f"warmup={self.warmup} must be at least 1 and caution={self.caution} at least 0"
            )
        if not 0 <= self.share < 1:
            raise ValueError(f"share={self.share}: write a share of the steps, in [0, 1)")
        if self.probe < 0 or self.probe == 1:
            raise ValueError(f"probe={self.probe}: write a number of plans, at least 2, or 0 for none")
        super().__post_init__()

    def budget(self, ranks: int = 1) -> Budget:
        """Starts by measuring."""
        del ranks
        return BandwidthBudget(self)


_REMEMBERED = 300
"""Steps from which the time to compress and decompress a byte is estimated."""
_HALF_LIFE = 3.0
"""Half-life of a monitor, in steps: a step is one transfer, of all of its collectives."""
_MARGIN_STEP = 0.1
"""By how much a step that takes too long widens the margin."""
_MOST_MARGIN = 0.9
"""With more, there would be too few bytes to estimate the bandwidth."""


class BandwidthBudget(Budget):
    """See :class:`Bandwidth`."""

    def __init__(self, options: Bandwidth) -> None:
        self._options = options
        own = {Measurement.PER_RANK_ERRORS} if options.per_worker else set()
        self.needs = frozenset({Measurement.TRANSFERS, Measurement.ERRORS_OF_SENT, *own})
        self._computing: deque[tuple[float, float]] = deque(maxlen=max(options.warmup, _REMEMBERED))
        """Bytes sent and seconds of computing."""
        self._byte_work = 0.0
        """Seconds of computing that a byte takes: to be compressed and decompressed."""
        self._margin = 0.0
        """Share of the time left by computing that is kept free."""
        self._granted = 0
        self._monitors: dict[str, BandwidthMonitor] = {}
        self._count: dict[str, int] = {}
        self._report: dict[str, float] = {}
        self._line: tuple[float, float] | None = None
        """Seconds of a step: those that bytes do not change, and those of a byte."""
        self._prices = Prices()

    def observe(self, facts: StepMeasurements) -> None:
        """Every transfer goes to its direction's monitor."""
        if facts.compute_seconds is not None:
            self._computing.append((facts.nbytes or 0.0, float(facts.compute_seconds)))
        # second limits are asked for when the first one's plan is in force
        if facts.seconds is not None and self._granted > 1:
            late = facts.seconds > self._options.seconds
            wider = self._margin + _MARGIN_STEP * (late - (1 - self._options.share))
            self._margin = min(max(0.0, wider), _MOST_MARGIN)
        # a direction of which nothing is known in this step has as many as in the one before
        self._count |= Counter(transfer.direction for transfer in facts.transfers)
        for transfer in facts.transfers:
            direction = transfer.direction
            monitor = self._monitors.setdefault(direction, BandwidthMonitor(_HALF_LIFE))
            monitor.observe(transfer.nbytes, transfer.seconds)

    @property
    def ready(self) -> bool:
        """After the warm-up, and with two transfers at least in every direction."""
        monitors = self._monitors.values()
        enough = len(self._computing) >= self._options.warmup
        return enough and bool(monitors) and all(monitor.ready for monitor in monitors)

    def allow(self, table: CandidateTable) -> Limits:
        """Bytes of all directions together whose times add up to what computing leaves."""
        del table
        fixed, work = self._work()
        self._report = {"compute_seconds": fixed, "margin": self._margin}
        sent, each = {}, {}
        known = {way: monitor.estimate() for way, monitor in self._monitors.items() if monitor.ready}
        slowest = max(known.values(), key=lambda rate: rate.seconds_per_byte)
        for direction, monitor in sorted(self._monitors.items()):
            # one that has just appeared, as sums that are compressed when dense steps have ended
            rate = known.get(direction, slowest)
            fixed += self._count.get(direction, 0) * rate.latency
            # an error that is unknown counts as nothing
            error = rate.error if math.isfinite(rate.error) else 0.0
            each[direction] = work + rate.seconds_per_byte + self._options.caution * error
            sent[direction] = monitor.last_bytes(max(1, self._count.get(direction, 0)))
            self._report[f"bandwidth_{direction}"] = rate.bandwidth
            self._report[f"bandwidth_error_{direction}"] = rate.bandwidth_error
        # of a byte that goes as those of the last step did
        slope = sum(each[way] * nbytes for way, nbytes in sent.items()) / sum(sent.values())
        self._prices = Prices({way: seconds / slope for way, seconds in each.items()})
        left = max(0.0, self._options.seconds - fixed) * (1 - self._margin)
        self._report["communication_seconds"] = left
        self._line, self._granted = (fixed, slope), self._granted + 1
        probe = self._options.probe
        probes = probe and self._granted % probe == 2 % probe
        return Limits(max_bytes=left / slope / (2 if probes else 1))

    def _work(self) -> tuple[float, float]:
        """Seconds of computing: those that bytes do not change, and those of a byte.

        As latency, the second hardly changes and is estimated from steps of different sizes.
        """
        nbytes, seconds = np.array(self._computing).T
        _, slope = robust_line(nbytes, seconds)
        if not math.isnan(slope):
            self._byte_work = max(0.0, slope)
        latest = slice(-self._options.warmup, None)
        fixed = np.median(seconds[latest] - self._byte_work * nbytes[latest])
        return max(0.0, float(fixed)), self._byte_work

    @property
    def prices(self) -> Prices:
        """Seconds of a byte in each direction, over those of the mean byte."""
        return self._prices

    def seconds(self, nbytes: float) -> float | None:
        """By the bandwidths of the last limits."""
        return None if self._line is None else self._line[0] + self._line[1] * nbytes

    def report(self) -> dict[str, float]:
        """Seconds, and bytes per second of each direction."""
        return dict(self._report)

    def state_dict(self) -> dict[str, Any]:
        """Times and samples."""
        monitors = {direction: monitor.state_dict() for direction, monitor in self._monitors.items()}
        return {
            "computing": [list(each) for each in self._computing],
            "byte_work": self._byte_work,
            "count": dict(self._count),
            "monitors": monitors,
            "margin": self._margin,
            "granted": self._granted,
            "line": None if self._line is None else list(self._line),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._computing.clear()
        self._computing.extend(
            (float(nbytes), float(seconds)) for nbytes, seconds in state["computing"]
        )
        self._byte_work = float(state["byte_work"])
        self._count = {direction: int(count) for direction, count in state["count"].items()}
        self._granted = int(state["granted"])
        self._margin = float(state["margin"])
        self._line = None
        if state["line"] is not None:
            fixed, slope = state["line"]
            self._line = (float(fixed), float(slope))
        self._monitors = {}
        for direction, samples in state["monitors"].items():
            self._monitors[direction] = BandwidthMonitor(_HALF_LIFE)
            self._monitors[direction].load_state_dict(samples)
