"""All plans of a run as one picture: one band per layer, time to the right, darker for fewer bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_adaptive.planning.plan import Plan

WIDTH = 640
"""Pixels of the time axis."""
BAND = 12
"""Pixels of a layer, so that its name can be read."""
_NAMES = 230
_STRONGEST = 1000.0
"""Compression at which a band is darkest."""
_NONE = np.full(3, 200.0)
"""Gray, for a layer that was not trained."""
_COLORS = np.array([[253, 231, 37], [94, 201, 98], [33, 145, 140], [59, 82, 139], [68, 1, 84]])
"""From dense to the strongest compression, even steps of its logarithm."""


@dataclass(frozen=True)
class _Moment:
    """The step from which a plan holds, and each layer's color."""

    step: int
    colors: dict[str, npt.NDArray[np.float64]]


class PlanPicture:
    """Layers x time; pixels of one plan have one color per layer.

    Example:
        >>> from hvd_adaptive.planning.plan import LayerPlan
        >>> picture = PlanPicture()
        >>> picture.add(Plan((LayerPlan("w", (8, 8), "topk", 0.01, "allgather", 8, 256),)), step=0)
        >>> picture.add(Plan((LayerPlan("w", (8, 8), "none", 32, "allreduce", 256, 256),)), step=10)
        >>> picture.pixels().shape  # one layer
        (12, 640, 3)
        >>> png, width, height = picture.png()
    """

    def __init__(self) -> None:
        self._moments: list[_Moment] = []

    def add(self, plan: Plan, step: int) -> None:
        """A plan that holds from this step on."""
        colors = {row.layer: _color(row.dense_bytes / max(1, row.wire_bytes)) for row in plan}
        self._moments.append(_Moment(step, colors))
        if len(self._moments) > 4 * WIDTH:
            self._moments = [self._moments[index] for index in np.unique(self._shown())]

    def pixels(self) -> npt.NDArray[np.uint8]:
        """``uint8[layers * BAND, WIDTH, 3]``; gray where a layer was not trained."""
        bands = np.array(
            [[moment.colors.get(name, _NONE) for moment in self._moments] for name in self._names]
        )
        return np.repeat(bands[:, self._shown()], BAND, axis=0).astype(np.uint8)

    def _shown(self) -> npt.NDArray[np.int64]:
        """Index of the plan at each pixel of the axis."""
        steps = np.array([moment.step for moment in self._moments])
        # the last plan has begun just now: it gets a share of the axis as if it had lasted a little
        length = max(1.0, 1.02 * float(steps[-1] - steps[0]))
        times = steps[0] + length * (np.arange(WIDTH) + 0.5) / WIDTH
        return np.asarray(np.searchsorted(steps, times, side="right") - 1)

    @property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for moment in self._moments for name in moment.colors))

    def png(self) -> tuple[bytes, int, int]:
        """The picture with names and a time axis: PNG, width and height in pixels."""
        from PIL import Image, ImageDraw  # TensorBoard brings it

        pixels = self.pixels()
        height = len(pixels) + 2 * BAND
        image = Image.new("RGB", (_NAMES + WIDTH, height), "white")
        image.paste(Image.fromarray(pixels), (_NAMES, 0))
        draw = ImageDraw.Draw(image)
        for row, name in enumerate(self._names):
            draw.text((2, row * BAND), name[-36:], fill="black")
        first, last = self._moments[0].step, self._moments[-1].step
        draw.text((_NAMES, len(pixels)), f"step {first}", fill="black")
        draw.text((_NAMES + WIDTH - 90, len(pixels)), f"step {last}", fill="black")
        legend = f"dense (light) to a compression ratio of {_STRONGEST:g} (dark)"
        draw.text((2, len(pixels) + BAND), legend, fill="black")
        file = io.BytesIO()
        image.save(file, format="PNG", optimize=True)
        return file.getvalue(), _NAMES + WIDTH, height


def _color(ratio: float) -> npt.NDArray[np.float64]:
    share = np.clip(np.log(max(ratio, 1.0)) / np.log(_STRONGEST), 0, 1) * (len(_COLORS) - 1)
    places = np.arange(len(_COLORS))
    return np.array([np.interp(share, places, channel) for channel in _COLORS.T])
