"""Which elements a sparse compressor sends: the rules, their thresholds, and the error that they leave.

What all backends share; they do the work on elements.
"""

from __future__ import annotations

import bisect
import enum
import math
import operator
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hvd_adaptive.kernels.floats import BINS, INF

SMALL = 1 << 16
"""Elements up to which DGC's sample is the layer itself."""
LARGE = 1 << 21
"""Elements from which on the sample is thinner."""
SAMPLE = 16
"""Elements that stand together in a sample: a cache line. What is large often stands together, too, so
that more at once would tell less."""
STRIDES = (13, 61)
"""One group of so many is in the sample, below and from :data:`LARGE` on; odd, because weights have
periods of powers of two."""


class SelectionRule(enum.IntEnum):
    """How a layer's elements are selected: always the largest; what differs is how many of them.

    * ``topk``: exactly ``k``.
    * ``threshold``: all that reach a threshold, but at most ``k``. (Sahu et al., "Rethinking gradient
      sparsification as total error minimization", NeurIPS 2021, section 4.)
    * ``dgc``: all that reach a threshold that was estimated from a sample; of more than ``k`` exactly
      ``k``, selected among them, and where fewer than 0.7 ``k`` reach it exactly ``k`` as well. (Lin et
      al., "Deep Gradient Compression", ICLR 2018, section 5.)
    * ``redsync``: all that reach a threshold of 8 significant bits that bisection between the mean and
      the largest magnitude finds; between ``k`` and 2 ``k``. (Fang et al., "RedSync", JPDC 2019,
      section 5.)

    Zeros are never sent, and ties go to the lowest index where a rule sends exactly ``k``.
    """

    topk = 0
    threshold = 1
    dgc = 2
    redsync = 3

    def most(self, count: int) -> int:
        """The most elements that are sent where ``count`` were asked for.

        Example:
            >>> [rule.most(100) for rule in SelectionRule]
            [100, 100, 100, 200]
        """
        return 2 * count if self is SelectionRule.redsync else count


def dgc_floor(sampled: npt.NDArray[np.int64], numel: int, k: int) -> int:
    """The bits of a magnitude that DGC guesses somewhat more than ``k`` elements to reach.

    Inside the bin of the sample's k-th largest, bits are taken to be spread evenly. The sample is asked
    for more by two deviations of what it holds of the largest, so that fewer than ``k`` are seldom, and
    by so much more where it holds few that fewer than 0.7 ``k`` are unlikely.

    Args:
        sampled: ``int64[32768]``: how many of the sample (:func:`sample_spectrum`) are in a bin or in
            a higher one.
        numel: elements of the layer, at least one.
        k: elements to send.
    """
    expected = k * int(sampled[0]) / numel
    deviation = math.sqrt(expected)
    wanted = int(max(expected + 2 * deviation, 0.7 * expected + 4 * deviation + 2))
    b = bisect.bisect_right(sampled, -wanted, key=operator.neg) - 1  # the last that so many reach
    if b <= 0:
        return 1
    inside = int(sampled[b] - sampled[b + 1])  # there is a next bin: those of Inf and NaN are empty
    return (b << 16) + ((int(sampled[b]) - wanted) << 16) // inside


def dgc_count(
    sampled: npt.NDArray[np.int64], numel: int, k: int, reaching: Callable[[int], int]
) -> int:
    """How many of the largest DGC sends, where so many are not zero.

    Args:
        sampled: as for :func:`dgc_floor`; not used for small layers.
        numel: elements of the layer.
        k: elements to send.
        reaching: how many elements' magnitudes have at least the bits that it is called with.
    """
    if k == 0 or numel <= SMALL or k >= numel // 3:
        return k
    count = reaching(dgc_floor(sampled, numel, k))
    return count if 7 * k <= 10 * count < 10 * k else k


def counts_from_above(hist: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many are in a bin or in a higher one.

    Example:
        >>> counts_from_above(np.array([5, 0, 2])).tolist()
        [7, 2, 2]
    """
    return np.cumsum(hist[::-1])[::-1]


def redsync_count(k: int, mean: float, largest: float, reaching: Callable[[int], int]) -> int:
    """How many of the largest RedSync sends of a tensor that has more than ``k`` that are not zero.

    The first threshold is the mean; then the interval that is left, of 0 to the largest magnitude, is
    halved until the count is right. Thresholds are rounded down to the edge of a bin, so that a
    :func:`spectrum` says all that bisection asks; where no edge has the right count, ``k`` are sent.

    Args:
        k: elements to send at least.
        mean: of the magnitudes, as float32.
        largest: magnitude.
        reaching: how many elements are in the bin that it is called with or in a higher one.
    """
    low, high, middle = 0.0, largest, mean
    low_bin, high_bin = 0, bin_of(largest) + 1
    while high_bin - low_bin > 1:
        middle_bin = max(1, bin_of(middle))
        count = reaching(middle_bin)
        if k <= count <= 2 * k:
            return count
        if count < k:
            high, high_bin = middle, middle_bin
        else:
            low, low_bin = middle, middle_bin
        middle = low + (high - low) / 2
    return k


def bin_of(magnitude: float) -> int:
    """The bin of a magnitude, once rounded to float32.

    Example:
        >>> bin_of(1.0) == 127 << 7
        True
    """
    [bits] = struct.unpack("i", struct.pack("f", magnitude))
    return int(bits) >> 16


def _bin_energies() -> npt.NDArray[np.float64]:
    """Mean square of each bin, of magnitudes spread evenly over it; 0 for Inf and NaN."""
    finite = INF >> 16
    starts = (np.arange(finite, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    edges = np.append(starts.astype(np.float64), 2.0**128)
    low, high = edges[:-1], edges[1:]
    energies = np.zeros(BINS)
    energies[:finite] = (low * low + low * high + high * high) / 3
    energies[0] = 0  # almost always zeros; the denormals that share the bin have no energy to speak of
    return energies


BIN_ENERGIES = _bin_energies()


def errors_from_spectrum(
    hist: npt.NDArray[np.int64], energy: float, numel: int, counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Squared L2 error of top-k for many k from one histogram: within 1 % of the truth.

    The energy of a bin is its count times its mean square, scaled so that all bins together have the
    exact energy; inside the bin of the k-th largest, energy is taken to be proportional to the count.
    The rounding of values is not counted. Cost: one pass over 32,768 bins.

    Args:
        hist: ``int64[32768]`` from :func:`spectrum`.
        energy: squared L2 norm of the tensor.
        numel: its number of elements.
        counts: ``int64[C]``: how many elements would be sent, each 0 or more.

    Returns:
        ``float64[C]``; NaN throughout where the tensor was not finite.

    Raises:
        ValueError: the histogram is not one of ``numel`` elements.

    Example:
        >>> import torch
        >>> from hvd_adaptive.kernels import for_device
        >>> x = torch.tensor([4.0, 3.0, 2.0, 1.0])
        >>> hist = for_device(x.device).sparse.spectrum(x)
        >>> errors_from_spectrum(hist, 30.0, 4, np.array([0, 1, 4])).round(1).tolist()
        [30.0, 14.0, 0.0]
    """
    if hist.shape != (BINS,) or int(hist.sum()) != numel:
        raise ValueError(
            f"expected a histogram of {BINS} bins that counts {numel} elements, got shape "
            f"{hist.shape} counting {int(hist.sum())}"
        )
    counts = np.asarray(counts, dtype=np.int64)
    if hist[INF >> 16 :].any():
        return np.full(len(counts), np.nan)
    used = np.flatnonzero(hist)  # some thousands of the bins at most
    energies = hist[used] * BIN_ENERGIES[used]
    total = energies.sum()
    if total == 0.0:
        return np.zeros(len(counts))
    left = np.concatenate([[0.0], np.cumsum(energies)]) * (energy / total)
    kept = np.concatenate([[0], np.cumsum(hist[used])])
    errors: npt.NDArray[np.float64] = np.interp(numel - np.minimum(counts, numel), kept, left)
    return errors
