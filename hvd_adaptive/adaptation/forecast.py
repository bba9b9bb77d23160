"""What a plan was expected to cost, against what its steps cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_adaptive.adaptation.timing import CollectiveTiming, span_of
from hvd_adaptive.telemetry import Meter
from hvd_adaptive.telemetry.tags import in_milliseconds


class Forecast:
    """Predicted and measured costs, written every :data:`REPORT_EVERY` steps and when a plan ends.

    Args:
        meter: writes them.
    """

    REPORT_EVERY = 50

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._predicted: Mapping[str, float] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0

    def begin(self, predicted: Mapping[str, float], step: int) -> None:
        """A plan takes effect after this step."""
        self._report(step)
        self._predicted = predicted
        self._forget()

    def step(self, step: int, seconds: float | None, timings: Sequence[CollectiveTiming]) -> None:
        """One step under the plan."""
        if not self._predicted or seconds is None or not timings:
            return
        self._steps += 1
        costs = {
            "bytes": sum(timing.traffic for timing in timings),
            "seconds": seconds,
            "sync_seconds": span_of(timings),
        }
        for key, value in costs.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        if self._steps == self.REPORT_EVERY:
            self._report(step)
            self._forget()

    def _report(self, step: int) -> None:
        """Write the means since the last report, and what was predicted of them."""
        foreseen = {key: self._predicted[key] for key in self._sums if key in self._predicted}
        measured = {key: self._sums[key] / self._steps for key in foreseen}
        for kind, figures in (("predicted", foreseen), ("measured", measured)):
            for key, value in in_milliseconds(figures).items():
                self._meter.scalar(f"forecast/{kind}_{key}", value, step)

    def _forget(self) -> None:
        self._sums, self._steps = {}, 0
