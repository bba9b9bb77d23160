"""What a step costs and what it sends: a meter in the middle, sinks at the edge."""

from __future__ import annotations

from hvd_adaptive.telemetry.config import Telemetry
from hvd_adaptive.telemetry.meter import Meter
from hvd_adaptive.telemetry.sinks import JsonLinesSink, Sink
from hvd_adaptive.telemetry.summary import Summary
from hvd_adaptive.telemetry.tensorboard import TensorBoardSink

__all__ = ["JsonLinesSink", "Meter", "Sink", "Summary", "Telemetry", "TensorBoardSink"]
