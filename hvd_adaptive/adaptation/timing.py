"""When the collectives of a step ran, and what planners learn from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.comm.request import Direction
from hvd_adaptive.planning import Measurement, StepMeasurements, Transfer


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """One collective of a step.

    Args:
        bucket: index of the bucket.
        traffic: bytes that this rank's link carried in one direction; 0 inside a node.
        launched: when, in seconds.
        done: when its result was there at the latest.
        exposed: seconds of it that were exposed communication.
        round: how many operations of the bucket went before it in this step.
        direction: whether it carries what ranks send, or sums that were compressed again.
    """

    bucket: int
    traffic: int
    launched: float
    done: float
    exposed: float
    round: int = 0
    direction: Direction = "up"


def span_of(timings: Sequence[CollectiveTiming]) -> float:
    """Seconds from the start of the first collective to the end of the last."""
    return max(timing.done for timing in timings) - min(timing.launched for timing in timings)


def local_measurements(
    step: int,
    seconds: float | None,
    learning_rate: float | None,
    timings: Sequence[CollectiveTiming],
    needs: frozenset[Measurement],
    **known: Any,
) -> StepMeasurements:
    """What this rank knows of a step by itself.

    Args:
        step: its number.
        seconds: from the end of the step before to its own; None where that is not known.
        learning_rate: of the optimizer.
        timings: the step's collectives.
        needs: what the planner asks for.
        known: further fields.
    """
    facts = {**known, "seconds": seconds, "learning_rate": learning_rate}
    if seconds is not None and timings:
        exposed = sum(timing.exposed for timing in timings)
        facts["compute_seconds"] = max(0.0, seconds - exposed)
        if Measurement.SIGNALS in needs:
            facts["launches"] = _before_the_last(timings)
        if Measurement.BUCKETS in needs:
            facts["bucket_bytes"] = _bucket_bytes(timings)
            facts["sync_seconds"] = span_of(timings)
    return StepMeasurements(step, **facts)  # copies would take longer than all of this


def _before_the_last(timings: Sequence[CollectiveTiming]) -> list[float]:
    """By how many seconds each bucket was launched before the last; 0 for one that was not launched."""
    launched = {timing.bucket: timing.launched for timing in timings if timing.round == 0}
    last = max(launched.values(), default=0.0)
    buckets = range(1 + max(timing.bucket for timing in timings))
    return [last - launched.get(bucket, last) for bucket in buckets]


def _bucket_bytes(timings: Sequence[CollectiveTiming]) -> Float64s:
    """Bytes of each bucket on this rank's link."""
    nbytes = np.zeros(1 + max(timing.bucket for timing in timings))
    for timing in timings:
        nbytes[timing.bucket] += timing.traffic
    return nbytes


def rank_times(compute_seconds: float | None, timings: Sequence[CollectiveTiming]) -> Float64s:
    """This rank's times, of which the least over the ranks is wanted.

    Minus its computing time; then, for all collectives together, for all of each direction where there
    are two, and for each collective, its seconds twice. The second time they are infinite where this
    rank mostly did something else meanwhile. A rank's seconds include those until the last of the
    others joined, and until it saw the end. The rank that joins last computes longest and waits for
    nobody: so the least of these numbers over the ranks are what computing and collectives take.
    """
    times = [np.inf if compute_seconds is None else -compute_seconds]
    spans = [(span_of(timings), sum(timing.exposed for timing in timings))] if timings else []
    free, taken = -np.inf, np.zeros(len(timings))
    for index in sorted(range(len(timings)), key=lambda index: timings[index].done):
        # collectives run one after the other, so one begins when the one before has ended
        taken[index] = timings[index].done - max(timings[index].launched, free)
        free = timings[index].done
    for direction in _directions([timing.direction for timing in timings]):
        mine = [index for index, timing in enumerate(timings) if timing.direction == direction]
        exposed = sum(timings[index].exposed for index in mine)
        spans.append((float(taken[mine].sum()), exposed))
    spans += [(float(each), timing.exposed) for each, timing in zip(taken, timings, strict=True)]
    for seconds, exposed in spans:
        times += [seconds, seconds if exposed >= 0.5 * seconds > 0 else np.inf]
    return np.array(times)


def with_sync_seconds(facts: StepMeasurements, least: Float64s) -> StepMeasurements:
    """The step with the least of all ranks' times from its first collective to the last.

    A rank that started first waits for the others: the one that joined last has seen the network alone.

    Args:
        facts: the step, with this rank's time.
        least: ``float64[1]``: the least of the ranks' times; infinite where none has one.
    """
    known = facts.sync_seconds is not None and least[0] < np.inf
    return replace(facts, sync_seconds=float(least[0]) if known else None)


def _directions(found: Sequence[Direction]) -> list[Direction]:
    """The directions that are timed apart: none where all collectives have one."""
    each = sorted({*found})
    return each if len(each) > 1 else []


def with_transfers(
    facts: StepMeasurements,
    traffic: Sequence[int],
    least: Float64s,
    directions: Sequence[Direction] = (),
) -> StepMeasurements:
    """The step with its transfers and computing time.

    Args:
        facts: the step.
        traffic: bytes of each collective.
        least: the least over the ranks of :func:`rank_times`.
        directions: of each collective; none where all have one.
    """
    computing, *times = least.tolist()
    known = [_known(*pair) for pair in zip(times[::2], times[1::2], strict=True)]
    compute_seconds = None if computing == np.inf else max(0.0, -computing)
    nbytes = float(sum(traffic))
    facts = replace(facts, nbytes=nbytes, compute_seconds=compute_seconds)
    if not known:
        return facts
    apart = _directions(directions)
    each = known[1 + len(apart) :]
    ways = list(directions) or [_ONLY] * len(each)
    transfers = []
    for position, direction in enumerate(apart or [_ONLY]):
        mine = [index for index, way in enumerate(ways) if way == direction or not apart]
        together = known[1 + position] if apart else known[0]
        # together, because the end of one is seen late where cores are busy, which shortens the next
        spans = [(sum(traffic[index] for index in mine), together)]
        if together == np.inf:
            spans = [(traffic[index], each[index]) for index in mine]
        transfers += [
            Transfer(size, seconds, ways[mine[0]])
            for size, seconds in spans
            if size > 0 and seconds < np.inf
        ]
    return replace(facts, transfers=transfers)


def with_transfers_of(
    timings: Sequence[CollectiveTiming], least: Callable[[], Float64s], facts: StepMeasurements
) -> StepMeasurements:
    """As :func:`with_transfers`, of these collectives; ``least`` waits for the other ranks."""
    traffic = [timing.traffic for timing in timings]
    return with_transfers(facts, traffic, least(), [timing.direction for timing in timings])


_ONLY: Direction = "up"
"""The direction where nobody names one."""


def _known(seconds: float, exposed: float) -> float:
    """The least seconds of all ranks, if a rank that took hardly longer did nothing but wait.

    Else the rank that joined last was busy, and the others waited for it, not for the network.
    """
    return exposed if exposed <= 1.25 * seconds else np.inf
