"""What compression may cost in accuracy: the gradient's own noise, and how long it waits.

Two things are lost, and one number cannot tell both:

* *Noise*: unbiased compressors add variance. Their ``n`` ranks' errors are independent, so the mean
  gradient's variance grows by ``error / n``, where ``error`` is the mean over the ranks of
  ``|Q(g_r) - g_r|**2``. A mini-batch's gradient is noisy anyway: with ``g_r = G + noise_r``, the noises
  independent and of variance ``S`` each, the mean over the ranks has the variance ``S / n``. So the
  relative variance is ``error / S``, which the number of ranks is no longer in (:func:`noise_of`).

* *Delay*: with error feedback what is not sent waits. A residual that holds the last ``W`` gradients is
  ``W G`` plus ``W`` independent noises: signals add up, noises add in squares ::

      |e|**2 = W**2 |G|**2 + W N,    N = S / n

  of which the positive root (:func:`withheld_steps`) is how many steps of training are withheld. The
  plain ratio ``|e| / |mean gradient|`` would be ``sqrt(W)`` where noise dominates, and would grant a
  layer 100 steps of delay where 10 are allowed.

  What waits is sent together. Optimizers that divide by the root of a second moment, as Adam does, take
  that for noise (:func:`bunching`).

``|G|**2`` and ``S`` are the estimators of McCandlish, Kaplan et al., "An Empirical Model of Large-Batch
Training" (2018), appendix A.1, from the mean of the ranks' squared norms and the squared norm of their
mean; the two batch sizes are one rank's and all ranks'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s

__all__ = [
    "GradientSignals",
    "bunching",
    "metric_weights",
    "noise_of",
    "release_steps",
    "withheld_steps",
]

METRICS = ("optimizer", "l2", "relative")


@dataclass(frozen=True, slots=True, eq=False)
class GradientSignals:
    """What is known of the layers when a plan is made, besides their table.

    Args:
        energy: ``float64[L]``: mean over the ranks of each gradient's squared L2 norm.
        mean_energy: ``float64[L]``: squared norm of the mean gradient, estimated.
        residual: ``float64[L]``: squared norm of the mean residual, estimated.
        nonzero: ``float64[L]``: share of a gradient's elements that are not 0.
        numel: ``int64[L]``: elements.
        specs: the compressor of every candidate, as text.
        payloads: ``float64[C_l]`` per layer: bytes that one rank sends.
        unbiased: ``bool[C_l]`` per layer: whether a candidate adds noise; else it withholds.
        densities: ``float64[C_l]`` per layer: share of the elements, or of the dimensions, that a
            candidate sends; 1 where all are sent, as well as they can be.
        projected: ``bool[C_l]`` per layer: whether it is a share of the dimensions.
    """

    energy: Float64s
    mean_energy: Float64s
    residual: Float64s
    nonzero: Float64s
    numel: Int64s
    specs: tuple[tuple[str, ...], ...]
    payloads: tuple[Float64s, ...]
    unbiased: tuple[npt.NDArray[np.bool_], ...]
    densities: tuple[Float64s, ...]
    projected: tuple[npt.NDArray[np.bool_], ...]

    def at(self, ranks: int, others: int) -> GradientSignals:
        """The same gradients with another number of ranks: their mean has more noise, or less.

        Args:
            ranks: of which these are.
            others: of which they are wanted.
        """
        signal, noise = noise_of(self.energy, self.mean_energy, ranks)
        return replace(self, mean_energy=signal + noise / max(1, others))


def noise_of(energy: Float64s, mean_energy: Float64s, ranks: int) -> tuple[Float64s, Float64s]:
    """Squared norm of the true gradient, and one rank's variance, of each layer; at least 0.

    Unbiased but for that bound, which counts where a layer's estimates are noisier than its gradient.

    Args:
        energy: ``float64[L]``: mean over the ranks of ``|g_r|**2``.
        mean_energy: ``float64[L]``: ``|mean of g_r|**2``.
        ranks: how many; one rank's noise cannot be told from its signal, and counts as none.

    Example:
        >>> signal, noise = noise_of(np.array([10.0]), np.array([4.0]), ranks=4)
        >>> signal.tolist(), noise.tolist()
        ([2.0], [8.0])
    """
    if ranks < 2:
        return energy.copy(), np.zeros_like(energy)
    mean_energy = np.minimum(mean_energy, energy)
    signal = (ranks * mean_energy - energy) / (ranks - 1)
    noise = (energy - mean_energy) * ranks / (ranks - 1)
    return np.maximum(signal, 0.0), np.maximum(noise, 0.0)


def withheld_steps(residual: Float64s, signal: Float64s, noise: Float64s) -> Float64s:
    """How many steps' gradients a residual holds: the root of ``W**2 signal + W noise = residual``.

    Args:
        residual: ``float64[L]``: squared norm of the mean residual.
        signal: ``float64[L]``: squared norm of the true gradient.
        noise: ``float64[L]``: variance of the mean gradient (``S / n``).

    Returns:
        ``float64[L]``; 0 where nothing waits, and where a gradient is 0.

    Example:
        >>> withheld_steps(np.array([100.0]), np.array([1.0]), np.array([0.0])).tolist()
        [10.0]
        >>> withheld_steps(np.array([100.0]), np.array([0.0]), np.array([1.0])).tolist()
        [100.0]
    """
    # in the form that does not cancel where the noise dominates
    root = noise + np.sqrt(noise**2 + 4 * signal * residual)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(root > 0, 2 * residual / root, 0.0)


def bunching(withheld: Float64s, signal: Float64s | float) -> Float64s:
    """What sending the gradients of ``W`` steps at once adds to the second moment of their mean.

    An element whose mean gradient is ``G + noise`` in each step has the second moment ``G**2 + N``.
    Where the sum of ``W`` of them comes once in ``W`` steps it has ``(W G)**2 + W N`` then, which is
    ``W G**2 + N`` in the mean of the steps: ``(W - 1) G**2`` more, with the same mean gradient. An
    optimizer that divides by the root of the second moment takes smaller steps by that, as if the
    gradients had so much more noise.

    Args:
        withheld: any shape: steps that are sent at once; below 1 nothing is added.
        signal: squared norm of the true gradient, at least 0; a shape that goes with it.

    Example:
        >>> bunching(np.array([0.0, 1.0, 10.0]), signal=2.0).tolist()
        [0.0, 0.0, 18.0]
    """
    with np.errstate(invalid="ignore"):  # what never gets there, of no gradient
        return np.where(np.asarray(signal) > 0, np.maximum(withheld - 1.0, 0.0) * signal, 0.0)


def release_steps(step: int) -> int:
    """With how many gradients a residual is sent that is no longer added to, under ``auto``.

    With the default limit it holds a twentieth of the steps so far at most, so each of these gradients
    counts as about three.

    Example:
        >>> release_steps(10), release_steps(1000)
        (4, 25)
    """
    return max(4, step // 40)


def metric_weights(metric: str, signals: GradientSignals) -> Float64s:
    """What a squared unit of each layer's gradient counts for.

    Args:
        metric: ``relative``: divided by the layer's mean square per element, as Adam and its kin divide
            by it; otherwise all alike, as SGD steps along them.
        signals: of the layers.

    Returns:
        ``float64[L]``.
    """
    if metric != "relative":
        return np.ones(len(signals.energy))
    square = signals.energy / np.maximum(signals.numel, 1)
    with np.errstate(divide="ignore"):
        return np.where(square > 0, 1.0 / square, 0.0)
