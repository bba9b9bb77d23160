"""What a step costs and what it sends: a meter in the middle, sinks at the edge."""

from __future__ import annotations

from hvd_adaptive.telemetry.config import Telemetry
from hvd_adaptive.telemetry.loggers import MlflowSink, WandbSink
from hvd_adaptive.telemetry.meter import Meter
from hvd_adaptive.telemetry.sinks import JsonLinesSink, Sink
from hvd_adaptive.telemetry.summary import Summary
from hvd_adaptive.telemetry.tensorboard import TensorBoardSink
from hvd_adaptive.telemetry.trace import Trace
from hvd_adaptive.telemetry.verdict import Placement

__all__ = [
    "JsonLinesSink",
    "Meter",
    "MlflowSink",
    "Placement",
    "Sink",
    "Summary",
    "Telemetry",
    "TensorBoardSink",
    "Trace",
    "WandbSink",
]
