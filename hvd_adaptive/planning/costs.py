"""What a byte costs: seconds per byte of each bucket, and of a single collective.

* :func:`fit_bucket_costs`: from an experiment with random plans (:func:`random_plans`).
* :func:`random_prices`: such plans by their prices, so that an allocator keeps their error.
* :class:`OnlineCosts`: the same during training, with forgetting.
* :class:`BandwidthMonitor`: latency and bandwidth of single collectives, now.

All are free of scales: bytes and seconds may have any unit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.arrays import Float64s, Int64s

__all__ = [
    "BandwidthMonitor",
    "BucketCosts",
    "OnlineCosts",
    "Rate",
    "fit_bucket_costs",
    "nonnegative_least_squares",
    "random_plans",
    "random_prices",
]


# --- buckets --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BucketCosts:
    """``seconds = intercept + coefficients @ bytes``.

    Args:
        intercept: seconds.
        coefficients: ``float64[B]``: seconds per byte of each bucket.
        r2: share of the variance of the seconds that this explains.
        errors: ``float64[B]``: standard errors of the coefficients, of independent noise in each step
            and without the bound at 0; infinite where the bytes do not determine a coefficient.
        even: seconds per byte if all buckets had the same.
    """

    intercept: float
    coefficients: Float64s
    r2: float
    errors: Float64s
    even: float

    def prices(self) -> Float64s:
        """Seconds per byte of each bucket, as far as buckets are known to differ: ``float64[B]``.

        A coefficient counts by its difference from ``even``, of which the share is taken that is no
        noise: one minus the squared ratio of its standard error to it, at least 0 (James and Stein's
        positive part, one coefficient at a time). No price is below a tenth of ``even``: bytes that
        take no time now would if there were many more of them.

        Example:
            >>> costs = BucketCosts(0, np.array([1.0, 3.0, 3.0, 0.0]), 1, np.array([0, 0.5, 9, 0]), 2.0)
            >>> costs.prices().tolist()
            [1.0, 2.75, 2.0, 0.2]
        """
        difference = self.coefficients - self.even
        with np.errstate(divide="ignore", invalid="ignore"):
            known = 1.0 - (self.errors / difference) ** 2
        shrunk = np.where(known > 0, known, 0.0) * difference
        prices: Float64s = np.maximum(self.even + shrunk, _LEAST_PRICE * self.even)
        return prices


_LEAST_PRICE = 0.1
"""Of the price that all buckets would have together."""


def fit_bucket_costs(nbytes: npt.ArrayLike, seconds: npt.ArrayLike) -> BucketCosts:
    """Fit by non-negative least squares.

    Cost: O(M * B**2). Source: L-GreCo, section 4, "Time optimization", and section 5.5.

    Args:
        nbytes: ``[M, B]``: bytes of each bucket in each of M steps.
        seconds: ``[M]``: from the start of the first bucket to the end of the last.

    Raises:
        ValueError: shapes that do not fit, no rows, or a number that is negative or not finite.

    Example:
        >>> costs = fit_bucket_costs([[1, 0], [0, 1], [1, 1], [2, 1]], [3, 5, 6, 7])
        >>> round(costs.intercept, 6), costs.coefficients.round(6).tolist(), round(costs.r2, 6)
        (2.0, [1.0, 3.0], 1.0)
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1] or not len(x):
        raise ValueError(f"bytes must be [M, B], seconds [M], M at least 1: got {x.shape}, {y.shape}")
    _check_numbers(x, y)
    rows = np.column_stack([np.ones(len(x)), x])
    gram, moment = rows.T @ rows, rows.T @ y
    solution = nonnegative_least_squares(gram, moment)
    residual = y - rows @ solution
    unexplained, variance = float(residual @ residual), float(((y - y.mean()) ** 2).sum())
    return _costs(gram, solution, unexplained, variance, _even(gram, moment))


def _check_numbers(*arrays: Float64s) -> None:
    if not all(np.isfinite(each).all() and (each >= 0).all() for each in arrays):
        raise ValueError("bytes or seconds are negative or not finite")


def _costs(
    gram: Float64s, solution: Float64s, unexplained: float, variance: float, even: float
) -> BucketCosts:
    r2 = 1.0 - unexplained / variance if variance > 0 else float(unexplained <= 0)
    errors = _standard_errors(gram, unexplained)
    return BucketCosts(float(solution[0]), solution[1:], r2, errors, even)


def _even(gram: Float64s, moment: Float64s) -> float:
    """The coefficient that all buckets have if they have the same."""
    together = np.zeros((2, len(gram)))
    together[0, 0], together[1, 1:] = 1.0, 1.0
    return float(nonnegative_least_squares(together @ gram @ together.T, together @ moment)[1])


_DETERMINED = 1e-9
"""Share of a bucket's squared bytes that nothing else explains, if they determine its coefficient."""


def _standard_errors(gram: Float64s, unexplained: float) -> Float64s:
    """Standard errors of all coefficients but the intercept, which is the first.

    Args:
        gram: ``float64[1 + B, 1 + B]``: sums of products of 1 and the bytes, over the steps.
        unexplained: sum of the squared residuals.
    """
    count = len(gram)
    errors = np.full(count - 1, math.inf)
    free = gram[0, 0] - count  # steps, less what was fitted
    lengths = np.sqrt(np.diag(gram))
    lengths[lengths == 0] = 1.0
    scaled = gram / np.outer(lengths, lengths)
    for bucket in range(1, count):
        others = np.arange(count) != bucket
        row = scaled[bucket, others]
        left = scaled[bucket, bucket] - row @ np.linalg.lstsq(scaled[others][:, others], row)[0]
        if free > 0 and left > _DETERMINED * scaled[bucket, bucket]:
            errors[bucket - 1] = math.sqrt(unexplained / free / left) / lengths[bucket]
    return errors


def nonnegative_least_squares(gram: Float64s, moment: Float64s) -> Float64s:
    """The ``x >= 0`` of least ``|A x - b|``, from ``A^T A`` and ``A^T b``.

    The active-set method of Lawson and Hanson ("Solving Least Squares Problems", 1974, chapter 23), on
    columns scaled to length 1. Where several x are equally good it returns one of them.

    Args:
        gram: ``float64[n, n]``.
        moment: ``float64[n]``.

    Example:
        >>> nonnegative_least_squares(np.eye(2), np.array([3.0, -1.0])).tolist()
        [3.0, 0.0]
    """
    lengths = np.sqrt(np.diag(gram))
    lengths[lengths == 0] = 1.0
    g, m = gram / np.outer(lengths, lengths), moment / lengths
    count = len(m)
    x, passive = np.zeros(count), np.zeros(count, dtype=np.bool_)
    tolerance = 1e-12 * float(np.abs(m).max(initial=0.0))
    for _ in range(10 * count):  # a bound against rounding: each round lowers the residual
        ascent = np.where(passive, -np.inf, m - g @ x)
        if passive.all() or ascent.max() <= tolerance:
            break
        passive[ascent.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(g[np.ix_(passive, passive)], m[passive], rcond=None)[0]
            falling = passive & (trial <= 0)
            if not falling.any():
                break
            # as far as the first coefficient that reaches 0, which leaves
            ratios = x[falling] / np.maximum(x[falling] - trial[falling], np.finfo(np.float64).tiny)
            x += ratios.min() * (trial - x)
            passive &= ~(falling & (x <= 1e-15 * np.abs(x).max(initial=0.0)))
            x[~passive] = 0.0
        x = trial
    return np.asarray(x / lengths)


def random_plans(
    counts: Sequence[int], buckets: Sequence[int], seed: int = 0, start: int = 0
) -> Iterator[Int64s]:
    """Choices that vary every bucket by itself: what :func:`fit_bucket_costs` needs to see.

    All layers of a bucket take the candidate at the same share of their rows, drawn uniformly.

    Args:
        counts: candidates of each layer.
        buckets: bucket of each layer, from 0.
        seed: of the sequence.
        start: number of the first plan; plan ``n`` is the same wherever one starts.

    Example:
        >>> plans = random_plans([100, 100, 1], [0, 0, 1])
        >>> [next(plans).tolist() for _ in range(2)]
        [[63, 63, 0], [88, 88, 0]]
    """
    last, owner = np.asarray(counts) - 1, np.asarray(buckets, dtype=np.int64)
    number = start
    while True:
        share = np.random.default_rng([seed, number]).random(int(owner.max(initial=-1)) + 1)
        yield np.minimum((share[owner] * (last + 1)).astype(np.int64), last)
        number += 1


_SPREAD = 8.0
"""A bucket's price is between this and its inverse in trials."""


def random_prices(buckets: int, number: int, seed: int = 0) -> tuple[Float64s, float]:
    """Prices of a byte in each bucket, and a share of the allowed error, that vary plans.

    Trials come in pairs whose prices are inverses of each other: what one moves out of a bucket, the
    other moves into it. The share of the error, a quarter to all, makes all bytes rise and fall.

    Args:
        buckets: how many there are.
        number: of the trial.
        seed: of the sequence.

    Returns:
        ``float64[B]``, each from 1/8 to 8, and the share.

    Example:
        >>> [random_prices(3, number)[0].round(2).tolist() for number in range(2)]
        [[1.77, 0.38, 0.15], [0.57, 2.6, 6.75]]
    """
    rng = np.random.default_rng([seed, number // 2])
    exponents = rng.uniform(-1, 1, buckets) * (-1 if number % 2 else 1)
    shares = 4.0 ** -rng.uniform(0, 1, 2)
    return _SPREAD**exponents, float(shares[number % 2])


TOGETHER = 5
"""Steps of one plan of which the one of median seconds counts."""


class OnlineCosts:
    """Bucket costs during training: the weight of a step halves after ``half_life`` further ones.

    Of every five steps the one of median seconds counts for all: a step now and then takes several
    times as long as others, and least squares would follow it.

    Plans vary the buckets less than an experiment does. Where their variation does not separate two
    buckets, the cost is shared evenly: a weak pull towards one coefficient for all buckets.

    Args:
        half_life: in steps.
        ridge: strength of the pull, as a share of each bucket's sum of squared bytes.
        together: steps that count as one.

    Example:
        >>> costs = OnlineCosts(together=1)
        >>> for nbytes, seconds in [((1, 0), 3), ((0, 1), 5), ((1, 1), 6), ((2, 1), 7)]:
        ...     costs.observe(np.array(nbytes), seconds)
        >>> costs.fit().coefficients.round(1).tolist()
        [1.0, 3.0]
    """

    def __init__(self, half_life: float = 500.0, ridge: float = 1e-3, together: int = TOGETHER) -> None:
        self._keep = 0.5 ** (together / half_life)
        self._ridge, self._together = ridge, together
        self._moments = np.zeros((0, 0))
        """Sums of products of (1, bytes of each bucket, seconds)."""
        self._waiting: list[list[float]] = []
        """Bytes and seconds of steps that are too few to count yet."""

    def observe(self, nbytes: npt.ArrayLike, seconds: float) -> None:
        """Add a step: ``[B]`` bytes and its seconds. Other buckets than before start afresh."""
        row = np.array([*np.asarray(nbytes, dtype=np.float64), seconds])
        _check_numbers(row)
        if self._waiting and len(self._waiting[0]) != len(row):
            self._waiting.clear()
        self._waiting.append(row.tolist())
        if len(self._waiting) == self._together:
            self.settle()

    def settle(self) -> None:
        """Let steps count that do not yet: steps of another plan do not count together with them."""
        if not self._waiting:
            return
        steps = sorted(self._waiting, key=lambda row: row[-1])
        self._waiting.clear()
        row = np.array([1.0, *steps[(len(steps) - 1) // 2]])
        if self._moments.shape != (len(row), len(row)):
            self._moments = np.zeros((len(row), len(row)))
        weight = len(steps) / self._together
        self._moments = self._keep * self._moments + weight * np.outer(row, row)

    def fit(self) -> BucketCosts | None:
        """The costs now; None before ``2 * together`` steps. Cost: O(B**4)."""
        if not len(self._moments) or self._moments[0, 0] <= 1.0:
            return None
        gram, moment = self._moments[:-1, :-1], self._moments[:-1, -1]
        even = _even(gram, moment)
        pull = self._ridge * np.diag(gram)
        pull[0] = 0.0
        solution = nonnegative_least_squares(gram + np.diag(pull), moment + pull * even)
        squares, weight = self._moments[-1, -1], self._moments[0, 0]
        unexplained = squares - 2 * solution @ moment + solution @ gram @ solution
        variance = squares - self._moments[0, -1] ** 2 / weight
        # faded steps count for less than they are: so these errors are rather too large
        return _costs(gram, solution, max(0.0, float(unexplained)), max(0.0, float(variance)), even)

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"moments": self._moments.tolist(), "waiting": self._waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        moments = np.array(state["moments"], dtype=np.float64)
        self._moments = moments.reshape(len(moments), len(moments))
        self._waiting = [[float(each) for each in row] for row in state["waiting"]]


# --- collectives ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rate:
    """``seconds = latency + seconds_per_byte * bytes`` of one collective.

    Args:
        latency: seconds.
        seconds_per_byte: of this rank's payload.
        error: standard error of ``seconds_per_byte``; infinite where the samples do not determine it.
        samples: on which this rests.
    """

    latency: float
    seconds_per_byte: float
    error: float
    samples: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return 1 / self.seconds_per_byte

    @property
    def bandwidth_error(self) -> float:
        """Standard error of :attr:`bandwidth`."""
        return self.error / self.seconds_per_byte**2


class BandwidthMonitor:
    """Latency and bandwidth of single collectives, as they are now.

    The bandwidth may change at any time: a sample's weight in it halves with every ``half_life``
    further samples, so a change is followed within two and a half half-lives. The latency hardly
    changes: it is the median of what all pairs of neighboring samples of different sizes say, of a
    window that is much longer. While all have one size it stays what it was, which is 0 at first.
    Neither is moved by samples that were delayed by something else: the bandwidth is a weighted median,
    refined by one weighted least squares fit around it (Tukey's biweight).

    Cost: O(1) per sample; O(window**2) numpy operations per estimate (some milliseconds).

    Args:
        half_life: in samples.
        window: samples that are kept.

    Example:
        >>> monitor = BandwidthMonitor()
        >>> for nbytes in (1e3, 1e6, 2e6, 1e3):
        ...     monitor.observe(nbytes, 0.001 + nbytes / 1e8)
        >>> rate = monitor.estimate()
        >>> round(rate.bandwidth), round(rate.latency, 6)
        (100000000, 0.001)
    """

    def __init__(self, half_life: float = 8.0, window: int = 300) -> None:
        self._half_life = half_life
        self._samples: deque[tuple[float, float]] = deque(maxlen=window)
        self._latency = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        """Add a collective; ValueError unless both are positive and finite."""
        if not (0 < nbytes < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"a transfer of {nbytes} bytes in {seconds} s: both must be positive")
        self._samples.append((float(nbytes), float(seconds)))

    @property
    def ready(self) -> bool:
        """Whether there are two samples."""
        return len(self._samples) >= 2

    def last_bytes(self, count: int) -> float:
        """Bytes of the last ``count`` samples."""
        return sum(nbytes for nbytes, _ in list(self._samples)[max(0, len(self._samples) - count) :])

    def estimate(self) -> Rate:
        """The rate now.

        Raises:
            ValueError: fewer than two samples.
        """
        if not self.ready:
            raise ValueError(f"an estimate needs two transfers, and there are {len(self._samples)}")
        nbytes, seconds = np.array(self._samples).T
        latency, _ = robust_line(nbytes, seconds)
        if not math.isnan(latency):
            self._latency = max(0.0, latency)
        weights = 0.5 ** (np.arange(len(nbytes))[::-1] / self._half_life)
        # a sample that took less than the latency still took some time for its bytes
        rest = np.maximum(seconds - self._latency, _LEAST * seconds)
        # the errors of times are in proportion to the whole of them
        slope, error = _slope(nbytes, rest, weights * (rest / seconds) ** 2)
        return Rate(self._latency, slope, error if len(nbytes) > 2 else math.inf, len(nbytes))

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"latency": self._latency, "samples": [list(sample) for sample in self._samples]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._latency = float(state["latency"])
        self._samples.clear()
        self._samples.extend((float(nbytes), float(seconds)) for nbytes, seconds in state["samples"])


_LEAST = 0.1
"""Share of a transfer's seconds that its bytes take at least."""
_REACH = 4
"""Samples up to so far apart are compared: the bandwidth is then much the same."""
_APART = 1.25
"""Sizes count as different if their ratio is at least this."""


def robust_line(x: Float64s, y: Float64s) -> tuple[float, float]:
    """Intercept and slope of ``y``, a series in time whose slope and intercept may drift.

    Weighted medians of the lines through neighbors whose ``x`` differ; the weights are inverse errors
    where those of ``y`` are in proportion to it. Source: Theil and Sen's estimator, of neighbors.

    Args:
        x: ``float64[N]``, none below 0.
        y: ``float64[N]``.

    Returns:
        NaN where no neighbors differ by more than a quarter.

    Example:
        >>> x = np.array([1.0, 2.0, 4.0, 8.0])
        >>> robust_line(x, 3 + 0.5 * x)
        (3.0, 0.5)
        >>> robust_line(np.ones(4), np.ones(4))
        (nan, nan)
        >>> robust_line(x, np.zeros(4))
        (0.0, 0.0)
    """
    i, j = np.triu_indices(len(x), 1)
    near = (j - i <= _REACH) & (np.maximum(x[i], x[j]) > _APART * np.minimum(x[i], x[j]))
    i, j = i[near], j[near]
    if not len(i):
        return math.nan, math.nan
    run, rise = x[j] - x[i], y[j] - y[i]
    slopes = rise / run
    # nothing is without error, not even two zeros
    noise = np.maximum(np.abs(y), 1e-9 * np.abs(y).max() or 1.0)
    errors = np.hypot(noise[i], noise[j]) / np.abs(run)
    misses = np.hypot(noise[i] * x[j], noise[j] * x[i]) / np.abs(run)
    intercepts = y[i] - slopes * x[i]
    return _weighted_median(intercepts, 1 / misses), _weighted_median(slopes, 1 / errors)


def _slope(x: Float64s, y: Float64s, weights: Float64s) -> tuple[float, float]:
    """Slope of a line through the origin, and its standard error: infinite where it is not known."""
    slope = _weighted_median(y / x, weights)
    residuals = y / (slope * x) - 1
    scale = max(1.4826 * _weighted_median(np.abs(residuals), weights), 1e-9)
    u = np.clip(np.abs(residuals) / (7.0 * scale), 0, 1)
    w = weights * (1 - u**2) ** 2
    change = float(w @ residuals / w.sum())
    # the weights count samples and are no precisions: hence the sandwich, with leverages (HC3)
    leverage = w / w.sum()
    if change <= -1 or leverage.max() > 1 - 1e-9:
        return slope, math.inf
    scores = leverage * (residuals - change) / (1 - leverage)
    return slope * (1 + change), slope * float(np.sqrt(scores @ scores))


def _weighted_median(numbers: Float64s, weights: Float64s) -> float:
    order = np.argsort(numbers)
    reached = np.cumsum(weights[order])
    return float(numbers[order[np.searchsorted(reached, reached[-1] / 2)]])
