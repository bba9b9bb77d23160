"""What counts as a layer's error: the metric in which planners add errors up and bound them.

Errors are measured as squared L2 norms. :class:`ErrorMetric` turns a table of these into one in the
metric before a budget bounds it and an allocator shares it out, so that both see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.measurements import CheckedOptions
from hvd_adaptive.planning.table import DENSE, CandidateTable

__all__ = ["SQUARED", "ErrorMetric"]

METRICS = ("squared", "norm", "relative", "preconditioned")


@dataclass(frozen=True)
class ErrorMetric(CheckedOptions):
    """What counts as a layer's error, on which tensor it is measured, and what each layer must send.

    ``E`` is the squared L2 norm of what compressing a layer's tensor loses (its mean over the ranks).
    The errors of the layers are added up:

    * ``squared``: ``E``: their sum is the squared error of the whole model, as the paper's text says in
      places. Layers with small gradients may lose all of it.
    * ``norm``: ``sqrt(E)``, as the paper's authors compute it. Layers' errors differ by half as many
      orders of magnitude, so that those with small gradients keep more.
    * ``relative``: ``E`` over the squared L2 norm of the layer's tensor, which is one minus the share
      of its energy that is sent. How large a layer's gradients are does not count.
    * ``preconditioned``: ``E`` of the gradient divided by the root of the optimizer's second moment, as
      Adam scales it, as if that were what is compressed. ``squared`` as long as the optimizer has no
      second moments of all layers.

    Source: L-GreCo (2023), sections 3 and 4, and its authors' code.

    Args:
        metric: one of these.
        residual: measure what is compressed, the gradient with what feedback adds, as the authors' code
            does; else the gradient. Together with ``accumulate`` it is the mean of what was compressed
            in the steps since the last plan.
        floor: least share of a layer's energy that is sent: levels below it are not chosen, unless the
            reference has them.

    Raises:
        ValueError: an unknown metric, or a floor outside [0, 1).

    Example:
        >>> table = CandidateTable.of("ab", [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2, [1, 1],
        ...     [32] * 2, energies=[10, 2])
        >>> for metric in ("norm", "relative"):
        ...     found, _ = ErrorMetric(metric).applied(table)
        ...     print([row.tolist() for row in found.errors])
        [[0.0, 3.0], [0.0, 1.0]]
        [[0.0, 0.9], [0.0, 0.5]]
        >>> admitted = ErrorMetric("squared", floor=0.2).admitted(table, table, None)
        >>> [row.tolist() for row in admitted.errors]
        [[0.0, inf], [0.0, 1.0]]
    """

    metric: str = "norm"
    residual: bool = False
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} is not one of {', '.join(METRICS)}")
        if not 0 <= self.floor < 1:
            raise ValueError(
                f"floor={self.floor:g}: write the least share of a layer's energy that is sent, at "
                "least 0 and below 1, such as floor=0.05"
            )
        super().__post_init__()

    def applied(
        self, table: CandidateTable, preconditioned: CandidateTable | None = None
    ) -> tuple[CandidateTable, tuple[str, ...]]:
        """The table with errors in this metric, and what must be said about that.

        Args:
            table: with squared errors.
            preconditioned: the same, measured on preconditioned gradients; None where the optimizer
                has no second moments.
        """
        if self.metric == "norm":
            return replace(table, errors=tuple(np.sqrt(row) for row in table.errors)), ()
        if self.metric == "relative":
            rows = zip(table.errors, table.energies, strict=True)
            return replace(table, errors=tuple(_relative(row, energy) for row, energy in rows)), ()
        if self.metric == "preconditioned" and preconditioned is None:
            return table, ("squared errors count: the optimizer has no second moments of all layers",)
        if self.metric == "preconditioned" and preconditioned is not None:
            return replace(table, errors=preconditioned.errors), ()
        return table, ()

    def admitted(
        self, table: CandidateTable, squared: CandidateTable, reference: Int64s | None
    ) -> CandidateTable:
        """The table without candidates below the floor: their errors are infinite.

        Args:
            table: with errors in this metric.
            squared: with squared errors and energies, as they were measured.
            reference: ``int64[L]``: candidates that stay in any case.
        """
        if not self.floor:
            return table
        kept = np.full(len(table.names), DENSE) if reference is None else reference
        layers = zip(table.errors, squared.errors, squared.energies, kept, strict=True)
        return replace(table, errors=tuple(self._above_floor(*layer) for layer in layers))

    def _above_floor(self, row: Float64s, squared: Float64s, energy: float, kept: int) -> Float64s:
        below = squared > (1 - self.floor) * energy if energy > 0 else np.zeros(len(row), np.bool_)
        # a layer must have something to send
        below[squared.argmin() if kept == DENSE else kept] = False
        return np.where(below, np.inf, row)


def _relative(row: Float64s, energy: float) -> Float64s:
    """Errors over the energy, or over the largest of them where the energy is not known."""
    whole = energy if energy > 0 else row.max(initial=0.0)
    return row / whole if whole > 0 else row


SQUARED = ErrorMetric("squared")
"""The errors as they are measured: what planners without the options of a metric add up."""
