"""The means over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Summary"]


@dataclass(frozen=True)
class Summary:
    """Means per step over the complete steps of a run; seconds, bytes.

    The first call of `Meter.end_step` only starts the clock. Of the complete steps after it the
    first five are left out as warm-up, provided that at least as many remain. NaN means "unknown":
    no step is complete, `samples_per_step` was not given, or a ratio's denominator is zero.

    `compute` is what remains of `total` without `compress`, `communicate` and `decompress`;
    `communicate` is the exposed communication, so the four add up to `total`.
    `gain` is the share of the gradients' energy that was sent. `node_bytes` stay inside a node, and are
    no part of `traffic_bytes`. `verdict` says in one sentence what bounds a step.

    `sent_bytes` and `saved_bytes` are of the whole run, warm-up included: the payloads that this rank
    handed to collectives, and by how much its dense gradients were larger.
    """

    steps: float
    samples_per_sec: float
    total: float
    compute: float
    compress: float
    communicate: float
    decompress: float
    payload_bytes: float
    traffic_bytes: float
    dense_bytes: float
    ratio_payload: float
    ratio_traffic: float
    gain: float
    node_bytes: float = 0.0
    verdict: str = ""
    sent_bytes: float = 0.0
    saved_bytes: float = 0.0

    @property
    def floats_sent(self) -> float:
        """Payloads of the whole run in units of a float32, as GraVAC counts them."""
        return self.sent_bytes / 4

    def line(self) -> str:
        """What a step costs and sends, in one line; "" where no step is complete.

        Example:
            >>> unknown = float("nan")
            >>> seconds = (1e-3, 5.2e-4, 7e-5, 4e-4, 1e-5)
            >>> found = Summary(295, unknown, *seconds, 5, 7, 9, 1.8, 1.3, unknown)
            >>> print(*found.line().split("; "), sep="\\n")
            steps of 1 ms: 52 % compute, 8 % compression, 40 % exposed communication
            5 bytes sent (dense: 9)
        """
        if not self.total > 0:
            return ""
        parts = {
            "compute": self.compute,
            "compression": self.compress + self.decompress,
            "exposed communication": self.communicate,
        }
        shares = ", ".join(f"{100 * each / self.total:.0f} % {name}" for name, each in parts.items())
        sent = f"{self.payload_bytes:,.0f} bytes sent (dense: {self.dense_bytes:,.0f})"
        return f"steps of {1e3 * self.total:.3g} ms: {shares}; {sent}"

    def table(self) -> str:
        """The summary as aligned lines of text."""
        lines = [("steps measured", f"{self.steps:.0f}")]
        lines.append(("samples per second", _number(self.samples_per_sec, "{:,.1f}")))
        for name in ("total", "compute", "compress", "communicate", "decompress"):
            seconds = getattr(self, name)
            label = "exposed communication" if name == "communicate" else name
            share = _number(seconds / self.total * 100 if self.total else math.nan, "{:5.1f} %")
            lines.append((f"{label} per step", f"{_number(seconds * 1e3, '{:10.3f} ms')}  {share}"))
        for name in ("payload", "traffic", "dense"):
            count = getattr(self, f"{name}_bytes")
            lines.append((f"{name} per step", _number(count, "{:,.0f} bytes")))
        if self.node_bytes > 0:
            lines.append(("traffic inside the node per step", f"{self.node_bytes:,.0f} bytes"))
        lines.append(("compression ratio of the payload", _number(self.ratio_payload, "{:,.2f}")))
        lines.append(("compression ratio of the traffic", _number(self.ratio_traffic, "{:,.2f}")))
        lines.append(("gain", _number(self.gain, "{:.4f}")))
        lines.append(("sent in the whole run", f"{self.sent_bytes:,.0f} bytes"))
        lines.append(("floats sent in the whole run", f"{self.floats_sent:,.0f}"))
        lines.append(("saved in the whole run", f"{self.saved_bytes:,.0f} bytes"))
        width = max(len(label) for label, _ in lines)
        table = [f"{label:<{width}}  {value}" for label, value in lines]
        return "\n".join([*table, self.verdict] if self.verdict else table)


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)
