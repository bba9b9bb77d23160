"""A plan: one compressor and one level for every layer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's row.

    Args:
        layer: the parameter's name.
        shape: its shape.
        compressor: specification of the compressor, as text.
        level: density, bits or rank.
        wire_bytes: bytes that one rank sends for it in a step (an upper bound, close to it).
        dense_bytes: bytes of the gradient itself.
    """

    layer: str
    shape: tuple[int, ...]
    compressor: str
    level: float
    wire_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Plan:
    """What every layer does from one step on; the same on all ranks.

    Args:
        layers: one row a layer.
        version: counts the plans of a run.
        step: the step at which it takes effect.
    """

    layers: tuple[LayerPlan, ...]
    version: int = 0
    step: int = 0

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal plans, and on all ranks."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(row.wire_bytes for row in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(row.dense_bytes for row in self.layers)

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __str__(self) -> str:
        """A table: layer, shape, compressor, level, bytes on the wire, share of the dense bytes."""
        rows = [("layer", "shape", "compressor", "level", "bytes", "of dense")]
        rows += [
            (
                row.layer,
                "x".join(map(str, row.shape)) or "scalar",
                row.compressor,
                f"{row.level:g}",
                f"{row.wire_bytes:,}",
                _share(row.wire_bytes, row.dense_bytes),
            )
            for row in self.layers
        ]
        total = _share(self.wire_bytes, self.dense_bytes)
        rows.append(("total", "", "", "", f"{self.wire_bytes:,}", total))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"
