"""How much compression now: small state machines that watch the steps and grant an allowance.

=======================  =================================================================
:class:`Static`          as much error as the defaults make (L-GreCo)
:class:`Bandwidth`       as many bytes as fit into a step's time (Kimad)
:class:`Throughput`      the factor with the highest throughput x gain (GraVAC)
:class:`CriticalRegimes`  little compression in critical regimes, else much (Accordion)
=======================  =================================================================

These four hold options; ``budget(ranks)`` of each starts its state machine. A budget is told of every
step by :meth:`Budget.observe` and asked for an :class:`~hvd_adaptive.planning.allocators.Limits`
when a plan is due; it may ask for a plan itself (:attr:`Budget.urgent`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.planning.allocators import Limits, Table
from hvd_adaptive.planning.costs import BandwidthMonitor, robust_line
from hvd_adaptive.planning.measurements import Float64s, Measurement, Options, StepMeasurements

__all__ = [
    "Bandwidth",
    "BandwidthBudget",
    "Budget",
    "BudgetOptions",
    "CriticalRegimes",
    "RegimeBudget",
    "Static",
    "StaticBudget",
    "Throughput",
    "ThroughputBudget",
]


class Budget(ABC):
    """Decides how much compression now."""

    needs: frozenset[Measurement] = frozenset()
    """What must be measured for it."""

    @property
    def ready(self) -> bool:
        """Whether it has seen enough to grant anything."""
        return True

    @property
    def urgent(self) -> bool:
        """Whether it would grant something else than last time, so that a plan is due at once."""
        return False

    @property
    def factors(self) -> tuple[float, ...]:
        """Compression factors whose gains it wants to be told of, step by step."""
        return ()

    @property
    def factor(self) -> float:
        """The nominal compression factor that it grants now, where it goes by factors; else 1."""
        return 1.0

    def observe(self, facts: StepMeasurements) -> None:
        """Learn from a step; what is missing in ``facts`` is skipped. Cost: O(layers) at most."""
        del facts

    @abstractmethod
    def allow(self, table: Table) -> Limits:
        """What may be lost or sent from now on."""

    def seconds(self, nbytes: float) -> float | None:
        """How long a step that sends so many bytes is expected to take; None where it cannot tell."""
        del nbytes
        return None

    def report(self) -> dict[str, float]:
        """Figures that explain the last allowance."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        del state


class BudgetOptions(Options, ABC):
    """Options of a budget; members are frozen dataclasses."""

    @abstractmethod
    def budget(self, ranks: int = 1) -> Budget:
        """A state machine at its start, for a training on so many ranks."""


# --- a static reference ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Static(BudgetOptions):
    """No more error than the defaults make. Source: L-GreCo, section 3, "The Error Bound"."""

    def budget(self, ranks: int = 1) -> Budget:
        """Has no state."""
        del ranks
        return StaticBudget()


class StaticBudget(Budget):
    """See :class:`Static`."""

    def allow(self, table: Table) -> Limits:
        """The defaults' error and bytes."""
        return Limits.like(table, table.defaults)


# --- bandwidth ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bandwidth(BudgetOptions):
    """As many bytes as the network carries in the time that computing leaves of a step.

    With ``t`` the wanted seconds of a step: ``t - T_comp`` is shared by all transfers of a step. Every
    direction that is seen has its own latency and bandwidth. Source: Kimad, section 3.1. Beyond the
    paper, ``T_comp`` is a line of the bytes, because compressing and decompressing more takes longer.

    Bytes that follow the bandwidth make all transfers take as long, from which latency and bandwidth
    cannot be told apart. So the second plan and one every now and then are given half as much.

    The paper's workers choose each for itself, because each has a link of its own to a server, and
    gradients of its own. Here every link carries the payloads of all ranks, so a collective takes as
    long as its slowest link takes for the sum, however that is shared out: all ranks get as many bytes
    as fit the slowest link. Fewer for the rank behind it would not help: with four hosts, one of them
    at a quarter of the others' rate, the same sum takes 1.3 times as long where that one sends only a
    quarter of its share, because it must receive what the others send instead. What is left of the
    paper's choice is how a rank shares out its bytes: ``per_worker`` lets each do so by its own errors.
    Of four ranks that draw from the same data, their mean error then was 0 to 4 % lower (LSTM), or less
    than 0.2 % (MLP, transformer); it is for ranks whose data differ.

    An estimate is as often too high as too low, and a rate falls on between a plan and its steps, so
    bytes that need all of the time would miss it in half of the steps. Therefore part of it is kept
    free, and this margin follows what happens: a step that takes longer than ``t`` widens it, one that
    does not narrows it, in the proportion at which the wanted share of the steps keeps the time
    (Gibbs and Candes, "Adaptive Conformal Inference Under Distribution Shift", 2021).

    Args:
        seconds: wanted for a step (``t``), above 0; must be given.
        warmup: the last so many steps' median computing time is taken as ``T_comp``, at least 1; the
            first plan waits for so many.
        caution: standard errors by which the time of a byte is taken longer than estimated.
        share: of the steps that are to keep the time, in [0, 1); 0 keeps nothing free, as the paper.
        probe: every so manieth plan is given half of the bytes, at least 2; 0 for none, as the paper.
        per_worker: give each rank levels of its own, by its own errors, within the same bytes. For
            compressors whose payloads are gathered; the first rank then gathers and plans for each.
            One label for all layers (``kimad``) differs only where bytes depend on the data.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> from hvd_adaptive.planning.measurements import Transfer
        >>> budget = Bandwidth(seconds=0.5, warmup=2).budget()
        >>> for step in range(2):
        ...     sent = [Transfer(100, 0.2)]
        ...     budget.observe(StepMeasurements(step, compute_seconds=0.1, transfers=sent))
        >>> table = Table.of(["w"], [[0]], [[40]], [["all"]], [0], [1000])
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
"""Steps from which it is told how long a byte takes to be compressed and decompressed."""
_HALF_LIFE = 3.0
"""Of a monitor, in steps: a step is one transfer, of all of its collectives."""
_MARGIN_STEP = 0.1
"""By how much a step that takes too long widens the margin."""
_MOST_MARGIN = 0.9
"""With more, bytes would be too few to tell the bandwidth by."""


class BandwidthBudget(Budget):
    """See :class:`Bandwidth`."""

    def __init__(self, options: Bandwidth) -> None:
        self._options = options
        own = {Measurement.PER_RANK_ERRORS} if options.per_worker else set()
        self.needs = frozenset({Measurement.TRANSFERS, *own})
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

    def observe(self, facts: StepMeasurements) -> None:
        """Every transfer goes to its direction's monitor."""
        if facts.compute_seconds is not None:
            self._computing.append((facts.nbytes or 0.0, float(facts.compute_seconds)))
        # a second allowance is asked for when the first one's plan is in force
        if facts.seconds is not None and self._granted > 1:
            late = facts.seconds > self._options.seconds
            wider = self._margin + _MARGIN_STEP * (late - (1 - self._options.share))
            self._margin = min(max(0.0, wider), _MOST_MARGIN)
        if facts.transfers:
            self._count = {}
        for transfer in facts.transfers:
            direction = transfer.direction
            self._count[direction] = self._count.get(direction, 0) + 1
            monitor = self._monitors.setdefault(direction, BandwidthMonitor(_HALF_LIFE))
            monitor.observe(transfer.nbytes, transfer.seconds)

    @property
    def ready(self) -> bool:
        """After the warm-up, and with two transfers at least in every direction."""
        monitors = self._monitors.values()
        enough = len(self._computing) >= self._options.warmup
        return enough and bool(monitors) and all(monitor.ready for monitor in monitors)

    def allow(self, table: Table) -> Limits:
        """Bytes that make all directions' times add up to what computing leaves."""
        del table
        fixed, slope = self._work()
        self._report = {"compute_seconds": fixed, "margin": self._margin}
        for direction, monitor in sorted(self._monitors.items()):
            rate = monitor.estimate()
            fixed += self._count.get(direction, 0) * rate.latency
            # an error that is unknown counts as nothing
            error = rate.error if math.isfinite(rate.error) else 0.0
            slope += rate.seconds_per_byte + self._options.caution * error
            self._report[f"bandwidth_{direction}"] = rate.bandwidth
            self._report[f"bandwidth_error_{direction}"] = rate.bandwidth_error
        left = max(0.0, self._options.seconds - fixed) * (1 - self._margin)
        self._report["communication_seconds"] = left
        self._line, self._granted = (fixed, slope), self._granted + 1
        probe = self._options.probe
        probes = probe and self._granted % probe == 2 % probe
        return Limits(max_bytes=left / slope / (2 if probes else 1))

    def _work(self) -> tuple[float, float]:
        """Seconds of computing: those that bytes do not change, and those of a byte.

        As latency, the second hardly changes and is told by steps of different sizes.
        """
        nbytes, seconds = np.array(self._computing).T
        _, slope = robust_line(nbytes, seconds)
        if not math.isnan(slope):
            self._byte_work = max(0.0, slope)
        latest = slice(-self._options.warmup, None)
        fixed = np.median(seconds[latest] - self._byte_work * nbytes[latest])
        return max(0.0, float(fixed)), self._byte_work

    def seconds(self, nbytes: float) -> float | None:
        """By the bandwidths of the last allowance."""
        return None if self._line is None else self._line[0] + self._line[1] * nbytes

    def report(self) -> dict[str, float]:
        """Seconds, and bytes a second of each direction."""
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
        """Go on from :meth:`state_dict`."""
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


# --- compression throughput -----------------------------------------------------------------------


@dataclass(frozen=True)
class Throughput(BudgetOptions):
    """Search for the compression factor that gains most a second. Source: GraVAC, algorithm 1.

    A candidate factor is tried for ``window`` steps, then the next, larger one. A step is sent at the
    candidate if its gain reaches ``epsilon``, else at the smallest factor, else dense. When the two
    best throughputs (samples a second times gain) differ by ``omega`` at most, the smaller of their
    factors is kept for good.

    The candidates are those of the paper's section IV-B, on the smallest factor at the start:
    ``theta_min`` times 2, 4, 16, 256 (exponential) or times 2, 4, 8, ... (geometric), up to
    ``theta_max``. Where a candidate's gain is within ``omega`` of the smallest factor's, it becomes the
    smallest factor: the candidate that was tried, as the paper's text says (its listing takes the next
    one, whose gain nobody has seen).

    Args:
        theta_min: smallest compression factor, above 1.
        theta_max: largest.
        epsilon: least gain, in [0, 1].
        omega: relative difference that counts as none.
        window: steps for each candidate.
        policy: ``exponential`` or ``geometric``.
        exact: decide with the gains of the step that is to be sent, as the paper does, which forbids
            overlap; else with those up to the step before. Shows in ``needs`` only.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> budget = Throughput(theta_min=10, window=1).budget()
        >>> budget.factor, budget.factors
        (1.0, (10.0, 20.0, 40.0))
        >>> budget.observe(StepMeasurements(0, gains={10.0: 0.95, 20.0: 0.6}))
        >>> budget.factor
        10.0
    """

    theta_min: float = 10.0
    theta_max: float = 1000.0
    epsilon: float = 0.7
    omega: float = 0.01
    window: int = 500
    policy: str = "exponential"
    exact: bool = False

    def __post_init__(self) -> None:
        if not 1 < self.theta_min <= self.theta_max < math.inf:
            raise ValueError(
                f"theta_min={self.theta_min:g} and theta_max={self.theta_max:g} must be 1 < min <= max"
            )
        if not (0 <= self.epsilon <= 1 and 0 <= self.omega < 1 and self.window >= 1):
            raise ValueError(
                f"epsilon={self.epsilon:g} must lie in [0, 1], omega={self.omega:g} in [0, 1), and "
                f"window={self.window} must be at least 1"
            )
        if self.policy not in ("exponential", "geometric"):
            raise ValueError(f"policy={self.policy!r} is not one of exponential, geometric")
        super().__post_init__()

    def after(self, theta: float) -> float:
        """The candidate that follows ``theta``.

        Example:
            >>> search = Throughput(theta_min=10, theta_max=1000)
            >>> search.after(10), search.after(40), search.after(160)
            (20.0, 160.0, 1000.0)
        """
        scale = theta / self.theta_min
        grown = scale**2 if self.policy == "exponential" and scale > 1 else 2 * scale
        return float(min(grown * self.theta_min, self.theta_max))

    def budget(self, ranks: int = 1) -> Budget:
        """Smooths with a weight of ``ranks / 100``."""
        return ThroughputBudget(self, ranks)


class ThroughputBudget(Budget):
    """See :class:`Throughput`.

    Throughputs are smoothed as gains are; the paper keeps the last step's, which noise would decide.
    The first ones of a factor are averaged evenly, or its first step, which the switch delays, would
    count for most of a window.
    """

    def __init__(self, options: Throughput, ranks: int) -> None:
        self._options = options
        self._alpha = min(1.0, ranks / 100)
        self._steps = 0
        self._theta_min = float(options.theta_min)
        self._theta = options.after(self._theta_min)
        self._ideal: float | None = None
        self._gains: dict[float, float] = {}
        self._measured: int | None = None
        """The last step whose gains were told."""
        self._throughputs: dict[float, float] = {}
        self._counts: dict[float, int] = {}
        self._granted: float | None = None
        """None until the first plan: till then layers do what nobody has chosen."""
        self._last_decision = self.factors
        first = {Measurement.GAINS_BEFORE_SEND} if options.exact else set()
        self.needs = frozenset({Measurement.GAINS, *first})

    @property
    def factors(self) -> tuple[float, ...]:
        """The smallest factor, the candidate, and the next one, to know it when its turn comes."""
        wanted = {self._theta_min, self._theta}
        if self._ideal is None:
            wanted.add(self._options.after(self._theta))
        return tuple(sorted(theta for theta in wanted if theta > 1))

    @property
    def factor(self) -> float:
        """The candidate if its gain suffices, else the smallest factor, else 1. Without history: 1."""
        for theta in (self._theta, self._theta_min):
            if self._gain(theta) >= self._options.epsilon:
                return theta
        return 1.0

    @property
    def urgent(self) -> bool:
        """Whether the factor has changed, or whose gains are wanted; not before a gain is known."""
        if self._measured is None:
            return False
        return self.factor != self._granted or self.factors != self._last_decision

    def _gain(self, theta: float) -> float:
        return 1.0 if theta <= 1 else self._gains.get(theta, 0.0)

    def observe(self, facts: StepMeasurements) -> None:
        """Gains first, then the throughput at the factor that the step was sent with."""
        self._learn_gains(facts)
        if facts.seconds is None or facts.seconds <= 0:
            return
        if facts.factor in (*self.factors, 1.0):  # else of a candidate that is gone
            speed = facts.samples / facts.seconds * self._gain(facts.factor)
            count = self._counts[facts.factor] = self._counts.get(facts.factor, 0) + 1
            _smooth(self._throughputs, facts.factor, speed, max(self._alpha, 1 / count))
        self._steps += 1
        if self._steps % self._options.window == 0 and self._ideal is None:
            self._turn()

    def _learn_gains(self, facts: StepMeasurements) -> None:
        """Gains that are told on every tenth step only weigh as those of ten steps."""
        told = [theta for theta in self.factors if math.isfinite(facts.gains.get(theta, math.nan))]
        if not told:
            return
        steps = 1 if self._measured is None else max(1, facts.step - self._measured)
        self._measured = facts.step
        for theta in told:
            _smooth(self._gains, theta, facts.gains[theta], 1 - (1 - self._alpha) ** steps)

    def _turn(self) -> None:
        """The end of a window."""
        tried, omega = self._theta, self._options.omega
        self._theta = self._options.after(tried)
        least, now = self._gain(self._theta_min), self._gain(tried)
        if least > 0 and abs(least - now) / least <= omega:
            self._theta_min = tried
        best = sorted(self._throughputs.items(), key=lambda item: (item[1], -item[0]))[-2:]
        if len(best) == 2 and best[0][1] > 0 and (best[1][1] - best[0][1]) / best[0][1] <= omega:
            self._ideal = self._theta = min(best)[0]
            self._theta_min = min(self._theta_min, max(self._theta, 1.0))

    def allow(self, table: Table) -> Limits:
        """The error and bytes of the factor that is wanted now."""
        granted = self.factor
        self._granted, self._last_decision = granted, self.factors
        return Limits.like(table, table.at_factor(granted))

    def report(self) -> dict[str, float]:
        """Factors, gains and throughputs."""
        figures = {"theta_min": self._theta_min, "theta": self._theta, "ideal": self._ideal or 0.0}
        figures |= {f"gain_{theta:g}x": gain for theta, gain in sorted(self._gains.items())}
        figures |= {f"throughput_{theta:g}x": t for theta, t in sorted(self._throughputs.items())}
        return figures

    def state_dict(self) -> dict[str, Any]:
        """All but the options."""
        return {
            "steps": self._steps,
            "theta_min": self._theta_min,
            "theta": self._theta,
            "ideal": self._ideal,
            "gains": list(self._gains.items()),
            "measured": self._measured,
            "counts": list(self._counts.items()),
            "throughputs": list(self._throughputs.items()),
            "granted": self._granted,
            "told": list(self._last_decision),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._last_decision = tuple(float(theta) for theta in state["told"])
        self._steps = int(state["steps"])
        self._theta_min, self._theta = float(state["theta_min"]), float(state["theta"])
        self._ideal = None if state["ideal"] is None else float(state["ideal"])
        self._gains = {float(theta): float(gain) for theta, gain in state["gains"]}
        self._measured = None if state["measured"] is None else int(state["measured"])
        self._counts = {float(theta): int(count) for theta, count in state["counts"]}
        self._throughputs = {float(theta): float(speed) for theta, speed in state["throughputs"]}
        self._granted = None if state["granted"] is None else float(state["granted"])


def _smooth(averages: dict[float, float], theta: float, value: float, weight: float) -> None:
    before = averages.get(theta, value)
    averages[theta] = before + weight * (value - before)


# --- critical regimes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class CriticalRegimes(BudgetOptions):
    """Little compression for layers in a critical regime, much for the others.

    A layer is critical if its gradient's norm, root mean square over the period, changed by ``eta``
    or more since the period before (the first period counts as changed), and all layers are if the
    learning rate fell. Source: Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, "Accordion" (2021),
    algorithm 1.

    Args:
        eta: relative change.
        low: bytes in a critical regime, in those of the default: little compression.
        high: bytes otherwise: much compression.
        drop: share by which the learning rate must fall within one step to count; schedules that
            fall a little with every step would be critical for ever.

    Raises:
        ValueError: an option out of its range.

    Example:
        >>> budget = CriticalRegimes().budget()
        >>> table = Table.of(["w"], [[1, 2, 4]], [[80, 40, 20]], [["8", "4", "2"]], [1], [320])
        >>> for energy in (1.0, 1.1, 9.0):
        ...     budget.observe(StepMeasurements(0, energy=np.array([energy])))
        ...     print(budget.allow(table).reference)
        [0]
        [2]
        [0]
    """

    eta: float = 0.5
    low: float = 2.0
    high: float = 0.5
    drop: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.eta < math.inf and 0 < self.high <= self.low < math.inf and 0 < self.drop < 1):
            raise ValueError(
                f"eta={self.eta:g} must be above 0, drop={self.drop:g} in (0, 1), and "
                f"0 < high={self.high:g} <= low={self.low:g} (multiples of the default's bytes)"
            )
        super().__post_init__()

    def budget(self, ranks: int = 1) -> Budget:
        """Starts critical."""
        del ranks
        return RegimeBudget(self)


class RegimeBudget(Budget):
    """See :class:`CriticalRegimes`."""

    needs = frozenset({Measurement.ENERGY, Measurement.LEARNING_RATE})

    def __init__(self, options: CriticalRegimes) -> None:
        self._options = options
        self._energy: Float64s | None = None
        self._steps = 0
        self._norms: Float64s | None = None
        self._rate: float | None = None
        self._critical = 1.0
        self._fell = False

    @property
    def urgent(self) -> bool:
        """Whether the learning rate has fallen since the last plan."""
        return self._fell

    def observe(self, facts: StepMeasurements) -> None:
        """Add the energies of a step; those that are not finite are left out."""
        if facts.energy is not None and np.isfinite(facts.energy).all():
            energy = np.asarray(facts.energy, dtype=np.float64)
            self._energy = energy if self._energy is None else self._energy + energy
            self._steps += 1
        if facts.learning_rate is not None:
            if self._rate is not None and facts.learning_rate < (1 - self._options.drop) * self._rate:
                self._fell = True
            self._rate = float(facts.learning_rate)

    def allow(self, table: Table) -> Limits:
        """The error and bytes of the levels that the regimes call for; a new period starts.

        Raises:
            ValueError: energies of another number of layers.
        """
        critical = self._regimes(len(table.names))
        self._critical = float(critical.mean()) if len(critical) else 0.0
        multiples = np.where(critical, self._options.low, self._options.high)
        return Limits.like(table, table.resized(table.defaults, multiples))

    def _regimes(self, layers: int) -> npt.NDArray[np.bool_]:
        fell, self._fell = self._fell, False
        before = self._norms
        if self._energy is None:  # nothing was seen: nothing is known
            return np.ones(layers, dtype=np.bool_)
        if len(self._energy) != layers:
            raise ValueError(f"energies of {len(self._energy)} layers, but the table has {layers}")
        self._norms = np.sqrt(self._energy / self._steps)
        self._energy, self._steps = None, 0
        if before is None or fell:
            return np.ones(layers, dtype=np.bool_)
        change = np.abs(before - self._norms)
        return (change >= self._options.eta * before) & (change > 0)

    def report(self) -> dict[str, float]:
        """The share of the layers that were critical."""
        return {"critical": self._critical}

    def state_dict(self) -> dict[str, Any]:
        """Norms and sums."""
        return {
            "energy": None if self._energy is None else self._energy.tolist(),
            "steps": self._steps,
            "norms": None if self._norms is None else self._norms.tolist(),
            "rate": self._rate,
            "critical": self._critical,
            "fell": self._fell,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._energy = None if state["energy"] is None else np.array(state["energy"], dtype=np.float64)
        self._norms = None if state["norms"] is None else np.array(state["norms"], dtype=np.float64)
        self._steps = int(state["steps"])
        self._rate = None if state["rate"] is None else float(state["rate"])
        self._critical, self._fell = float(state["critical"]), bool(state["fell"])
