"""What dense steps take: the base of every forecast of seconds."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.measurements import StepMeasurements
from hvd_adaptive.planning.step_time import spread

__all__ = ["DenseSteps"]

LAST = 30
"""Steps that count, unless more are asked for."""


@dataclass(slots=True)
class DenseSteps:
    """The last dense steps of a training run.

    Args:
        seconds: of each.
        computing: of the same steps, without exposed communication.
        launches: seconds from each bucket's launch to the last one's, of the same steps.
    """

    seconds: deque[float]
    computing: deque[float]
    launches: deque[list[float]]

    @classmethod
    def empty(cls, last: int = LAST) -> DenseSteps:
        """Nothing yet.

        Args:
            last: steps that are kept.
        """
        last = max(LAST, last)
        return cls(deque(maxlen=last), deque(maxlen=last), deque(maxlen=last))

    def add(self, facts: StepMeasurements) -> None:
        """One more step, if its times are known."""
        if facts.seconds is None or facts.compute_seconds is None:
            return
        self.seconds.append(float(facts.seconds))
        self.computing.append(float(facts.compute_seconds))
        if facts.launches is not None:
            launches = list(facts.launches)
            if self.launches and len(self.launches[-1]) != len(launches):
                self.launches.clear()
            self.launches.append(launches)

    def keep_last(self, count: int) -> None:
        """Forget all others."""
        for each in (self.seconds, self.computing, self.launches):
            while len(each) > count:
                each.popleft()

    @property
    def usual(self) -> float:
        """Median of the seconds; infinite where there are none. Asked for after every step."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    def quantiles(self, share: float = 0.5) -> tuple[float, float]:
        """Seconds, and those without exposed communication, at a share of the steps: 0.5 is the median.

        Example:
            >>> steps = DenseSteps.empty()
            >>> for seconds in (0.3, 0.1, 0.2):
            ...     steps.add(StepMeasurements(0, seconds=seconds, compute_seconds=0.1))
            >>> steps.quantiles()
            (0.2, 0.1)
        """
        seconds, computing = (
            float(np.quantile(each, share)) if each else 0.0 for each in (self.seconds, self.computing)
        )
        return seconds, computing

    def ready(self, buckets: Int64s, numel: Int64s, order: Int64s, seconds: float) -> Float64s:
        """When the bucket of each layer was launched, in seconds before the end of the backward pass.

        Args:
            buckets: ``int64[L]``: of each layer.
            numel: ``int64[L]``: its elements.
            order: ``int64[L]``: layers in the order in which their gradients arrive.
            seconds: of forward and backward pass, by which launches are spread where none were seen.
        """
        launches = list(self.launches)
        if launches and len(launches[0]) > int(buckets.max(initial=0)):
            seen: Float64s = -np.median(np.array(launches), axis=0)[buckets]
            return seen
        return spread(seconds, numel, order)

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "seconds": list(self.seconds),
            "computing": list(self.computing),
            "launches": list(self.launches),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], last: int = LAST) -> DenseSteps:
        """From :meth:`to_dict`."""
        found = cls.empty(max(last, len(state["seconds"])))
        found.seconds.extend(_floats(state["seconds"]))
        found.computing.extend(_floats(state["computing"]))
        found.launches.extend(_floats(row) for row in state["launches"])
        return found


def _floats(values: Iterable[Any]) -> list[float]:
    return [float(each) for each in values]
