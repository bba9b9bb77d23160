"""Memory: what is fetched ahead of its use, and the buffers that each thread keeps."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from hvd_adaptive.kernels.floats import BINS
from hvd_adaptive.wire.sparse import CODE_BLOCK

TILE = 8192
"""Elements that are summed at once: 32 KiB."""
AHEAD = 24
"""So many values ahead of time, a value's place in the output is fetched; so many groups, a group's."""
LINE = 64
"""Bytes of a cache line."""
STREAMED = 1 << 20
"""Bytes from which on a sum is written past the cache, which could not hold it until it is read."""
KEPT = 1 << 22
"""Values that a thread keeps room for, 32 MiB to compress and as much to decompress; of more, the room
is given back after each call."""


class Room:
    """Of indices and values of up to so many elements, and a byte for each block of them.

    Room for the most that was ever sent would grow for long while plans vary, as if it leaked.
    """

    def __init__(self) -> None:
        self._kept = self._make(1 << 12)

    @staticmethod
    def _make(count: int) -> tuple[npt.NDArray[np.generic], ...]:
        heads = np.empty(count // CODE_BLOCK + 1, np.uint8)
        return np.empty(count, np.int32), np.empty(count, np.float32), heads

    def of(self, count: int) -> tuple[npt.NDArray[np.generic], ...]:
        if count > KEPT:
            return self._make(count)
        if count > len(self._kept[0]):
            self._kept = self._make(min(KEPT, count + count // 4))
        return self._kept


class ThreadBuffers(threading.local):
    """Buffers of one thread; the histogram is always zero."""

    def __init__(self) -> None:
        self.hist = np.zeros(BINS, np.int32)
        self.block = np.empty(TILE, np.float32)
        self._candidates, self._decoded = Room(), Room()

    def arrays(self, candidates: int) -> tuple[npt.NDArray[np.generic], ...]:
        """For compressing: bins, candidates, and what blocks of positions begin with."""
        return (self.hist, *self._candidates.of(candidates))

    def decoded(self, count: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """For decompressing: indices and values."""
        indices, values, _ = self._decoded.of(count)
        return indices, values


thread_buffers = ThreadBuffers()
