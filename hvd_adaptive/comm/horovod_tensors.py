"""Lets no rank hang that hands an operation to Horovod while another rank ends.

When a rank ends, Horovod's thread drops the others' operations, with their tensors, while it holds
the lock of its queue. PyTorch (seen with 2.13) takes Python's lock where C++ drops a tensor that only
Python refers to from then on. So that thread waits for Python's lock with the queue's in its hands,
and a main thread that hands over its next operation waits for the queue's with Python's in its hands:
forever, and the rank's other threads with them. Where C++ refers to the tensors as well, nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from horovod.torch import mpi_ops
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]


class _References(list[Any]):
    """To tensors, held by C++."""


@contextmanager
def tensors_held() -> Iterator[None]:
    """Hold the tensors of operations that are under way, until each is waited for.

    For what hands one over: what is under way before is held, whoever began it, and afterwards that
    one. Copies nothing; costs microseconds.
    """
    _hold()
    yield
    _hold()


def _hold() -> None:
    # Horovod's own: tensors by their operation's handle, the result last, until that is waited for.
    under_way: dict[int, tuple[Any, ...]] = mpi_ops._handle_map
    for handle in [*reversed(under_way)]:  # in one piece: another thread may wait for some of them
        tensors = under_way.get(handle)
        if tensors is None:
            continue
        if isinstance(tensors[0], _References):
            return
        # A capsule refers to the tensor itself; a view would refer to what that is a view of.
        under_way[handle] = (_References(map(to_dlpack, _tensors_in(tensors))), *tensors)


def _tensors_in(held: tuple[Any, ...]) -> Iterator[Tensor]:
    """All tensors, also in the tuples of operations on several; there may be None as well."""
    for each in held:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors_in(each)
