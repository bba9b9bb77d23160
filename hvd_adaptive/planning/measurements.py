"""What planners observe of every step, what they know when they plan, and what is measured for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.gradient_signals import GradientSignals
from hvd_adaptive.planning.step_time import StepCosts
from hvd_adaptive.planning.table import CandidateTable

__all__ = ["CheckedOptions", "Measurement", "PlanningInput", "StepMeasurements", "Transfer"]


class CheckedOptions:
    """Base of all options, which are combined by inheritance: each class checks its own fields."""

    def __post_init__(self) -> None:
        """Raise ValueError if a field is out of range; then let the next class check."""


class Measurement(Enum):
    """Something that must be measured because a planner asks for it."""

    ERRORS = "errors"
    """``CandidateTable.errors`` when a plan is made."""
    PER_RANK_ERRORS = "own errors"
    """``PlanningInput.own`` when a plan is made: every rank then has levels of its own."""
    ERRORS_OF_SENT = "errors of what is sent"
    """``ERRORS`` are those of what is compressed, with what feedback adds; else of the gradient."""
    GAINS = "gains"
    """``gains`` at ``Planner.factors`` now and then; ``seconds`` and ``factor`` every step."""
    FEEDBACK_GAINS = "gains of feedback"
    """Gains are shares of the energy of what is compressed, not of the gradients' norms."""
    GAINS_BEFORE_SEND = "gains first"
    """This step's gains before it is sent: observe them alone, plan if due, send, observe the rest."""
    PERIOD_ENERGY = "energy of a period"
    """``period_energy`` and ``period_steps`` just before every plan."""
    LEARNING_RATE = "learning rate"
    """``StepMeasurements.learning_rate`` every step."""
    TRANSFERS = "transfers"
    """``StepMeasurements.transfers`` and ``compute_seconds`` every step."""
    SIGNALS = "signals"
    """``PlanningInput.signals`` and ``costs`` in plans; ``compute_seconds`` and ``launches``."""
    BUCKETS = "buckets"
    """``bucket_bytes`` and ``sync_seconds`` every step, ``PlanningInput.buckets`` in plans."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective: what this rank gave to it, and how long it took from start to end.

    Args:
        nbytes: payload in bytes, above 0.
        seconds: above 0.
        direction: where two directions are measured apart: any two names.
    """

    nbytes: float
    seconds: float
    direction: str = "up"


@dataclass(frozen=True, slots=True, eq=False)
class StepMeasurements:
    """One step, as seen by the rank that plans. What was not measured is left out.

    Args:
        step: its number.
        seconds: from one step's start to the next one's.
        compute_seconds: of forward and backward pass.
        samples: training samples that all ranks together consumed; 1 where that is not known, so that
            throughputs are in steps.
        factor: :attr:`Decision.factor` of the plan that it ran under.
        gains: by compression factor, ``sum |C(x_l)| / sum |g_l|`` over the layers, with ``g_l`` the
            gradient and ``x_l`` what is compressed, which feedback has added to; for
            ``FEEDBACK_GAINS``, ``sum |C(x_l)|^2 / sum |x_l|^2``. Mean over the ranks.
        period_energy: ``float64[L]``: squared L2 norm of each layer's mean gradient (without what
            feedback adds), over the ranks and the steps since the last plan.
        period_steps: how many steps these are.
        learning_rate: of the optimizer.
        nbytes: that its collectives put on this rank's link.
        transfers: its collectives, where it is known how long they took.
        bucket_bytes: ``float64[B]``: payload of each bucket.
        sync_seconds: from the start of its first collective to the end of the last, on the rank where
            that took least.
        launches: seconds from each bucket's launch to the last one's; at least 0.
        plan: how many plans had taken effect before it.
        loss: of the training, where the user reports it.
        horizon: steps of the whole training run, where that is known.
        deciding_seconds: that measuring gradients and planning took of it, or beside it, on the rank
            that plans; 0 where time is assumed.
        pricing_seconds: that measuring the network again took after it; likewise.
    """

    step: int
    seconds: float | None = None
    compute_seconds: float | None = None
    samples: float = 1.0
    factor: float = 1.0
    gains: Mapping[float, float] = field(default_factory=dict)
    period_energy: Float64s | None = None
    period_steps: int = 1
    learning_rate: float | None = None
    nbytes: float | None = None
    transfers: Sequence[Transfer] = ()
    bucket_bytes: Float64s | None = None
    sync_seconds: float | None = None
    launches: Sequence[float] | None = None
    plan: int = 0
    loss: float | None = None
    horizon: int | None = None
    deciding_seconds: float = 0.0
    pricing_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PlanningInput:
    """What is known when a plan is made.

    Args:
        step: after which it is made.
        table: candidates of the layers, with squared errors; these only where ``Measurement.ERRORS`` is
            needed.
        buckets: ``int64[L]``: bucket of each layer, in the order in which buckets are sent.
        other_bytes: that layers which are not in the table send, whatever is decided.
        own: tables of all ranks, whose mean is ``table``; only for ``PER_RANK_ERRORS``.
        signals: norms of gradients and residuals, and the candidates' payloads; only for ``SIGNALS``.
        costs: seconds of compressors and network; only for ``SIGNALS``.
        preconditioned: the table with errors and energies of preconditioned gradients, where the metric
            asks for them and the optimizer has second moments of all layers.
        period: steps from one regular plan to the next; 0 where there are none.
    """

    step: int
    table: CandidateTable
    buckets: Int64s | None = None
    other_bytes: float = 0.0
    own: tuple[CandidateTable, ...] = ()
    signals: GradientSignals | None = None
    costs: StepCosts | None = None
    preconditioned: CandidateTable | None = None
    period: int = 0
