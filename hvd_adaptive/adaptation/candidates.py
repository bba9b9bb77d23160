"""Levels of several compressors as one set of candidates for a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hvd_adaptive.compressors.base import CodecState, Compressor, Float64s, Int64s, LayerContext, Level
from hvd_adaptive.layers import Layer


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compress a layer."""

    compressor: Compressor
    level: Level


def candidates_of(layer: Layer, compressors: Sequence[Compressor]) -> tuple[Candidate, ...]:
    """Every level of every compressor, from the most bytes to the fewest.

    Args:
        layer: the layer.
        compressors: of one family or of several.

    Example:
        >>> from hvd_adaptive.compressors import parse
        >>> layer = Layer(0, "w", (64, 64))
        >>> rows = candidates_of(layer, [parse("none"), parse("qsgd:bits=2"), parse("powersgd:rank=2")])
        >>> [(row.compressor.name, row.level) for row in rows][:3]
        [('none', 32), ('qsgd', 4), ('powersgd', 4)]
    """
    rows = [
        Candidate(compressor, level) for compressor in compressors for level in compressor.levels(layer)
    ]
    return tuple(sorted(rows, key=lambda row: -_bytes_of(row, layer)))


def errors_of(
    x: Tensor,
    layer: Layer,
    candidates: Sequence[Candidate],
    states: Mapping[Compressor, CodecState] | None = None,
) -> Float64s:
    """Squared L2 error of every candidate: one summary of ``x`` for each compressor.

    Args:
        x: the layer's gradient: float32, 1-D.
        layer: its shape.
        candidates: as of :func:`candidates_of`.
        states: what compressors have learnt, by their ``state_key``.

    Returns:
        ``float64[C]``.
    """
    errors = np.zeros(len(candidates))
    for compressor, mine, levels, state in _by_compressor(candidates, states):
        errors[mine] = compressor.errors(x, levels, LayerContext(shape=layer.shape, state=state))
    return errors


def sizes_of(
    x: Tensor,
    layer: Layer,
    candidates: Sequence[Candidate],
    states: Mapping[Compressor, CodecState] | None = None,
) -> Int64s:
    """Bytes of every candidate, ``int64[C]``; arguments as of :func:`errors_of`."""
    sizes = np.zeros(len(candidates), np.int64)
    for compressor, mine, levels, state in _by_compressor(candidates, states):
        sizes[mine] = compressor.sizes(x, levels, LayerContext(shape=layer.shape, state=state))
    return sizes


def _by_compressor(
    candidates: Sequence[Candidate], states: Mapping[Compressor, CodecState] | None
) -> Iterator[tuple[Compressor, list[int], list[Level], CodecState | None]]:
    """Each compressor once: the indices and levels of its candidates, and what it has learnt."""
    for compressor in dict.fromkeys(row.compressor for row in candidates):
        mine = [index for index, row in enumerate(candidates) if row.compressor == compressor]
        levels = [candidates[index].level for index in mine]
        yield compressor, mine, levels, (states or {}).get(compressor.state_key)


def table_of(
    x: Tensor,
    layer: Layer,
    candidates: Sequence[Candidate],
    states: Mapping[Compressor, CodecState] | None = None,
) -> tuple[Float64s, Int64s]:
    """Errors and bytes of every candidate; arguments as of :func:`errors_of`.

    Returns:
        ``float64[C]`` and ``int64[C]``.

    Example:
        >>> import torch
        >>> from hvd_adaptive.compressors import parse
        >>> layer, x = Layer(0, "w", (64, 64)), torch.ones(4096)
        >>> rows = candidates_of(layer, [parse("none"), parse("powersgd:rank=1")])
        >>> errors, sizes = table_of(x, layer, rows)
        >>> errors.round(3).tolist(), sizes.tolist()
        ([0.0, 0.0, 0.0], [16384, 1024, 512])
    """
    return errors_of(x, layer, candidates, states), sizes_of(x, layer, candidates, states)


def _bytes_of(row: Candidate, layer: Layer) -> int:
    return row.compressor.wire_bytes(layer.numel, row.level, shape=layer.shape)
