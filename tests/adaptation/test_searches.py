"""Planners in trainings of virtual ranks, with a clock that goes by the bytes that are sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive import VirtualRanks
from hvd_adaptive.adaptation.layer_samples import LayerSamples
from hvd_adaptive.adaptation.sampling import Sampler
from hvd_adaptive.compressors import parse
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import Decision, PlanningInput, StepMeasurements
from hvd_adaptive.planning import parse as parse_recipe
from hvd_adaptive.planning.budgets.throughput import ThroughputBudget

FACTORS = (10.0, 20.0, 40.0, 160.0, 1000.0)


class Training:
    """A small network that learns what another one does; seconds are computing and 3 MB/s."""

    def __init__(self, planner: str, seed: int, ranks: int = 2) -> None:
        self.seconds, self.ranks = 0.0, ranks
        torch.manual_seed(seed)
        self.teacher, self.model = (
            torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
            for _ in range(2)
        )
        self.virtual = VirtualRanks(
            ranks,
            self.model.named_parameters(),
            "topk:density=0.01",
            planner=planner,
            clock=lambda: self.seconds,
        )
        self.rule = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.factors: list[float] = []

    @property
    def budget(self) -> ThroughputBudget:
        budget = self.virtual._members[0].reducer.controller._worker.planner.budget
        assert isinstance(budget, ThroughputBudget)
        return budget

    def step(self) -> None:
        gradients = []
        for _ in range(self.ranks):
            x = torch.randn(16, 48)
            self.model.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(self.model(x), self.teacher(x)).backward()
            gradients.append({name: p.grad for name, p in self.model.named_parameters()})
            self.model.zero_grad(set_to_none=True)
        self.virtual.reduce(gradients)
        self.rule.step()
        nbytes = self.virtual.plan.wire_bytes
        self.seconds += 1e-3 + nbytes / 3e6
        self.factors.append(sum(p.numel() * 4 for p in self.model.parameters()) / nbytes)


@pytest.mark.parametrize(("epsilon", "seed"), [(0.7, 0), (0.9, 1), (0.7, 2), (0.9, 2)])
def test_gravac_ends_at_the_factor_of_highest_throughput_whose_gain_suffices(
    epsilon: float, seed: int
) -> None:
    training = Training(f"gravac:epsilon={epsilon},window=10", seed)
    tried: list[float] = []
    for _ in range(150):
        training.step()
        report = training.budget.report()
        tried.append(report["theta"])
        if report["ideal"]:
            break
    assert set(tried) >= {20.0, 40.0, 160.0, 1000.0}
    suffice = [theta for theta in FACTORS if report[f"gain_{theta:g}x"] >= epsilon]
    throughputs = {theta: report.get(f"throughput_{theta:g}x", 0.0) for theta in suffice}
    assert throughputs[report["ideal"]] >= 0.99 * max(throughputs.values())
    for _ in range(10):
        training.step()
    assert training.factors.count(1.0) < 0.5 * len(training.factors)
    assert 1.0 not in training.factors[-10:]


# --- Accordion with L-GreCo -----------------------------------------------------------------------

MATRICES = (Layer(0, "flat", (96, 128)), Layer(1, "steep", (128, 96)), Layer(2, "small", (40, 32)))


def matrix(layer: Layer, step: int) -> torch.Tensor:
    """Singular values that fall slowly in the first layer and fast in the others."""
    rows, columns = layer.shape
    generator = torch.Generator().manual_seed(10 * step + layer.index)
    left, right = (torch.randn(size, 32, generator=generator) for size in (rows, columns))
    spectrum = torch.arange(1, 33) ** -(0.3 + 1.2 * layer.index)
    return ((left * spectrum) @ right.T).reshape(-1)


def decisions(planned: str, spec: str) -> list[tuple[Decision, np.ndarray, np.ndarray]]:
    """Of two periods: one that is critical and one that is not; with the layers' errors and bytes."""
    recipe, own, found = parse_recipe(planned), parse(spec), []
    planner = recipe.planner()
    sampler = Sampler(recipe, planner.needs | parse_recipe("lgreco").planner().needs, (), 1, {})
    sampler.rows = {each.name: LayerSamples.of(each, own, "allgather", (), 1) for each in MATRICES}
    for period in range(2):
        for layer in MATRICES:
            for step in range(4):
                x = matrix(layer, 0)
                sampler.observe(layer, x, x, 125 * step)
        measured = sampler.take()
        table = sampler.table(measured)
        energy, steps = sampler.period(measured)
        planner.observe(StepMeasurements(period, period_energy=energy, period_steps=steps))
        decision = planner.plan(PlanningInput(period, table))
        rows = list(zip(table.errors, table.sizes, decision.levels, strict=True))
        errors, sizes = (np.array([row[part][row[2]] for row in rows]) for part in (0, 1))
        found.append((decision, errors, sizes))
    return found


def test_a_range_beyond_accordions_levels_lets_lgreco_save_bytes_at_no_more_error() -> None:
    spec, levels = "powersgd:rank=4,levels=1-64", "low=2,high=0.5"
    accordions = decisions(f"accordion:{levels}", spec)
    combined = decisions(f"accordion+lgreco:{levels},metric=squared", spec)
    for alone, both in zip(accordions, combined, strict=True):
        assert both[1].sum() <= alone[1].sum() * (1 + 1e-9)
        assert both[2].sum() < 0.97 * alone[2].sum()
    assert [each.report["critical"] for each, *_ in accordions] == [1.0, 0.0]
