"""Controllers of several ranks in one process: measured alone, decided together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvd_adaptive.adaptation.base import Assignment
from hvd_adaptive.adaptation.candidates import check_per_rank_levels
from hvd_adaptive.adaptation.controller import LAG, AdaptationController
from hvd_adaptive.adaptation.timing import CollectiveTiming
from hvd_adaptive.adaptation.worker import PlannerWorker
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank
from hvd_adaptive.compressors import Compressor, parse
from hvd_adaptive.planning import Planner, StepMeasurements
from hvd_adaptive.planning import parse as parse_recipe
from hvd_adaptive.telemetry import Meter
from tests.adaptation.helpers import LAYERS, gradient

Steps = list[tuple[int, dict[str, Assignment] | None]]


def drive(recipe: str, ranks: int, steps: int) -> tuple[list[Steps], list[AdaptationController]]:
    """As an engine does it; the steps at which each rank's plan was taken over, and what it says."""
    own = parse("topk:density=0.05")

    def work(rank: LocalRank) -> tuple[Steps, AdaptationController]:
        channel, control = rank.channel("test.plan"), rank.control("test.votes")
        controller = AdaptationController(parse_recipe(recipe), channel, Meter(), rank.rank, rank.size)
        controller.attach(
            [(layer, own, "allgather") for layer in LAYERS], {"wide": 0, "tall": 1}, 0.0, False
        )
        switches: Steps = []
        for step in range(steps):
            for layer in LAYERS:
                x = gradient(layer, step, rank.rank)
                if controller.observes(step):
                    controller.observe(layer, x, x, step)
            collect, ready = control.allgather(controller.votes(step))[0]
            controller.learn()
            controller.end_step(step, 0.1, [])
            if collect:
                controller.start_collection(step)
            if ready:
                switches.append((step, controller.apply_decision(step)))
            controller._worker.wait()  # a plan in time, however busy the machine
        return switches, controller

    outcomes = LocalGroup(ranks).run(work)
    return [switches for switches, _ in outcomes], [controller for _, controller in outcomes]


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_switch_to_the_same_levels_at_the_same_step(ranks: int) -> None:
    switches, controllers = drive("lgreco:period=8", ranks, 24)
    assert switches[0], "nothing was decided"
    assert all(mine == switches[0] for mine in switches)
    assert switches[0][0][0] == 1 + LAG  # a plan is due after the first step
    levels = [controller.state_dict()["levels"] for controller in controllers]
    assert all(mine == levels[0] for mine in levels)
    assert all(set(each.expected) == {"wide", "tall"} for each in controllers)


def test_only_rank_0_votes() -> None:
    _, controllers = drive("lgreco:period=8", 2, 1)
    assert [tuple(each.votes(1)) for each in controllers] == [(True, False), (False, False)]


def test_a_planner_that_fails_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Planner, facts: Any) -> Any:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr(Planner, "plan", fail)
    message = "the planner failed on rank 0 of the process set: ZeroDivisionError: nothing to divide"
    with pytest.raises(RuntimeError, match=message):
        drive("lgreco:period=8", 2, 10)


def test_a_decision_that_cannot_be_sent_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.plan

    def plan_with_an_object(self: Planner, facts: Any) -> Any:
        return replace(plan(self, facts), reasons=(object(),))

    monkeypatch.setattr(Planner, "plan", plan_with_an_object)
    with pytest.raises(RuntimeError, match=r"failed on rank 0 .*: TypeError: .* not JSON"):
        drive("lgreco:period=8", 2, 10)


def test_the_time_of_communication_is_that_of_the_rank_where_it_took_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the others waited for the last to join."""
    waits = ((3.0, 1.0, 2.0), (1.0, 4.0, 2.0), (None, None, None), (5.0, 6.0, 1.5))

    def work(rank: LocalRank) -> None:
        channel = rank.channel("test.times")
        recipe = parse_recipe("lgreco-time")
        controller = AdaptationController(recipe, channel, Meter(), rank.rank, rank.size)
        for step, seconds in enumerate((*waits, (1.0, 1.0, 1.0))):
            span = seconds[rank.rank]
            timings = [] if span is None else [
                CollectiveTiming(0, 100, 10 * step, 10 * step + 0.5, 0.0),
                CollectiveTiming(1, 300, 10 * step + 0.1, 10 * step + span, 0.0),
            ]  # fmt: skip
            controller.learn()
            controller.end_step(step, 0.1, timings)

    seen: list[StepMeasurements] = []
    monkeypatch.setattr(Planner, "observe", lambda planner, facts: seen.append(facts))
    LocalGroup(3).run(work)
    # of the first step nobody knows when it began, and of the third there is nothing to know
    assert [facts.sync_seconds for facts in seen] == [None, pytest.approx(1), None, pytest.approx(1.5)]
    sent = [None if facts.bucket_bytes is None else facts.bucket_bytes.tolist() for facts in seen]
    assert sent == [None, [100, 300], None, [100, 300]]


# --- the worker -----------------------------------------------------------------------------------


def test_what_is_observed_while_the_planner_plans_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Planner, "observe", lambda planner, facts: seen.append(facts.step))
    worker = PlannerWorker(parse_recipe("lgreco").planner())
    worker.add(StepMeasurements(1))
    worker.add(StepMeasurements(2))
    assert not seen
    worker.observe_backlog()
    worker.observe_backlog()
    assert seen == [1, 2]


def test_what_the_thread_raises_becomes_a_message_for_all_ranks() -> None:
    worker = PlannerWorker(parse_recipe("lgreco").planner())

    def fail() -> Any:
        raise ValueError("no layers")

    worker.start(fail)
    worker.wait()
    assert worker.planned
    assert not worker.guard(worker.conclude)
    assert worker.failed
    assert not worker.planning
    message = worker.take()
    assert message is not None
    assert message.to_json() == '{"error": "ValueError: no layers"}'
    assert worker.take() is None


# --- per-rank levels ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compressors", "alternatives", "message"),
    [
        (["topk:density=0.01", "powersgd:rank=2"], [], "'powersgd' is summed"),
        (["topk:density=0.01"], ["qsgd:bits=4"], "there are candidates"),
    ],
)
def test_per_rank_levels_need_gathered_payloads_of_one_compressor(
    compressors: list[str], alternatives: list[str], message: str
) -> None:
    def parsed(specs: list[str]) -> list[Compressor]:
        return [parse(spec) for spec in specs]

    own = parse_recipe("kimad+:seconds=1,per_worker=true")
    with pytest.raises(ValueError, match=message):
        check_per_rank_levels(own, parsed(compressors), parsed(alternatives))
    check_per_rank_levels(own, parsed(["topk:density=0.01", "fp16"]))
    check_per_rank_levels(parse_recipe("lgreco"), parsed(compressors), parsed(alternatives))
