"""All plans of a run as one picture: one band per layer, time to the right, darker for fewer bytes.

TensorBoard first shows it a few hundred pixels wide: the large labels, which name groups of layers, the
scale and the steps can be read there; every layer's own name at actual size.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.planning.plan import Plan

__all__ = ["BAND", "NONE", "STRONGEST", "WIDTH", "PlanPicture", "color", "group_names"]

WIDTH = 640
"""Pixels of the time axis."""
BAND = 14
"""Pixels of a layer at least, so that its name can be read."""
STRONGEST = 1000.0
"""Compression at which a band is darkest."""
NONE = np.full(3, 200.0)
"""Gray, for a layer that was not trained."""
_HEIGHT = 420
"""Pixels of all bands at least: with less the large labels would not have room."""
_GROUPS, _NAMES, _SCALE = 270, 210, 180
"""Pixels of the columns: large labels, names of layers, and the scale to the right."""
_LARGE, _SMALL = 40, 12
"""Pixels of letters."""
_MARGIN = 12
_COLORS = np.array([[253, 231, 37], [94, 201, 98], [33, 145, 140], [59, 82, 139], [68, 1, 84]])
"""From dense to the strongest compression, even steps of its logarithm."""
_TICKS = (1, 10, 100, 1000)


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
        (420, 640, 3)
        >>> png, width, height = picture.png()
    """

    def __init__(self) -> None:
        self._moments: list[_Moment] = []

    def add(self, plan: Plan, step: int) -> None:
        """A plan that holds from this step on."""
        colors = {row.layer: color(row.dense_bytes / max(1, row.wire_bytes)) for row in plan}
        self._moments.append(_Moment(step, colors))
        if len(self._moments) > 4 * WIDTH:
            self._moments = [self._moments[index] for index in np.unique(self._shown())]

    def pixels(self) -> npt.NDArray[np.uint8]:
        """``uint8[layers * band, WIDTH, 3]``; gray where a layer was not trained."""
        bands = np.array(
            [[moment.colors.get(name, NONE) for moment in self._moments] for name in self._names]
        )
        return np.repeat(bands[:, self._shown()], self._band, axis=0).astype(np.uint8)

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

    @property
    def _band(self) -> int:
        """Pixels of a layer."""
        return max(BAND, -(-_HEIGHT // max(1, len(self._names))))

    def png(self) -> tuple[bytes, int, int]:
        """The picture with names, a time axis and a scale: PNG, width and height in pixels."""
        from PIL import Image, ImageDraw  # TensorBoard brings it

        pixels = self.pixels()
        left, bottom = _GROUPS + _NAMES, _MARGIN + len(pixels)
        width, height = left + WIDTH + _SCALE, bottom + _LARGE + 2 * _MARGIN
        image = Image.new("RGB", (width, height), "white")
        image.paste(Image.fromarray(pixels), (left, _MARGIN))
        draw = ImageDraw.Draw(image)
        large, small = _font(_LARGE), _font(_SMALL)
        for row, name in enumerate(self._names):
            middle = _MARGIN + (row + 0.5) * self._band
            draw.text((left - 6, middle), name[-36:], fill="black", font=small, anchor="rm")
        room = max(1, len(pixels) // (_LARGE + 4))
        for label, first, last in group_names(self._names, room):
            top, end = _MARGIN + first * self._band, _MARGIN + (last + 1) * self._band
            draw.line([(_MARGIN, end), (left, end)], fill="#bbbbbb")
            place = (_MARGIN, (top + end) / 2)
            draw.text(
                place, _cut(label, _GROUPS - _MARGIN, large), fill="black", font=large, anchor="lm"
            )
        first_step, last_step = self._moments[0].step, self._moments[-1].step
        draw.text((left, bottom + 6), f"step {first_step}", fill="black", font=large)
        draw.text(
            (left + WIDTH, bottom + 6), f"step {last_step}", fill="black", font=large, anchor="ra"
        )
        self._draw_scale(image, draw, left + WIDTH + 2 * _MARGIN, len(pixels))
        file = io.BytesIO()
        image.save(file, format="PNG", optimize=True)
        return file.getvalue(), width, height

    def _draw_scale(self, image: Any, draw: Any, x: int, height: int) -> None:
        """A bar of all colors, and how many times fewer bytes than dense they stand for."""
        from PIL import Image

        height = min(height, 2 * _HEIGHT)
        ratios = STRONGEST ** np.linspace(0, 1, height)
        bar = np.repeat(np.array([color(ratio) for ratio in ratios])[:, None], 36, axis=1)
        image.paste(Image.fromarray(bar.astype(np.uint8)), (x, _MARGIN))
        font = _font(_LARGE)
        for tick in _TICKS:
            share = np.log(tick) / np.log(STRONGEST)
            y = _MARGIN + _LARGE / 2 + share * (height - _LARGE)
            draw.text(
                (x + 42, y), "dense" if tick == 1 else f"{tick}x", fill="black", font=font, anchor="lm"
            )


def color(ratio: float) -> npt.NDArray[np.float64]:
    """``float64[3]``: red, green and blue, 0 to 255, of dense bytes / sent bytes."""
    share = np.clip(np.log(max(ratio, 1.0)) / np.log(STRONGEST), 0, 1) * (len(_COLORS) - 1)
    places = np.arange(len(_COLORS))
    return np.array([np.interp(share, places, channel) for channel in _COLORS.T])


def group_names(names: Sequence[str], room: int) -> list[tuple[str, int, int]]:
    """Neighboring layers under one label: their common module.

    Args:
        names: of all layers, in order.
        room: at most this many labels.

    Returns:
        Labels, with the numbers of their first and last layer. As many as there is room for: modules
        as deep as possible. Where even the outermost ones are too many, neighbors share a label.

    Example:
        >>> names = ["stem.weight", "body.0.w", "body.0.b", "body.1.w", "head.w"]
        >>> group_names(names, 3)
        [('stem', 0, 0), ('body', 1, 3), ('head', 4, 4)]
        >>> group_names(names, 2)
        [('stem ...', 0, 2), ('body.1 ...', 3, 4)]
    """
    deepest = max((name.count(".") for name in names), default=0) + 1
    for depth in range(deepest, 0, -1):
        groups: list[tuple[str, int, int]] = []
        for number, name in enumerate(names):
            parts = name.split(".")
            label = ".".join(parts[: min(depth, max(1, len(parts) - (depth < deepest)))])
            if groups and groups[-1][0] == label:
                groups[-1] = (label, groups[-1][1], number)
            else:
                groups.append((label, number, number))
        if len(groups) <= room:
            return groups
    size = -(-len(names) // room)
    starts = range(0, len(names), size)
    return [
        (
            f"{names[start].rpartition('.')[0] or names[start]} ...",
            start,
            min(start + size, len(names)) - 1,
        )
        for start in starts
    ]


def _font(size: int) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size=size)
    except TypeError:  # Pillow before 10.1 has one size only
        return ImageFont.load_default()


def _cut(text: str, width: int, font: Any) -> str:
    """The text, without its beginning where it is too wide."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"...{text}") > width:
        text = text[1:]
    return f"...{text}"
