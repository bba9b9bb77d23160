"""The planner ``auto``, in a world whose times, noise and delays are known."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.planning import (
    Auto,
    CandidateTable,
    Decision,
    PlanningInput,
    StepMeasurements,
    parse,
)
from hvd_adaptive.planning.budgets.auto import PRESETS
from hvd_adaptive.planning.budgets.decision_costs import DecisionCosts
from hvd_adaptive.planning.budgets.dense_control import DenseControl
from hvd_adaptive.planning.budgets.forecast_score import ForecastScore
from hvd_adaptive.planning.budgets.loss_guard import LossGuard
from hvd_adaptive.planning.gradient_signals import GradientSignals
from hvd_adaptive.planning.least_time import Contender, TimeLimits
from hvd_adaptive.planning.step_time import StepModel, StepSeconds, spread
from tests.planning.helpers import costs_of

LAG = 6
RANKS = 4
BITS = np.arange(8, 1, -1.0)


@dataclass
class World:
    """A training run on a network of ``mbit``; what is measured of the network may lag behind it."""

    spec: str = "auto"
    mbit: float = 100.0
    layers: int = 6
    compute: float = 0.1
    noisy: float = 30.0
    nonzero: float = 1.0
    numel: int = 500_000
    levels_of_topk: int = 30
    topk: str = "topk"
    quantizer: str = "qsgdinf"
    slowness: float = 1.0
    """By how much compressed steps take longer than any model foresees."""
    blur: float = 0.0
    """Spread of what sketches say of the mean gradient."""
    restless: float = 0.0
    """Spread of the machine's speed, which changes every 60 steps."""
    seed: int = 0
    """Of that speed."""
    decisions: list[Decision] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """As they would be on a machine of the same speed at all times."""
    disorder: float = 1.0
    """By what factor all steps are slower now, as where ranks share cores and get into disorder."""
    projects: bool = False
    """Whether topk stands for low rank: a share of the dimensions is sent, and not of the elements."""
    rate: float = 0.1
    """Of learning."""
    held: float = 1.0
    """What residuals hold, of what they should."""
    deciding: float = 0.0
    """Seconds that each plan takes, of measuring and of planning."""
    late: float = 0.0
    """Seconds by which gathering was measured as slower than it is, until it is measured again."""
    compressed: list[bool] = field(default_factory=list)
    switched: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        densities = np.geomspace(0.1, 0.001, self.levels_of_topk)
        self.planner = parse(self.spec).planner(RANKS)
        self.measured = self.mbit
        self.levels = np.zeros(self.layers, np.int64)
        self.plans = 0
        self.pending: tuple[int, Decision] | None = None
        self._alike: tuple[float, float, bytes] | None = None
        self.step = 0
        self.since = 0
        self.densities = np.concatenate([[1.0, 1.0], densities, np.ones(len(BITS))])
        self.specs = ("fp16", "none", *[self.topk] * len(densities), *[self.quantizer] * len(BITS))
        sizes = np.concatenate([[2.0, 4.0], 3.2 * densities, BITS / 8]) * self.numel
        self.sizes = (sizes,) * self.layers
        self.energy = 1.0 + self.noisy
        errors = np.concatenate([[1e-8, 0.0], 1 - densities**0.5, 40 * 4.0**-BITS]) * self.energy
        self.table = CandidateTable.of(
            [f"layer{index}" for index in range(self.layers)],
            [errors] * self.layers,
            self.sizes,
            [[f"{spec} {index}" for index, spec in enumerate(self.specs)]] * self.layers,
            [2] * self.layers,
            [4.0 * self.numel] * self.layers,
        )

    def model(self, mbit: float) -> StepModel:
        numel = np.full(self.layers, self.numel)
        order = np.arange(self.layers)[::-1].copy()
        ready = spread(self.compute, numel, order)
        costs = costs_of(mbit, cap_bytes=4e6)
        return StepModel(
            costs, self.compute, ready, order, numel, (self.specs,) * self.layers, self.sizes
        )

    def parts(self) -> StepSeconds:
        """Of a step; foreseen once for all steps that are alike."""
        alike = (self.mbit, self.compute, self.levels.tobytes())
        if alike != self._alike:
            self._alike, self._parts = alike, self.model(self.mbit).seconds(self.levels)
        return self._parts

    def input(self) -> PlanningInput:
        """Residuals are full at once, and hold one over the density steps."""
        density = self.densities[self.levels]
        mean = 1.0 + self.noisy / RANKS
        withheld = np.where(density < 1, np.minimum(self.held / density, self.step - self.since), 0.0)
        signals = GradientSignals(
            energy=np.full(self.layers, self.energy),
            mean_energy=mean * np.random.default_rng(self.step).normal(1.0, self.blur, self.layers),
            residual=withheld**2 + withheld * self.noisy / RANKS,
            nonzero=np.full(self.layers, self.nonzero),
            numel=np.full(self.layers, self.numel),
            specs=(self.specs,) * self.layers,
            payloads=self.sizes,
            unbiased=(np.array([spec != self.topk for spec in self.specs]),) * self.layers,
            densities=(self.densities,) * self.layers,
            projected=(self.projects & (self.densities < 1),) * self.layers,
        )
        buckets = (self.layers - 1 - np.arange(self.layers)) // 2
        costs = costs_of(self.measured, cap_bytes=4e6, late=self.late)
        return PlanningInput(self.step, self.table, buckets, signals=signals, costs=costs)

    def run(self, steps: int, loss: Any = None, horizon: int | None = None) -> World:
        for _ in range(steps):
            parts = self.parts()
            compresses = bool((self.levels > 1).any())
            phase = np.random.default_rng([self.seed, self.step // 60]).standard_normal()
            here = np.random.default_rng([self.seed, 1, self.step]).standard_normal()
            seconds = parts.total * (self.slowness if compresses else 1.0)
            self.times.append(seconds)
            self.compressed.append(compresses)
            speed = self.disorder * float(np.exp(self.restless * (phase + here / 2)))
            seconds *= speed
            self.planner.observe(
                StepMeasurements(
                    self.step,
                    seconds=seconds,
                    compute_seconds=seconds - parts.exposed * speed,
                    plan=self.plans,
                    learning_rate=self.rate,
                    loss=None if loss is None else loss(self.step, compresses),
                    horizon=horizon,
                    deciding_seconds=self.deciding * (self.step in self.planned[-1:]),
                )
            )
            if self.pending and self.step >= self.pending[0] + LAG:
                self.use(self.pending[1])
            if not self.pending and self.planner.due(self.step):
                self.pending = self.step, self.planner.plan(self.input())
                self.decisions.append(self.pending[1])
                self.planned.append(self.step + 1)
            self.step += 1
        return self

    def use(self, decision: Decision) -> None:
        if (decision.levels != self.levels).any():
            self.switched.append(self.step)
        if not (self.levels > 1).any():
            self.since = self.step
        self.levels, self.pending = decision.levels, None
        self.plans += 1
        if decision.report["measure_again"]:
            self.measured, self.late = self.mbit, 0.0

    def used(self) -> set[str]:
        return {self.specs[index] for index in self.levels}

    @property
    def dense_seconds(self) -> float:
        model = self.model(self.mbit)
        choices = (np.zeros(self.layers, np.int64), np.ones(self.layers, np.int64))
        return min(model.seconds(choice).total for choice in choices)


# --- what is chosen -------------------------------------------------------------------------------


def test_it_starts_dense_and_compresses_where_that_is_faster() -> None:
    world = World().run(14)
    assert not world.decisions
    world.run(200)
    assert world.used() & {"topk", "qsgdinf"}
    assert world.times[-1] < 0.9 * world.dense_seconds
    report = world.decisions[-1].report
    assert report["seconds"] == pytest.approx(world.times[-1], rel=0.05)
    assert report["delay"] <= report["max_delay"] * (1 + 1e-9)
    assert report["noise"] <= report["max_noise"] * (1 + 1e-9)


def test_it_stays_dense_and_says_why_where_communication_is_hidden() -> None:
    world = World(mbit=1e5).run(200)
    assert world.used() <= {"fp16", "none"}
    assert any("left dense" in reason for reason in world.decisions[-1].reasons)
    assert any("% exposed communication" in reason for reason in world.decisions[-1].reasons)


def test_reasons_name_the_choice_its_limits_and_what_came_second() -> None:
    reasons = World().run(200).decisions[-1].reasons
    assert any("is foreseen" in reason and "dense" in reason for reason in reasons)
    assert any("limits (balanced): delay" in reason for reason in reasons)
    assert any(reason.startswith("second: ") and "slower" in reason for reason in reasons)


def test_where_compressing_takes_longer_than_it_saves_the_limits_are_not_to_blame() -> None:
    """Once topk may be used at all: until then it is for the limits that nothing is compressed."""
    early, late = (World("auto:noise=1e-9,delay=0.02", mbit=1e5).run(steps) for steps in (16, 400))
    assert "the limits on delay and noise admit no compression yet" in early.decisions[0].reasons[0]
    assert "compressing any layer would take longer than it saves" in late.decisions[-1].reasons[0]


def test_limits_are_not_used_up_where_that_saves_next_to_nothing() -> None:
    """Communication is hidden behind the backward pass at half of the limits already."""
    world = World("auto:noise=1e-9,delay=0.05", mbit=300.0).run(1600)
    report = world.decisions[-1].report
    assert "topk" in world.used()
    assert 0 < report["delay"] <= 0.5 * report["max_delay"] * (1 + 1e-9)
    slow = World("auto:noise=1e-9,delay=0.05", mbit=3.0).run(1200).decisions[-1].report
    assert slow["delay"] > 0.5 * slow["max_delay"]


def test_without_noise_of_their_own_gradients_get_no_noise() -> None:
    assert "qsgdinf" not in World(noisy=0.0).run(300).used()


def test_stricter_presets_send_more() -> None:
    times = [World(f"auto:accuracy={name}", mbit=30.0).run(400).times[-1] for name in PRESETS]
    assert times[0] > times[1] > times[2]


def test_the_delay_follows_the_steps_so_far() -> None:
    world = World("auto:noise=1e-9,delay=0.02", mbit=30.0)
    sent = []
    for _ in range(6):
        world.run(150)
        sent.append(float(world.densities[world.levels].mean()))
        assert (1 / world.densities[world.levels] <= 4 * 0.02 * world.step + 1).all()
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] < sent[0] / 3


def test_what_waits_is_sent_before_a_known_end() -> None:
    """Density rises again in the last fifth, and nothing is compressed with delay at the end."""
    world = World("auto:noise=1e-9,delay=0.02,total_steps=1000", mbit=30.0).run(700)
    middle = world.densities[world.levels].mean()
    assert middle < 0.2
    world.run(240)
    assert world.densities[world.levels].mean() > middle
    world.run(60)
    assert "topk" not in world.used()
    late = World("auto:noise=1e-9,delay=0.02", mbit=30.0).run(1000)
    assert "topk" in late.used()


def test_near_the_end_reasons_say_that_the_end_is_why_less_may_wait() -> None:
    """Instead of a limit of 0 % that nobody has set."""
    world = World("auto:noise=1e-9,delay=0.005,total_steps=1000", mbit=30.0).run(600)
    assert not any(" left to send" in said or "the end" in said for said in words(world))
    late = words(world.run(400))
    lowered = r"of [\d.]+ % of the steps so far \(lowered, because \d+ steps are left to send it\)"
    assert any(re.search(lowered, said) for said in late)
    assert re.search(r"\d+ steps before the end the limits admit no compression any more", late[-1])
    last = words(World("auto:delay=0.005,total_steps=1000", mbit=30.0).run(1000))
    nothing = r"no delay, because what waits could not be sent in the \d+ steps that are left, noise"
    assert any(re.search(nothing, said) for said in last)
    assert not any("of 0 % of the steps so far" in said for said in [*late, *last])


def words(world: World) -> list[str]:
    """The reasons of each decision."""
    return [" ".join(decision.reasons) for decision in world.decisions]


def test_an_end_that_is_reported_later_counts_as_well() -> None:
    world = World("auto:noise=1e-9", mbit=30.0).run(700).run(300, horizon=1000)
    assert "topk" not in world.used()


def test_a_sparse_gradient_is_not_sent_slower_than_it_arrives() -> None:
    world = World("auto:noise=1e-9,delay=0.005", mbit=30.0, nonzero=0.04).run(1500)
    assert "topk" in world.used()
    assert (world.densities[world.levels] >= 0.04).all()


def test_a_layer_without_a_gradient_is_planned_for_without_a_warning() -> None:
    world = World()
    facts = world.input()
    assert facts.signals is not None
    rows = [np.append(0.0, row[1:]) for row in (facts.signals.energy, facts.signals.mean_energy)]
    silent = replace(facts.signals, energy=rows[0], mean_energy=rows[1])
    with np.errstate(invalid="raise"):
        decision = world.planner.plan(replace(facts, signals=silent))
    assert world.specs[decision.levels[0]] in ("fp16", "none")


def test_adam_counts_layers_relative_to_their_gradients() -> None:
    """In plain L2 a layer of tiny gradients is free; relative to itself it is not."""
    sent = {}
    for metric in ("l2", "relative"):
        world = World(f"auto:metric={metric},noise=1e-9,delay=0.05", mbit=30.0)
        planner, facts = world.run(400).planner, world.input()
        assert facts.signals is not None
        small = np.where(np.arange(world.layers) == 0, 1e-6, 1.0)
        signals = GradientSignals(
            **{
                name: getattr(facts.signals, name) * small
                if name in ("energy", "mean_energy", "residual")
                else getattr(facts.signals, name)
                for name in GradientSignals.__dataclass_fields__
            }
        )
        errors = [row * scale for row, scale in zip(world.table.errors, small, strict=True)]
        table = CandidateTable.of(
            world.table.names, errors, world.sizes, world.table.labels, [2] * 6, world.table.dense
        )
        planned = planner.plan(
            PlanningInput(world.step, table, facts.buckets, signals=signals, costs=facts.costs)
        )
        sent[metric] = world.densities[planned.levels]
    assert sent["l2"][0] < sent["l2"][1:].min()
    assert sent["relative"][0] == pytest.approx(sent["relative"][1:].mean(), rel=0.5)


@pytest.mark.parametrize("noisy", [3.0, 300.0, 3000.0])
def test_what_adam_takes_for_noise_is_bounded(noisy: float) -> None:
    """Signal that comes in bunches adds to second moments; noise in bunches is what it was."""
    worlds = {
        metric: World(f"auto:metric={metric},accuracy=fast", mbit=10.0, noisy=noisy)
        for metric in ("l2", "relative")
    }
    sent, added = {}, {}
    for metric, world in worlds.items():
        chosen = world.run(2000).levels
        sent[metric] = float(np.mean(world.sizes[0][chosen]))
        withheld = np.where(world.densities < 1, 1 / world.densities, 1.0)[chosen]
        quantized = np.where(world.densities < 1, 0.0, world.table.errors[0])[chosen]
        # of the mean gradient, whose own is the noise over the ranks; the signal is 1
        added[metric] = float(((withheld - 1) + quantized / RANKS).sum()) / (
            world.layers * noisy / RANKS
        )
    assert "topk" in worlds["l2"].used()
    assert added["relative"] <= 0.2
    if added["l2"] > 0.2:
        assert sent["relative"] > 1.1 * sent["l2"]
    else:
        assert sent["relative"] == pytest.approx(sent["l2"])


def test_a_restless_machine_is_not_measured_again_and_again() -> None:
    """Forecasts go wrong by chance there, and hold by chance: one that holds is no reason to hurry."""
    world = World("auto:delay=0.005", mbit=100.0, restless=0.2).run(4000)
    assert sum(bool(each.report["measure_again"]) for each in world.decisions) <= 10
    world.mbit = 10.0  # a network that has really changed is seen even so
    world.run(250)
    assert world.measured == world.mbit


def plans_at(world: World) -> list[int]:
    """Steps of the plans, after the first ones."""
    return [each for each in world.planned if each > 200]


def test_what_stays_dense_is_looked_at_ever_more_seldom() -> None:
    """Planning, and measuring errors for it, takes as long as a small step does."""
    dense, compressed = World(mbit=1e5).run(4000), World(mbit=100.0).run(4000)
    assert [after - before for before, after in pairwise(plans_at(dense))][-1] == 800
    assert len(plans_at(dense)) <= 8
    kept = [(after - before) / before for before, after in pairwise(plans_at(compressed))]
    assert max(kept) <= 0.5  # as much more may wait by then
    assert len(kept) < 30


@pytest.mark.parametrize("deciding", [0.01, 0.1, 1.0])
def test_decisions_take_next_to_nothing_of_a_training(deciding: float) -> None:
    """The first plans come early: what they cost is not known yet."""
    world = World(mbit=1000.0, deciding=deciding).run(3000)
    spent = deciding * (len(world.planned) - 1)  # the first must come
    assert spent <= 0.005 * sum(world.times) + 2 * deciding
    told, last = world.decisions[-1].report["deciding_share"], world.planned[-1]
    since = sum(world.times[world.planned[0] : last])
    assert told == pytest.approx(spent / since, rel=0.5)


def test_cheap_decisions_are_as_many_as_if_they_cost_nothing() -> None:
    free, cheap = (World(mbit=100.0, deciding=each).run(2000) for each in (0.0, 1e-3))
    assert free.planned == cheap.planned


def test_a_plan_that_may_save_much_does_not_wait_for_its_costs() -> None:
    """Steps of 1.6 s, most of which is exposed: 0.5 s for a plan is soon saved."""
    slow = World(mbit=10.0, deciding=0.5).run(400)
    assert slow.planned[:4] == World(mbit=10.0).run(400).planned[:4]


def test_what_waits_is_sent_before_the_end_whatever_plans_cost() -> None:
    world = World("auto:delay=0.05", mbit=100.0, deciding=5.0).run(900, horizon=1000)
    assert world.decisions[-1].report["delay"] > 0
    world.run(100, horizon=1000)
    assert world.decisions[-1].report["delay"] == 0


def test_costs_of_decisions_are_resumed() -> None:
    world = World(mbit=1000.0, deciding=0.2).run(500)
    again = World(mbit=1000.0)
    again.planner.load_state_dict(json.loads(json.dumps(world.planner.state_dict())))
    assert again.planner.state_dict() == world.planner.state_dict()
    assert world.decisions[-1].report["patience"] > 1
    state = world.planner.state_dict()["budget"]["decision_costs"]
    # older states hold the wait itself
    assert DecisionCosts.from_dict({**state, "wait": 100}) == DecisionCosts.from_dict(state)


@pytest.mark.parametrize("slowness", [0.6, 0.8])
def test_compressed_steps_faster_than_foreseen_are_measured_once_and_then_foreseen(
    slowness: float,
) -> None:
    world = World(mbit=300.0, slowness=slowness).run(1000)
    assert sum(bool(each.report["measure_again"]) for each in world.decisions) == 1
    report = world.decisions[-1].report
    assert report["drift"] == pytest.approx(slowness, rel=0.05)
    assert report["seconds"] == pytest.approx(world.times[-1], rel=0.05)


def test_compressed_steps_that_become_faster_are_no_haste_where_plans_cost_much() -> None:
    for slowness, measured in ((0.8, False), (1.25, True)):
        world = World(mbit=300.0, deciding=1.0).run(300)
        world.slowness = slowness
        world.run(50)
        assert any(each.report["measure_again"] for each in world.decisions) == measured


def test_a_plan_that_is_made_early_goes_by_compressed_steps_that_became_faster() -> None:
    world = World(mbit=100.0).run(4000)
    world.deciding = 5.0
    planned = len(world.planned)
    while len(world.planned) == planned:  # one more, which costs more than there is for all
        world.run(1)
    world.slowness = 0.8
    world.run(50)
    planned = len(world.planned)
    world.rate *= 0.1
    world.run(50)
    assert len(world.planned) > planned
    assert not any(each.report["measure_again"] for each in world.decisions)
    assert "so forecasts go by the last compressed steps" in world.decisions[planned].reasons[0]
    assert world.decisions[-1].report["seconds"] == pytest.approx(world.times[-1], rel=0.05)


def test_another_learning_rate_ends_patience() -> None:
    """Errors and noise may be others."""
    world = World(mbit=100.0).run(4000)
    assert world.planner.budget.patience > 1
    planned = len(world.planned)
    world.rate *= 0.1
    world.run(50)
    assert len(world.planned) > planned
    assert world.planner.budget.patience == 1


def test_dense_steps_that_are_off_spare_the_network_and_tell_the_same() -> None:
    """A slower machine, or network: half a second of measuring would tell what dense steps do."""
    world = World(mbit=1e5).run(400)
    world.compute *= 1.3
    world.run(100)
    assert not any(each.report["measure_again"] for each in world.decisions)
    said = [reason for each in world.decisions for reason in each.reasons]
    assert any("so forecasts go by the last dense steps" in reason for reason in said)
    assert world.decisions[-1].report["seconds"] == pytest.approx(world.times[-1], rel=0.05)
    world.compute *= 2  # of a machine that is far slower no network tells
    world.run(100)
    assert not any(each.report["measure_again"] for each in world.decisions)


@pytest.mark.parametrize(("mbit", "looks"), [(100.0, 1), (1e4, 0)])
def test_a_bad_measurement_does_not_keep_all_dense(mbit: float, looks: int) -> None:
    """Dense steps take what is foreseen of them; but where they wait for the network, it is odd."""
    world = World(mbit=mbit, late=0.5).run(300)
    measured = [each for each in world.decisions if each.report["measure_again"]]
    assert len(measured) == looks
    odd = "all is dense though much is exposed, so the network is looked at again"
    assert [each.reasons for each in measured] == [(odd,)] * looks
    assert bool(world.used() & {"topk", "qsgdinf"}) == bool(looks)


def test_forecasts_mended_by_dense_steps_do_not_put_off_measuring_a_slow_network() -> None:
    world = World(mbit=1e5).run(400)
    for _ in range(3):  # after each, it is longer before the next may be mended
        world.compute *= 1.3
        world.run(150)
    assert not any(each.report["measure_again"] for each in world.decisions)
    world.mbit = 30.0
    world.run(50)
    assert any(each.report["measure_again"] for each in world.decisions)
    assert world.used() & {"topk", "qsgdinf"}


def test_patience_ends_where_the_network_becomes_slow() -> None:
    world = World(mbit=1e5).run(3000)
    assert world.decisions[-1].report["patience"] == 8
    world.mbit = 30.0
    world.run(50)
    assert world.used() & {"topk", "qsgdinf"}
    assert world.decisions[-1].report["patience"] == 1
    assert any(each.report["measure_again"] for each in world.decisions)


def test_a_resumed_run_is_as_patient() -> None:
    world = World(mbit=1e5).run(3000)
    again = World(mbit=1e5)
    again.planner.load_state_dict(json.loads(json.dumps(world.planner.state_dict())))
    assert again.planner.budget.patience == world.planner.budget.patience == 8


def test_low_rank_withholds_what_it_does_not_send_however_little_its_energy_is() -> None:
    """The residuals that are seen hold a tenth of what is expected."""
    selecting, projecting = (
        World("auto:noise=1e-9,delay=0.05", mbit=3.0, projects=projects, held=0.1)
        for projects in (False, True)
    )
    counted = []
    for world in (selecting, projecting):
        world.run(1260)
        waits = np.where(world.levels > 1, 1 / world.densities[world.levels], 0)
        counted.append(world.decisions[-1].report["delay"] * world.planned[-1])
        counted.append(float(np.sqrt((waits**2).mean())))
    assert counted[0] == pytest.approx(0.1 * counted[1], rel=0.3)
    assert counted[2] == pytest.approx(counted[3], rel=0.01)
    state = json.loads(json.dumps(selecting.planner.budget.state_dict()))
    older = {**state, "factors": state["factors"][1]}  # it knew one kind of candidate
    for each in (state, older):
        selecting.planner.budget.load_state_dict(each)
        assert selecting.planner.budget.state_dict()["factors"][1] == state["factors"][1]


def test_errors_of_sketches_do_not_decide_what_may_wait() -> None:
    """By each plan's own sketches, layers would wait in turn in which no signal happens to be seen."""
    world = World("auto:metric=relative", mbit=10.0, noisy=10.0, blur=0.18).run(4000)
    withholding = [float((world.densities[each.levels] < 1).mean()) for each in world.decisions[4:]]
    assert len(withholding) > 10
    assert np.mean(withholding) < 0.05


# --- when it was wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1e4, 30.0), (30.0, 1e5)])
def test_another_network_is_noticed_measured_and_planned_for_within_50_steps(
    before: float, after: float
) -> None:
    world = World(mbit=before).run(240)
    compressed = bool(world.used() & {"topk", "qsgdinf"})
    world.mbit = after
    switches, changed = len(world.switched), world.step
    world.run(50)
    assert len(world.switched) > switches
    assert world.switched[switches] <= changed + 50
    assert bool(world.used() & {"topk", "qsgdinf"}) != compressed
    said = [reason for decision in world.decisions for reason in decision.reasons]
    assert any("were foreseen: off by more than 15 %" in reason for reason in said)


@pytest.mark.parametrize("off", [0.2, 0.4, 3.0])
def test_a_network_that_was_measured_wrongly_does_not_make_dense_steps_look_faster(off: float) -> None:
    """Dense steps show what it takes; when it is measured rightly, that must not be counted twice."""
    world = World(mbit=150.0)
    world.measured = off * world.mbit
    world.run(100)
    world.slowness = 1.3  # so it is measured again
    world.run(200)
    assert [bool(each.report["measure_again"]) for each in world.decisions].count(True) == 1
    assert changes_of_mind(world) == 1
    # the machine is blamed for what the network does not explain
    report = world.decisions[-1].report
    assert report["dense_seconds"] == pytest.approx(1.3 * world.dense_seconds, rel=0.1)


@pytest.mark.parametrize("steps", [12, 20])
def test_a_phase_in_which_the_machine_was_slow_changes_nothing(steps: int) -> None:
    """Dense steps right after it would be faster than those in it, whatever compression saves."""
    world = World(mbit=200.0, compute=0.006, numel=50_000).run(400)
    assert world.compressed[-1]
    plans = len(world.planned)
    for _ in range(3):
        world.disorder = 1.8
        world.run(steps)
        world.disorder = 1.0
        world.run(150)
    assert all(world.compressed[300:])
    assert not any(each.report["measure_again"] for each in world.decisions[plans:])


@pytest.mark.parametrize("steps", [25, 30])
def test_after_a_long_slow_phase_compression_is_soon_tried_again(steps: int) -> None:
    """Where it had never been faster, hundreds of steps pass before that."""
    world = World(mbit=200.0, compute=0.006, numel=50_000).run(430)
    world.disorder = 1.2 * world.dense_seconds / world.times[-1]
    world.run(steps)
    world.disorder = 1.0
    world.run(30)
    assert not world.compressed[-1], "dense steps right after the phase were faster than those in it"
    again = World(mbit=200.0, compute=0.006, numel=50_000)
    state = world.planner.state_dict()
    again.planner.load_state_dict(json.loads(json.dumps(state)))
    assert again.planner.state_dict() == state
    world.run(200)
    assert all(world.compressed[-170:])


def test_what_an_earlier_plan_took_is_a_reason_to_try_compression_again_soon() -> None:
    """Also where ranks get into disorder as soon as another plan takes effect."""
    world = World(mbit=200.0, compute=0.006, numel=50_000).run(330)
    plans = len(world.switched)
    while len(world.switched) == plans:
        world.run(1)
    assert world.compressed[-1]
    world.disorder = 1.3 * world.dense_seconds / world.parts().total
    world.run(30)
    world.disorder = 1.0
    world.run(30)
    assert not world.compressed[-1]
    world.run(200)
    assert all(world.compressed[-150:])


def test_it_returns_to_dense_where_compression_turns_out_slower_than_foreseen() -> None:
    world = World(mbit=300.0, slowness=4.0).run(600)
    slower = [seconds > 1.02 * world.dense_seconds for seconds in world.times]
    assert any(slower)
    assert np.mean(slower[40:]) < 0.1
    said = [reason for decision in world.decisions for reason in decision.reasons]
    assert any("dense ones right after them" in reason for reason in said)


def test_compressed_steps_slower_than_dense_ones_are_compared_and_the_network_left_alone() -> None:
    """Dense steps cost nothing, where measuring the network takes as long as many of them."""
    world = World(mbit=500.0, slowness=2.5).run(1500)
    assert changes_of_mind(world) > 0
    assert not any(each.report["measure_again"] for each in world.decisions)


def changes_of_mind(world: World) -> int:
    """Between compressing and not."""
    return int(np.count_nonzero(np.diff(np.array(world.compressed, dtype=int))))


@pytest.mark.parametrize(
    ("mbit", "slowness"), [(500.0, 1.5), (1000.0, 1.0), (1000.0, 1.5), (3000.0, 2.5)]
)
def test_a_machine_of_changing_speed_does_not_make_it_restless(mbit: float, slowness: float) -> None:
    """On the whole: what a single run meets is chance."""
    worlds = [
        World(mbit=mbit, slowness=slowness, restless=0.15, seed=seed).run(1500) for seed in range(8)
    ]
    assert np.mean([changes_of_mind(world) for world in worlds]) <= 6
    assert np.mean([np.mean(each.times) / each.dense_seconds for each in worlds]) < 1.025


def test_a_few_steps_that_met_another_program_are_not_believed_to_the_letter() -> None:
    control = DenseControl()
    control.begin(seconds=1.0, levels=[3])
    said = control.conclude(dense=0.1, foreseen=0.05, step=80, known=1.0)
    assert "compressed steps took 1,000 ms" in said
    for foreseen in (0.05, 0.15):  # a better model must not be corrected for what it knows by now
        assert foreseen * control.correction(81, 0.1, foreseen) == pytest.approx(0.2)
    state = control.state_dict()
    assert DenseControl.from_dict(state) == control
    older = {key: state[key] for key in ("compressed", "levels", "gap", "patience", "_next", "_found")}
    before = DenseControl.from_dict(older | {"_correction": 4.0, "_dense": 0.1})
    assert before.correction(81, 0.1, 0.05) == 1.0, "of an older state, which lacks the levels"


def test_what_was_found_slower_is_tried_again_ever_more_seldom() -> None:
    world = World(mbit=500.0, slowness=2.5).run(6000)
    begins = np.flatnonzero(np.diff(np.array(world.compressed, dtype=int)) > 0)
    assert len(begins) >= 3
    assert (np.diff(begins)[1:] > 1.3 * np.diff(begins)[:-1]).all()


def limits_of(world: World) -> TimeLimits:
    """What a plan would be made within now."""
    world.planner.budget.inform(world.input())
    limits = world.planner.budget.allow(world.table)
    assert isinstance(limits, TimeLimits)
    return limits


def test_a_plan_stays_where_others_are_hardly_better() -> None:
    world = World(mbit=100.0).run(300)
    limits = limits_of(world)
    free = replace(limits, current=None)
    slow = np.full(world.layers, world.specs.index("qsgdinf"))
    late = np.full(world.layers, world.specs.index("topk"))
    assert free.of(slow).seconds > 1.05 * free.best.seconds
    assert free.weighed(late)[0] > free.max_delay
    for bad in (slow, late):
        assert (replace(limits, current=bad).best.choice == free.best.choice).all()
    near = free.best.choice.copy()
    near[3] -= 1  # one layer sends a little more
    assert free.of(near).seconds != free.best.seconds
    assert (replace(limits, current=near).best.choice == near).all()


def test_of_plans_that_are_as_fast_the_one_that_counts_on_less_overlap_is_chosen() -> None:
    world = World(mbit=100.0).run(300)
    limits = limits_of(world)
    limits = replace(limits, current=None)
    best, dense = limits.best, limits.dense
    choice = best.choice.copy()
    choice[3] = 0  # a layer in half precision: less is lost
    parts = replace(best.parts, network=best.parts.exposed)
    plan = replace(best, parts=parts)

    def chosen(hidden: float) -> bool:
        other = replace(plan, choice=choice, parts=replace(parts, network=parts.network + hidden))
        given = replace(limits)
        given.__dict__["contenders"] = (other, plan, dense)
        return given.best is other

    assert chosen(0.0)
    assert chosen(0.09 * dense.seconds)
    assert not chosen(0.11 * dense.seconds)


def test_a_step_faster_than_its_exposed_communication_was_foreseen_still_works() -> None:
    parts = StepSeconds(0.02, 0.0, exposed=0.08, decompress=0.0, network=0.09)
    dense = Contender("fp16", np.zeros(3, np.int64), parts, seconds=0.05, dense=True)
    assert dense.working == pytest.approx(0.01)


def test_half_precision_and_single_do_not_take_turns_where_they_are_about_equal() -> None:
    world = World(mbit=1e5).run(30)
    limits = limits_of(world)
    fp16, none = (np.full(world.layers, level) for level in (0, 1))
    seconds = [limits.of(choice).seconds for choice in (fp16, none)]
    assert abs(seconds[0] / seconds[1] - 1) < 0.02
    for choice in (fp16, none):
        assert (replace(limits, current=choice).best.choice == choice).all()
    limits = replace(limits_of(World(mbit=200.0).run(5)), only_dense=True)
    assert (replace(limits, current=none).best.choice == fp16).all()  # which takes half as long


def test_medians_of_two_windows_decide_and_not_a_single_step() -> None:
    score = ForecastScore()
    score.begin(0.1)
    windows = sum(score.observe(5.0 if step % 10 == 7 else 0.1) for step in range(45))
    assert (score.misses, windows) == (0, 4)


# --- the guard ------------------------------------------------------------------------------------


def fed(losses: list[float], guard: LossGuard | None = None, dense: bool = False) -> LossGuard:
    guard = guard or LossGuard()
    for index, loss in enumerate(losses):
        guard.observe(loss + 0.01 * (-1) ** index, dense)
    return guard


def test_a_rise_that_dense_steps_do_not_show_is_blamed_on_compression() -> None:
    guard = fed([1.0] * 20 + [0.9] * 20 + [1.3] * 20)
    assert guard.wants_dense
    fed([1.2] * 30, guard)  # the control window has not begun
    assert guard.wants_dense
    fed([0.95] * 20, guard, dense=True)
    assert guard.blames
    assert not guard.wants_dense
    assert guard.take_verdict().startswith("stepped back: the loss rose to 1.3")
    assert not guard.blames


def test_a_rise_that_dense_steps_show_too_is_the_new_normal() -> None:
    guard = fed([0.9] * 20 + [1.3] * 20)
    fed([1.3] * 20, guard, dense=True)
    assert guard.take_verdict().startswith("compression is not the cause")
    assert not fed([1.3] * 40, guard).wants_dense


def test_falling_losses_and_small_rises_do_not_matter() -> None:
    losses = [2.0 - 0.01 * step for step in range(100)] + [1.0 + 0.001 * step for step in range(40)]
    assert not fed(losses).wants_dense


def test_auto_steps_back_after_a_control_window_and_says_so() -> None:
    def loss(step: int, compresses: bool) -> float:
        return 1.0 + (0.5 if compresses and step > 300 else 0.0) + 0.01 * (-1) ** step

    world = World(mbit=30.0).run(290, loss)
    assert world.used() & {"topk", "qsgdinf"}
    limit = world.decisions[-1].report["max_noise"]
    world.run(110, loss)
    said = [reason for decision in world.decisions for reason in decision.reasons]
    assert any("control window" in reason for reason in said)
    assert any(reason.startswith("stepped back: the loss rose to 1.") for reason in said)
    assert world.decisions[-1].report["max_noise"] <= limit / 2
    quiet = World(mbit=30.0).run(400)
    assert quiet.decisions[-1].report["max_noise"] == limit


# --- cost -----------------------------------------------------------------------------------------


def test_a_plan_for_161_layers_of_109_candidates_takes_less_than_a_tenth_of_a_second() -> None:
    world = World(mbit=30.0, layers=161, numel=150_000, compute=1.0, levels_of_topk=100).run(40)
    seconds = []
    for _ in range(10):
        facts = world.input()
        started = time.process_time()
        world.planner.plan(facts)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ("accuracy=balanced", (0.003, 0.05)),
        ("metric=relative,accuracy=fast", (0.012, 0.2)),
        ("accuracy=strict,delay=0.03", (0.03, 0.02)),
        ("delay=0.03,noise=0.1", (0.03, 0.1)),
    ],
)
def test_presets_give_both_limits_and_options_replace_them(
    options: str, limits: tuple[float, float]
) -> None:
    recipe = parse(f"auto:{options}")
    assert isinstance(recipe, Auto)
    assert recipe.limits == limits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("accuracy=good", "not one of strict, balanced, fast"),
        ("delay=1", r"must lie in \[0, 1\)"),
        ("metric=l3", "not one of optimizer, l2, relative"),
        ("accumulate=true", "accumulate=true is not possible"),
    ],
)
def test_wrong_options_are_refused(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"auto:{options}")
