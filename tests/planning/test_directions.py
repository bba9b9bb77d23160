"""Levels of their own for sums that come back: one budget of time for both directions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hvd_adaptive.adaptation.timing import CollectiveTiming, rank_times, with_transfers
from hvd_adaptive.planning import (
    DENSE,
    CandidateTable,
    PlanningInput,
    StepMeasurements,
    Transfer,
    parse,
)
from hvd_adaptive.planning.allocators import MinErrorKnapsack, Uniform
from hvd_adaptive.planning.planner import Decision
from hvd_adaptive.planning.table import Limits, Prices

BITS = (8, 6, 4, 3, 2)
NUMEL = np.array([40_000.0, 9_000.0, 100_000.0])
ENERGY = (3.0, 80.0, 0.4)
UP, DOWN = 1e-6, 4e-6
"""Seconds of a byte."""


def table(returned: float = 0.5) -> CandidateTable:
    """Quantizers; a share of each layer's bytes but for the last one's comes back."""
    return CandidateTable.of(
        "abc",
        [[energy * 4.0**-bits for bits in BITS] for energy in ENERGY],
        [[numel * bits / 8 for bits in BITS] for numel in NUMEL],
        [[f"{bits} bit" for bits in BITS]] * 3,
        [2] * 3,
        4 * NUMEL,
        returned=[returned, returned, 0.0],
    )


def planned(recipe: str, seconds: float, up: float = UP, down: float = DOWN) -> Decision:
    """After steps that have measured both directions; 0.1 s are those of computing."""
    planner = parse(f"{recipe}:seconds={0.1 + seconds},warmup=2,probe=0").planner(4)
    for step in range(4):
        moved = [Transfer(size, size * up) for size in (1e4, 2e4)]
        moved += [Transfer(size, size * down, "down") for size in (1e4, 2e4)]
        planner.observe(StepMeasurements(step, compute_seconds=0.1, transfers=moved))
    return planner.plan(PlanningInput(4, table()))


def seconds_of(levels: tuple[int, ...], sums: tuple[int, ...], up: float, down: float) -> float:
    sizes = [NUMEL[layer] * BITS[level] / 8 for layer, level in enumerate(levels)]
    back = [NUMEL[layer] * BITS[level] / 8 for layer, level in enumerate(sums)]
    return up * (sizes[0] / 2 + sizes[1] / 2 + sizes[2]) + down * (back[0] / 2 + back[1] / 2)


@pytest.mark.parametrize("seconds", [0.08, 0.12, 0.2])
@pytest.mark.parametrize(("up", "down"), [(UP, DOWN), (DOWN, UP), (UP, UP)])
def test_kimad_plus_loses_least_in_the_time_of_both_directions(
    seconds: float, up: float, down: float
) -> None:
    decision = planned("kimad+", seconds, up, down)
    assert decision.sums is not None
    assert decision.sums[2] == DENSE  # nothing comes back of the last layer
    mine, back = tuple(decision.levels.tolist()), tuple(decision.sums[:2].tolist())

    def error(levels: tuple[int, ...], sums: tuple[int, ...]) -> float:
        rows = [*enumerate(levels), *enumerate(sums)]
        return sum(ENERGY[layer] * 4.0 ** -BITS[level] for layer, level in rows)

    every = itertools.product(
        itertools.product(range(5), repeat=3), itertools.product(range(5), repeat=2)
    )
    fitting = [pair for pair in every if seconds_of(*pair, up, down) <= seconds * (1 + 1e-9)]
    best = min((error(*pair) for pair in fitting), default=None)
    if best is None:
        assert decision.report["shortfall"] > 0
        return
    assert seconds_of(mine, back, up, down) <= seconds * (1 + 1e-9)
    assert error(mine, back) <= best * 1.005
    assert decision.report["seconds"] == pytest.approx(0.1 + seconds_of(mine, back, up, down))
    assert decision.report["error"] + decision.report["error_of_sums"] == pytest.approx(
        error(mine, back)
    )


def test_the_slow_direction_sends_less() -> None:
    down_slow, up_slow = planned("kimad+", 0.12), planned("kimad+", 0.15, DOWN, UP)
    assert down_slow.sums is not None
    assert up_slow.sums is not None
    # indices rise as bits fall
    assert (down_slow.sums[:2] - down_slow.levels[:2]).tolist() == [2, 0]
    assert (up_slow.sums[:2] - up_slow.levels[:2]).tolist() == [-2, -1]


@pytest.mark.parametrize("seconds", [0.12, 0.2, 0.3])
def test_kimad_shares_the_time_evenly_and_leaves_none(seconds: float) -> None:
    decision = planned("kimad", seconds)
    assert decision.sums is not None
    (mine,), (back,) = {*decision.levels.tolist()}, {*decision.sums[:2].tolist()}

    def taken(level: int, sums: int) -> tuple[float, float]:
        whole = seconds_of((level,) * 3, (sums,) * 2, UP, DOWN)
        return whole - seconds_of((level,) * 3, (sums,) * 2, 0.0, DOWN), seconds_of(
            (level,) * 3, (sums,) * 2, 0.0, DOWN
        )

    assert sum(taken(mine, back)) <= seconds
    for better in ((mine - 1, back), (mine, back - 1)):  # neither direction could do with more
        assert min(better) < 0 or sum(taken(*better)) > seconds
    assert taken(mine, back)[0] >= seconds / 2 or mine == 0 or sum(taken(mine - 1, 4)) > seconds / 2


def test_all_is_dense_where_that_fits_and_least_where_nothing_does() -> None:
    roomy = planned("kimad+", 10.0)
    assert roomy.sums is None
    assert (roomy.levels == DENSE).all()
    for recipe in ("kimad", "kimad+"):
        tight = planned(recipe, 1e-3)
        assert tight.sums is not None
        assert tight.levels.tolist() == [4, 4, 4]
        assert tight.sums.tolist() == [4, 4, DENSE]
        assert tight.report["shortfall"] > 0
        assert "as compressed as can be" in tight.reasons[0]


def test_without_anything_that_comes_back_there_is_one_direction() -> None:
    planner = parse("kimad+:seconds=0.2,warmup=1,probe=0").planner()
    for step in range(2):
        moved = [Transfer(1e4 * (1 + step), 1e-2 * (1 + step))]
        planner.observe(StepMeasurements(step, compute_seconds=0.1, transfers=moved))
    decision = planner.plan(PlanningInput(2, table(returned=0.0)))
    assert decision.sums is None
    assert "error_of_sums" not in decision.report


def test_tables_by_direction_hold_all_bytes_at_their_prices() -> None:
    whole, prices = table(0.25), Prices({"up": 2.0, "down": 3.0})
    up, down = whole.by_direction(prices)
    assert down.names == ("a", "b")
    assert up.sizes[0].tolist() == (2.0 * 0.75 * whole.sizes[0]).tolist()
    assert down.sizes[1].tolist() == (3.0 * 0.25 * whole.sizes[1]).tolist()
    assert up.sizes[2].tolist() == (2.0 * whole.sizes[2]).tolist()
    choice, sums = np.array([0, 1, 2]), np.array([4, 3, DENSE])
    priced = up.bytes(choice) + down.bytes(sums[:2])
    assert whole.bytes_of_both(choice, sums, prices) == pytest.approx(priced)
    assert whole.bytes_of_both(choice, np.full(3, DENSE)) == pytest.approx(whole.bytes(choice))
    assert whole.bytes_of_both(whole.all_dense(), sums) == whole.bytes(whole.all_dense())


def test_a_direction_that_needs_more_than_half_gets_it() -> None:
    whole = table()
    up, down = whole.by_direction(Prices({"up": 0.1, "down": 4.0}))
    least = up.bytes(up.cheapest()) + down.bytes(down.cheapest())
    for allocator in (Uniform(), MinErrorKnapsack()):
        levels, sums = allocator.allocate_directions(up, down, Limits(max_bytes=1.02 * least))
        assert sums.tolist() == [4, 4]
        assert up.bytes(levels) + down.bytes(sums) <= 1.02 * least


# --- measuring ------------------------------------------------------------------------------------


def test_directions_are_timed_apart() -> None:
    """Two buckets in two shots, one operation after the other, on two ranks of which one joins late."""
    rows = [(0, 100, 0.0, 1.0, "up"), (1, 50, 0.1, 1.5, "up"), (0, 90, 1.0, 3.5, "down")]

    def on(rank: int) -> list[CollectiveTiming]:
        exposed = (0.95, 0.45, 1.9) if rank == 0 else (0.25, 0.45, 1.9)
        start = 0.0 if rank == 0 else 0.75
        return [
            CollectiveTiming(bucket, traffic, max(start, launched), done, waited, 0, way)  # type: ignore[arg-type]
            for (bucket, traffic, launched, done, way), waited in zip(rows, exposed, strict=True)
        ]

    ranks = [rank_times(0.1 if rank == 0 else 0.85, on(rank)) for rank in range(2)]
    ways = [timing.direction for timing in on(0)]
    found = with_transfers(StepMeasurements(0), [100, 50, 90], np.min(ranks, axis=0), ways)
    assert found.compute_seconds == 0.85
    assert found.nbytes == 240
    by_way = {each.direction: (each.nbytes, each.seconds) for each in found.transfers}
    # up: the late rank's 0.25 + 0.5 s; down: from where the link was free, at 1.5 s
    assert by_way == {"up": (150, pytest.approx(0.75)), "down": (90, pytest.approx(2.0))}
    assert len(found.transfers) == 2


def test_one_direction_is_timed_as_a_whole() -> None:
    timings = [CollectiveTiming(0, 100, 0.0, 1.0, 0.9), CollectiveTiming(1, 50, 0.1, 1.2, 0.2)]
    found = with_transfers(
        StepMeasurements(0), [100, 50], rank_times(0.1, timings), [each.direction for each in timings]
    )
    assert [(each.nbytes, each.direction) for each in found.transfers] == [(150, "up")]
    again = [replace(each, direction="down") for each in timings]
    found = with_transfers(StepMeasurements(0), [100, 50], rank_times(0.1, again), ["down", "down"])
    assert [(each.nbytes, each.direction) for each in found.transfers] == [(150, "down")]
