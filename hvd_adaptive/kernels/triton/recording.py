"""A call's launches, recorded as a CUDA graph and replayed as one, where it comes again.

To start 20 kernels from Python takes the host longer than a GPU takes to run them. A bucket is
compressed by the same launches at every step: only numbers change, among them the addresses of tensors,
and these are all in one table. So the second call with the same key is recorded, and later ones replay
it: a copy of the table to the device, the kernels, and a copy back of what the host must know.

What a recording holds on the device is kept as long as it is: intermediate results share one pool of
memory, because recordings of a stream run in turn.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton.launching import read_back, upload

Found = TypeVar("Found")
Work = Callable[[Tensor], tuple[Found, Tensor]]
"""From a table on the device to what stays there, and what the host must know."""

MOST_SEEN = 1024
"""Keys that are remembered because they came once."""
IDLE = 8
"""Calls for each recording, after which one that was not replayed goes: a bucket that has a new plan
has new recordings, and what the old ones hold is a few hundredths of its gradient."""


def run(
    key: Hashable, numbers: npt.NDArray[np.int64], device: torch.device, work: Work[Found]
) -> tuple[Found, npt.NDArray[Any]]:
    """Do some work on the current stream and wait for it.

    Args:
        key: two calls of one key start the same kernels with the same arguments, but for what
            ``numbers`` hold, and allocate the same tensors.
        numbers: the table.
        device: of all tensors.
        work: what to do; it does not wait, and holds what it needs but what ``numbers`` point to.

    Returns:
        What ``work`` returned, which holds until the next call on this stream; the latter as an array.
    """
    if device.type != "cuda":
        found, told = work(upload(numbers, device))
        return found, read_back(told)
    stream = torch.cuda.current_stream(device)
    own = (device.index, stream.cuda_stream, numbers.size, key)
    recording = _recordings.get(own)
    if recording is None:
        form = _seen.pop(own, None)
        if form is None:
            found, told = work(upload(numbers, device))
            _seen[own] = told.shape, told.dtype
            if len(_seen) > MOST_SEEN:
                _seen.popitem(last=False)
            return found, read_back(told)
        _drop_idle()
        told = torch.empty(form[0], dtype=form[1], pin_memory=True)
        recording = _recordings[own] = Recording(numbers.size, told, stream, work)
    recording.used = next(_calls)
    return recording.replay(numbers)


class Recording(Generic[Found]):
    """A graph of launches.

    Args:
        size: of the table.
        told: pinned memory for what the host must know.
        stream: on which it will be replayed.
        work: as of :func:`run`.
    """

    def __init__(self, size: int, told: Tensor, stream: torch.cuda.Stream, work: Work[Found]) -> None:
        given = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self._pinned, self._given, self._told = (given, told), given.numpy(), told.numpy()
        self._stream = stream
        self._work = work  # and with it the tensors that the graph has the addresses of
        self.used = 0
        """The number of its last replay."""
        self._done = torch.cuda.Event()
        self._graph, self._pool = torch.cuda.CUDAGraph(), _Pool.of(stream)
        aside = torch.cuda.Stream(stream.device)
        aside.wait_stream(stream)
        with torch.cuda.stream(aside), _without_collector():
            self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
            try:
                table = given.to(stream.device, non_blocking=True)
                self._found, on_device = work(table)
                told.copy_(on_device, non_blocking=True)
            finally:
                self._graph.capture_end()

    def replay(self, numbers: npt.NDArray[np.int64]) -> tuple[Found, npt.NDArray[Any]]:
        """Run the graph with another table, and wait for it."""
        self._done.synchronize()  # the last replay may have been interrupted before its end
        self._given[:] = numbers
        self._graph.replay()
        self._done.record(self._stream)
        self._done.synchronize()
        return self._found, self._told.copy()


_recordings: dict[Hashable, Recording[Any]] = {}
_seen: collections.OrderedDict[Hashable, tuple[torch.Size, torch.dtype]] = collections.OrderedDict()
"""The form of what the host was told."""
_calls = itertools.count()
"""Replays, by number."""


def _drop_idle() -> None:
    """Recordings that are no longer replayed."""
    oldest = next(_calls) - IDLE * len(_recordings)
    for key in [key for key, each in _recordings.items() if each.used < oldest]:
        del _recordings[key]


class _Pool:
    """The memory of all recordings of a stream; torch gives it up with the last of them."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    @classmethod
    def of(cls, stream: torch.cuda.Stream) -> _Pool:
        """That of a stream, or a new one."""
        key = stream.device, stream.cuda_stream
        pool = _pools.get(key) or cls()
        _pools[key] = pool
        return pool


_pools: weakref.WeakValueDictionary[tuple[torch.device, int], _Pool] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """What is freed while a graph is recorded must not be what others left behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def forget() -> None:
    """Drop all recordings and their memory."""
    _recordings.clear()
    _seen.clear()
