"""What the rank that plans learns of a step: from its own times, and from the other ranks'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hvd_adaptive.adaptation.sampling import Sampler, with_averages
from hvd_adaptive.adaptation.timing import (
    CollectiveTiming,
    rank_times,
    with_sync_seconds,
    with_transfers_of,
)
from hvd_adaptive.comm.control_channel import Channel
from hvd_adaptive.planning import Measurement, StepMeasurements

__all__ = ["StepReport"]

_Completion = Callable[[StepMeasurements], StepMeasurements]
_JOINED = frozenset({Measurement.TRANSFERS, Measurement.BUCKETS, Measurement.GAINS})
"""What takes all ranks, and not the times of one alone."""
_OF_FACTORS = frozenset({Measurement.GAINS, Measurement.GAINS_BEFORE_SEND})
"""Where seconds belong to a factor."""


class StepReport:
    """One step at a time: begun at its end, and complete once all ranks have reported theirs.

    Args:
        needs: of the planner.
        channel: to the other ranks.
        sampler: measures gains.
        plans: whether this rank is the one that plans.
    """

    def __init__(
        self, needs: frozenset[Measurement], channel: Channel, sampler: Sampler, plans: bool
    ) -> None:
        self._needs, self._channel, self._sampler = needs, channel, sampler
        self.wanted = plans or bool(needs & _JOINED)
        """Whether this rank has anything to do with it."""
        self._facts: Callable[[], StepMeasurements] | None = None
        self._completions: list[_Completion] = []

    def begin(
        self,
        step: int,
        own: Callable[[], StepMeasurements],
        timings: Sequence[CollectiveTiming],
        decided: bool,
    ) -> None:
        """Keep what this rank knows of a step by itself, and ask the others for the rest.

        Args:
            step: its number.
            own: says what this rank knows; asked by :meth:`complete`, where no other rank waits for
                the answer, as all do between two steps.
            timings: the step's collectives, which stay as they are.
            decided: whether the levels were those of a plan.
        """
        self._facts = own
        if self._needs & _JOINED:
            facts = own()
            self._facts = lambda: facts
            self._join(step, facts, timings)
        if not decided and self._needs & _OF_FACTORS:  # of a factor that nobody chose
            self._completions.append(partial(replace, seconds=None))

    def _join(self, step: int, facts: StepMeasurements, timings: Sequence[CollectiveTiming]) -> None:
        """Ask the other ranks."""
        if self._sampler.averages(step):
            averages = self._channel.mean(self._sampler.step_vector(step))
            factors = self._sampler.factors
            self._completions.append(lambda facts: with_averages(facts, factors, averages()))
        if Measurement.TRANSFERS in self._needs:
            least = self._channel.least(rank_times(facts.compute_seconds, timings))
            self._completions.append(partial(with_transfers_of, timings, least))
        if Measurement.BUCKETS in self._needs:
            span = np.array([np.inf if facts.sync_seconds is None else facts.sync_seconds])
            fastest = self._channel.least(span)
            self._completions.append(lambda facts: with_sync_seconds(facts, fastest()))

    def complete(self) -> StepMeasurements | None:
        """The last step, with everything; None if there is none. Waits for the other ranks."""
        if self._facts is None:
            return None
        facts, self._facts = self._facts(), None
        completions, self._completions = self._completions, []
        for completed in completions:
            facts = completed(facts)
        return facts
