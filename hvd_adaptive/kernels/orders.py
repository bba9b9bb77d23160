"""Random subsets that all ranks draw alike: the beginning of a random order that a key chooses.

In large tensors elements are drawn in runs of neighbors, of which there are always 65,536 or more: a
place in memory that was not read lately costs as much as dozens of elements beside each other. Runs
begin at an offset that the key chooses, too, and go round from the end to the beginning, so that
all elements are equally likely whatever their number.

A Feistel network permutes the numbers below the next power of two; those that are not below the
number of runs are left out. Source: Luby and Rackoff, "How to Construct Pseudorandom Permutations
from Pseudorandom Functions" (SIAM J. Comput. 1988).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.rng import mix

_LEAST_RUNS, _LONGEST_RUN = 1 << 16, 64
_ROUNDS, _ROUNDS_IF_SMALL, _SMALL = 4, 16, 16
"""Four are enough for large domains (Luby and Rackoff); those of a few bits need more."""


class Order(NamedTuple):
    """The order in which a key draws: how long runs are, where the first begins, who permutes them."""

    run: int
    offset: np.uint32
    low: np.uint32
    high: np.uint32
    keys: npt.NDArray[np.uint32]


def run_length(numel: int) -> int:
    """How many neighbors are drawn together: 1 up to 131,071 elements, 64 from 4,194,304 on.

    Example:
        >>> [run_length(numel) for numel in (1000, 1 << 17, 1 << 30)]
        [1, 2, 64]
    """
    return min(_LONGEST_RUN, 1 << max(0, (numel // _LEAST_RUNS).bit_length() - 1))


def order_of(numel: int, count: int, key: int) -> Order:
    """What a key chooses, for so many elements."""
    if not 0 <= count <= numel < 1 << 31:
        raise ValueError(f"cannot draw {count} different numbers below {numel}")
    run = run_length(numel)
    bits = max(2, (-(-numel // run) - 1).bit_length())
    rounds = _ROUNDS if bits > _SMALL else _ROUNDS_IF_SMALL
    keys = np.array([mix(key ^ (r << 56)) & 0xFFFFFFFF for r in range(rounds)], np.uint32)
    offset = mix(key ^ (rounds << 56)) % max(1, numel)
    return Order(run, np.uint32(offset), np.uint32(bits // 2), np.uint32(bits - bits // 2), keys)


def check_subset(*tensors: Tensor) -> None:
    """ValueError unless what addresses are formed of is contiguous float32."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"a subset is taken of contiguous float32 tensors, got {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}, stride {tensor.stride()}: use x.float().contiguous()"
            )
