"""TensorBoard event files."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Final

from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry.plan_image import PlanPicture
from hvd_adaptive.telemetry.sinks import make_folder

__all__ = ["TensorBoardSink"]

_PICTURE_SECONDS: Final = 30.0
"""Between two pictures of plans at least."""


class TensorBoardSink:
    """TensorBoard event files, written in the calling thread.

    A plan becomes the text `plan/table`, the image `plan/levels`, and where measured `gain/LAYER`.

    TensorBoard's own `EventFileWriter` writes in a thread whose errors surface at some later call;
    here a full disk is reported by the call that met it. All scalars of a step are in one event.
    """

    _counter = itertools.count()

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        # Imported here: TensorBoard is optional, and its import takes a noticeable time.
        proto = "tensorboard.compat.proto"
        try:
            event_pb2 = importlib.import_module(f"{proto}.event_pb2")
            summary_pb2 = importlib.import_module(f"{proto}.summary_pb2")
            tensor_pb2 = importlib.import_module(f"{proto}.tensor_pb2")
            tensor_shape_pb2 = importlib.import_module(f"{proto}.tensor_shape_pb2")
            record_writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"telemetry to TensorBoard needs the package tensorboard ({error}): "
                "pip install tensorboard, or write Telemetry(..., tensorboard=False)"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2.TensorProto
        self._shape: Any = tensor_shape_pb2.TensorShapeProto
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
            f"{os.getpid()}.{next(self._counter)}"
        )
        self._picture = PlanPicture()
        # a plan that is not shown yet, and when the last one was
        self._unshown: tuple[Plan, int] | None = None
        self._shown = -math.inf
        self._file = (make_folder(logdir) / name).open("xb")
        self._records: Any = record_writer.RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        self._write_summary(step, [value(tag=tag, simple_value=v) for tag, v in values.items()])

    def text(self, tag: str, text: str, step: int) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor(
                dtype="DT_STRING",
                string_val=[text.encode()],
                tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
            ),
        )
        self._write_summary(step, [value])

    def plan(self, plan: Plan, step: int) -> None:
        """Write the plan as a table, a picture of all plans so far, and the gains that it expects.

        At most twice per minute: some planners change their mind every few steps.
        """
        self._picture.add(plan, step)
        self._unshown = plan, step
        if time.monotonic() >= self._shown + _PICTURE_SECONDS:
            self._show_plan()

    def _show_plan(self) -> None:
        if self._unshown is None:
            return
        (plan, step), self._unshown = self._unshown, None
        self._shown = time.monotonic()
        self.text("plan/table", f"```\n{plan}\n```", step)
        gains = {f"gain/{row.layer}": row.gain for row in plan if row.gain is not None}
        if gains:
            self.scalars(step, gains)
        png, width, height = self._picture.png()
        image = self._summary.Summary.Image(
            encoded_image_string=png, width=width, height=height, colorspace=3
        )
        self._write_summary(step, [self._summary.Summary.Value(tag="plan/levels", image=image)])

    def _write_summary(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        try:
            self._show_plan()
        finally:
            self._file.close()
