"""The picture of all plans."""

from __future__ import annotations

import pytest

from hvd_adaptive.planning.plan import LayerPlan, Plan
from hvd_adaptive.telemetry.plan_image import BAND, WIDTH, PlanPicture
from tests.telemetry.helpers import (
    plan_of,
)


def test_a_picture_has_a_band_a_layer_and_each_plan_its_share_of_the_time() -> None:
    picture = PlanPicture()
    picture.add(plan_of(256, 8), 0)
    picture.add(plan_of(8, 8), 300)
    picture.add(Plan((LayerPlan("late", (2,), "none", 32, "allreduce", 8, 8),)), 400)
    pixels = picture.pixels()
    assert pixels.shape == (3 * BAND, WIDTH, 3)
    first, second, late = pixels[0], pixels[BAND], pixels[2 * BAND]
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
