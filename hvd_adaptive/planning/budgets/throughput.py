"""GraVAC's budget: the compression factor with the highest throughput x gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions
from hvd_adaptive.planning.measurements import Measurement, StepMeasurements
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = ["Throughput", "ThroughputBudget"]


@dataclass(frozen=True)
class Throughput(BudgetOptions):
    """Search for the compression factor with the highest throughput x gain.

    Source: GraVAC, algorithm 1.

    A candidate factor is tried for ``window`` steps, then the next, larger one. A step is sent at the
    candidate if its gain reaches ``epsilon``, else at the smallest factor, else dense. When the two
    best throughputs (samples per second times gain) differ by ``omega`` at most, the smaller of their
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
        """The last step whose gains were observed."""
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
        """Gains that are observed on every tenth step only weigh as those of ten steps."""
        seen = [theta for theta in self.factors if math.isfinite(facts.gains.get(theta, math.nan))]
        if not seen:
            return
        steps = 1 if self._measured is None else max(1, facts.step - self._measured)
        self._measured = facts.step
        for theta in seen:
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

    def allow(self, table: CandidateTable) -> Limits:
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
        """Continue from :meth:`state_dict`."""
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
