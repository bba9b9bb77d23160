"""A plan: one compressor and one level for every layer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Expected: TypeAlias = tuple[float, float]
"""Squared L2 error of compressing a layer's gradient, and the gradient's squared L2 norm."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's row.

    Args:
        layer: the parameter's name.
        shape: its shape.
        compressor: specification of the compressor, as text.
        level: density, bits or rank.
        scheme: how payloads meet: the collective scheme, as text.
        wire_bytes: bytes that one rank sends for it in a step (an upper bound, close to it).
        dense_bytes: bytes of the gradient itself.
        error: expected squared L2 error of compressing its gradient; None where no planner measured it.
        energy: squared L2 norm of that gradient.
        sum_level: of its sum, where a planner has the scheme compress that at another level; else 0.
    """

    layer: str
    shape: tuple[int, ...]
    compressor: str
    level: float
    scheme: str
    wire_bytes: int
    dense_bytes: int
    error: float | None = None
    energy: float | None = None
    sum_level: float = 0.0

    @property
    def gain(self) -> float | None:
        """Share of the gradient's energy that is sent; None where it is not known."""
        if self.error is None or not self.energy:
            return None
        return 1.0 - self.error / self.energy


@dataclass(frozen=True)
class Plan:
    """What every layer does from one step on; the same on all ranks, except for per-rank levels.

    Args:
        layers: one row per layer.
        version: counts the plans of a run.
        step: the step at which it takes effect.
        per_rank_levels: whether the levels and bytes are of this rank only; other ranks have others.
        reasons: why schemes were chosen: what was foreseen of each bucket, a line each.
        decided: the step of the planner's last decision, which may have left all as it was.
    """

    layers: tuple[LayerPlan, ...]
    version: int = 0
    step: int = 0
    per_rank_levels: bool = False
    reasons: tuple[str, ...] = ()
    decided: int = 0

    @functools.cached_property
    def digest(self) -> str:
        """Equal on all ranks, and for plans that do the same; what they expect does not count.

        Nor do per-rank levels.
        """
        same: dict[str, float | None] = {"error": None, "energy": None}
        if self.per_rank_levels:
            same |= {"level": 0, "wire_bytes": 0}  # there are no levels of sums then
        rows = [asdict(row) | same for row in self.layers]
        text = json.dumps([self.version, self.step, rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(row.wire_bytes for row in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(row.dense_bytes for row in self.layers)

    def error_share(self, row: LayerPlan) -> float | None:
        """A layer's share of the error of all layers; None where it is not known."""
        return None if row.error is None or not self._error else row.error / self._error

    @functools.cached_property
    def _error(self) -> float:
        """Error of all layers of which it is known."""
        return sum(each.error or 0.0 for each in self.layers)

    def record(self) -> dict[str, Any]:
        """As JSON, for a trace: shares and gains in place of errors."""
        layers = [
            {
                "layer": row.layer,
                "shape": list(row.shape),
                "compressor": row.compressor,
                "level": row.level,
                "scheme": row.scheme,
                "wire_bytes": row.wire_bytes,
                "dense_bytes": row.dense_bytes,
                "gain": row.gain,
                "error_share": self.error_share(row),
                **({"sum_level": row.sum_level} if row.sum_level else {}),
            }
            for row in self.layers
        ]
        return {
            "version": self.version,
            "digest": self.digest,
            "layers": layers,
            "reasons": list(self.reasons),
        }

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __str__(self) -> str:
        """A table of the layers and their total.

        Layer, shape, compressor, scheme, level, bytes on the wire, their share of the dense bytes; and,
        where a planner measured them, gain (share of the gradient's energy that is sent) and share of
        the error.
        """
        rows = [
            ("layer", "shape", "compressor", "scheme", "level", "bytes", "of dense", "gain", "of error")
        ]
        rows += [
            (
                row.layer,
                "x".join(map(str, row.shape)) or "scalar",
                row.compressor,
                row.scheme,
                f"{row.level:g}" + (f" / {row.sum_level:g}" if row.sum_level else ""),
                f"{row.wire_bytes:,}",
                _share(row.wire_bytes, row.dense_bytes),
                "-" if row.gain is None else f"{row.gain:.4f}",
                _percent(self.error_share(row)),
            )
            for row in self.layers
        ]
        total = _share(self.wire_bytes, self.dense_bytes)
        rows.append(("total", "", "", "", "", f"{self.wire_bytes:,}", total, "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 4 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self.reasons])


def _share(part: int, whole: int) -> str:
    return _percent(part / whole if whole else None)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
