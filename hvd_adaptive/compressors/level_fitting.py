"""Quantization levels that follow the gradients: ALQ's free levels and AMQ's single multiplier.

A magnitude divided by its block's norm is ``r`` in [0, 1]. A table of levels ``l_0 < ... < l_S = 1``
rounds ``r`` at random to one of its two neighbors, so that the expectation is ``r``. What that costs
is known in advance if the distribution of ``r`` is (:mod:`hvd_adaptive.compressors.distributions`):
levels are moved to where the expected variance is least.

* :func:`psi` is the expected variance of a table, :func:`coordinate_descent`,
  :func:`gradient_descent` and :func:`amq` lower it.
* :class:`LearnedLevels` does so during training, as a
  :class:`~hvd_adaptive.compressors.base.Learner`.

Source: Faghri, Tabrizian, Markov, Alistarh, Roy and Ramezani-Kebrya, "Adaptive Gradient Quantization
for Data-Parallel SGD" (NeurIPS 2020), section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors.base import Learner
from hvd_adaptive.compressors.distributions import (
    Distribution,
    Norm,
    TabulatedDistribution,
    Weighting,
    block_statistics,
    merge,
    model,
)

Float32s: TypeAlias = npt.NDArray[np.float32]
Kind: TypeAlias = Literal["alq", "amq"]
Method: TypeAlias = Literal["cd", "gd"]
Start: TypeAlias = Literal["uniform", "exponential"]

MAX_BITS = 8

_SMALLEST = 2.0**-126  # normal float32: a kernel may flush what is smaller to zero


# --- the expected variance and its descent ------------------------------------------------------------


def psi(levels: npt.ArrayLike, distribution: Distribution) -> float:
    """Expected variance of rounding r at random to a table of levels.

    Between neighbors ``a < c`` the variance is ``(c - r)(r - a)``. Below the lowest level of a table
    without zero the sign is random instead: ``l_0² - r²``.

    Cost: one evaluation of ``distribution`` a level. Source: Faghri et al. (2020), equation (3).

    Args:
        levels: ``float64[S + 1]``, rising, in [0, 1]; the last is 1.
        distribution: of r.

    Raises:
        ValueError: the levels are no such table.

    Example:
        >>> from hvd_adaptive.compressors.distributions import Mixture
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
    """ALQ: each level in turn goes to its optimum between its neighbors.

    The optimum is where the cdf equals its own mean over the interval between the neighbors, which
    is the paper's ``beta(a, c) = F^-1(F(c) - integral of (r - a) / (c - a) dF)`` by parts. A level
    depends on its neighbors only, so every second level is moved at once, then the others: a
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
        >>> from hvd_adaptive.compressors.distributions import Mixture
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
    """The best place of the inner levels between their neighbors."""
    low, high = table[inner - 1], table[inner + 1]
    cdf, first, _ = distribution.partial(table)
    area = table * cdf - first
    # Where next to nothing lies between the neighbors, a level is as good as any other.
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
    """ALQ by gradient descent: all levels move at once, none farther than half way to a neighbor.

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
        >>> from hvd_adaptive.compressors.distributions import Mixture
        >>> flat = Mixture([0.5], [100.0], [1.0])
        >>> gradient_descent([0.0, 0.1, 1.0], flat).round(4).tolist()
        [0.0, 0.5, 1.0]
    """
    table, rate = _checked(levels), 1.0
    value = _psi(table, distribution)
    for _ in range(steps):
        slope = _gradient(table, distribution)
        # a little less than half, or neighbors that move towards each other would meet
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
    """From each level to the nearer neighbor, and from the lowest to 0."""
    gaps = np.diff(table)
    nearer: Float64s = np.minimum(np.append(table[0], gaps), np.append(gaps, 1.0))
    return nearer


def amq(multiplier: float, s: int, distribution: Distribution, steps: int = 60) -> float:
    """AMQ: the multiplier p of the levels p^s, ..., p, 1, moved downhill to a local minimum of psi.

    The gradient says which way. Steps double until psi rises or the slope turns, and then the
    interval that holds a minimum is halved: gradient descent with the step found by bisection, which
    needs no rate and never raises ``psi``. There may be a better minimum elsewhere.

    Cost: s + 1 points of ``distribution`` per step. Source: Faghri et al. (2020), section 3.3,
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
        >>> from hvd_adaptive.compressors.distributions import Mixture
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


# --- the learner --------------------------------------------------------------------------------------


class LearnedLevels(Learner):
    """Tables of levels for every number of bits, learned from one optimizer's gradients.

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
        updates: steps to learn at, rising; the last one's multiples follow. Empty: never. The paper has
            no step before 100; by the levels to start from, with L2 norms, AMQ adds many times a
            gradient's variance, and an MLP diverged until then (benchmarks/accuracy/three_bits.py).
        start: the levels before anything was learned; AMQ's are always exponential.
        method: ``cd``, coordinate descent, or ``gd``, gradient descent, for ``alq``; ``amq`` has one
            number to move.
        weighting: ``expected``, blocks count by their squared norm (the variance of the gradient), or
            ``normalized``, all alike (the paper's normalized variance: ALQ-N and AMQ-N).
        drop: share by which the learning rate must fall within one step, so that levels are learned
            again in the next: a schedule that falls a little with every step never does.
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
        drop: float = 0.1,
    ) -> None:
        options = {
            "kind": (kind, ("alq", "amq")),
            "norm": (norm, ("l2", "max")),
            "start": (start, ("uniform", "exponential")),
            "method": (method, ("cd", "gd")),
            "weighting": (weighting, ("expected", "normalized")),
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
        if not 0.0 < drop < 1.0:
            raise ValueError(f"levels: drop must lie in (0, 1), got {drop}: 0.1 is a fall by 10 %")
        self.drop = drop
        self.zero = zero and kind == "alq"
        self._observed: list[Float64s] = []
        first = start if kind == "alq" else "exponential"
        self._tables = {bits: _start_table(first, bits, self.zero) for bits in self.all_bits}

    @property
    def all_bits(self) -> range:
        """Bits per value that there are tables for: from 2 (with zero) or 1 up to 8."""
        return range(2 if self.zero else 1, MAX_BITS + 1)

    def table(self, bits: int) -> Float32s:
        """The magnitudes at ``bits`` bits per value, sign included.

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
        found = [
            block_statistics(x[begin:end], self.block, self.norm, self.weighting)
            for begin, end in layers
        ]
        self._observed.append(merge(np.concatenate([*found, np.empty((0, 3))])))

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
        grid = TabulatedDistribution(model(merged))
        best = self._best_free if self.kind == "alq" else _best_powers
        return {str(bits): _as_table(best(bits, grid)).tolist() for bits in self.all_bits}

    def adopt(self, learned: Any) -> None:
        """Use these tables from now on.

        Raises:
            ValueError: they are not what :meth:`fit` of an equal learner returns.
        """
        self._tables = self._read(learned)

    def _best_free(self, bits: int, grid: TabulatedDistribution) -> Float64s:
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


@functools.cache
def _start_table(start: Start, bits: int, zero: bool) -> Float32s:
    """What levels are before any were learned; nobody can write to it, so that all share it."""
    return _as_table(_start(start, bits, zero))


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


def _spread(grid: TabulatedDistribution, count: int, zero: bool) -> Float64s:
    """Levels whose density is the cube root of r's: the optimum where levels are many.

    Between levels a distance h apart the variance is h²/6 on average; minimizing the integral of
    h² dF with a given number of levels makes h the inverse cube root of the density.
    """
    share = np.append(0.0, np.cumsum(np.cbrt(grid.density) * np.diff(grid.edges)))
    levels: Float64s = np.interp(_places(count, zero) * share[-1], share, grid.edges)
    levels[-1] = 1.0
    if zero:
        levels[0] = 0.0  # where nothing is near 0, the interpolation begins later
    return levels


def _best_powers(bits: int, grid: TabulatedDistribution) -> Float64s:
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
