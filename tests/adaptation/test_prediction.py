"""Predictions from a trace: they explain what was seen, scale by closed forms, decide as auto."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.adaptation.prediction import Method, Predictor
from hvd_adaptive.adaptation.step_trace import StepTrace
from hvd_adaptive.collectives.costs import CodecCosts
from hvd_adaptive.collectives.measured_costs import MeasuredCosts, SumCosts, SummandCosts
from hvd_adaptive.comm.link_costs import CYCLE, LinkCosts
from hvd_adaptive.planning import CandidateTable
from hvd_adaptive.planning.dense_steps import DenseSteps
from hvd_adaptive.planning.gradient_signals import GradientSignals, noise_of
from tests.planning.test_auto import World

RANKS, COMPUTE = 4, 0.1
CAP = 4e6


def trace_of(mbit: float = 200.0, recipe: str = "auto", seconds: Any = None, **world: Any) -> StepTrace:
    """Of a model with six layers on four hosts; its dense steps are those of the model."""
    made = World(**world)
    made.step = 20
    facts = made.input()
    assert facts.signals is not None
    byte = 8e-6 / mbit
    sums = {"float16": SumCosts(CYCLE, byte), "float32": SumCosts(CYCLE, byte)}
    codecs = {
        "fp16": SummandCosts("fp16", 0.0, 0.0, "float16", dense=True),
        "none": SummandCosts("none", 0.0, 0.0, "float32", dense=True),
        made.topk: CodecCosts(1e-9, 2e-10, 2e-9),
        made.quantizer: CodecCosts(2e-9, 2e-10, 1e-9),
    }
    link = LinkCosts(CYCLE, CYCLE, byte, byte)
    measured = MeasuredCosts(RANKS, link, sums, codecs, ("auto",), CAP)
    table = replace(facts.table, labels=tuple(map(labels, facts.table.labels)))
    assert facts.buckets is not None
    trace = StepTrace(recipe, DenseSteps.empty(), measured, table, facts.signals, facts.buckets, RANKS)
    assumed = replace(trace, measured=replace(measured, assumed=True, compute_seconds=COMPUTE))
    true = Predictor(assumed)
    found = true.seconds(true.methods[0].choice, RANKS)
    for each in seconds or [found.seconds] * 10:
        trace.dense.seconds.append(each)
        trace.dense.computing.append(each - found.exposed)
    return trace


def labels(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("{} at {}".format(*label.split()) for label in row)


def named(predictor: Predictor, name: str) -> Method:
    return next(each for each in predictor.methods if each.name.startswith(name))


def test_the_dense_steps_that_were_seen_are_explained() -> None:
    trace = trace_of()
    predictor = Predictor(trace)
    found = predictor.seconds(named(predictor, "fp16").choice, RANKS)
    assert found.seconds == pytest.approx(trace.dense.seconds[0], rel=1e-3)
    assert (found.low, found.high) == pytest.approx((found.seconds, found.seconds), rel=2e-3)


def test_the_spread_of_steps_is_the_range_of_what_was_seen() -> None:
    base = trace_of().dense.seconds[0]
    predictor = Predictor(trace_of(seconds=[base * each for each in (0.9, 0.95, 1.0, 1.05, 1.1)]))
    found = predictor.seconds(named(predictor, "fp16").choice, RANKS)
    assert found.low == pytest.approx(0.95 * base, rel=2e-3)
    assert found.high == pytest.approx(1.05 * base, rel=2e-3)


def test_a_dense_step_that_hides_nothing_grows_as_a_ring_does() -> None:
    """Six layers of 0.5 M elements in buckets of two: what is exposed is a sum of lines."""
    predictor = Predictor(trace_of(mbit=20.0))
    choice = named(predictor, "fp16").choice
    byte = 8e-6 / 20.0
    for ranks in (4, 16, 256):
        # all but the first bucket's overlap is the same, so the difference is the ring's alone
        more = predictor.seconds(choice, ranks).seconds - predictor.seconds(choice, 4).seconds
        carried = 6 * 2 * 500_000 * (2 * (ranks - 1) / ranks - 1.5)
        assert more == pytest.approx(carried * byte, rel=0.02, abs=1e-6)


def test_an_allgather_loses_to_dense_where_two_shots_do_not() -> None:
    predictor = Predictor(trace_of(mbit=100.0))
    quantizer = named(predictor, "qsgdinf")
    dense = named(predictor, "fp16")
    few = predictor.seconds(quantizer.choice, 4, "allgather")
    many = predictor.seconds(quantizer.choice, 64, "allgather")
    assert few.seconds < predictor.seconds(dense.choice, 4).seconds
    assert many.seconds > predictor.seconds(dense.choice, 64).seconds
    two = predictor.seconds(quantizer.choice, 64, "two_shot")
    assert two.seconds < predictor.seconds(dense.choice, 64).seconds
    # with the better of them it pays for any number of ranks
    assert predictor.pays(quantizer)[-1][1] == 1024


def test_ranges_hold_the_prediction_and_widen_with_the_ranks() -> None:
    trace = trace_of()
    trace.dense.computing.extend([0.5 * each for each in list(trace.dense.computing)])
    trace.dense.seconds.extend(list(trace.dense.seconds))
    predictor = Predictor(trace)
    widths = []
    for ranks in (4, 64, 1024):
        for method in predictor.methods:
            found = predictor.seconds(method.choice, ranks)
            assert found.low <= found.seconds <= found.high
        found = predictor.seconds(named(predictor, "topk").choice, ranks)
        widths.append(found.high - found.low)
    assert widths == sorted(widths)


def test_auto_compresses_on_slow_links_and_not_on_fast_ones() -> None:
    trace = trace_of(mbit=100.0)
    slow, fast = Predictor(trace), Predictor(trace, rate=4e11)
    assert slow.auto(16, 1000).compresses
    stays = fast.auto(16, 1000)
    assert not stays.compresses
    assert any("left dense" in each for each in stays.reasons)
    assert slow.auto(16, 1000).predicted.seconds < fast.auto(16, 1000).predicted.seconds * 10


def test_the_table_and_auto_foresee_the_same() -> None:
    predictor = Predictor(trace_of())
    for ranks in (4, 64):
        found = predictor.auto(ranks, 1000)
        assert found.predicted.seconds == pytest.approx(found.limits.best.seconds, rel=5e-3)
        assert found.limits.dense.seconds == pytest.approx(
            min(
                predictor.seconds(each.choice, ranks).seconds
                for each in predictor.methods
                if each.dense
            ),
            rel=5e-3,
        )


def test_auto_may_delay_more_later_in_training() -> None:
    predictor = Predictor(trace_of(mbit=20.0))
    early, late = predictor.auto(16, 100), predictor.auto(16, 10_000)
    assert late.limits.max_delay > early.limits.max_delay
    assert late.predicted.seconds <= early.predicted.seconds
    near_the_end = predictor.auto(16, 10_000, horizon=10_050)
    assert near_the_end.limits.max_delay < late.limits.max_delay


def test_a_mean_over_more_ranks_has_less_noise() -> None:
    signals = trace_of().signals
    other = signals.at(RANKS, 64)
    assert (other.mean_energy < signals.mean_energy).all()
    before = noise_of(signals.energy, signals.mean_energy, RANKS)
    after = noise_of(other.energy, other.mean_energy, 64)
    assert np.allclose(before, after)
    assert np.allclose(signals.at(RANKS, RANKS).mean_energy, signals.mean_energy)


def test_a_trace_survives_json() -> None:
    trace = trace_of()
    again = StepTrace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert again.to_dict() == trace.to_dict()
    ours, theirs = Predictor(trace), Predictor(again)
    for mine, other in zip(ours.methods, theirs.methods, strict=True):
        assert ours.seconds(mine.choice, 64) == theirs.seconds(other.choice, 64)
    assert isinstance(again.table, CandidateTable)
    assert isinstance(again.signals, GradientSignals)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"version": 0}, "version 0"), ({"measured": {}}, "KeyError"), ({"buckets": None}, "no trace")],
)
def test_what_is_no_trace_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StepTrace.from_dict(trace_of().to_dict() | changed)


def test_a_trace_of_another_planner_or_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="only auto's"):
        Predictor(trace_of(recipe="lgreco"))
    with pytest.raises(ValueError, match="no timed steps"):
        Predictor(replace(trace_of(), dense=DenseSteps.empty()))
    with pytest.raises(ValueError, match="one host, without links"):
        Predictor(replace(trace_of(), hosts=1), rate=1e8, traced_rate=1e9)


def test_hosts_go_up_to_the_limit_without_a_gap() -> None:
    predictor = Predictor(replace(trace_of(), hosts=2))
    hosts = predictor.hosts()
    assert hosts[0] == 1
    assert hosts[-1] * predictor.trace.ranks_per_host == 1024
    assert all(a < b <= max(a + 1, math.ceil(1.2 * a)) for a, b in itertools.pairwise(hosts))
