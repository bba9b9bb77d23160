"""Launches, and the tables that they read: how numbers get to the device and back.

What the host knows before goes there from pinned memory, without waiting; what it has to know comes
back at once for a whole bucket (:func:`read_back`), which is the only time that a call waits.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.triton.jit import arithmetic
from hvd_adaptive.rng import mix
from hvd_adaptive.wire.quantized import Tables

Given = ParamSpec("Given")
Made = TypeVar("Made")

_GRADIENTS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""What :func:`hvd_adaptive.kernels.triton.jit.arithmetic.load_gradient` calls each dtype."""
TILE = 4096
"""Elements of a program, about."""
_SUMMED = 2048
"""Rows that one program sums up."""
COPIES = 32
"""Of a histogram that many programs add to: atomic additions to one word are made in turn."""


_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels and their constants, by what Triton compiles them for."""


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, /, *arguments: Any, **meta: Any
) -> None:
    """Start a kernel on the current stream of ``device``; an empty grid starts nothing.

    Without contraction: ``a * b + c`` is rounded twice, as everywhere else. What has been compiled is
    started without Triton's own look-up, which takes the host several times as long.

    Args:
        kernel: with its constants last.
        grid: programs.
        device: of all tensors.
        arguments: all that are no constants.
        meta: the constants and Triton's options.
    """
    if not all(grid):
        return
    if device.type != "cuda":
        kernel[grid](*arguments, **meta, enable_fp_fusion=False)
        return
    key = (kernel, device.index, *meta.items(), *map(_compiled_for, arguments))
    known = _compiled.get(key)
    here = torch.cuda.current_device() == device.index
    with contextlib.nullcontext() if here else torch.cuda.device(device):
        if known is None:
            compiled = kernel[grid](*arguments, **meta, enable_fp_fusion=False)
            _compiled[key] = compiled, [meta[name] for name in kernel.arg_names[len(arguments) :]]
        else:
            compiled, constants = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _compiled_for(argument: Any) -> Any:
    """What Triton may compile another kernel for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return float


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


def scale_bits(scale: float) -> int:
    """A float32 in a table, as kernels load it."""
    return int(np.float32(scale).view(np.int32))


def gradient_code(grads: Sequence[Tensor] | None) -> int:
    """The dtype of gradients, as kernels know it; 0 if there are none."""
    return _GRADIENTS[grads[0].dtype] if grads else 0


def key_words(key: int, device: torch.device) -> Tensor:
    """The halves of a mixed key, the lower first: ``int64[2]``."""
    word = mix(key)
    return upload(np.array([word & 0xFFFFFFFF, word >> 32], np.int64), device)


class Table:
    """Numbers for the device, of which only some are others at the next call.

    Args:
        parts: numbers, or rows of them.
    """

    def __init__(self, *parts: npt.NDArray[np.int64]) -> None:
        self._numbers: npt.NDArray[np.int64] = np.concatenate([part.ravel() for part in parts])
        self._sizes = [part.size for part in parts]
        self._widths = [part.shape[1] if part.ndim > 1 else 1 for part in parts]

    def copy(self) -> npt.NDArray[np.int64]:
        """The numbers, part after part."""
        return self._numbers.copy()

    def column(self, part: int, column: int = 0) -> slice:
        """Where a column of a part is in :meth:`copy`."""
        first = sum(self._sizes[:part])
        return slice(first + column, first + self._sizes[part], self._widths[part])

    def split(self, sent: Tensor) -> Sequence[Tensor]:
        """The parts, of a copy on the device."""
        parts: Sequence[Tensor] = sent.split(self._sizes)
        return parts


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
        self.ranges = Ranges(np.append(firsts, self.count), device)
        """The tiles of each layer, as rows."""


class Ranges:
    """Rows of which each owner has those from one edge to the next, to be summed up in two steps.

    Args:
        edges: ``int64[owners + 1]``, rising from 0.
        device: where the tables are.
    """

    def __init__(self, edges: npt.NDArray[np.int64], device: torch.device) -> None:
        counts = -(-np.diff(edges) // _SUMMED)
        firsts = np.cumsum(counts) - counts
        inside = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        starts = np.repeat(edges[:-1], counts) + _SUMMED * inside
        self.steps = (
            upload(np.append(starts, edges[-1]), device),
            upload(np.append(firsts, counts.sum()), device),
        )
        """The edges of chunks of rows, and where each owner's chunks are."""


def sums_between(parts: Tensor, ranges: Ranges) -> Tensor:
    """Sums of rows, float64: in the same order every time, which atomics would not have.

    Args:
        parts: ``float64[rows, columns]``.
        ranges: whose rows they are.
    """
    columns = parts.shape[1]
    for edges in ranges.steps:
        owners = edges.numel() - 1
        sums = torch.empty((owners, columns), dtype=torch.float64, device=parts.device)
        launch(
            *(arithmetic.sum_parts, (owners, columns), parts.device, parts, edges, sums),
            COLUMNS=columns,
            SIZE=1024,
        )
        parts = sums
    return parts


def kept(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """What is made of the same arguments again, because a bucket has the same ones at every step.

    Arrays among them are of int64, and the same by what they hold.
    """

    plain: Callable[..., Made] = make

    @functools.lru_cache(maxsize=256)
    def made(*parts: Any, **named: Any) -> Made:
        arrays = (np.frombuffer(part, np.int64) if isinstance(part, bytes) else part for part in parts)
        return plain(*arrays, **named)

    look_up: Callable[..., Made] = made

    def found(*parts: Given.args, **named: Given.kwargs) -> Made:
        known = [
            np.ascontiguousarray(part, np.int64).tobytes() if isinstance(part, np.ndarray) else part
            for part in parts
        ]
        return look_up(*known, **named)

    return found


tiles_of = kept(Tiles)
"""The tiles of layers."""


class Levels(NamedTuple):
    """Signed levels and alphabets of tables, on a device, and their addresses."""

    tensors: tuple[Tensor, Tensor]
    addresses: tuple[int, int]


_levels: weakref.WeakKeyDictionary[Tables, dict[torch.device, Levels]]
_levels = weakref.WeakKeyDictionary()


def levels_of(tables: Tables, device: torch.device) -> Levels:
    """The levels of tables, which are sent to a device once, and kept there as long as the tables."""
    places = _levels.setdefault(tables, {})
    known = places.get(device)
    if known is None:
        levels, alphabets = upload(tables.levels, device), upload(tables.alphabets, device)
        known = Levels((levels, alphabets), (levels.data_ptr(), alphabets.data_ptr()))
        places[device] = known
    return known
