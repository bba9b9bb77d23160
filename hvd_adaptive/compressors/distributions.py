"""How normalized magnitudes are distributed: mixtures of truncated normals, and how ranks find them.

A vector is cut into blocks, and each magnitude is divided by its block's norm: ``r`` in [0, 1]. Ranks
measure two moments of ``r`` in every block (:func:`block_statistics`), keep a few groups of similar
blocks (:func:`merge`), and make a mixture of them all (:func:`model`). :class:`Mixture` has closed
forms; :class:`TabulatedDistribution` is the same thing on a grid, a hundred times faster.

Source: Faghri, Tabrizian, Markov, Alistarh, Roy and Ramezani-Kebrya, "Adaptive Gradient Quantization
for Data-Parallel SGD" (NeurIPS 2020), section 3.4.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s

Norm: TypeAlias = Literal["l2", "max"]
Weighting: TypeAlias = Literal["expected", "normalized"]

COMPONENTS = 64
"""Groups of blocks that a rank's statistics are merged to: 1.5 KiB on the wire."""
MAX_SIGMA = 100.0
"""A wider normal is flat on [0, 1], and differences of its tails would lose their digits."""

_POINT_SIGMA = 1e-12
_SERIES_FROM = 15.0
_SERIES_TERMS = 12
_MAX_ALPHA = 10.0  # distance from mu to 0, in sigmas: within one percent of an exponential
_WIDEST = 30.0  # sigma of a density that is flat on [0, 1] within 0.1 %
_GRID = 2048
_GRID_FROM = 1e-7


class Distribution(ABC):
    """A distribution on [0, 1], known by its partial moments; it may have point masses."""

    @abstractmethod
    def partial(self, x: npt.ArrayLike) -> tuple[Float64s, Float64s, Float64s]:
        """The integrals of 1, r and r² dF over [0, x], point masses at 0 and at x included.

        Args:
            x: points in [0, 1], any shape.

        Returns:
            Three ``float64`` arrays of the shape of ``x``.
        """

    @abstractmethod
    def inverse(self, q: npt.ArrayLike) -> Float64s:
        """The smallest x with cdf(x) >= q; ``q`` of any shape, ``float64`` of that shape returned."""

    @final
    def cdf(self, x: npt.ArrayLike) -> Float64s:
        """The probability of r <= x: ``float64`` of the shape of ``x``."""
        return self.partial(x)[0]

    @final
    def first(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Float64s:
        """The integral of r dF over (a, b]."""
        difference: Float64s = self.partial(b)[1] - self.partial(a)[1]
        return difference

    @final
    def second(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Float64s:
        """The integral of r² dF over (a, b]."""
        difference: Float64s = self.partial(b)[2] - self.partial(a)[2]
        return difference

    @final
    def area(self, x: npt.ArrayLike) -> Float64s:
        """The integral of the cdf over [0, x]: by parts, x F(x) less the partial first moment."""
        cdf, first, _ = self.partial(x)
        area: Float64s = np.asarray(x, dtype=np.float64) * cdf - first
        return area


class Mixture(Distribution):
    """Weighted normals, each truncated to [0, 1]; closed forms throughout.

    Cost: K special functions a point; :meth:`inverse` sixty times that. Accuracy: 1e-12 of the scale
    of a component, also where its parent's mean lies far outside [0, 1]; 1e-8 where sigma nears 100.
    Source: Faghri et al. (2020), section 3.4.

    Args:
        means: ``float64[K]`` of the parent normals, anywhere.
        sigmas: ``float64[K]`` of the parent normals, in [0, 100]; 0 is a point mass at the mean
            (at the nearer end, if the mean lies outside [0, 1]).
        weights: ``float64[K]``, not negative; divided by their sum.

    Raises:
        ValueError: the arrays differ in length or are empty, a number is not finite, a sigma is
            outside its range, or no weight is positive.

    Example:
        >>> mixture = Mixture([0.5, 0.0], [100.0, 0.0], [3.0, 1.0])  # flat, and a point mass at 0
        >>> mixture.cdf([0.0, 0.5, 1.0]).round(6).tolist()
        [0.25, 0.625, 1.0]
        >>> round(float(mixture.first(0.0, 1.0)), 6)
        0.375
        >>> mixture.inverse([0.1, 0.625]).round(6).tolist()
        [0.0, 0.5]
    """

    def __init__(self, means: npt.ArrayLike, sigmas: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        self.means, self.sigmas, self.weights = (
            np.asarray(values, dtype=np.float64).reshape(-1) for values in (means, sigmas, weights)
        )
        if not len(self.means) == len(self.sigmas) == len(self.weights) > 0:
            raise ValueError(
                f"a mixture needs as many means, sigmas and weights, at least one of each, got "
                f"{len(self.means)}, {len(self.sigmas)} and {len(self.weights)}"
            )
        if not all(np.isfinite(values).all() for values in (self.means, self.sigmas, self.weights)):
            raise ValueError("a mixture's means, sigmas and weights must be finite")
        if self.sigmas.min() < 0 or self.sigmas.max() > MAX_SIGMA:
            raise ValueError(
                f"a mixture's sigmas must lie in [0, {MAX_SIGMA:g}], got {self.sigmas.min():g} to "
                f"{self.sigmas.max():g}"
            )
        if self.weights.min() < 0 or self.weights.sum() <= 0:
            raise ValueError("a mixture's weights must not be negative, and one must be positive")
        self.weights = self.weights / self.weights.sum()

    def partial(self, x: npt.ArrayLike) -> tuple[Float64s, Float64s, Float64s]:
        """See :meth:`Distribution.partial`."""
        points = np.asarray(x, dtype=np.float64)
        moments = _truncated(points[..., None], self.means, self.sigmas)
        zeroth, first, second = (moment @ self.weights for moment in moments)
        return zeroth, first, second

    def inverse(self, q: npt.ArrayLike) -> Float64s:
        """By bisection: absolutely within 1e-15, where the cdf is exact."""
        wanted = np.asarray(q, dtype=np.float64)
        low, high = np.zeros_like(wanted), np.ones_like(wanted)
        reached_at_zero = self.cdf(low) >= wanted
        for _ in range(60):
            middle = (low + high) / 2
            reached = self.cdf(middle) >= wanted
            low, high = np.where(reached, low, middle), np.where(reached, middle, high)
        return np.where(reached_at_zero, 0.0, high)


class TabulatedDistribution(Distribution):
    """A distribution on a grid: flat within each cell, with a point mass at 0 where there is one.

    Integrals over the grid are exact, so that descent on a table is as monotone as on the mixture.
    Cells grow geometrically (0.8 % of r), because r is small where the norm is that of a large block.

    Cost: one evaluation of ``distribution`` at 2,049 points; afterwards a binary search per point.

    Args:
        distribution: what to tabulate.

    Example:
        >>> table = TabulatedDistribution(Mixture([0.0], [0.1], [1.0]))
        >>> round(float(table.inverse(0.5)), 4)  # the median of a half normal
        0.0674
    """

    def __init__(self, distribution: Distribution) -> None:
        self.edges = np.concatenate([[0.0], np.geomspace(_GRID_FROM, 1.0, _GRID)])
        # rounding must not make the cdf fall
        self._cdf = np.maximum.accumulate(distribution.cdf(self.edges))
        widths = np.diff(self.edges)
        self.density: Float64s = np.diff(self._cdf) / widths
        left, right = self.edges[:-1], self.edges[1:]
        mass = np.diff(self._cdf)
        self._first = np.concatenate([[0.0], np.cumsum(mass * (left + right) / 2)])
        squares = (left**2 + left * right + right**2) / 3
        self._second = np.concatenate([[0.0], np.cumsum(mass * squares)])

    def partial(self, x: npt.ArrayLike) -> tuple[Float64s, Float64s, Float64s]:
        """See :meth:`Distribution.partial`."""
        points = np.asarray(x, dtype=np.float64)
        cell = np.clip(np.searchsorted(self.edges, points, side="right") - 1, 0, _GRID - 1)
        left, density = self.edges[cell], self.density[cell]
        mass = density * (points - left)
        first = self._first[cell] + mass * (points + left) / 2
        second = self._second[cell] + mass * (points**2 + points * left + left**2) / 3
        return self._cdf[cell] + mass, first, second

    def inverse(self, q: npt.ArrayLike) -> Float64s:
        """Linear within a cell, as the cdf is."""
        inverse: Float64s = np.interp(np.asarray(q, dtype=np.float64), self._cdf, self.edges)
        return inverse


def _truncated(x: Float64s, means: Float64s, sigmas: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Partial moments over [0, x] of normals truncated to [0, 1]; all arguments broadcast."""
    # Seen from 1, a mean above the middle is one below it: two cases are left instead of three.
    flipped = means > 0.5
    mu = np.where(flipped, 1 - means, means)
    sigma = np.maximum(sigmas, _POINT_SIGMA)
    whole, mean, square = _untruncated(np.ones_like(mu), mu, sigma)
    mean, square = mean / whole, square / whole
    zeroth, first, second = (m / whole for m in _untruncated(np.where(flipped, 1 - x, x), mu, sigma))
    # From 1 - r back to r: what lies beyond, and (1 - s), (1 - s)² written out.
    beyond, beyond_first, beyond_second = 1 - zeroth, mean - first, square - second
    zeroth = np.where(flipped, beyond, zeroth)
    first = np.where(flipped, beyond - beyond_first, first)
    second = np.where(flipped, beyond - 2 * beyond_first + beyond_second, second)
    # Point masses, where the formulas have no meaning.
    pointed, place = sigmas < _POINT_SIGMA, np.clip(means, 0.0, 1.0)
    reached = np.where(x >= place, 1.0, 0.0)
    return (
        np.where(pointed, reached, np.clip(zeroth, 0.0, 1.0)),
        np.where(pointed, reached * place, first),
        np.where(pointed, reached * place**2, second),
    )


def _untruncated(y: Float64s, mu: Float64s, sigma: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Integrals over [0, y] of (1, r, r²) and a normal density with mu <= 1/2, up to one factor.

    With mu > 0 the textbook formulas lose nothing. With mu <= 0 all mass is in one tail: there, terms
    of size mu² would cancel, so moments about 0 come from the tail's repeated integrals, with the
    density at 0 divided out.
    """
    alpha, width = -mu / sigma, y / sigma
    xi = alpha + width
    in_tail = alpha >= 0

    at_zero, at_y = _tail(np.maximum(alpha, 0.0)), _tail(np.maximum(xi, 0.0))
    fall = np.exp(-np.maximum(width * (xi + alpha), 0.0) / 2)
    tail_zeroth = at_zero[0] - fall * at_y[0]
    tail_first = at_zero[1] - fall * (at_y[1] + width * at_y[0])
    tail_second = at_zero[2] - fall * (at_y[2] + 2 * width * at_y[1] + width**2 * at_y[0])

    body_zeroth = (_erf(xi / math.sqrt(2)) - _erf(alpha / math.sqrt(2))) / 2
    body_first = mu * body_zeroth + sigma * (_normal(alpha) - _normal(xi))
    body_second = mu * body_first + sigma**2 * body_zeroth - sigma * y * _normal(xi)
    return (
        np.where(in_tail, tail_zeroth, body_zeroth),
        np.where(in_tail, sigma * tail_first, body_first),
        np.where(in_tail, sigma**2 * tail_second, body_second),
    )


def _tail(z: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Integrals of (t - z)^n phi(t) / phi(z) over t > z for n = 0, 1, 2; z >= 0."""
    mills = math.sqrt(math.pi / 2) * _erfcx(z / math.sqrt(2))
    first = 1 - z * mills
    second = mills - z * first
    # Both lose digits as z², z⁴: further out the asymptotic series has converged to the last digit.
    inverse = 1 / np.square(np.maximum(z, _SERIES_FROM))
    term, series_first, series_second = inverse, np.zeros_like(z), np.zeros_like(z)
    for k in range(1, _SERIES_TERMS + 1):
        series_first = series_first + term
        series_second = series_second + 2 * k * term
        term = -(2 * k + 1) * term * inverse
    far = z > _SERIES_FROM
    return (
        mills,
        np.where(far, series_first, first),
        np.where(far, series_second * np.sqrt(inverse), second),
    )


def _normal(z: Float64s) -> Float64s:
    density: Float64s = np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi)
    return density


def _erf(z: Float64s) -> Float64s:
    values: Float64s = torch.special.erf(torch.from_numpy(np.ascontiguousarray(z))).numpy()
    return values.reshape(z.shape)


def _erfcx(z: Float64s) -> Float64s:
    values: Float64s = torch.special.erfcx(torch.from_numpy(np.ascontiguousarray(z))).numpy()
    return values.reshape(z.shape)


# --- from a tensor to a mixture -----------------------------------------------------------------------


def block_statistics(x: Tensor, block: int, norm: Norm, weighting: Weighting = "expected") -> Float64s:
    """Mean and variance of r in each block of a layer, and the block's weight.

    Blocks of zeros are left out, because they are sent exactly; so are those with a NaN or an Inf.

    Cost: five passes and two copies of ``x``. Source: Faghri et al. (2020), section 3.4.

    Args:
        x: float32, 1-D.
        block: elements of a block; the last of a layer may be shorter.
        norm: ``l2``, or ``max`` for the largest magnitude.
        weighting: ``expected`` weighs a block by its squared norm, which makes the variance of the
            mixture that of the gradient (section 3.4); ``normalized`` weighs all blocks alike, which
            makes it that of the gradient divided by its norm (equation 3).

    Returns:
        ``float64[B, 3]``: mean of r, variance of r, weight. A short block's weight is scaled by its
        share of a whole block's elements: the variance is a sum over elements.

    Raises:
        ValueError: the block is not positive, or the norm or the weighting is unknown.

    Example:
        >>> block_statistics(torch.tensor([3.0, -4.0, 0.0, 0.0, 2.0]), 2, "l2").round(3).tolist()
        [[0.7, 0.01, 25.0], [1.0, 0.0, 2.0]]
    """
    if block < 1 or norm not in ("l2", "max"):
        raise ValueError(f"blocks need a positive size and norm l2 or max, got {block} and {norm!r}")
    if weighting not in ("expected", "normalized"):
        raise ValueError(f"blocks are weighted as expected or normalized, got {weighting!r}")
    magnitudes = x.detach().abs()
    whole = magnitudes.numel() // block * block
    parts = [magnitudes[:whole].view(-1, block), magnitudes[whole:].view(1, -1)]
    return np.concatenate([_statistics_of_rows(part, block, norm, weighting) for part in parts])


def _statistics_of_rows(rows: Tensor, block: int, norm: Norm, weighting: Weighting) -> Float64s:
    if rows.numel() == 0:
        return np.empty((0, 3))
    largest = rows.amax(dim=1)
    used = (largest > 0) & largest.isfinite()
    if not used.all():
        rows, largest = rows[used], largest[used]
    # Of the largest, so that squares neither overflow nor vanish.
    scaled = rows / largest[:, None]
    count = rows.shape[1]
    mean = scaled.sum(dim=1, dtype=torch.float64) / count
    square = scaled.square_().sum(dim=1, dtype=torch.float64) / count
    # The norm in units of the largest.
    unit = (square * count).sqrt() if norm == "l2" else torch.ones_like(square)
    mean, square = mean / unit, square / unit.square()
    weight = torch.full_like(mean, count / block)
    if weighting == "expected":
        weight *= (unit * largest.double()).square()
    variance = (square - mean.square()).clamp_(min=0.0)
    statistics: Float64s = torch.stack([mean, variance, weight], dim=1).cpu().numpy()
    return statistics


def merge(statistics: npt.ArrayLike, components: int = COMPONENTS) -> Float64s:
    """Any number of blocks as a few groups of similar mean and equal weight.

    Moments of a group follow the law of total variance, so mean, variance and weight of the whole
    stay what they were, however often groups are merged again. The order of the rows does not matter.

    Cost: a sort of the rows.

    Args:
        statistics: ``float64[B, 3]`` of mean, variance, weight; rows without weight are left out.
        components: at most so many groups.

    Returns:
        ``float64[min(B, components) or fewer, 3]``, rising in the mean.

    Example:
        >>> merge([[0.1, 0.0, 1.0], [0.4, 0.0, 1.0], [0.2, 0.0, 1.0]], 1).round(4).tolist()
        [[0.2333, 0.0156, 3.0]]
    """
    rows = np.asarray(statistics, dtype=np.float64).reshape(-1, 3)
    rows = rows[rows[:, 2] > 0]
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    if len(rows) <= components:
        return rows
    mean, variance, weight = rows.T
    # A block belongs where its middle falls when all weight is laid out in a row.
    middle = (np.cumsum(weight) - weight / 2) / weight.sum()
    group = np.minimum((middle * components).astype(np.int64), components - 1)
    total = np.bincount(group, weight, components)
    used = total > 0
    total = total[used]
    centre = np.bincount(group, weight * mean, components)[used] / total
    square = np.bincount(group, weight * (variance + mean**2), components)[used] / total
    return np.column_stack([centre, np.maximum(square - centre**2, 0.0), total])


def model(statistics: npt.ArrayLike) -> Mixture:
    """The mixture whose components have the means and variances of the statistics.

    A group becomes the normal that *after* truncation to [0, 1] has its mean and variance (the
    authors' program takes both for the parent's, which moves mass away from 0, where gradients
    have most of theirs). No truncated normal has a standard deviation much above its mean. A group
    that does is sparse or has heavy tails: it becomes a point mass at 0 and a nearly exponential
    component, which again have its mean and variance: exactly, but for some 1 % right beside the edge
    between the two, where a nearly exponential component alone is used.

    Cost: some 20 ms for 64 groups.

    Args:
        statistics: ``float64[K, 3]`` of mean, variance, weight, as :func:`merge` returns them.

    Raises:
        ValueError: no row has any weight.

    Example:
        >>> mixture = model([[0.2, 0.01, 1.0], [0.1, 0.04, 1.0]])
        >>> len(mixture.means)  # the second is sparse
        3
        >>> mean, square = float(mixture.first(0, 1)), float(mixture.second(0, 1))
        >>> round(mean, 6), round(square, 6)  # (0.2 + 0.1) / 2, (0.05 + 0.05) / 2
        (0.15, 0.05)
    """
    mean, variance, weight = np.asarray(statistics, dtype=np.float64).reshape(-1, 3).T
    mean = np.clip(mean, 0.0, 1.0)
    if not (weight > 0).any():
        raise ValueError("no statistics: every block was zero or not finite")
    mu, sigma, share = _match_moments(mean, np.clip(variance, 0.0, mean * (1 - mean)))
    sparse = share < 1
    return Mixture(
        np.concatenate([mu, np.zeros(int(sparse.sum()))]),
        np.concatenate([sigma, np.zeros(int(sparse.sum()))]),
        np.concatenate([weight * share, (weight * (1 - share))[sparse]]),
    )


def _match_moments(mean: Float64s, variance: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Parents' means and sigmas, and the share that is not a point mass at 0: each ``float64[K]``."""
    deviation = np.sqrt(variance)
    # So narrow that truncation takes nothing: parent's moments are the truncated normal's.
    narrow = deviation * 7 <= np.minimum(mean, 1 - mean)
    mu, sigma, share = mean.copy(), deviation.copy(), np.ones_like(mean)
    wide_mu, wide_sigma, wide_mean = _widest_of_ratio(mean, variance)
    sparse = ~narrow & (wide_mean > mean)
    mu[sparse], sigma[sparse] = wide_mu[sparse], wide_sigma[sparse]
    share[sparse] = mean[sparse] / wide_mean[sparse]
    left = ~narrow & ~sparse
    if left.any():
        nearest = np.stack([wide_mu[left], wide_sigma[left]])
        mu[left], sigma[left] = _newton(mean[left], variance[left], nearest)
    return mu, sigma, share


def _widest(slope: Float64s) -> tuple[Float64s, Float64s]:
    """Parents of densities that fall (slope > 0) or rise nearly exponentially: the widest there are."""
    steepness = np.abs(slope)
    sigma = np.minimum(_WIDEST, _MAX_ALPHA / np.maximum(steepness, 1e-12))
    mu = -steepness * sigma**2
    return np.where(slope >= 0, mu, 1 - mu), sigma


def _widest_of_ratio(mean: Float64s, variance: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """The nearly exponential density whose second moment over its first is the given one's.

    With a share w of it and a point mass at 0, both moments are met: w is the quotient of the means.
    The quotient of moments rises with the mean along the family, so where w would exceed 1, the
    variance lies within what a truncated normal can have.

    Returns:
        Parents' means, sigmas, and the means after truncation.
    """
    wanted = (variance + mean**2) / np.maximum(mean, 1e-300)
    low, high = np.full_like(mean, -20.0), np.full_like(mean, 20.0)
    for _ in range(60):  # in arcsinh of the slope: from 1e-8 to 1e8 in both directions
        middle = (low + high) / 2
        first, second = _moments(*_widest(np.sinh(middle)))
        above = second > wanted * first
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    mu, sigma = _widest(np.sinh(high))
    return mu, sigma, _moments(mu, sigma)[0]


def _newton(mean: Float64s, variance: Float64s, widest: Float64s) -> tuple[Float64s, Float64s]:
    """Parents of truncated normals with these moments.

    Damped Newton from the moments themselves; the unknowns are the distance from mu to the nearer end,
    in sigmas, and the logarithm of sigma. Right beside ``widest`` (mu and sigma) the equations are too
    stiff for it: what is nearer of the two is used.
    """
    flipped = mean > 0.5
    mean = np.where(flipped, 1 - mean, mean)
    wanted = np.log(np.stack([mean, variance]))

    def residual(unknown: Float64s) -> Float64s:
        sigma = np.exp(unknown[1])
        first, second = _moments(-unknown[0] * sigma, sigma)
        spread = np.maximum(second - first**2, 1e-300)
        off: Float64s = np.log(np.stack([np.maximum(first, 1e-300), spread])) - wanted
        return off

    deviation = np.sqrt(variance)
    unknown = np.stack([-mean / deviation, np.log(deviation)])
    off, open_ = residual(unknown), np.ones(len(mean), dtype=np.bool_)
    for _ in range(30):
        move = np.where(open_, _newton_move(residual, unknown, off), 0.0)
        better = ~open_
        for _ in range(8):  # halved where it does not bring the moments closer
            candidate = np.clip(unknown - move, [[-50.0], [-25.0]], [[20.0], [4.0]])
            new = residual(candidate)
            good = ~better & (_worst(new) < _worst(off))
            unknown, off = np.where(good, candidate, unknown), np.where(good, new, off)
            better |= good
            if better.all():
                break
            move = move / 2
        open_ &= better & (_worst(off) > 1e-10)
        if not open_.any():
            break
    wide_mu = np.where(flipped, 1 - widest[0], widest[0])
    edge = np.stack([-wide_mu / widest[1], np.log(widest[1])])
    unknown = np.where(_worst(residual(edge)) < _worst(off), edge, unknown)
    sigma = np.exp(unknown[1])
    mu = -unknown[0] * sigma
    return np.where(flipped, 1 - mu, mu), sigma


def _worst(residual: Float64s) -> Float64s:
    worst: Float64s = np.abs(residual).max(axis=0)
    return worst


def _newton_move(
    residual: Callable[[Float64s], Float64s], unknown: Float64s, off: Float64s
) -> Float64s:
    """Two equations in two unknowns, solved by Cramer's rule; derivatives by differences."""
    nudge = 1e-6
    a, c = (residual(unknown + np.array([[nudge], [0.0]])) - off) / nudge
    b, d = (residual(unknown + np.array([[0.0], [nudge]])) - off) / nudge
    determinant = a * d - b * c
    determinant = np.where(np.abs(determinant) < 1e-12, 1e-12, determinant)
    move = np.stack([d * off[0] - b * off[1], a * off[1] - c * off[0]]) / determinant
    return np.clip(move, -1.0, 1.0)


def _moments(mu: Float64s, sigma: Float64s) -> tuple[Float64s, Float64s]:
    """First and second moment of normals truncated to [0, 1]."""
    _, first, second = _truncated(np.ones_like(mu), mu, sigma)
    return first, second
