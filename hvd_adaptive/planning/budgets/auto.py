"""The budget of ``auto``: limits on delay and noise, and what a step takes here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Int64s
from hvd_adaptive.planning.budgets.arrivals import Arrivals
from hvd_adaptive.planning.budgets.base import Budget, BudgetOptions
from hvd_adaptive.planning.budgets.calibration import Calibration
from hvd_adaptive.planning.budgets.decision_costs import DecisionCosts
from hvd_adaptive.planning.budgets.dense_control import FAR_SLOWER, SLOWER, DenseControl
from hvd_adaptive.planning.budgets.forecast_score import ForecastScore
from hvd_adaptive.planning.budgets.loss_guard import LossGuard
from hvd_adaptive.planning.budgets.losses import Losses, losses_of
from hvd_adaptive.planning.budgets.mean_shares import MeanShares
from hvd_adaptive.planning.budgets.patience import Patience, in_vain
from hvd_adaptive.planning.budgets.remeasurement import Remeasurement, far_off
from hvd_adaptive.planning.budgets.withholding import Withholding
from hvd_adaptive.planning.dense_steps import DenseSteps
from hvd_adaptive.planning.explanation import explain, in_ms
from hvd_adaptive.planning.gradient_signals import (
    METRICS,
    GradientSignals,
    noise_of,
    release_steps,
    withheld_steps,
)
from hvd_adaptive.planning.least_time import Contender, TimeLimits
from hvd_adaptive.planning.measurements import Measurement, PlanningInput, StepMeasurements
from hvd_adaptive.planning.step_time import StepCosts, StepModel
from hvd_adaptive.planning.table import CandidateTable, Limits

__all__ = ["PRESETS", "Accuracy", "AutoBudget"]

PRESETS = {"strict": (0.0015, 0.02), "balanced": (0.003, 0.05), "fast": (0.012, 0.2)}
"""Largest delay and largest noise, by name."""


@dataclass(frozen=True)
class Accuracy(BudgetOptions):
    """The least time within two limits: how much of training waits, and how much noise is added.

    *Delay*, of compressors with error feedback: a layer that sends a share ``d`` of its elements holds
    ``W = k / d`` steps of its gradient, and one that is projected to few dimensions, which keep a share
    ``c`` of its energy, ``W = k / c``; ``k`` is 1 until it has been observed (see
    :mod:`hvd_adaptive.planning.gradient_signals`). With ``w`` a layer's share of all gradients' energy,
    ``sum w W**2`` is kept within ``(delay * t)**2`` at step ``t``: no more than this share of the steps
    so far waits. Where the end ``T`` is known, it also is within a quarter of the steps that are left,
    so that what waits is sent before the learning rate reaches 0.

    *Noise*, of unbiased compressors: the variance that they add is within ``noise`` of the variance
    that the ranks' gradients have by themselves. With Adam and its kin (``metric=relative``) what error
    feedback sends together counts as well, because it adds to second moments (see
    :func:`~hvd_adaptive.planning.gradient_signals.bunching`).

    No layer may exceed four times either limit by itself, and none whose gradient is sparse may send
    fewer elements than arrive in a step: its residual would fill up.

    Training starts dense. The first plan comes after some timed steps, the next ones every period and
    whenever the allowed delay has changed much. While all stays dense, or a plan saves next to nothing
    over the one before, each is kept for twice as many periods as the one before, up to eight; unless
    the learning rate doubles or halves. What a plan foresees is compared with its steps; after two
    windows of steps in a row that are off by 15 % the network is measured again, or the last steps
    tell enough, if they are dense, or compressed and fast.

    Args:
        accuracy: ``strict``, ``balanced`` or ``fast``, which set both limits.
        delay: limit in the place of the preset's, below 1; 0 takes the preset's.
        noise: likewise.
        total_steps: of the training run; 0 where that is not known, or is reported later.
        metric: what counts across layers: ``l2``, or ``relative`` to each layer's mean square; or
            ``optimizer``: relative where the optimizer divides by it, as Adam does.
        timed_steps: dense steps that are timed before the first plan.

    Raises:
        ValueError: an option out of its range.
    """

    accuracy: str = "balanced"
    delay: float = 0.0
    noise: float = 0.0
    total_steps: int = 0
    metric: str = "optimizer"
    timed_steps: int = 10

    def __post_init__(self) -> None:
        if self.accuracy not in PRESETS:
            raise ValueError(f"accuracy={self.accuracy!r} is not one of {', '.join(PRESETS)}")
        if not (0 <= self.delay < 1 and 0 <= self.noise < math.inf and self.total_steps >= 0):
            raise ValueError(
                f"delay={self.delay:g} must lie in [0, 1), noise={self.noise:g} and "
                f"total_steps={self.total_steps} must be at least 0"
            )
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} is not one of {', '.join(METRICS)}")
        if self.timed_steps < 1:
            raise ValueError(f"timed_steps={self.timed_steps}: write at least 1")
        super().__post_init__()

    @property
    def limits(self) -> tuple[float, float]:
        """Delay and noise."""
        delay, noise = PRESETS[self.accuracy]
        return self.delay or delay, self.noise or noise

    def budget(self, ranks: int = 1) -> Budget:
        """Starts dense."""
        return AutoBudget(self, ranks)


DRAIN = 0.25
"""Share of the steps that are left by which the delay is bounded near the end."""
LAST_STEPS = 20
"""Steps before the end at which nothing is to wait any more, without those of its release."""
LEAST_APART = 10
"""Steps between two plans at least, unless something went wrong."""
MUCH_EXPOSED = 0.2
"""Share of a dense step that is exposed, from which it is odd that no compression is faster."""


class AutoBudget(Budget):
    """See :class:`Accuracy`."""

    needs = frozenset({Measurement.SIGNALS, Measurement.ERRORS})

    def __init__(self, options: Accuracy, ranks: int) -> None:
        self._options, self._ranks = options, ranks
        self._horizon = options.total_steps
        self._step = 0
        self._dense = DenseSteps.empty(options.timed_steps)
        self._score, self._guard, self._control = ForecastScore(), LossGuard(), DenseControl()
        self._score.begin(None)
        # the plan in force
        self._plans = 0
        self._compresses = False
        self._levels: Int64s | None = None
        self._planned_step = 0
        self._planned_delay = 0.0
        self._patience, self._costs = Patience(), DecisionCosts()
        # what was learned
        self._withholding, self._shares = Withholding(), MeanShares()
        self._arrivals: Arrivals | None = None
        self._found = Calibration()
        self._caution = 1.0
        # what is to be done next
        self._again = Remeasurement()
        # of the plan that is being made
        self._facts: PlanningInput | None = None
        self._limits: TimeLimits | None = None
        self._report: dict[str, float] = {}
        self._notes: list[str] = []

    # --- learning ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """After some timed dense steps."""
        return self._plans > 0 or len(self._dense.seconds) >= self._options.timed_steps

    @property
    def dense(self) -> DenseSteps:
        """Times of the dense steps that forecasts go by."""
        return self._dense

    @property
    def deciding_share(self) -> float:
        """Of the time since the first plan: what decisions have taken."""
        return self._costs.share

    @property
    def plans(self) -> int:
        """How many there have been."""
        return self._plans

    @property
    def patience(self) -> int:
        """Twice as many with each plan that leaves all dense once more, or is hardly faster; and as
        many as it takes for decisions to cost little."""
        period = 0 if self._facts is None else self._facts.period
        return max(self._patience.periods, self._costs.periods(period))

    @property
    def urgent(self) -> bool:
        """Whether something went wrong, or the allowed delay is another one by now."""
        if self._again.wanted or self._again.done or self._guard.verdict:
            return True
        if self._compresses and (self._guard.wants_dense or self._control.on):
            return True
        if self._compared or self._control.doubts(self._step):
            return True
        if self._patience.ended and (self._compresses or not self._costs.early):
            return True
        if self._step < self._planned_step + LEAST_APART:
            return False
        now, then = self._allowed_delay(self._step), self._planned_delay
        # what waits must be sent in time, whatever plans cost
        return (self._compresses and now < then / 1.5) or (
            now > max(2 * then, 1) and not self._costs.early
        )

    @property
    def _compared(self) -> bool:
        """Whether the dense steps of a control are there."""
        timed = len(self._dense.seconds) >= self._options.timed_steps
        return self._control.on and not self._compresses and timed

    def observe(self, facts: StepMeasurements) -> None:
        """Times of the plan in force, and the loss where there is one."""
        self._step = facts.step
        if facts.horizon is not None:
            self._horizon = int(facts.horizon)
        self._patience.note(facts.learning_rate)
        self._costs.observe(facts)
        if facts.plan != self._plans:
            return
        if facts.loss is not None:
            self._guard.observe(float(facts.loss), not self._compresses)
        if facts.seconds is None:
            return
        if self._score.settled and not self._compresses:
            self._dense.add(facts)
        if self._score.observe(float(facts.seconds), facts.compute_seconds):
            self._judge()
        elif self._compresses and self._score.early is not None:
            self._compare(self._score.early, FAR_SLOWER)

    def _judge(self) -> None:
        """A window of steps is complete: dense steps tell what measuring would, and cost nothing."""
        score = self._score
        if score.expected is None or score.median is None:
            return
        if self._compresses:
            self._control.saw(score.median)
            if score.usual is not None:
                self._compare(score.usual, SLOWER)
                self._control.pass_test()
            elif score.median > SLOWER * self._dense.usual:
                return  # they may soon be compared with dense ones, which costs less than measuring
        if self._control.on or (self._can_wait and not far_off(score)):
            return
        self._again.judge(score, self._step)
        self._spare()

    @property
    def _can_wait(self) -> bool:
        """Whether plans have cost enough, and nothing is lost by forecasts that are off."""
        return self._costs.early and (not self._compresses or self._score.faster)

    def _spare(self) -> None:
        """Where forecasts are off, go by the last steps: where they do, nothing is measured."""
        if not self._again.wanted:
            return
        self._dense.keep_last(self._score.window)
        tell = not self._compresses or self._can_wait
        spared = tell and self._again.spared(self._score, self._step)
        steps = "compressed" if self._compresses else "dense"
        so = f"forecasts go by the last {steps} steps" if spared else "the network is measured again"
        self._notes = [self._score.told(so)]

    def _doubt(self) -> None:
        """Have the network looked at again if the first plan was odd.

        Dense steps take what they should, whatever was measured of compressed ones: a single bad
        measurement would not show otherwise.
        """
        if self._again.doubted and not self._compresses and not self._again.wanted:
            self._again.wanted = True
            self._notes = ["all is dense though much is exposed, so the network is looked at again"]

    def _compare(self, seconds: float, share: float) -> None:
        """Have dense steps follow, if compressed ones take longer than these did."""
        usual = self._dense.usual
        if self._levels is None or self._again.wanted or self._score.expected is None:
            return
        if not self._control.looks_slower(seconds, usual, self._step, share):
            return
        self._control.begin(seconds, self._levels.tolist())
        self._notes = [f"a step took {in_ms(seconds)}, dense steps {in_ms(usual)}: dense steps follow"]

    # --- granting ---------------------------------------------------------------------------------

    def inform(self, facts: PlanningInput) -> None:
        """Keep what :meth:`allow` works with."""
        self._facts = facts

    def allow(self, table: CandidateTable) -> Limits:
        """Rows of delay and noise for all candidates, and a model of a step's seconds.

        Raises:
            ValueError: no signals or costs have been handed in.
        """
        facts = self._facts
        if facts is None or facts.signals is None or facts.costs is None:
            raise ValueError("auto needs PlanningInput(..., signals=..., costs=...)")
        signals, costs = facts.signals, facts.costs
        if not self._control.on:
            self._again.join(self._score, facts.step)
            self._spare()
            self._doubt()
        if self._guard.blames:
            self._caution *= 0.5
        if verdict := self._guard.take_verdict():
            self._notes.append(verdict)
        if self._levels is not None and len(self._levels) != len(table.names):
            self._levels = self._arrivals = None
            self._withholding = Withholding()
            self._control.give_up()
        losses = self._losses(table, signals, costs, facts.step)
        limits = TimeLimits(
            model=self._model(facts, signals, costs),
            delays=losses.delays,
            noises=losses.noises,
            max_delay=losses.max_delay,
            max_noise=losses.max_noise,
            drift=self._found.drift,
            reference=np.zeros(len(table.names), np.int64),
        )
        current = self._current(limits)
        if not costs.assumed:
            limits = self._calibrated(limits, current)
        self._limits = replace(
            limits,
            keep=current.choice if self._again.wanted else None,
            only_dense=self._guard.wants_dense or self._control.on,
            current=self._levels,
            reference=current.choice,
        )
        return self._limits

    def _corrected(self, limits: TimeLimits) -> TimeLimits:
        """With what is known of how right it foresees compressed steps."""
        return replace(limits, correction=_correction(self._control, limits, self._step))

    def _current(self, limits: TimeLimits) -> Contender:
        """What is done now; before the first plan half precision, as far as that will do."""
        if self._levels is not None:
            return limits.of(self._levels)
        found = limits.denses()
        return next((each for each in found if each.name.startswith("fp16")), found[0])

    def _allowed_delay(self, step: int) -> float:
        """Steps of training that may wait."""
        return self._caution * min(self._options.limits[0] * step, _sendable(step, self._horizon))

    def _losses(
        self, table: CandidateTable, signals: GradientSignals, costs: StepCosts, step: int
    ) -> Losses:
        """Of all candidates, and their limits."""
        signals = self._shares.smoothed(signals)
        signal, noise = noise_of(signals.energy, signals.mean_energy, self._ranks)
        steps = withheld_steps(signals.residual, signal, noise / self._ranks)
        seen = self._withholding.observe(table, signals, steps, self._levels, step)
        delay, share = self._allowed_delay(step), self._caution * self._options.limits[1]
        metric = self._options.metric
        return losses_of(table, signals, costs, metric, seen, delay, share, self._ranks)

    # --- seconds ----------------------------------------------------------------------------------

    def _model(self, facts: PlanningInput, signals: GradientSignals, costs: StepCosts) -> StepModel:
        """Of a step; when gradients arrive is known from dense steps."""
        numel = signals.numel
        buckets = facts.buckets if facts.buckets is not None else np.zeros(len(numel), np.int64)
        compute = costs.compute_seconds if costs.assumed else self._found.compute
        if self._arrivals is None or not self._compresses:
            self._arrivals = (
                Arrivals.even(buckets, numel, float(compute or 0.0))
                if costs.assumed
                else Arrivals.seen(buckets, numel, self._dense)
            )
        return StepModel(
            costs,
            float(compute or 0.0),
            self._arrivals.ready,
            self._arrivals.order,
            numel,
            signals.specs,
            signals.payloads,
            self._found.network,
        )

    def _calibrated(self, limits: TimeLimits, current: Contender) -> TimeLimits:
        """With the seconds that steps have taken: dense ones as they were, others in proportion."""
        if not self._compresses and self._dense.seconds:
            dense = self._dense.quantiles()
            model = self._found.by_dense(limits, current.choice, *dense)
            limits = replace(limits, model=model, drift=1.0)
            if self._compared:
                foreseen = model.seconds(np.array(self._control.levels, np.int64)).total
                known = _correction(self._control, limits, self._step)
                self._notes.append(self._control.conclude(dense[0], foreseen, self._step, known))
            return self._corrected(limits)
        # at other times a forecast that is off must show
        if self._compresses and self._score.median is not None and self._again.done:
            model = self._found.by_compressed(limits, current.choice, self._score.exposed)
            limits = self._corrected(replace(limits, model=model))
            self._found.blame_machine(self._score.median, limits.of(current.choice).seconds)
        return self._corrected(replace(limits, drift=self._found.drift))

    # --- afterwards -------------------------------------------------------------------------------

    def chosen(self, levels: Int64s) -> tuple[str, ...]:
        """Begin to watch the plan, and say why it is the one."""
        limits, facts = self._limits, self._facts
        assert limits is not None, "limits come first"
        assert facts is not None, "limits come first"
        chosen = limits.of(levels)
        asks = self._again.asked(facts.step)
        noise = self._caution * self._options.limits[1]
        self._report = _foreseen(limits, chosen, levels, max(1, facts.step), noise) | {
            "network_factor": self._found.network,
            "deciding_share": self._costs.share,
            "measure_again": float(asks),
        }
        words, self._notes = self._notes, []
        if not asks:
            self._report["dense_seconds"] = limits.dense.seconds
            bounds = _sendable(facts.step, self._horizon) < self._options.limits[0] * facts.step
            left = self._horizon - facts.step if bounds else None
            words += explain(limits, chosen, self._report, self._options.accuracy, left)
        kept = facts.step - self._planned_step if self._compresses else 0
        vain = (
            self._plans > 0
            and not asks
            and in_vain(limits, chosen, self._withholding.since, facts.step)
        )
        self._patience.judge(vain, kept, facts.step)
        self._costs.decided(chosen.parts.exposed, self._patience.periods)
        self._report["patience"] = float(self.patience)
        self._again.doubted = self._plans == 0 and _is_odd(limits, chosen)
        same = self._levels is not None and bool((self._levels == levels).all())
        self._take(levels, limits, chosen, facts.step)
        if not asks:  # until the network has been measured, steps are those that were off
            expected = None if limits.model.costs.assumed else chosen.seconds
            computing = chosen.working if chosen.dense else None
            self._score.begin(expected, computing=computing, same=same)
        return tuple(words)

    def _take(self, levels: Int64s, limits: TimeLimits, chosen: Contender, step: int) -> None:
        """The plan is in force from now on, or soon."""
        biased = np.array([row[index] > 0 for row, index in zip(limits.delays, levels, strict=True)])
        self._withholding.take(biased, step)
        if self._control.on and self._compresses:
            self._dense.keep_last(0)  # only those of now are a comparison
        self._levels, self._compresses = levels.copy(), not chosen.dense
        self._control.test(step)
        self._plans += 1
        self._planned_step, self._planned_delay = step, self._allowed_delay(step)

    def report(self) -> dict[str, float]:
        """Seconds, delay and noise of the last plan, and their limits."""
        return dict(self._report)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Times, the plan in force, and what its steps have shown."""
        return {
            "step": self._step,
            "horizon": self._horizon,
            **self._dense.to_dict(),
            "score": self._score.state_dict(),
            "guard": self._guard.state_dict(),
            "plans": self._plans,
            "compresses": self._compresses,
            "levels": None if self._levels is None else self._levels.tolist(),
            "planned_step": self._planned_step,
            "planned_delay": self._planned_delay,
            **self._patience.to_dict(),
            "decision_costs": self._costs.to_dict(),
            **self._withholding.to_dict(),
            **self._shares.to_dict(),
            **({"ready": None, "order": None} if self._arrivals is None else self._arrivals.to_dict()),
            **self._found.to_dict(),
            "control": self._control.state_dict(),
            "caution": self._caution,
            **self._again.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; notes that nobody has read yet are not kept."""
        self._step, self._horizon = int(state["step"]), int(state["horizon"])
        self._dense = DenseSteps.from_dict(state, self._options.timed_steps)
        self._score.load_state_dict(state["score"])
        self._guard.load_state_dict(state["guard"])
        self._plans, self._compresses = int(state["plans"]), bool(state["compresses"])
        levels = state["levels"]
        self._levels = None if levels is None else np.array(levels, np.int64)
        self._planned_step = int(state["planned_step"])
        self._planned_delay = float(state["planned_delay"])
        self._patience = Patience.from_dict(state)
        self._costs = DecisionCosts.from_dict(state.get("decision_costs", {}))  # older states have none
        self._withholding = Withholding.from_dict(state)
        self._shares, self._arrivals = MeanShares.from_dict(state), Arrivals.from_dict(state)
        self._found = Calibration.from_dict(state)
        self._caution = float(state["caution"])
        self._control = DenseControl.from_dict(state["control"])
        self._again = Remeasurement.from_dict(state)


def _sendable(step: int, horizon: int) -> float:
    """Steps that may wait and still be sent before the end; infinite where that is not known."""
    if step >= horizon:
        return math.inf
    return DRAIN * max(0, horizon - step - LAST_STEPS - release_steps(step))


def _correction(control: DenseControl, limits: TimeLimits, step: int) -> float:
    """Of foreseen seconds of compressed steps, by the model of now."""
    if not control.found_levels:
        return 1.0
    dense = min(each.parts.total for each in limits.denses())
    foreseen = limits.model.seconds(np.array(control.found_levels, np.int64)).total
    return control.correction(step, dense, foreseen)


def _is_odd(limits: TimeLimits, chosen: Contender) -> bool:
    """Whether all is dense although the limits admit compression and much of a step is exposed."""
    measured = limits.admit and not limits.model.costs.assumed
    return measured and chosen.dense and chosen.parts.exposed_share > MUCH_EXPOSED


def _foreseen(
    limits: TimeLimits, chosen: Contender, levels: Int64s, step: int, noise: float
) -> dict[str, float]:
    """What a plan is expected to take, withhold and add.

    Args:
        limits: that it was made within.
        chosen: the plan.
        levels: of each layer.
        step: of the training, of whose steps so far delays are shares.
        noise: largest share of the gradient's own, which the limits are for.
    """
    delay, added = limits.weighed(levels)
    return {
        "seconds": chosen.seconds,
        "exposed_seconds": chosen.parts.exposed,
        "delay": math.sqrt(delay) / step,
        "max_delay": math.sqrt(limits.max_delay) / step,
        "noise": added / max(limits.max_noise, 1e-300) * noise,
        "max_noise": noise,
        "correction": limits.correction,
        "drift": limits.drift,
    }
