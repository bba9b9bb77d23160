"""The picture of all plans."""

from __future__ import annotations

import io

import numpy as np
import pytest

from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.telemetry.plan_image import BAND, WIDTH, PlanPicture, group_names
from tests.telemetry.helpers import (
    plan_of,
)


def test_a_picture_has_a_band_a_layer_and_each_plan_its_share_of_the_time() -> None:
    picture = PlanPicture()
    picture.add(plan_of(256, 8), 0)
    picture.add(plan_of(8, 8), 300)
    picture.add(Plan((LayerPlan("late", (2,), "none", 32, "allreduce", 8, 8),)), 400)
    pixels = picture.pixels()
    band = len(pixels) // 3
    assert pixels.shape == (3 * band, WIDTH, 3)
    assert band >= BAND
    first, second, late = pixels[0], pixels[band], pixels[2 * band]
    changes = [column for column in range(1, WIDTH) if (first[column] != first[column - 1]).any()]
    assert changes == [pytest.approx(300 / 408 * WIDTH, abs=1), pytest.approx(400 / 408 * WIDTH, abs=1)]
    assert first[0].sum() > first[changes[0]].sum()  # dense is light
    assert (second[0] == first[changes[0]]).all()
    assert (late[0] == 200).all()
    assert (late[-1] == first[0]).all()


def test_a_picture_of_very_many_plans_keeps_those_that_show() -> None:
    picture = PlanPicture()
    for step in range(6 * WIDTH):
        picture.add(plan_of(256 if step < 3 * WIDTH else 8), step)
    pixels = picture.pixels()
    assert (pixels[0, : WIDTH // 3] == pixels[0, 0]).all()
    assert (pixels[0, -WIDTH // 3 :] == pixels[0, -1]).all()
    assert (pixels[0, 0] != pixels[0, -1]).any()


def test_a_picture_is_wide_and_its_labels_can_be_read_a_few_hundred_pixels_wide() -> None:
    image = pytest.importorskip("PIL.Image")
    names = [f"layer{block}.conv{part}.weight" for block in range(4) for part in range(3)]
    picture = PlanPicture()
    rows = [LayerPlan(name, (8, 8), "topk", 0.1, "allgather", 8, 256) for name in names]
    picture.add(Plan(tuple(rows)), 0)
    png, width, height = picture.png()
    assert width >= 2 * height
    drawn = image.open(io.BytesIO(png)).convert("L")
    assert drawn.size == (width, height)
    # a line of text is a run of rows in which there is ink; labels of groups are in the first column
    labels = np.asarray(drawn.crop((12, 0, 200, height - 60)))
    ink = (labels < 100).any(axis=1)
    edges = np.diff(ink.astype(int))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    assert len(starts) == 4  # layer0 to layer3
    assert (ends - starts).min() * 430 / width >= 8, "in a card of TensorBoard, 430 pixels wide"


@pytest.mark.parametrize("room", [1, 2, 5, 8, 100])
@pytest.mark.parametrize(
    "names",
    [
        ["weight"],
        [f"layers.{n}.{kind}" for n in range(30) for kind in ("weight", "bias")],
        [f"block{n}" for n in range(70)],
        ["stem.w", *(f"body.{n}.attention.q" for n in range(12)), "body.norm", "head"],
    ],
)
def test_labels_cover_all_layers_in_order_and_fit(names: list[str], room: int) -> None:
    groups = group_names(names, room)
    assert len(groups) <= room
    covered = [number for _, first, last in groups for number in range(first, last + 1)]
    assert covered == list(range(len(names)))
    for label, first, _ in groups:
        assert names[first].startswith(label.removesuffix(" ...").removesuffix("..."))
