"""What is measured of gradients, against what compressing them gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvd_adaptive.adaptation.candidates import errors_of
from hvd_adaptive.adaptation.layer_samples import LayerSamples
from hvd_adaptive.adaptation.sampling import Sampler, check_ranges
from hvd_adaptive.adaptation.sketch import Gradient, sketch
from hvd_adaptive.compressors import Compressor, parse
from hvd_adaptive.compressors.base import LayerContext
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import parse as parse_recipe
from tests.adaptation.helpers import controllers, gradient

LAYERS = (Layer(0, "wide", (64, 32)), Layer(1, "tall", (400, 8)))


def sampler_of(recipe: str, own: Compressor, factors: tuple[float, ...] = ()) -> Sampler:
    made = parse_recipe(recipe)
    planner = made.planner()
    sampler = Sampler(made, planner.needs, factors or planner.factors, 1, {})
    asked = made.candidate_factors()
    rows = [LayerSamples.of(layer, own, "allgather", (), 1, 1, asked) for layer in LAYERS]
    sampler.rows = {row.layer.name: row for row in rows}
    return sampler


# --- when -----------------------------------------------------------------------------------------


def sampled_steps(sampler: Sampler, steps: int) -> list[int]:
    return [step for step in range(steps) if sampler.samples(step)]


def test_errors_are_measured_on_a_few_steps_of_the_time_until_the_next_plan() -> None:
    sampler = sampler_of("auto", parse("fp16"))
    assert sampled_steps(sampler, 200) == [*range(0, 200, 25)]
    sampler.schedule.keep(8, 110)
    assert sampled_steps(sampler, 910) == [825, 850, 875, 900]  # of the last period


def test_where_a_plan_is_asked_for_and_nothing_was_measured_the_next_step_is() -> None:
    (controller,) = controllers("lgreco:period=400,accumulate=false")
    sampler = controller._sampler
    assert not sampler.samples(7)
    controller.start_collection(6)
    assert sampler.samples(7)
    for layer in (each.layer for each in sampler.rows.values()):
        controller.observe(layer, gradient(layer, 7), gradient(layer, 7), 7)
    controller.learn()
    controller.end_step(7, None, [])
    controller.start_collection(7)
    assert not sampler.samples(8)


# --- GraVAC's gain --------------------------------------------------------------------------------


def sent_norm(own: Compressor, x: torch.Tensor, factor: float, layer: Layer) -> float:
    """Root mean square norm of what the payload nearest to a factor decodes to."""
    levels = own.levels(layer)
    factors = [abs(math.log(own.nominal_factor(level, layer) / factor)) for level in levels]
    level = levels[int(np.argmin(factors))]
    squares = []
    for key in range(20):
        rest = x.clone()
        own.compress_(rest, level, LayerContext(key=key, shape=layer.shape))
        squares.append(float((x - rest).double().square().sum()))
    return float(np.sqrt(np.mean(squares)))


@pytest.mark.parametrize("gain", ["raw", "feedback"])
@pytest.mark.parametrize(
    ("spec", "factors"),
    [
        ("topk:density=0.02,values=fp32", (10.0, 40.0)),
        ("qsgd:bits=3", (6.0, 18.0)),
        ("terngrad:clip=2.5", (18.0,)),
        ("signsgd", (30.0,)),
        ("randomk:density=0.05,unbiased=true", (10.0,)),
    ],
)
def test_gains_are_those_of_really_compressing(
    spec: str, factors: tuple[float, ...], gain: str
) -> None:
    own = parse(spec)
    sampler = sampler_of(f"gravac:gain={gain}", own, factors)
    sent, whole = np.zeros(len(factors)), 0.0
    for layer in LAYERS:
        grad = gradient(layer, 0)
        x = grad + 2 * gradient(layer, 1)  # with what feedback adds
        sampler.observe(layer, grad, x, 0)
        norms = np.array([sent_norm(own, x, factor, layer) for factor in factors])
        if gain == "raw":  # the authors' code: norms, added up, over those of the gradient alone
            sent += norms
            whole += float(grad.norm())
        else:
            sent += norms**2
            whole += float(x.square().sum())
    # of 20 draws of random-k's energy
    tolerance = 0.08 if spec.startswith("randomk") else 0.03
    np.testing.assert_allclose(sampler.step_vector(0), sent / whole, rtol=tolerance)


def test_with_error_feedback_the_raw_gain_hovers_about_1_and_the_printed_one_vanishes() -> None:
    layer, own = Layer(0, "w", (20_000,)), parse("topk:density=0.01,values=fp32")
    for factor, steps, most in ((10, 60, 0.5), (100, 500, 0.1)):
        residual, raw, printed = torch.zeros(layer.numel), [], []
        generator = torch.Generator().manual_seed(0)
        for step in range(steps):
            grad = torch.randn(layer.numel, generator=generator)
            x = residual.add_(grad)
            if step >= steps - 30:
                sent = own.sent_energies(x, [1 / factor])[0]
                raw.append(math.sqrt(sent) / float(grad.norm()))
                printed.append(sent / float(x @ x))
            own.compress_(x, 1 / factor)
        assert np.mean(raw) == pytest.approx(1.0, abs=0.1)
        assert np.mean(printed) < most


# --- Accordion's norm -----------------------------------------------------------------------------


def test_a_sketch_keeps_norms_and_sums() -> None:
    assert np.linalg.norm(sketch(torch.full((1021,), 2.0), 3)) == pytest.approx(2 * math.sqrt(1021))
    generator = torch.Generator().manual_seed(0)
    for shape in ((100_000,), (2042, 30)):
        x, y = (torch.randn(shape, generator=generator) for _ in range(2))
        if len(shape) > 1:
            x, y = x * (torch.arange(30) == 7), y * (torch.arange(30) == 7)  # one column
        x, y = x.reshape(-1), y.reshape(-1)
        np.testing.assert_allclose(sketch(x, 5) + sketch(y, 5), sketch(x + y, 5), atol=1e-4)
        ratios = [np.linalg.norm(sketch(x, key)) / float(x.norm()) for key in range(40)]
        assert np.mean(np.square(ratios)) == pytest.approx(1, abs=0.02)
        assert np.std(ratios) < 0.04


def test_the_norm_of_a_period_is_that_of_the_mean_gradient_of_all_ranks() -> None:
    """As the authors accumulate it; mean energies of steps would not see what cancels out."""
    ranks = 3
    samplers = [sampler_of("accordion", parse("topk:density=0.05")) for _ in range(ranks)]
    means = {layer.name: torch.zeros(layer.numel) for layer in LAYERS}
    for step in range(8):
        for rank, sampler in enumerate(samplers):
            for layer in LAYERS:
                # the noise of ranks cancels out, that of steps as well in the first layer
                noise = gradient(layer, step // 2, rank) * (1 if step % 2 or layer.index else -1)
                grad = 0.1 + noise
                sampler.observe(layer, grad, 5 * grad, step)
                means[layer.name] += grad / (8 * ranks)
    average = np.mean([sampler.take() for sampler in samplers], axis=0)
    energies, steps = samplers[0].period(average)
    assert steps == 8
    expected = [float(mean.norm()) for mean in means.values()]
    np.testing.assert_allclose(np.sqrt(energies), expected, rtol=0.06)
    assert expected[0] < 0.2 * float(gradient(LAYERS[0], 0).norm())
    again, none = samplers[0].period(samplers[0].take())
    assert (again.tolist(), none) == ([0.0, 0.0], 0)


def kept_elements(sampler: Sampler) -> int:
    """Of all sums of gradients, as checkpoints hold them."""
    found = [part for row in sampler.measured().values() for part in row]
    return sum(part.numel() for part in found if isinstance(part, torch.Tensor))


def feed(sampler: Sampler, steps: range) -> None:
    """Gradients, and what is compressed of each: with a residual, which is something else."""
    for step in steps:
        for layer in LAYERS:
            grad = 0.1 + gradient(layer, step)
            sampler.observe(layer, grad, grad + gradient(layer, step + 100), step)


@pytest.mark.parametrize(("options", "sums"), [("", 1), (":residual=true", 2)])
def test_one_sum_of_gradients_serves_accordion_and_lgreco_to_the_bit(options: str, sums: int) -> None:
    """It decides by the same numbers as two; with residuals, the sums are of different tensors."""
    own = parse("topk:density=0.05")
    both, norms, errors = (
        sampler_of(recipe, own)
        for recipe in (f"accordion+lgreco{options}", "accordion", f"lgreco{options}")
    )
    numel = sum(layer.numel for layer in LAYERS)
    for steps in (range(5), range(5, 12)):
        for sampler in (both, norms, errors):
            feed(sampler, steps)
        assert [kept_elements(each) for each in (both, norms, errors)] == [sums * numel, numel, numel]
        found, rows = both.take(), both.rows.values()
        start = sum(len(row.sums) for row in rows)
        np.testing.assert_array_equal(found[:start], errors.take())
        np.testing.assert_array_equal(found[start:], norms.take()[start:])
        energies, count = both.period(found)
        assert (count, kept_elements(both)) == (len(steps), 0)
        assert (energies > 0).all()


def test_a_checkpoint_with_the_sum_in_two_places_continues_with_one() -> None:
    before, after = (sampler_of("accordion+lgreco", parse("topk:density=0.05")) for _ in range(2))
    feed(before, range(4))
    state = before.measured()
    for row in state.values():  # as it was written when each of the two kept its own
        row[4], row[5] = row[3].clone(), row[1]
    after.restore(state, {})
    assert kept_elements(after) == kept_elements(before)
    for sampler in (before, after):
        feed(sampler, range(4, 6))
    np.testing.assert_array_equal(after.take(), before.take())


# --- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "spec", "message"),
    [
        ("gravac", "qsgd:bits=4", "factor of 1000, but the levels of qsgd:.* have 3.97 to 19.1"),
        ("gravac", "topk:density=0.01,levels=0.005-0.1", r"factor of 1000, .* have 10 to 200"),
        ("gravac:theta_min=1.5", "topk:density=0.01,levels=0.001-0.1", "factor of 1.5, but"),
        ("gravac:theta_max=64", "threshold", "factor of 10, but the levels of threshold"),
        ("gravac:theta_min=4,theta_max=64", "powersgd:rank=1", "factor of 4, but"),
        ("accordion:low=4", "qsgd:bits=4", "write a smaller low or a larger high"),
        ("accordion:high=0.1", "powersgd:rank=4", "give the compressor a wider range, levels="),
        ("accordion", "terngrad", "factor of 9.57009, but the levels of terngrad"),
    ],
)
def test_a_range_that_cannot_hold_what_the_planner_asks_for_is_an_error(
    recipe: str, spec: str, message: str
) -> None:
    made, own = parse_recipe(recipe), parse(spec)
    factors = made.candidate_factors()
    rows = [LayerSamples.of(layer, own, "allgather", (), 1, 1, factors) for layer in LAYERS]
    with pytest.raises(ValueError, match=message):
        check_ranges(made, rows)


@pytest.mark.parametrize(
    ("recipe", "spec"),
    [
        ("gravac", "topk:density=0.01"),
        ("gravac:theta_min=1.5,theta_max=2000", "dgc"),
        ("gravac:theta_min=1.5,theta_max=2000", "randomk:density=0.01"),
        ("gravac:theta_min=4,theta_max=16", "qsgd:bits=4"),
        ("accordion:low=10,high=0.1", "topk:density=0.01"),
        ("accordion:low=16,high=1", "powersgd:rank=1,levels=1-16"),
        ("accordion", "powersgd:rank=4"),
        ("accordion", "threshold"),
        ("lgreco", "terngrad"),
    ],
)
def test_ranges_that_hold_it_are_taken(recipe: str, spec: str) -> None:
    made, own = parse_recipe(recipe), parse(spec)
    asked = made.candidate_factors()
    biases = Layer(2, "bias", (8,))  # which powersgd sends dense
    rows = [LayerSamples.of(each, own, "allgather", (), 1, 1, asked) for each in (*LAYERS, biases)]
    check_ranges(made, rows)
    if recipe.startswith("gravac") and not spec.startswith("qsgd"):
        found = {each.nominal_factor(LAYERS[0]) for each in rows[0].candidates}
        assert found >= set(asked)


def test_a_controller_refuses_layers_whose_levels_do_not_reach() -> None:
    with pytest.raises(ValueError, match="the planner asks for a compression factor of 200000, but"):
        controllers("accordion:high=0.0001")


def test_a_plan_soon_after_another_goes_by_the_errors_measured_for_that_one() -> None:
    """To measure them takes longer than all else that a plan needs of a step."""
    (controller,) = controllers("auto:period=100")
    sampler = controller._sampler
    row = sampler.rows["wide"]
    count = len(row.candidates)
    one, other = gradient(row.layer, 1), gradient(Layer(1, "wide", (64, 32)), 2)

    def shares(x: torch.Tensor, step: int) -> np.ndarray:
        sampler.observe(row.layer, x, x, step)
        measured = row.take({})
        return measured[:count] / measured[count]

    first = shares(one, 0)
    assert shares(other, 75) == pytest.approx(first), "of the same period"
    resumed = controllers("auto:period=100")[0]._sampler
    resumed.restore(sampler.measured(), sampler.shares())
    assert resumed.rows["wide"].shares == pytest.approx(first)
    later = shares(other, 100)
    assert np.abs(later / first - 1).max() > 0.1, "a period is over"
    assert later == pytest.approx(errors_of(other, row.layer, row.candidates) / float(other @ other))


def test_with_signals_errors_are_measured_once_a_period_and_follow_the_energy() -> None:
    """Of the other samples the energy counts: what is lost is about as large a share of it."""
    layer, own = LAYERS[0], parse("qsgdinf:bits=4")
    row = LayerSamples.of(layer, own, "allgather", (), 1, signals=True)
    count = len(row.candidates)
    first, second = (gradient(layer, step) for step in (1, 2))
    second *= 3.0

    def measured(*samples: torch.Tensor) -> np.ndarray:
        row.shares = None
        for step, x in enumerate(samples):
            row.sample(x, float(x @ x), x, {})
            row.sample_signals(Gradient.seen(x, x, layer.index, step), step)
        return row.take({})

    alone, other, both = measured(first), measured(second), measured(first, second)
    energies = [float(x @ x) for x in (first, second)]
    assert both[count] == pytest.approx(sum(energies) / 2)
    assert both[:count] == pytest.approx(alone[:count] * sum(energies) / energies[0] / 2)
    assert both[:count] == pytest.approx((alone[:count] + other[:count]) / 2, rel=0.1)
    empty = torch.zeros_like(first)
    assert measured(empty, first)[:count] == pytest.approx(alone[:count] / 2), "nothing to go by yet"
