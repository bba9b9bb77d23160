"""GraVAC's budget: the compression factor with the highest throughput x gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions, require_factors
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = ["Throughput", "ThroughputBudget"]


@dataclass(frozen=True)
class Throughput(BudgetOptions):
    """Search for the compression factor with the highest throughput x gain.

    Source: GraVAC, algorithm 1, with the gain of its authors' code.

    A candidate factor is tried for ``window`` steps, then the next, larger one. A step is sent at the
    candidate if its gain reaches ``epsilon``, else at the smallest factor, else dense. The search ends
    in one of two ways, and the factor that it ends with is kept:

    * the two highest throughputs (samples per second times gain) differ by ``omega`` at most: the
      smaller of their factors, as in the paper;
    * ``theta_max`` has been tried, and the smallest factor where it was never sent: the factor with the
      highest throughput. The paper's listing would stay at ``theta_max``.

    Only factors whose gain reaches ``epsilon`` are kept, and never dense. The search begins again when
    the gain of the factor that was kept falls below ``epsilon``, when its throughput, looked at after
    every window, has changed by more than ``omega`` and its noise, or when no factor could be kept.

    The gain of a factor is ``sum |C(x_l)| / sum |g_l|`` over the layers, with ``g_l`` the gradient and
    ``x_l`` the gradient with what feedback adds. With error feedback what is left out is sent later, so
    that this hovers about 1 at every factor that training can follow, and falls where a factor
    withholds for good. ``gain=feedback`` takes the formula that the paper prints, ``sum |C(x_l)|^2 /
    sum |x_l|^2``: the residual counts in every step, and at 1000x a few thousandths remain.

    In throughputs a gain counts up to 1, the most that the paper's formula gives: beyond that, what is
    sent is of earlier gradients. After a switch to a smaller factor it is several times the gradient.

    The candidates are those of the paper's section IV-B, on the smallest factor at the start:
    ``theta_min`` times 2, 4, 16, 256 (exponential) or times 2, 4, 8, ... (geometric), up to
    ``theta_max``. Where a candidate's gain is within ``omega`` of the smallest factor's, it becomes the
    smallest factor: the candidate that was tried, as the paper's text says (its listing takes the next
    one, whose gain nobody has seen). Candidates outside a compressor's own range of levels extend it,
    where levels are densities; else, and where an explicit range leaves them out, they are an error.

    Gains are lower while residuals are empty than under a factor's own feedback, and dense steps empty
    them: a run that is sent dense would stay dense. So after some dense steps the smallest factor is
    tried, whatever its gain: for ``2 theta_min`` steps or twice those that gains are smoothed over,
    whichever is more, but a window at most. Where that does not help, as many dense steps follow, and
    twice as many each time, up to a window.

    Args:
        theta_min: smallest compression factor, above 1.
        theta_max: largest.
        epsilon: least gain, in [0, 1].
        omega: relative difference that counts as none.
        window: steps for each candidate.
        policy: ``exponential`` or ``geometric``.
        exact: decide with the gains of the step that is to be sent, as the paper does, which forbids
            overlap; else with those up to the step before. Shows in ``needs`` only.
        gain: ``raw`` or ``feedback``. Shows in ``needs`` only.

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
    gain: str = "raw"

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
        if self.gain not in ("raw", "feedback"):
            raise ValueError(f"gain={self.gain!r} is not one of raw, feedback")
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

    def candidate_factors(self) -> tuple[float, ...]:
        """All of the search.

        Example:
            >>> Throughput(theta_min=1.5, theta_max=20).candidate_factors()
            (1.5, 3.0, 6.0, 20.0)
        """
        found = [float(self.theta_min)]
        while found[-1] < self.theta_max:
            found.append(self.after(found[-1]))
        return tuple(found)

    def check_range(self, compressors: str, factors: Float64s, default: float) -> None:
        """ValueError unless ``theta_min`` and ``theta_max`` lie in the range."""
        del default
        ends = self.theta_min, self.theta_max
        require_factors(compressors, factors, ends, "write another theta_min or theta_max")

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
        self._gains: dict[float, float] = {}
        self._measured: int | None = None
        """The last step whose gains were observed."""
        self._granted: float | None = None
        """None until the first plan: till then layers do what nobody has chosen."""
        self._trial = min(options.window, math.ceil(max(2 * options.theta_min, 2 / self._alpha)))
        """Steps for which the smallest factor is tried after dense ones."""
        self._patience = self._trial
        """Dense steps before that."""
        self._dense = self._forced = 0
        """Dense steps one after the other, and steps that are left of a trial."""
        self._begin()
        self._last_decision = self.factors
        needs = {Measurement.GAINS}
        needs |= {Measurement.GAINS_BEFORE_SEND} if options.exact else set()
        needs |= {Measurement.FEEDBACK_GAINS} if options.gain == "feedback" else set()
        self.needs = frozenset(needs)

    def _begin(self) -> None:
        """Search from the start; gains that are known stay."""
        self._steps = 0
        self._theta_min = float(self._options.theta_min)
        self._theta = self._options.after(self._theta_min)
        self._ideal: float | None = None
        self._speeds: dict[float, Smoothed] = {}
        """Throughput x gain at each factor that was sent."""
        self._kept_at = 0.0
        """That of the factor that was kept, when it was."""

    @property
    def factors(self) -> tuple[float, ...]:
        """The smallest factor, the candidate, and the next one, to know it when its turn comes."""
        wanted = {self._theta_min, self._theta}
        if self._ideal is None:
            wanted.add(self._options.after(self._theta))
        return tuple(sorted(wanted))

    @property
    def factor(self) -> float:
        """The candidate if its gain suffices, else the smallest factor, else 1. Without history: 1."""
        for theta in (self._theta, self._theta_min):
            if self._suffices(theta):
                return theta
        return self._theta_min if self._forced else 1.0

    @property
    def urgent(self) -> bool:
        """Whether the factor has changed, or whose gains are wanted; not before a gain is known."""
        if self._measured is None:
            return False
        return self.factor != self._granted or self.factors != self._last_decision

    def _gain(self, theta: float) -> float:
        return 1.0 if theta <= 1 else self._gains.get(theta, 0.0)

    def _suffices(self, theta: float) -> bool:
        return theta in self._gains and self._gains[theta] >= self._options.epsilon

    def observe(self, facts: StepMeasurements) -> None:
        """Gains first, then the throughput at the factor that the step was sent with."""
        self._learn_gains(facts)
        if self._ideal is not None and not self._suffices(self._ideal):
            self._begin()
        if facts.seconds is None or facts.seconds <= 0:
            return
        if facts.factor in (*self.factors, 1.0):  # else of a candidate that is gone
            speed = facts.samples / facts.seconds * min(1.0, self._gain(facts.factor))
            self._speeds.setdefault(facts.factor, Smoothed()).add(speed, self._alpha)
        self._leave_dense(facts.factor)
        self._steps += 1
        if self._steps % self._options.window == 0:
            if self._ideal is None:
                self._turn()
            elif self._has_changed(self._ideal):
                self._begin()

    def _learn_gains(self, facts: StepMeasurements) -> None:
        """Gains that are observed on every tenth step only weigh as those of ten steps."""
        seen = [theta for theta in self.factors if math.isfinite(facts.gains.get(theta, math.nan))]
        if not seen:
            return
        steps = 1 if self._measured is None else max(1, facts.step - self._measured)
        self._measured = facts.step
        weight = 1 - (1 - self._alpha) ** steps
        for theta in seen:
            before = self._gains.get(theta, facts.gains[theta])
            self._gains[theta] = before + weight * (facts.gains[theta] - before)

    def _leave_dense(self, sent: float) -> None:
        """After some dense steps, try the smallest factor for some."""
        if sent > 1:
            self._forced = max(0, self._forced - 1)
            self._dense = 0
            if self._suffices(sent):
                self._patience = self._trial
            return
        self._dense += 1
        if self._dense >= self._patience and not self._forced:
            self._dense, self._forced = 0, self._trial
            self._patience = min(2 * self._patience, self._options.window)

    def _turn(self) -> None:
        """The end of a window of the search."""
        tried, smallest = self._theta, self._theta_min
        least, now = self._gain(smallest), self._gain(tried)
        if least > 0 and abs(least - now) / least <= self._options.omega:
            self._theta_min = tried
        kept = self._saturated()
        if kept is None and (tried >= self._options.theta_max or tried == smallest):
            if self._theta_min not in self._speeds and self._suffices(self._theta_min):
                self._theta = self._theta_min
                return
            kept = max(self._eligible(), key=lambda each: each[1:], default=(None,))[0]
            if kept is None:
                self._begin()
                return
        if kept is None:
            self._theta = self._options.after(tried)
            return
        self._ideal = self._theta = kept
        self._theta_min = min(self._theta_min, kept)
        self._kept_at = self._speeds[kept].mean

    def _eligible(self) -> list[tuple[float, float, float]]:
        """Factor, throughput and minus the factor, where the gain suffices; never dense."""
        return [
            (theta, speed.mean, -theta)
            for theta, speed in self._speeds.items()
            if self._suffices(theta)
        ]

    def _saturated(self) -> float | None:
        """The smaller factor of the two with the highest throughputs, if these hardly differ."""
        best = sorted(self._eligible(), key=lambda each: each[1:])[-2:]
        if len(best) < 2 or not best[0][1] > 0:
            return None
        gained = (best[1][1] - best[0][1]) / best[0][1]
        return min(best)[0] if gained <= self._options.omega else None

    def _has_changed(self, theta: float) -> bool:
        """Whether a throughput is another than when its factor was kept, and not by chance.

        By more than ``omega``, and two standard deviations of the difference of two smoothed values.
        """
        now = self._speeds[theta]
        noise = 2 * math.sqrt(2 * now.variance * max(self._alpha, 1 / now.count))
        return abs(now.mean - self._kept_at) > self._options.omega * self._kept_at + noise

    def allow(self, table: CandidateTable) -> Limits:
        """The error and bytes of the factor that is wanted now."""
        granted = self.factor
        self._granted, self._last_decision = granted, self.factors
        return Limits.like(table, table.at_factor(granted))

    def report(self) -> dict[str, float]:
        """Factors, gains and throughputs."""
        figures = {"theta_min": self._theta_min, "theta": self._theta, "ideal": self._ideal or 0.0}
        figures |= {f"gain_{theta:g}x": gain for theta, gain in sorted(self._gains.items())}
        speeds = sorted(self._speeds.items())
        return figures | {f"throughput_{theta:g}x": speed.mean for theta, speed in speeds}

    def state_dict(self) -> dict[str, Any]:
        """All but the options."""
        return {
            "steps": self._steps,
            "theta_min": self._theta_min,
            "theta": self._theta,
            "ideal": self._ideal,
            "kept_at": self._kept_at,
            "gains": list(self._gains.items()),
            "measured": self._measured,
            "speeds": [[theta, *astuple(speed)] for theta, speed in self._speeds.items()],
            "trial": [self._patience, self._dense, self._forced],
            "granted": self._granted,
            "told": list(self._last_decision),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._last_decision = tuple(float(theta) for theta in state["told"])
        self._steps = int(state["steps"])
        self._theta_min, self._theta = float(state["theta_min"]), float(state["theta"])
        self._ideal = None if state["ideal"] is None else float(state["ideal"])
        self._kept_at = float(state["kept_at"])
        self._gains = {float(theta): float(gain) for theta, gain in state["gains"]}
        self._measured = None if state["measured"] is None else int(state["measured"])
        self._speeds = {
            float(theta): Smoothed(float(mean), float(variance), int(count))
            for theta, mean, variance, count in state["speeds"]
        }
        self._patience, self._dense, self._forced = (int(count) for count in state["trial"])
        self._granted = None if state["granted"] is None else float(state["granted"])


@dataclass(slots=True)
class Smoothed:
    """Mean and variance of values of which each weighs as much as it says, the first ones evenly."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, value: float, weight: float) -> None:
        """One more value."""
        self.count += 1
        weight = max(weight, 1 / self.count)
        change = value - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change**2)
