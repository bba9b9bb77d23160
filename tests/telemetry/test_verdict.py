"""The sentence about what bounds a step."""

from __future__ import annotations

import math

import pytest

from hvd_adaptive.telemetry import Meter, Placement
from hvd_adaptive.telemetry.verdict import verdict
from tests.telemetry.helpers import Clock, run_step

ROOMY = Placement(ranks=4, hosts=4, sharing=1, cores=8)
CROWDED = Placement(ranks=16, hosts=1, sharing=16, cores=2)


@pytest.mark.parametrize(
    ("exposed", "compression", "placement", "least", "sentence"),
    [
        (0.74, 0.05, CROWDED, math.nan, "74 % exposed: 16 ranks on 2 cores, not the network"),
        (0.74, 0.05, Placement(2, 1, 2, 8), 0.7, "74 % exposed: ranks wait for each other, not the"),
        (0.60, 0.05, ROOMY, math.nan, "60 % exposed: the network"),
        (0.60, 0.05, ROOMY, 0.5, "60 % exposed: the network"),
        (0.60, 0.05, ROOMY, 0.06, "60 % exposed: slower ranks, not the network (one of the 4 ranks"),
        (0.60, 0.05, Placement(8, 2, 4, 2), 0.5, "the network, and 4 ranks on 2 cores"),
        (0.60, 0.05, Placement(8, 2, 4, 2), 0.1, "4 ranks on 2 cores, not the network (one of the 8"),
        (0.05, 0.04, ROOMY, math.nan, "compute bound: 5 % exposed, so more compression cannot"),
        (0.20, 0.35, ROOMY, math.nan, "35 % compressing and decompressing: a cheaper compressor"),
        (0.20, 0.35, CROWDED, math.nan, "35 % compressing and decompressing, with 16 ranks on 2 cores"),
    ],
)
def test_a_verdict_names_the_largest_part_and_its_cause(
    exposed: float, compression: float, placement: Placement, least: float, sentence: str
) -> None:
    assert sentence in verdict(1.0, exposed, compression, placement, least)


def test_without_a_step_there_is_no_verdict() -> None:
    assert verdict(math.nan, math.nan, math.nan, ROOMY) == ""
    assert Meter(clock=Clock()).summary().verdict == ""


def test_the_summary_ends_with_the_verdict() -> None:
    clock = Clock()
    meter = Meter(clock=clock, placement=CROWDED)
    meter.end_step(0)
    run_step(meter, clock, 1, 1.0, exposed=0.74)
    table = meter.summary().table().splitlines()
    assert table[-1] == "74 % exposed: 16 ranks on 2 cores, not the network"
