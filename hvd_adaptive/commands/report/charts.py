"""Charts of a report, as SVG within HTML: they load nothing, and can be read without scripts."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.telemetry.plan_image import NONE, STRONGEST, color

WIDTH, HEIGHT, MAP_WIDTH = 560, 220, 1060
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 10, 34
COLORS = ("#2a6fbb", "#d95f02", "#1b9e77", "#7a5ab5", "#c2185b", "#8a6d00", "#4d4d4d", "#00838f")
"""Of lines, in order; each is readable on white and on black."""
PARTS = {
    "compute": "#9aa0a6",
    "compress": "#d95f02",
    "exposed": "#2a6fbb",
    "decompress": "#a9744f",
}
"""Of the parts of a step."""
NAMES = {"exposed": "exposed communication"}

Series = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scale:
    """From values to pixels.

    Args:
        low: the value at ``start``.
        high: the value at ``end``.
        start: pixel.
        end: pixel.
        logarithmic: in place of linear.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(each, 1e-300)) for each in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the scale."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, (last - first) // 6)
            for factors in ((1,), (1, 2, 5)):
                steps = (m * 10.0**power for power in range(first, last + 1, every) for m in factors)
                inside = [tick for tick in steps if self.low <= tick <= self.high]
                if len(inside) > 1:
                    return inside
            return [self.low, self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        unit = 10.0 ** math.floor(math.log10(span / 5))
        step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A value, short: with a letter for thousands and more.

    Example:
        >>> number(12345678), number(0.25), number(1500), number(7)
        ('12.3M', '0.25', '1.5k', '7')
    """
    if not math.isfinite(value):
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def legend(labels: Mapping[str, str]) -> str:
    """Colors by label."""
    items = "".join(
        f'<span class="key"><i style="background:{shade}"></i>{html.escape(label)}</span>'
        for label, shade in labels.items()
    )
    return f'<div class="legend">{items}</div>'


def lines(
    series: Mapping[str, Series], x: str, y: str, *, logarithmic: bool = False, from_zero: bool = True
) -> str:
    """A chart of lines.

    Args:
        series: points by label.
        x: what the horizontal axis shows.
        y: what the vertical axis shows, with its unit.
        logarithmic: the vertical axis.
        from_zero: whether a linear vertical axis begins at 0.
    """
    shown = {label: _positive(points) if logarithmic else points for label, points in series.items()}
    shown = {label: points for label, points in shown.items() if points}
    if not shown:
        return ""
    every = [point for points in shown.values() for point in points]
    across = _across([at for at, _ in every])
    values = [value for _, value in every]
    low, high = min(values), max(values)
    if logarithmic:
        low, high = low / 1.1, high * 1.1
    else:
        low = min(0.0, low) if from_zero else low - 0.05 * (high - low or 1)
        high += 0.05 * (high - low) or 1.0
    up = Scale(low, high, HEIGHT - _BOTTOM, _TOP, logarithmic)
    shades = dict(zip(shown, itertools.cycle(COLORS), strict=False))
    drawn = []
    for label, points in shown.items():
        path = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in points)
        drawn.append(f'<polyline points="{path}" stroke="{shades[label]}" class="line"/>')
        if len(points) <= 40:
            drawn += [
                f'<circle cx="{across(at):.1f}" cy="{up(value):.1f}" r="2.5" fill="{shades[label]}"/>'
                for at, value in points
            ]
    content = _axes(across, up, x, y) + "".join(drawn)
    return _figure(content, f"{y} over {x}", across, shown, legend(shades))


def areas(parts: Mapping[str, Series], x: str, y: str) -> str:
    """Parts of a whole over the steps, one on top of the other; all have the same steps."""
    parts = {label: points for label, points in parts.items() if points}
    if not parts:
        return ""
    at = [step for step, _ in next(iter(parts.values()))]
    across = _across(at)
    totals = [sum(points[place][1] for points in parts.values()) for place in range(len(at))]
    up = Scale(0.0, 1.05 * max(totals) or 1.0, HEIGHT - _BOTTOM, _TOP)
    below = [0.0] * len(at)
    drawn = []
    for label, points in parts.items():
        above = [base + max(0.0, value) for base, (_, value) in zip(below, points, strict=True)]
        edge = [f"{across(step):.1f},{up(value):.1f}" for step, value in zip(at, above, strict=True)]
        back = [f"{across(step):.1f},{up(value):.1f}" for step, value in zip(at, below, strict=True)]
        drawn.append(f'<polygon points="{" ".join([*edge, *reversed(back)])}" fill="{PARTS[label]}"/>')
        below = above
    content = "".join(drawn) + _axes(across, up, x, y)
    shades = {NAMES.get(label, label): PARTS[label] for label in parts}
    named = {NAMES.get(label, label): points for label, points in parts.items()}
    return _figure(content, f"{y} over {x}", across, named, legend(shades))


def shares(parts: Mapping[str, float]) -> str:
    """One bar, of the parts of a step, with their shares in words."""
    total = sum(max(0.0, value) for value in parts.values())
    if not total:
        return ""
    pieces, words = [], []
    for label, value in parts.items():
        share = 100 * max(0.0, value) / total
        name = NAMES.get(label, label)
        title = f"{name}: {value:.2f} ms, {share:.1f} %"
        pieces.append(
            f'<div style="width:{share:.3f}%;background:{PARTS[label]}" title="{title}"></div>'
        )
        words.append(
            f'<span class="key"><i style="background:{PARTS[label]}"></i>{name} '
            f"<b>{value:.2f} ms</b> ({share:.1f} %)</span>"
        )
    return f'<div class="bar">{"".join(pieces)}</div><div class="legend">{"".join(words)}</div>'


def plan_map(plans: Sequence[tuple[int, Mapping[str, Any]]], last_step: int) -> str:
    """Layers x steps, darker where a layer is compressed more, with every layer's name."""
    names = list(dict.fromkeys(row["layer"] for _, plan in plans for row in plan["layers"]))
    steps = [step for step, _ in plans]
    band = 15
    left = 20 + 6.3 * min(48, max(map(len, names)))
    across = Scale(steps[0], max(last_step, steps[-1] + 1), left, max(MAP_WIDTH - 24, left + 400))
    height = band * len(names)
    drawn = [_text(left - 6, row * band + 11, name[-48:], "end") for row, name in enumerate(names)]
    ends = [*steps[1:], max(last_step, steps[-1] + 1)]
    for row, name in enumerate(names):
        cells = [_cell(plan, name) for _, plan in plans]
        start = 0
        for place in range(1, len(cells) + 1):
            if place < len(cells) and cells[place] == cells[start]:
                continue
            begin, end = across(steps[start]), across(ends[place - 1])
            shade, words = cells[start]
            title = html.escape(f"{name}, from step {steps[start]}: {words}")
            drawn.append(
                f'<rect x="{begin:.1f}" y="{row * band}" width="{max(0.3, end - begin):.1f}" '
                f'height="{band - 1}" fill="{shade}"><title>{title}</title></rect>'
            )
            start = place
    for tick in across.ticks():
        if tick == int(tick):
            drawn.append(_text(across(tick), height + 14, str(int(tick)), "middle"))
    drawn.append(_text(across.end, height + 30, "step", "end", "axis"))
    width = across.end + 24
    picture = (
        f'<svg viewBox="0 0 {width:.0f} {height + 36}" width="{width:.0f}" height="{height + 36}" '
        f'role="img" aria-label="compression of every layer over the steps">{"".join(drawn)}</svg>'
    )
    return f'<div class="map">{picture}</div>{_scale_of_plans()}'


def _scale_of_plans() -> str:
    """What the colors of a plan mean."""
    ratios = (1, 3, 10, 30, 100, 300, STRONGEST)
    return legend({"dense" if each == 1 else f"{each:g}x": _hex(color(each)) for each in ratios})


def _cell(plan: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Color and words of one layer in one plan."""
    row = next((each for each in plan["layers"] if each["layer"] == name), None)
    if row is None:
        return _hex(NONE), "not trained"
    ratio = row["dense_bytes"] / max(1, row["wire_bytes"])
    words = f"{row.get('compressor', '')}, level {row.get('level', 0):g}, {row['wire_bytes']:,} bytes"
    return _hex(color(ratio)), f"{words}, {ratio:.1f}x"


def _hex(channels: Any) -> str:
    return "#" + "".join(f"{round(float(each)):02x}" for each in channels)


def _positive(points: Series) -> Series:
    return [point for point in points if point[1] > 0]


def _across(at: Sequence[float]) -> Scale:
    """The horizontal scale of a chart."""
    low, high = min(at), max(at)
    return Scale(low, high if high > low else low + 1, _LEFT, WIDTH - _RIGHT)


def _axes(across: Scale, up: Scale, x: str, y: str) -> str:
    """Grid, ticks and names."""
    drawn = []
    for tick in up.ticks():
        place = up(tick)
        drawn.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        drawn.append(_text(_LEFT - 6, place + 4, number(tick), "end"))
    for tick in across.ticks():
        place = across(tick)
        drawn.append(_text(place, HEIGHT - _BOTTOM + 15, number(tick), "middle"))
    drawn.append(_text(WIDTH - _RIGHT, HEIGHT - 4, x, "end", "axis"))
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    drawn.append(
        f'<text x="14" y="{middle:.0f}" transform="rotate(-90 14 {middle:.0f})" text-anchor="middle" '
        f'class="axis">{html.escape(y)}</text>'
    )
    return f'<g class="grid">{"".join(drawn)}</g>'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{html.escape(words)}</text>"


def _figure(content: str, label: str, across: Scale, series: Mapping[str, Series], below: str) -> str:
    """A chart with the numbers that are shown under the mouse."""
    data = {
        "left": across.start,
        "right": across.end,
        "low": across.low,
        "high": across.high,
        "series": {
            name: [[at, float(f"{v:.5g}")] for at, v in points] for name, points in series.items()
        },
    }
    # "</" would end the script
    written = json.dumps(data).replace("</", "<\\/")
    return (
        f'<figure class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}">{content}<line class="cursor" y1="{_TOP}" '
        f'y2="{HEIGHT - _BOTTOM}" x1="-9" x2="-9"/></svg>{below}'
        f'<script type="application/json">{written}</script></figure>'
    )
