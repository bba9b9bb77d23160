"""The quantities that are recorded: their units, what they mean, and how TensorBoard groups them.

All times are in milliseconds, and a name that ends in ``_ms`` says so. Logs keep the plain names;
TensorBoard sorts its groups by name, so there :func:`shown` puts what a run is judged by into the first
group and what belongs to one bucket or one layer into the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["LAYOUT", "OVERVIEW", "PLAN_PICTURE", "description", "in_milliseconds", "modern", "shown"]

OVERVIEW: Final = "1_overview"
"""TensorBoard's first group."""
PLAN_PICTURE: Final = f"{OVERVIEW}/3_plan"
"""TensorBoard's picture of all plans."""

_DESCRIPTIONS: Final = {
    "time/step_ms": "Milliseconds per step; the mean over the steps since the last record.",
    "time/compute_ms": "Milliseconds per step in which training neither compressed nor waited.",
    "time/compress_ms": "Milliseconds per step in feedback and compression.",
    "time/exposed_ms": "Milliseconds per step of exposed communication: training waited for the "
    "network, or for slower ranks. What overlaps with the backward pass is not in it.",
    "time/decompress_ms": "Milliseconds per step in decompression.",
    "throughput/samples_per_sec": "Training samples per second of all ranks together.",
    "throughput/steps_per_sec": "Steps per second.",
    "loss/rank_0": "Loss on which rank 0 called backward(), mean over the steps since the last record.",
    "bytes/payload": "Bytes per step that this rank handed to the collectives that leave its node.",
    "bytes/traffic": "Bytes per step that this rank's link carried in one direction.",
    "bytes/dense": "Bytes per step of the gradients without compression.",
    "compression/ratio_payload": "Compression ratio: dense bytes / payload bytes.",
    "compression/ratio_traffic": "Bytes that dense gradients would put on the link / its bytes.",
    "compression/gain": "Share of the gradient's energy (squared L2 norm) that was sent, from 0 to 1.",
    "residual/norm": "L2 norm of what compression left out of a step.",
    "memory/feedback_bytes": "Bytes that error feedback keeps on this rank.",
    "plan/planner_ms": "Milliseconds of a core that the planner took; training does not wait for it.",
    "plan/bytes": "Bytes per step that the planner expects on this rank's link.",
    "plan/max_bytes": "Bytes per step that the planner allows itself.",
    "plan/error": "Squared L2 error that the planner expects of a step.",
    "plan/max_error": "Squared L2 error that the planner allows itself.",
    "plan/bucket_costs_r2": "Fit of the costs of buckets (R squared); 1 is perfect.",
}
_OF_ANY_NUMBER: Final = (
    (
        r"bucket/\d+/communicate_ms",
        "Milliseconds per step from launch to completion, overlapped or not.",
    ),
    (r"bucket/\d+/compress_ms", "Milliseconds per step in which this bucket was compressed."),
    (r"bucket/\d+/payload_bytes", "Bytes per step of this bucket's payload."),
    (r"gain/.+", "Share of this layer's energy that was sent; 1 is all, more is random rounding."),
    (r"expected_gain/.+", "Share of this layer's energy that the plan expects to send, from 0 to 1."),
    (r"forecast/predicted_.*_ms|forecast/predicted_ms", "Milliseconds per step that the plan foresaw."),
    (r"forecast/measured_.*_ms|forecast/measured_ms", "Milliseconds per step under the plan."),
    (r"forecast/predicted_bytes", "Bytes per step on this rank's link that the plan foresaw."),
    (r"forecast/measured_bytes", "Bytes per step on this rank's link under the plan."),
    (r"plan/bandwidth.*", "Bytes per second that the planner believes a link to carry."),
    (r"plan/throughput.*", "Samples per second that the planner measured at a compression factor."),
    (r"plan/gain.*", "Share of the gradient's energy sent at a compression factor, from 0 to 1."),
)
_FIRST: Final = {
    "throughput/samples_per_sec": "1_samples_per_sec",
    "time/exposed_ms": "2_exposed_ms",
    "compression/ratio_payload": "4_compression_ratio",
    "time/compute_ms": "5_compute_ms",
    "time/compress_ms": "6_compress_ms",
    "time/decompress_ms": "7_decompress_ms",
    "time/step_ms": "8_step_ms",
    "throughput/steps_per_sec": "8_steps_per_sec",
    "compression/gain": "9_gain",
    "loss/rank_0": "9_loss",
}
"""In the order of importance: four fit on TensorBoard's first screen."""
_GROUPS: Final = {
    "bytes": "2_bytes",
    "compression": "2_bytes",
    "plan": "3_plan",
    "forecast": "4_forecast",
    "memory": "5_memory",
    "residual": "5_memory",
    "bucket": "z_bucket",
    "gain": "z_layer_gain",
    "expected_gain": "z_layer_expected_gain",
}
_OLD: Final = {
    "compression/bytes_per_step": "bytes/payload",
    "step_time/total": "time/step_ms",
    "step_time/communicate": "time/exposed_ms",
}
"""Names that earlier versions wrote, with times in seconds."""


def shown(tag: str) -> str:
    """A tag as TensorBoard shows it.

    Example:
        >>> shown("time/exposed_ms"), shown("bucket/3/compress_ms"), shown("train/loss")
        ('1_overview/2_exposed_ms', 'z_bucket/3/compress_ms', 'train/loss')
    """
    if tag in _FIRST:
        return f"{OVERVIEW}/{_FIRST[tag]}"
    group, slash, name = tag.partition("/")
    return f"{_GROUPS.get(group, group)}{slash}{name}"


def description(tag: str) -> str:
    """What a tag means, with its unit; "" for one that the user has made.

    Example:
        >>> description("bucket/3/payload_bytes")
        "Bytes per step of this bucket's payload."
    """
    if tag in _DESCRIPTIONS:
        return _DESCRIPTIONS[tag]
    return next((text for form, text in _OF_ANY_NUMBER if re.fullmatch(form, tag)), "")


def in_milliseconds(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures by name, with those that are in seconds in milliseconds and named so.

    Example:
        >>> in_milliseconds({"sync_seconds": 0.5, "seconds": 1.0, "bytes": 8.0})
        {'sync_ms': 500.0, 'ms': 1000.0, 'bytes': 8.0}
    """
    return dict(_milliseconds(name, value) for name, value in figures.items())


def _milliseconds(name: str, value: float) -> tuple[str, float]:
    if name == "seconds" or name.endswith("_seconds"):
        return f"{name.removesuffix('seconds')}ms", 1e3 * value
    return name, value


def modern(tag: str, value: float) -> tuple[str, float]:
    """A tag and value as this version would have written what an earlier one wrote.

    Example:
        >>> modern("step_time/compute", 0.25), modern("bytes/payload", 3.0)
        (('time/compute_ms', 250.0), ('bytes/payload', 3.0))
    """
    group, _, name = tag.partition("/")
    if group == "step_time":
        return _OLD.get(tag, f"time/{name}_ms"), 1e3 * value
    if group in {"plan", "forecast"}:
        return _milliseconds(tag, value)
    return _OLD.get(tag, tag), value


LAYOUT: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Time": {
        "Where the time goes: ms per step": (
            shown("time/compute_ms"),
            shown("time/compress_ms"),
            shown("time/exposed_ms"),
            shown("time/decompress_ms"),
        ),
        "ms per step": (shown("time/step_ms"),),
        "Samples per second": (shown("throughput/samples_per_sec"),),
        "Loss": (shown("loss/rank_0"), "train/loss"),
    },
    "Bytes": {
        "Bytes per step": (shown("bytes/payload"), shown("bytes/traffic"), shown("bytes/dense")),
        "Compression ratio": (
            shown("compression/ratio_payload"),
            shown("compression/ratio_traffic"),
        ),
        "Share of the energy sent": (shown("compression/gain"),),
    },
    "Plan": {
        "Bytes per step: planned, and allowed": (shown("plan/bytes") + "$", shown("plan/max_bytes")),
        "Error: planned, and allowed": (shown("plan/error") + "$", shown("plan/max_error")),
        "Everything that the planner reports": (shown("plan/.*"),),
    },
    "Forecast": {
        "Bytes per step: predicted, and measured": (
            shown("forecast/predicted_bytes"),
            shown("forecast/measured_bytes"),
        ),
        "ms per step: predicted, and measured": (
            shown("forecast/predicted_.*ms"),
            shown("forecast/measured_.*ms"),
        ),
    },
}
"""TensorBoard's dashboard "Custom Scalars": charts by category, and patterns of their tags."""
