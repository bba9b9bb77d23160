"""What each candidate of each layer loses, as delay and as noise, for the limits of ``auto``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.gradient_signals import (
    GradientSignals,
    bunching,
    metric_weights,
    noise_of,
)
from hvd_adaptive.planning.step_time import StepCosts
from hvd_adaptive.planning.table import CandidateTable

__all__ = ["Losses", "losses_of"]

LAYER_CAP = 4.0
"""A layer by itself may have so many times the steps withheld, and the relative noise, of all."""
SPARSE = 0.5
"""A gradient with fewer elements that are not 0 counts as sparse."""
MOST_ROUNDING = 1e-4
"""Relative squared error from which half precision is no dense gradient any more: it has underflown."""


@dataclass(frozen=True, eq=False)
class Losses:
    """Numbers that add up over the layers, and their limits.

    Args:
        delays: ``float64[C_l]`` per layer: squared steps withheld, weighted; infinite forbids.
        noises: ``float64[C_l]`` per layer: added variance, weighted; infinite forbids.
        max_delay: limit of the sum of the chosen ``delays``.
        max_noise: limit of the sum of the chosen ``noises``.
    """

    delays: tuple[Float64s, ...]
    noises: tuple[Float64s, ...]
    max_delay: float
    max_noise: float


def losses_of(
    table: CandidateTable,
    signals: GradientSignals,
    costs: StepCosts,
    metric: str,
    factors: Float64s,
    delay: float,
    share: float,
    ranks: int,
) -> Losses:
    """What all candidates lose.

    Args:
        table: their squared errors.
        signals: of the layers.
        costs: say which compressors are dense.
        metric: what counts across layers: see :func:`~.gradient_signals.metric_weights`.
        factors: ``float64[2, L]``: steps withheld, of those that :func:`withheld_at_first` says: by
            candidates that round all elements, and by those that select some. Low rank has none: what
            it withholds has little energy, and may be most of what a layer learns by.
        delay: steps that may be withheld.
        share: of the gradient's own noise that may be added.
        ranks: how many there are.
    """
    weights = metric_weights(metric, signals)
    signal, noise = noise_of(signals.energy, signals.mean_energy, ranks)
    mean = signal + noise / ranks
    all_mean = max(float((weights * mean).sum()), 1e-300)
    delays, noises = [np.zeros(0)] * len(signals.specs), [np.zeros(0)] * len(signals.specs)
    # most layers have the same candidates, and are looked at together
    for specs, layers in _alike(signals.specs):
        dense = np.array([costs.compressors[spec].dense for spec in specs])
        errors, density, projected, unbiased = (
            np.array([rows[layer] for layer in layers])
            for rows in (table.errors, signals.densities, signals.projected, signals.unbiased)
        )
        energy, nonzero = signals.energy[layers, None], signals.nonzero[layers, None]
        unbiased = unbiased & ~dense
        factor = np.where(density < 1, factors[1, layers, None], factors[0, layers, None])
        factor = np.where(projected, 1.0, factor)
        withheld = factor * withheld_at_first(density, energy, errors)
        loudness = np.where(unbiased, errors, 0.0)
        if metric == "relative":
            # of the mean, and so of each of the ranks as many times
            bunched = ranks * bunching(withheld, signal[layers, None])
            loudness = np.where(dense | unbiased, loudness, bunched)
        with np.errstate(invalid="ignore"):  # what never gets there, of a layer without a gradient
            waits = (weights * mean / all_mean)[layers, None] * withheld**2
            refused = (withheld > LAYER_CAP * delay) | _fills_up(density, nonzero)
            loud = loudness > LAYER_CAP * share * noise[layers, None]
            added = weights[layers, None] * loudness
        nothing = ~(energy > 0)  # of what was never seen nobody knows what it would lose
        waits = np.where(refused | nothing, np.inf, waits)
        waits = np.where(dense | unbiased, 0.0, waits)
        rounded = np.where(errors > MOST_ROUNDING * energy, np.inf, 0.0)
        added = np.where(dense, rounded, np.where(loud | nothing, np.inf, added))
        for row, layer in enumerate(layers.tolist()):
            delays[layer], noises[layer] = waits[row], added[row]
    return Losses(tuple(delays), tuple(noises), delay**2, share * float((weights * noise).sum()))


def _alike(specs: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], Int64s]]:
    """Layers that have the same candidates."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer, each in enumerate(specs):
        groups.setdefault(each, []).append(layer)
    yield from ((each, np.array(layers, dtype=np.int64)) for each, layers in groups.items())


def withheld_at_first(density: Float64s, energy: Float64s, errors: Float64s) -> Float64s:
    """Steps that candidates withhold, as far as can be said before they were observed.

    One over the density where elements or dimensions are selected; where all are sent, rounded, one
    over the share of the energy that is sent, of which the rest waits one step more, and so on.

    Args:
        density: of what is selected, 1 where all elements are sent.
        energy: squared norms of the gradients.
        errors: of what is sent of them.

    Example:
        >>> withheld_at_first(np.array([0.1, 1.0]), np.array([2.0, 2.0]), np.array([1.5, 1.0])).tolist()
        [10.0, 2.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        faithful = energy / np.maximum(energy - errors, 0.0)
        selecting = np.where(errors <= 1e-6 * energy, 0.0, 1 / density)
    found = np.where(density < 1, selecting, faithful)
    return np.where(np.isfinite(found), found, np.inf)


def _fills_up(density: Float64s, nonzero: Float64s) -> npt.NDArray[np.bool_]:
    """Which candidates send fewer elements of a sparse gradient than arrive in a step."""
    return np.asarray((density < 1) & (density < nonzero) & (nonzero < SPARSE))
