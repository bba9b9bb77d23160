"""Quantization levels that follow the gradients: ALQ's free levels and AMQ's single multiplier.

A vector is cut into blocks, and each magnitude is divided by its block's norm: ``r`` in [0, 1]. A table
of levels ``l_0 < l_1 < ... < l_S = 1`` rounds ``r`` at random to one of its two neighbours, so that the
expectation is ``r``. What that costs is known in advance if the distribution of ``r`` is; so ranks
measure two moments of ``r`` in every block, model each block by a truncated normal, and move the
levels to where the expected variance is least.

* :class:`Mixture` is the model, :class:`Table` the same thing on a grid: a hundred times faster.
* :func:`psi` is the expected variance of a table, :func:`coordinate_descent`,
  :func:`gradient_descent` and :func:`amq` lower it.
* :func:`block_statistics`, :func:`merge` and :func:`model` lead from a tensor to a mixture.
* :class:`LearnedLevels` is all of it as a :class:`~hvd_adaptive.compressors.base.Learner`.

Source: Faghri, Tabrizian, Markov, Alistarh, Roy and Ramezani-Kebrya, "Adaptive Gradient Quantization
for Data-Parallel SGD" (NeurIPS 2020), section 3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.compressors.base import Float64s, Learner

Float32s: TypeAlias = npt.NDArray[np.float32]
Kind: TypeAlias = Literal["alq", "amq"]
Norm: TypeAlias = Literal["l2", "max"]
Method: TypeAlias = Literal["cd", "gd"]
Start: TypeAlias = Literal["uniform", "exponential"]
Weighting: TypeAlias = Literal["expected", "normalised"]

COMPONENTS = 64
"""Groups of blocks that a rank's statistics are merged to: 1.5 KiB on the wire."""
MAX_BITS = 8
MAX_SIGMA = 100.0
"""A wider normal is flat on [0, 1], and differences of its tails would lose their digits."""

_POINT_SIGMA = 1e-12
_SERIES_FROM = 15.0
_SERIES_TERMS = 12
_MAX_ALPHA = 10.0  # distance from mu to 0, in sigmas: within one percent of an exponential
_WIDEST = 30.0  # sigma of a density that is flat on [0, 1] within 0.1 %
_SMALLEST = 2.0**-126  # normal float32: a kernel may flush what is smaller to zero
_GRID = 2048
_GRID_FROM = 1e-7


# --- distributions of r -------------------------------------------------------------------------------


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


class Table(Distribution):
    """A distribution on a grid: flat within each cell, with a point mass at 0 where there is one.

    Integrals over the grid are exact, so that descent on a table is as monotone as on the mixture.
    Cells grow geometrically (0.8 % of r), because r is small where the norm is that of a large block.

    Cost: one evaluation of ``distribution`` at 2,049 points; afterwards a binary search a point.

    Args:
        distribution: what to tabulate.

    Example:
        >>> table = Table(Mixture([0.0], [0.1], [1.0]))
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


# --- the expected variance and its descent ------------------------------------------------------------


def psi(levels: npt.ArrayLike, distribution: Distribution) -> float:
    """Expected variance of rounding r at random to a table of levels.

    Between neighbours ``a < c`` the variance is ``(c - r)(r - a)``. Below the lowest level of a table
    without zero the sign is random instead: ``l_0² - r²``.

    Cost: one evaluation of ``distribution`` a level. Source: Faghri et al. (2020), equation (3).

    Args:
        levels: ``float64[S + 1]``, rising, in [0, 1]; the last is 1.
        distribution: of r.

    Raises:
        ValueError: the levels are no such table.

    Example:
        >>> flat = Mixture([0.5], [100.0], [1.0])
        >>> round(psi([0.0, 1.0], flat), 6), round(psi([0.0, 0.5, 1.0], flat), 6)
        (0.166667, 0.041667)
    """
    return _psi(_checked(levels), distribution)


def _psi(table: Float64s, distribution: Distribution) -> float:
    cdf, first, second = distribution.partial(table)
    low, high = table[:-1], table[1:]
    between = (low + high) * np.diff(first) - low * high * np.diff(cdf) - np.diff(second)
    below = table[0] ** 2 * cdf[0] - second[0]
    return max(0.0, float(between.sum() + below))


def coordinate_descent(
    levels: npt.ArrayLike, distribution: Distribution, sweeps: int = 20, tolerance: float = 1e-9
) -> Float64s:
    """ALQ: each level in turn goes to its optimum between its neighbours.

    The optimum is where the cdf equals its own mean over the interval between the neighbours, which
    is the paper's ``beta(a, c) = F^-1(F(c) - integral of (r - a) / (c - a) dF)`` by parts. A level
    depends on its neighbours only, so every second level is moved at once, then the others: a
    reordering of the paper's sweep. ``psi`` never rises, and the result is a local minimum where the
    sweeps sufficed. A lowest level of 0 stays; any other is moved too: its mirror image lies beyond.

    Cost: one evaluation and one inverse of ``distribution`` a level and sweep. Source: Faghri et al.
    (2020), theorem 1 and section 3.1.

    Args:
        levels: ``float64[S + 1]``, rising, in [0, 1], the last is 1: where to start.
        distribution: of r.
        sweeps: at most so many.
        tolerance: stop when no level moved farther.

    Returns:
        ``float64[S + 1]``, not falling; levels may meet at a point mass.

    Raises:
        ValueError: the levels are no such table.

    Example:
        >>> flat = Mixture([0.5], [100.0], [1.0])
        >>> coordinate_descent([0.0, 0.1, 1.0], flat).round(4).tolist()
        [0.0, 0.5, 1.0]
        >>> coordinate_descent([0.1, 1.0], flat).round(4).tolist()  # -1, -1/3, 1/3, 1 on [-1, 1]
        [0.3333, 1.0]
    """
    table = _checked(levels)
    has_zero = table[0] == 0.0
    for _ in range(sweeps):
        before = table.copy()
        for parity in (1, 2):
            inner = np.arange(parity, len(table) - 1, 2)
            if len(inner):
                table[inner] = _beta(table, inner, distribution)
        if not has_zero and len(table) > 1:
            table[0] = _lowest(table[0], table[1], distribution)
        if np.abs(table - before).max() <= tolerance:
            break
    return table


def _beta(table: Float64s, inner: npt.NDArray[np.int64], distribution: Distribution) -> Float64s:
    """The best place of the inner levels between their neighbours."""
    low, high = table[inner - 1], table[inner + 1]
    cdf, first, _ = distribution.partial(table)
    area = table * cdf - first
    # Where next to nothing lies between the neighbours, a level is as good as any other.
    kept = (cdf[inner + 1] - cdf[inner - 1] <= 1e-14) | (high <= low)
    width = np.where(kept, 1.0, high - low)
    best = distribution.inverse((area[inner + 1] - area[inner - 1]) / width)
    return np.where(kept, table[inner], np.clip(best, low, high))


def _lowest(current: float, above: float, distribution: Distribution) -> float:
    """The best lowest level of a table without zero, below the level ``above``.

    There ``(l + above) F(l) + area(l) = area(above)``: the derivative of psi, by parts. The left side
    rises, so the root is bracketed ever closer.
    """
    low, high = 0.0, above
    target = float(distribution.area(above))
    if target <= 0.0:  # nothing lies below
        return current
    for _ in range(5):
        places = np.linspace(low, high, 65)
        cdf, first, _ = distribution.partial(places)
        past = (places + above) * cdf + places * cdf - first >= target
        index = max(1, int(np.argmax(past))) if past.any() else 64
        low, high = float(places[index - 1]), float(places[index])
    return high


def gradient_descent(
    levels: npt.ArrayLike, distribution: Distribution, steps: int = 150, tolerance: float = 1e-9
) -> Float64s:
    """ALQ by gradient descent: all levels move at once, none farther than half way to a neighbour.

    That bound keeps the levels in order without a projection. The rate doubles after a step that
    lowered ``psi`` and halves after one that did not, which is taken back: ``psi`` never rises.

    Cost: one evaluation of ``distribution`` a level and step; many more steps than
    :func:`coordinate_descent` takes sweeps. Source: Faghri et al. (2020), section 3.2.

    Args:
        levels: ``float64[S + 1]``, rising, in [0, 1], the last is 1: where to start.
        distribution: of r.
        steps: at most so many.
        tolerance: stop when no level would move farther.

    Returns:
        ``float64[S + 1]``, rising; a lowest level of 0 stays.

    Raises:
        ValueError: the levels are no such table.

    Example:
        >>> flat = Mixture([0.5], [100.0], [1.0])
        >>> gradient_descent([0.0, 0.1, 1.0], flat).round(4).tolist()
        [0.0, 0.5, 1.0]
    """
    table, rate = _checked(levels), 1.0
    value = _psi(table, distribution)
    for _ in range(steps):
        slope = _gradient(table, distribution)
        # a little less than half, or neighbours that move towards each other would meet
        reach = 0.499 * _distances(table)
        move = np.sign(slope) * np.minimum(rate * np.abs(slope), reach)
        if np.abs(move).max() <= tolerance:
            break
        candidate = _psi(table - move, distribution)
        if candidate <= value:
            table, value, rate = table - move, candidate, 2 * rate
        else:
            rate /= 2
    return table


def _gradient(table: Float64s, distribution: Distribution) -> Float64s:
    """The derivative of psi with respect to each level; 0 for the ends that stay."""
    cdf, first, _ = distribution.partial(table)
    mass, moment = np.diff(cdf), np.diff(first)
    slope = np.zeros_like(table)
    slope[1:] = moment - table[:-1] * mass
    slope[:-1] -= table[1:] * mass - moment
    slope[0] = slope[0] + 2 * table[0] * cdf[0] if table[0] > 0 else 0.0
    slope[-1] = 0.0
    return slope


def _distances(table: Float64s) -> Float64s:
    """From each level to the nearer neighbour, and from the lowest to 0."""
    gaps = np.diff(table)
    nearer: Float64s = np.minimum(np.append(table[0], gaps), np.append(gaps, 1.0))
    return nearer


def amq(multiplier: float, s: int, distribution: Distribution, steps: int = 60) -> float:
    """AMQ: the multiplier p of the levels p^s, ..., p, 1, moved downhill to a local minimum of psi.

    The gradient says which way. Steps double until psi rises or the slope turns, and then the
    interval that holds a minimum is halved: gradient descent with the step found by bisection, which
    needs no rate and never raises ``psi``. There may be a better minimum elsewhere.

    Cost: s + 1 points of ``distribution`` a step. Source: Faghri et al. (2020), section 3.3,
    equation (8).

    Args:
        multiplier: where to start, in (0, 1).
        s: the highest power; 0 has one level, 1, and nothing to move.
        distribution: of r.
        steps: of doubling and halving together.

    Returns:
        The multiplier, in [2^(-126/s), 1 - 1e-5]: the lowest level stays a normal float32.

    Raises:
        ValueError: the multiplier is not in (0, 1), or s is negative.

    Example:
        >>> flat = Mixture([0.5], [100.0], [1.0])
        >>> round(amq(0.9, 1, flat), 4)
        0.3333
    """
    if not 0.0 < multiplier < 1.0 or s < 0:
        raise ValueError(f"amq needs a multiplier in (0, 1) and s >= 0, got {multiplier} and {s}")
    if s == 0:
        return multiplier
    floor, ceiling = float(_SMALLEST ** (1 / s)), 1 - 1e-5
    best: float = min(max(multiplier, floor), ceiling)
    value, slope = _amq_psi(best, s, distribution), _amq_slope(best, s, distribution)
    direction = -math.copysign(1.0, slope)
    step, limit = 1e-3, ceiling if direction > 0 else floor
    bracketed = False
    for _ in range(steps):
        # The minimum lies between `best`, where it goes down towards `limit`, and `limit`.
        place = (best + limit) / 2 if bracketed else best + direction * step
        if (place - limit) * direction >= 0:
            place = limit
        new = _amq_psi(place, s, distribution)
        downhill = new <= value and _amq_slope(place, s, distribution) * direction <= 0
        if downhill:
            best, value, step = place, new, 2 * step
        else:
            limit, bracketed = place, True
        if best == limit:
            break
    return best


def _amq_levels(multiplier: float, s: int) -> Float64s:
    levels: Float64s = multiplier ** np.arange(s, -1, -1, dtype=np.float64)
    return levels


def _amq_psi(multiplier: float, s: int, distribution: Distribution) -> float:
    return _psi(_amq_levels(multiplier, s), distribution)


def _amq_slope(p: float, s: int, distribution: Distribution) -> float:
    """The derivative of psi with respect to the multiplier: the paper's equation (8)."""
    powers = _amq_levels(p, s)  # p^s, ..., p^0
    cdf, first, _ = distribution.partial(powers)
    j = np.arange(s - 1, -1, -1, dtype=np.float64)  # the interval from p^(j+1) to p^j
    high = powers[1:]
    linear = (j / p + j + 1) * high
    constant = (2 * j + 1) * high**2
    below = 2 * s * powers[0] ** 2 / p * cdf[0]
    return float(below + (linear * np.diff(first) - constant * np.diff(cdf)).sum())


def _checked(levels: npt.ArrayLike) -> Float64s:
    """A float64 copy of a table of levels; ValueError unless it is one."""
    table = np.array(levels, dtype=np.float64)
    if (
        table.ndim != 1
        or len(table) == 0
        or not (np.diff(table) > 0).all()
        or not table[0] >= 0.0
        or table[-1] != 1.0
    ):
        raise ValueError(
            f"levels must rise within [0, 1] up to 1, got {np.array2string(table, threshold=8)}"
        )
    return table


# --- from a tensor to a mixture -----------------------------------------------------------------------


def block_statistics(x: Tensor, block: int, norm: Norm) -> Float64s:
    """Mean and variance of r in each block of a layer, and the block's weight.

    Blocks of zeros are left out, because they are sent exactly; so are those with a NaN or an Inf.

    Cost: five passes and two copies of ``x``. Source: Faghri et al. (2020), section 3.4.

    Args:
        x: float32, 1-D.
        block: elements of a block; the last of a layer may be shorter.
        norm: ``l2``, or ``max`` for the largest magnitude.

    Returns:
        ``float64[B, 3]``: mean of r, variance of r, squared norm. A short block's squared norm is
        scaled by its share of a whole block's elements: the variance is a sum over elements.

    Raises:
        ValueError: the block is not positive, or the norm is unknown.

    Example:
        >>> block_statistics(torch.tensor([3.0, -4.0, 0.0, 0.0, 2.0]), 2, "l2").round(3).tolist()
        [[0.7, 0.01, 25.0], [1.0, 0.0, 2.0]]
    """
    if block < 1 or norm not in ("l2", "max"):
        raise ValueError(f"blocks need a positive size and norm l2 or max, got {block} and {norm!r}")
    magnitudes = x.detach().abs()
    whole = magnitudes.numel() // block * block
    parts = [magnitudes[:whole].view(-1, block), magnitudes[whole:].view(1, -1)]
    return np.concatenate([_statistics_of_rows(part, block, norm) for part in parts])


def _statistics_of_rows(rows: Tensor, block: int, norm: Norm) -> Float64s:
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
    weight = (unit * largest.double()).square() * (count / block)
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


# --- the learner --------------------------------------------------------------------------------------


class LearnedLevels(Learner):
    """Tables of levels for every number of bits, learnt from one optimizer's gradients.

    One mixture serves all numbers of bits. Descent starts from uniform levels, from exponential ones
    and from levels spread as the cube root of the density (the optimum for many levels), and the best
    end is kept: no table is worse than QSGD's or NUQSGD's under the mixture.

    Cost: :meth:`observe` passes over the tensor a few times, at the steps that are :meth:`due` only;
    :meth:`statistics` is at most 64 triples; :meth:`fit` takes some 0.3 s. Source: Faghri et al.
    (2020), algorithm 1.

    Args:
        kind: ``alq``, levels that move one by one, or ``amq``, powers of one multiplier.
        block: elements that share a norm.
        norm: ``l2`` or ``max``. With ``l2`` nearly all r are far below 1, the level that is 1 is
            never used, and levels are missing where r is.
        updates: steps to learn at, rising; the last one's multiples follow. Empty: never.
        start: the levels before anything was learnt; AMQ's are always exponential.
        method: coordinate descent or gradient descent, for ``alq``.
        weighting: blocks count by their squared norm (the variance of the gradient), or all alike
            (the paper's normalised variance).
        zero: whether ``alq`` keeps a level at 0. Without it, a sign bit is not wasted on 0, the
            lowest level is free too, and ``psi`` is lower at equal fixed width; zeros are noise
            then, and an entropy code gains less. ``amq`` never has it.

    Raises:
        ValueError: an option is none of these.

    Example:
        >>> learned = LearnedLevels("alq", block=1000, norm="max")
        >>> learned.table(3).tolist()
        [0.0, 0.25, 0.5, 1.0]
        >>> learned.collecting = True
        >>> learned.observe(torch.linspace(-1, 1, 1000), np.array([0, 1000]))
        >>> learned.adopt(learned.fit([learned.statistics()]))
        >>> learned.table(3).round(2).tolist()
        [0.0, 0.33000001311302185, 0.6700000166893005, 1.0]
    """

    def __init__(
        self,
        kind: Kind,
        block: int,
        norm: Norm,
        updates: tuple[int, ...] = (100, 2000, 10_000),
        start: Start = "exponential",
        method: Method = "cd",
        weighting: Weighting = "expected",
        zero: bool = True,
    ) -> None:
        options = {
            "kind": (kind, ("alq", "amq")),
            "norm": (norm, ("l2", "max")),
            "start": (start, ("uniform", "exponential")),
            "method": (method, ("cd", "gd")),
            "weighting": (weighting, ("expected", "normalised")),
        }
        for option, (value, known) in options.items():
            if value not in known:
                raise ValueError(f"levels: {option}={value!r} is not one of {', '.join(known)}")
        if block < 1:
            raise ValueError(f"levels: a block has at least one element, got {block}")
        if list(updates) != sorted(set(updates)) or (updates and updates[0] < 1):
            raise ValueError(f"levels: updates must be rising steps from 1 on, got {updates}")
        self.kind, self.block, self.norm = kind, block, norm
        self.updates, self.start, self.method, self.weighting = updates, start, method, weighting
        self.zero = zero and kind == "alq"
        self._observed: list[Float64s] = []
        first = start if kind == "alq" else "exponential"
        self._tables = {bits: _as_table(_start(first, bits, self.zero)) for bits in self.all_bits}

    @property
    def all_bits(self) -> range:
        """Bits a value that there are tables for: from 2 (with zero) or 1 up to 8."""
        return range(2 if self.zero else 1, MAX_BITS + 1)

    def table(self, bits: int) -> Float32s:
        """The magnitudes at ``bits`` bits a value, sign included.

        Args:
            bits: 2 to 8, or 1 to 8 for tables without zero.

        Returns:
            ``float32[2^(bits - 1)]``, read-only, strictly rising, the last exactly 1.

        Raises:
            ValueError: there is no such table.
        """
        if bits not in self._tables:
            raise ValueError(
                f"{self.kind}: {bits} bits are not possible: use {self.all_bits[0]} to {MAX_BITS}"
            )
        return self._tables[bits]

    # --- learning -------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """At the listed steps, and at every multiple of the last."""
        if not self.updates or step < 1:
            return False
        return step in self.updates or step % self.updates[-1] == 0

    def observe(self, x: Tensor, offsets: npt.NDArray[np.int64]) -> None:
        """Take statistics of a bucket's layers, if :attr:`collecting`.

        Args:
            x: float32, 1-D; layer ``i`` is ``x[offsets[i]:offsets[i + 1]]``.
            offsets: ``int64[L + 1]``, rising.
        """
        if not self.collecting:
            return
        layers = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        found = [block_statistics(x[begin:end], self.block, self.norm) for begin, end in layers]
        statistics = np.concatenate([*found, np.empty((0, 3))])
        if self.weighting == "normalised":
            statistics[:, 2] = 1.0
        self._observed.append(merge(statistics))

    def statistics(self) -> list[list[float]]:
        """At most 64 triples of mean, variance and weight; what they were made of is forgotten."""
        merged = merge(np.concatenate([*self._observed, np.empty((0, 3))]))
        self._observed = []
        triples: list[list[float]] = merged.tolist()
        return triples

    def fit(self, everyone: Sequence[Any]) -> dict[str, list[float]]:
        """The best tables for what all ranks saw; where nobody saw anything, those in use.

        Changes nothing here, and does not depend on the order of the ranks.

        Args:
            everyone: what each rank's :meth:`statistics` returned.

        Returns:
            Levels by bits (as text, because JSON's keys are), exact float32 values.
        """
        rows = [np.asarray(one, dtype=np.float64).reshape(-1, 3) for one in everyone]
        merged = merge(np.concatenate([*rows, np.empty((0, 3))]))
        if len(merged) == 0:
            return {str(bits): table.tolist() for bits, table in self._tables.items()}
        grid = Table(model(merged))
        best = self._best_free if self.kind == "alq" else _best_powers
        return {str(bits): _as_table(best(bits, grid)).tolist() for bits in self.all_bits}

    def adopt(self, learnt: Any) -> None:
        """Use these tables from now on.

        Raises:
            ValueError: they are not what :meth:`fit` of an equal learner returns.
        """
        self._tables = self._read(learnt)

    def _best_free(self, bits: int, grid: Table) -> Float64s:
        """The best end of the descents from three starts."""
        descend = coordinate_descent if self.method == "cd" else gradient_descent
        count = 2 ** (bits - 1)
        starts = [
            _start("uniform", bits, self.zero),
            _start("exponential", bits, self.zero),
            _spread(grid, count, self.zero),
        ]
        ends = [descend(_as_table(start), grid) for start in starts]
        return min(ends, key=lambda levels: _psi(levels, grid))

    # --- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The tables in use and what they are for; a collection under way is not kept."""
        return {
            "kind": self.kind,
            "block": self.block,
            "norm": self.norm,
            "levels": {bits: torch.tensor(table.tolist()) for bits, table in self._tables.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the tables of ``state``.

        Raises:
            ValueError: it is of another kind, block or norm, or no such state at all.
        """
        for key in ("kind", "block", "norm"):
            mine = getattr(self, key)
            if state.get(key) != mine:
                raise ValueError(
                    f"levels: the checkpoint's {key} is {state.get(key)!r}, this run's is {mine!r}: "
                    f"resume with the same compression, or start without its state"
                )
        self._tables = self._read(state.get("levels"))

    def _read(self, levels: Any) -> dict[int, Float32s]:
        """Tables from a mapping of bits to levels, checked."""
        wanted = [str(bits) for bits in self.all_bits]
        if not isinstance(levels, Mapping) or sorted(map(str, levels)) != wanted:
            raise ValueError(
                f"{self.kind}: levels for {', '.join(wanted)} bits expected, got {levels!r}"
            )
        return {int(bits): self._read_table(int(bits), values) for bits, values in levels.items()}

    def _read_table(self, bits: int, values: Any) -> Float32s:
        numbers = values.tolist() if isinstance(values, Tensor) else values
        table = np.array(numbers, dtype=np.float32).reshape(-1)
        count, lowest = 2 ** (bits - 1), "0" if self.zero else "above 0"
        rising = len(table) == count and bool((np.diff(table) > 0).all())
        if not rising or table[-1] != 1.0 or table[0] < 0.0 or (table[0] == 0.0) != self.zero:
            raise ValueError(
                f"{self.kind}: the levels for {bits} bits must be {count} numbers that rise from "
                f"{lowest} to 1, got {table.tolist()}"
            )
        table.setflags(write=False)
        return table


def _start(start: Start, bits: int, zero: bool) -> Float64s:
    """Evenly spaced on [-1, 1], or halved each time, with or without a level at 0."""
    count = 2 ** (bits - 1)
    if start == "uniform":
        return _places(count, zero)
    s = count - 2 if zero else count - 1
    # 1/2, or a little more where the lowest level would be no normal float32
    powers = _amq_levels(max(0.5, _SMALLEST ** (1 / s)) if s else 0.5, s)
    return np.append(0.0, powers) if zero else powers


def _places(count: int, zero: bool) -> Float64s:
    """The magnitudes of evenly spaced levels on [-1, 1]."""
    places = np.arange(count) * 2.0 + (0.0 if zero else 1.0)
    scaled: Float64s = places / places[-1]
    return scaled


def _spread(grid: Table, count: int, zero: bool) -> Float64s:
    """Levels whose density is the cube root of r's: the optimum where levels are many.

    Between levels a distance h apart the variance is h²/6 on average; minimising the integral of
    h² dF with a given number of levels makes h the inverse cube root of the density.
    """
    share = np.append(0.0, np.cumsum(np.cbrt(grid.density) * np.diff(grid.edges)))
    levels: Float64s = np.interp(_places(count, zero) * share[-1], share, grid.edges)
    levels[-1] = 1.0
    if zero:
        levels[0] = 0.0  # where nothing is near 0, the interpolation begins later
    return levels


def _best_powers(bits: int, grid: Table) -> Float64s:
    """AMQ's levels, downhill from the best of a few multipliers."""
    s = 2 ** (bits - 1) - 1
    if s == 0:
        return np.ones(1)
    floor = _SMALLEST ** (1 / s)
    candidates = [p for p in np.linspace(0.02, 0.98, 49).tolist() if p > floor]
    start = min(candidates, key=lambda p: _amq_psi(p, s, grid))
    return _amq_levels(amq(start, s, grid), s)


def _as_table(levels: Float64s) -> Float32s:
    """As float32, strictly rising to exactly 1: levels that met are moved one float apart."""
    table = levels.astype(np.float32)
    table[-1] = 1.0
    first = 1 if table[0] == 0.0 and len(table) > 1 and levels[0] == 0.0 else 0
    for j in range(len(table) - 2, first - 1, -1):
        table[j] = min(table[j], np.nextafter(table[j + 1], np.float32(0)))
    for j in range(first, len(table) - 1):
        floor = np.nextafter(table[j - 1], np.float32(1)) if j else np.float32(0)
        table[j] = max(table[j], floor, np.float32(_SMALLEST))
    table.setflags(write=False)
    return table
