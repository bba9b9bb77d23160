"""Keys of random numbers: the same key gives the same numbers, on any machine.

Stochastic rounding and random selection draw from a counter-based generator: number ``i`` of a stream
is a hash of the stream's key and ``i``. A stream belongs to one layer in one step, so a resumed run
draws what the interrupted one would have drawn, and nothing has to be saved but the seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1

OWNER = 1 << 32
"""Added to the rank: the stream of what it compresses again for all ranks."""
SHARED = -1
"""In the place of the rank: the stream that all ranks draw from together."""


def mix(word: int) -> int:
    """Spread 64 bits: every bit of the result depends on every bit of ``word``.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014).

    Example:
        >>> hex(mix(1))
        '0x910a2dec89025cc1'
    """
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def layer_keys(seed: int, rank: int, step: int, layers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One key for each of ``layers`` (indices) in one step of one rank.

    Args:
        seed: of the run.
        rank: of the process, or :data:`SHARED` where all ranks must draw the same numbers.
        step: number of the step.
        layers: indices of the layers.

    Example:
        >>> mine, others = layer_keys(0, 0, 7, [3, 4]), layer_keys(0, 1, 7, [3, 4])
        >>> len({*mine.tolist(), *others.tolist()})
        4
    """
    base = mix(mix(mix(seed & _MASK) ^ (rank & _MASK)) ^ (step & _MASK))
    return np.array([mix(base ^ layer) for layer in layers], dtype=np.uint64)
