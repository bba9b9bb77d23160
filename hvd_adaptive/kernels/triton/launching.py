"""Launches, and the tables that they read: how numbers get to the device and back.

What the host knows before goes there from pinned memory, without waiting; what it has to know comes
back at once for a whole bucket (:func:`read_back`), which is the only time that a call waits.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton.jit import arithmetic
from hvd_adaptive.rng import mix
from hvd_adaptive.wire.quantized import Tables

_GRADIENTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""What :func:`hvd_adaptive.kernels.triton.jit.arithmetic.load_gradient` calls each dtype."""
TILE = 4096
"""Elements of a program, about."""
COPIES = 32
"""Of a histogram that many programs add to: atomic additions to one word are made in turn."""


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, /, *arguments: Any, **meta: Any
) -> None:
    """Start a kernel on the current stream of ``device``; an empty grid starts nothing.

    Without contraction: ``a * b + c`` is rounded twice, as everywhere else.
    """
    if not all(grid):
        return
    where = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with where:
        kernel[grid](*arguments, **meta, enable_fp_fusion=False)


def upload(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, in stream order; the host does not wait."""
    tensor = torch.from_numpy(np.array(numbers))  # a copy, which may be written
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def read_back(tensor: Tensor) -> npt.NDArray[Any]:
    """What a tensor holds, by pinned memory; waits for what it takes, and for nothing after it."""
    if tensor.device.type == "cpu":
        found: npt.NDArray[Any] = tensor.clone().numpy()
        return found
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(tensor.device))
    done.synchronize()
    copied: npt.NDArray[Any] = host.numpy()
    return copied


def pointers(tensors: Sequence[Tensor] | None, count: int) -> npt.NDArray[np.int64]:
    """Addresses of tensors; zeros if there are none."""
    if tensors is None:
        return np.zeros(count, np.int64)
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


def gradient_code(grads: Sequence[Tensor] | None) -> int:
    """The dtype of gradients, as kernels know it; 0 if there are none."""
    return _GRADIENTS[grads[0].dtype] if grads else 0


def key_words(key: int, device: torch.device) -> Tensor:
    """The halves of a mixed key, the lower first: ``int64[2]``."""
    word = mix(key)
    return upload(np.array([word & 0xFFFFFFFF, word >> 32], np.int64), device)


class Tiles:
    """How the elements of some layers are shared out among programs.

    Args:
        numels: elements of each layer.
        size: elements of a tile, at most.
        device: where the tables are.
        least: tiles of a layer without elements.
    """

    def __init__(
        self, numels: npt.NDArray[np.int64], size: int, device: torch.device, least: int = 0
    ) -> None:
        counts = np.maximum(-(-numels // size), least)
        firsts = np.cumsum(counts) - counts
        self.count = int(counts.sum())
        """Of all layers."""
        self.firsts = firsts
        """The first tile of each layer, as the host sees it."""
        self.layers = upload(np.repeat(np.arange(len(numels), dtype=np.int32), counts), device)
        """Of each tile."""
        self.first = upload(firsts, device)
        """The first tile of each layer."""
        self.edges = upload(np.append(firsts, self.count), device)
        """Where the tiles of each layer begin, and the end of the last."""


def sums_between(parts: Tensor, edges: Tensor) -> Tensor:
    """Sums of rows, float64: in the same order every time, which atomics would not have.

    Args:
        parts: ``float64[rows, columns]``.
        edges: ``int64[owners + 1]``: where each owner's rows begin, and the end.
    """
    owners, columns = edges.numel() - 1, parts.shape[1]
    sums = torch.zeros((owners, columns), dtype=torch.float64, device=parts.device)
    launch(
        *(arithmetic.sum_parts, (owners, columns), parts.device, parts, edges, sums),
        COLUMNS=columns,
        SIZE=1024,
    )
    return sums


@functools.lru_cache(maxsize=256)
def _kept_tiles(numels: bytes, size: int, device: torch.device, least: int) -> Tiles:
    return Tiles(np.frombuffer(numels, np.int64), size, device, least)


def tiles_of(numels: npt.NDArray[np.int64], size: int, device: torch.device, least: int = 0) -> Tiles:
    """The tiles of layers; kept, because a bucket has the same ones at every step."""
    return _kept_tiles(np.ascontiguousarray(numels, np.int64).tobytes(), size, device, least)


_levels: weakref.WeakKeyDictionary[Tables, dict[torch.device, tuple[Tensor, Tensor]]]
_levels = weakref.WeakKeyDictionary()


def levels_of(tables: Tables, device: torch.device) -> tuple[Tensor, Tensor]:
    """Signed levels and alphabets of tables, on a device; they are sent there once."""
    places = _levels.setdefault(tables, {})
    if device not in places:
        places[device] = upload(tables.levels, device), upload(tables.alphabets, device)
    return places[device]


def first_of(wrong: Tensor) -> Tensor:
    """The number of the first layer with a nonzero flag, else how many there are; int64, on the device.

    Args:
        wrong: ``int64[L]``.
    """
    layers = wrong.numel()
    numbers = torch.arange(layers + 1, device=wrong.device)
    flags = torch.nn.functional.pad(wrong, (0, 1), value=1)
    return torch.where(flags != 0, numbers, layers).amin()
