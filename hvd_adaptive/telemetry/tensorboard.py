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
from hvd_adaptive.telemetry.tags import LAYOUT, PLAN_PICTURE, description, shown

__all__ = ["TensorBoardSink"]

_PICTURE_SECONDS: Final = 30.0
"""Between two pictures of plans at least."""


class TensorBoardSink:
    """TensorBoard event files, written in the calling thread.

    Tags are shown in groups by :func:`hvd_adaptive.telemetry.tags.shown`, the first of which is
    `1_overview`, with their units in their descriptions; the dashboard "Custom Scalars" has charts that
    put what belongs together into one. A plan becomes the text `plan/table`, the image
    `1_overview/3_plan`, and where measured `z_layer_gain/LAYER`.

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
            layout_pb2 = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2")
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
        self._tags: dict[str, str] = {}
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write_layout(layout_pb2)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write_summary(step, [self._value(tag, value) for tag, value in values.items()])

    def _value(self, tag: str, value: float) -> Any:
        """One number; the first of its tag brings the description."""
        known = self._tags.get(tag)
        if known is not None:
            return self._summary.Summary.Value(tag=known, simple_value=value)
        self._tags[tag] = shown(tag)
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="scalars")
        metadata = self._summary.SummaryMetadata(
            plugin_data=plugin, summary_description=description(tag)
        )
        return self._summary.Summary.Value(tag=self._tags[tag], simple_value=value, metadata=metadata)

    def text(self, tag: str, text: str, step: int) -> None:
        self._write_tensor(step, tag, "text", text.encode(), [1])

    def _write_layout(self, layout_pb2: Any) -> None:
        """What the dashboard "Custom Scalars" shows."""
        category, chart = layout_pb2.Category, layout_pb2.Chart
        layout = layout_pb2.Layout(
            category=[
                category(
                    title=title,
                    chart=[
                        chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=tags))
                        for name, tags in charts.items()
                    ],
                )
                for title, charts in LAYOUT.items()
            ]
        )
        content = layout.SerializeToString()
        self._write_tensor(0, "custom_scalars__config__", "custom_scalars", content, [])

    def _write_tensor(self, step: int, tag: str, plugin: str, content: bytes, shape: list[int]) -> None:
        """Bytes that a plugin of TensorBoard reads."""
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin)
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=data),
            tensor=self._tensor(
                dtype="DT_STRING",
                string_val=[content],
                tensor_shape=self._shape(dim=[self._shape.Dim(size=size) for size in shape]),
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
        gains = {f"expected_gain/{row.layer}": row.gain for row in plan if row.gain is not None}
        if gains:
            self.scalars(step, gains)
        png, width, height = self._picture.png()
        image = self._summary.Summary.Image(
            encoded_image_string=png, width=width, height=height, colorspace=3
        )
        self._write_summary(step, [self._summary.Summary.Value(tag=PLAN_PICTURE, image=image)])

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
