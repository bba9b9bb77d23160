"""Errors as they are measured for a metric: of which tensor, over which steps, on which scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_adaptive.adaptation.candidates import candidates_of
from hvd_adaptive.adaptation.layer_samples import LayerSamples
from hvd_adaptive.adaptation.preconditioning import SecondMoment
from hvd_adaptive.adaptation.sampling import Sampler, preconditions
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import LayerContext
from hvd_adaptive.engine.virtual_ranks import VirtualRanks
from hvd_adaptive.planning import CandidateTable, Decision, Planner, PlanningInput
from hvd_adaptive.planning import parse as parse_recipe
from tests.adaptation.helpers import LAYERS, gradient

STEPS = 12


def residual(layer_index: int, step: int) -> Tensor:
    """What feedback adds in a step."""
    return 0.5 * gradient(LAYERS[layer_index], 1000 + step)


def sampler(spec: str, compression: str = "topk:density=0.05") -> Sampler:
    recipe, own = parse_recipe(spec), parse(compression)
    made = Sampler(recipe, recipe.planner().needs, (), 1, {})
    made.rows = {
        layer.name: LayerSamples.of(layer, own, "allgather", (), 1, preconditions=preconditions(recipe))
        for layer in LAYERS
    }
    return made


def measure(made: Sampler) -> CandidateTable:
    """The table of a few steps of the two layers."""
    for step in range(STEPS):
        if made.observes(step):
            for layer in LAYERS:
                grad = gradient(layer, step)
                made.observe(layer, grad, grad + residual(layer.index, step), step)
    return made.table(made.take())


def lost(x: Tensor, layer_index: int, level: float, compression: str = "topk:density=0.05") -> Tensor:
    """What really compressing it leaves."""
    left = x.clone()
    parse(compression).compress_(left, level, LayerContext(shape=LAYERS[layer_index].shape))
    return left


def mean_of(tensor: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([tensor(step) for step in range(STEPS)]).mean(0)


def compressed_errors(x: Tensor, index: int, compression: str = "topk:density=0.05") -> list[float]:
    levels = [each.level for each in candidates_of(LAYERS[index], [parse(compression)])]
    return [float(lost(x, index, level, compression).double().square().sum()) for level in levels]


@pytest.mark.parametrize("with_residual", [False, True])
def test_accumulated_errors_are_those_of_the_mean_tensor(with_residual: bool) -> None:
    table = measure(sampler(f"lgreco:residual={str(with_residual).lower()}"))
    for index, layer in enumerate(LAYERS):
        mean = mean_of(
            lambda step, layer=layer, index=index: (  # type: ignore[misc]
                gradient(layer, step) + (residual(index, step) if with_residual else 0.0)
            )
        )
        energy = float(mean.double().square().sum())
        assert table.energies[index] == pytest.approx(energy, rel=1e-5)
        wanted = compressed_errors(mean, index)
        assert table.errors[index] == pytest.approx(wanted, rel=0.01, abs=1e-3 * energy)


def test_without_accumulating_errors_are_means_over_a_few_steps() -> None:
    table = measure(sampler("lgreco:accumulate=false,residual=true,period=16"))
    steps = (0, 4, 8)
    xs = [gradient(LAYERS[1], step) + residual(1, step) for step in steps]
    wanted = np.mean([compressed_errors(x, 1) for x in xs], axis=0)
    assert table.errors[1] == pytest.approx(wanted, rel=0.01, abs=1e-3 * table.energies[1])


def test_the_residual_is_asked_for_where_it_is_measured() -> None:
    assert sampler("lgreco:residual=true").sees_feedback
    assert not sampler("lgreco").sees_feedback


def test_a_tensor_that_is_not_finite_does_not_count() -> None:
    made = sampler("lgreco:residual=true")
    (wide, _), bad = LAYERS, torch.full((LAYERS[0].numel,), torch.inf)
    made.observe(wide, gradient(wide, 0), gradient(wide, 0), 0)
    made.observe(wide, gradient(wide, 1), bad, 1)
    made.observe(wide, bad, bad, 2)
    assert made.table(made.take()).energies[0] == pytest.approx(
        float(gradient(wide, 0) @ gradient(wide, 0)), rel=1e-6
    )


def test_bytes_that_the_data_decide_are_those_of_single_steps() -> None:
    """A threshold takes fewer elements of a mean, in which noise has cancelled out."""
    compression = "threshold:threshold=1.5"
    made = sampler("lgreco:period=16", compression)
    table = measure(made)
    row = made.rows["wide"]
    index = row.default
    sizes = []
    for step in (0, 4, 8):
        x = gradient(LAYERS[0], step) + residual(0, step)
        sizes.append(parse(compression).compress_(x, row.candidates[index].level).nbytes)
    assert table.sizes[0][index] == pytest.approx(
        row.measured_link_bytes(np.mean([sizes]) * np.ones(len(row.varying)), 1)[index], rel=0.02
    )


@pytest.mark.parametrize("compression", ["topk:density=0.05", "powersgd:rank=2"])
def test_the_bound_is_what_the_authors_code_computes(compression: str) -> None:
    """``torch.dist(x, C(x))``, or the root of the tail energies, summed over the layers.

    Of tensors that include the residual, gathered over the steps since the last plan.
    """
    made = sampler("lgreco:residual=true", compression)
    table = measure(made)
    decision = parse_recipe("lgreco").planner().plan(PlanningInput(STEPS, table))
    own, distances = parse(compression), []
    for index, layer in enumerate(LAYERS):
        mean = mean_of(
            lambda step, layer=layer, index=index: (  # type: ignore[misc]
                gradient(layer, step) + residual(index, step)
            )
        )
        if compression.startswith("powersgd"):
            singular = torch.linalg.svdvals(mean.view(layer.shape))
            distances.append(float(torch.sqrt(singular[2:].square().sum())))
        else:
            sent = mean - lost(mean, index, own.level)
            distances.append(float(torch.dist(mean, sent)))
    assert decision.report["max_error"] == pytest.approx(sum(distances), rel=0.01)
    assert decision.report["error"] <= decision.report["max_error"]


# --- preconditioning ------------------------------------------------------------------------------


def test_preconditioned_errors_are_those_of_what_adam_makes_of_the_gradient() -> None:
    made = sampler("lgreco:metric=preconditioned")
    averages = [torch.rand(layer.numel, generator=torch.Generator().manual_seed(7)) for layer in LAYERS]
    made.second_moment = lambda layer: SecondMoment(averages[layer.index], 0.9, 1e-3)
    for step in range(STEPS):
        for layer in LAYERS:
            grad = gradient(layer, step)
            made.observe(layer, grad, grad, step)
    measured = made.take()
    table = made.table(measured)
    scaled = made.preconditioned(measured, table)
    assert scaled is not None
    for index, layer in enumerate(LAYERS):
        mean = mean_of(lambda step, layer=layer: gradient(layer, step))  # type: ignore[misc]
        assert table.errors[index] == pytest.approx(
            compressed_errors(mean, index), rel=0.01, abs=1e-3 * table.energies[index]
        )
        step = mean / ((0.9 * averages[index] + 0.1 * mean.square()).sqrt() + 1e-3)
        energy = float(step.double().square().sum())
        assert scaled.energies[index] == pytest.approx(energy, rel=1e-5)
        wanted = compressed_errors(step, index)
        assert scaled.errors[index] == pytest.approx(wanted, rel=0.01, abs=1e-3 * energy)


def test_one_layer_without_second_moment_leaves_all_squared() -> None:
    made = sampler("lgreco:metric=preconditioned")
    made.second_moment = lambda layer: (
        SecondMoment(torch.ones(layer.numel), 0.9, 1e-8) if layer.index else None
    )
    for layer in LAYERS:
        made.observe(layer, gradient(layer, 0), gradient(layer, 0), 0)
    measured = made.take()
    assert made.preconditioned(measured, made.table(measured)) is None
    assert sampler("lgreco").preconditioned(measured, made.table(measured)) is None


@pytest.mark.parametrize(
    ("rule", "has"),
    [(torch.optim.AdamW, True), (torch.optim.RMSprop, True), (torch.optim.SGD, False)],
)
def test_second_moments_come_from_the_optimizer(
    rule: type[torch.optim.Optimizer], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, made = Planner.plan, []

    def watched(self: Planner, facts: PlanningInput) -> Decision:
        made.append((facts, plan(self, facts)))
        return made[-1][1]

    monkeypatch.setattr(Planner, "plan", watched)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = rule(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    ranks = VirtualRanks(
        2,
        model.named_parameters(),
        "topk:density=0.05",
        planner="lgreco:period=6,metric=preconditioned",
        param_groups=lambda: optimizer.param_groups,
        optimizer_state=lambda: optimizer.state,
    )
    for step in range(20):
        grads = [
            torch.randn(64, 64, generator=torch.Generator().manual_seed(2 * step + r)) for r in (0, 1)
        ]
        ranks.reduce([{"weight": grad} for grad in grads])
        optimizer.step()
    seen = [facts.preconditioned is not None for facts, _ in made]
    assert len(seen) >= 2
    assert all(each is has for each in seen)  # the first plan comes after the optimizer's first step
    said = ["no second moments" in " ".join(decision.reasons) for _, decision in made]
    assert said == [not each for each in seen]
    state = ranks.compression_state_dicts()
    ranks.load_compression_state_dicts(state)
    assert str(ranks.compression_state_dicts()[1]["controller"]) == str(state[1]["controller"])


def test_what_no_square_is_known_of_does_not_count() -> None:
    moment = SecondMoment(torch.tensor([0.0, 0.0, 4.0]), 0.75, 0.0)
    x = torch.tensor([0.0, 1e-30, 2.0])  # whose square is 0 in float32
    assert moment.precondition(x).tolist() == [0.0, 0.0, 1.0]
