"""Levels of several compressors as one set of candidates for a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hvd_adaptive import specs
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.collectives import planned_link_bytes, scheme_for
from hvd_adaptive.compressors import CastCompressor, format_spec
from hvd_adaptive.compressors.base import (
    CodecState,
    Compressor,
    GatheredCompressor,
    LayerContext,
    Level,
)
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import Measurement, Recipe
from hvd_adaptive.planning.recipes import format_recipe


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compress a layer."""

    compressor: Compressor
    level: Level

    @property
    def label(self) -> str:
        """The same text for the same setting in different layers."""
        return f"{format_spec(self.compressor)} at {self.level:g}"

    def payload_bytes(self, layer: Layer) -> int:
        """Bytes that one rank sends for a layer: exact, or a tested upper bound."""
        return self.compressor.wire_bytes(layer.numel, self.level, shape=layer.shape)

    def link_bytes(self, layer: Layer, ranks: int, encoded: str, ranks_per_node: int = 1) -> float:
        """Bytes that one rank's link carries in one direction for a layer (ring algorithms).

        Args:
            layer: the layer.
            ranks: how many there are.
            encoded: the scheme of payloads that are encoded, as text.
            ranks_per_node: how many of them share a node.
        """
        scheme = scheme_for(self.compressor.payload_kind, encoded)
        return planned_link_bytes(self.payload_bytes(layer), scheme, ranks, ranks_per_node)

    def nominal_factor(self, layer: Layer) -> float:
        """Compression factor as the papers count it: 100 for a density of 1 %, 8 for 4 bits."""
        return self.compressor.nominal_factor(self.level, layer)


def candidates_of(
    layer: Layer, compressors: Sequence[Compressor], factors: Sequence[float] = ()
) -> tuple[Candidate, ...]:
    """Every level of every compressor, from the most bytes to the fewest.

    Args:
        layer: the layer.
        compressors: of one family or of several.
        factors: compression factors that the planner may ask for: levels that have them exactly are
            added, where a compressor knows such levels and no explicit range leaves them out.

    Example:
        >>> from hvd_adaptive.compressors import parse
        >>> layer = Layer(0, "w", (64, 64))
        >>> rows = candidates_of(layer, [parse("none"), parse("qsgd:bits=2"), parse("powersgd:rank=2")])
        >>> [(row.compressor.name, row.level) for row in rows][:3]
        [('none', 32), ('qsgd', 4), ('powersgd', 4)]
    """
    rows = [
        Candidate(compressor, level)
        for compressor in compressors
        for level in _levels_of(compressor, layer, factors)
    ]
    return tuple(sorted(rows, key=lambda row: -row.payload_bytes(layer)))


def _levels_of(compressor: Compressor, layer: Layer, factors: Sequence[float]) -> Sequence[Level]:
    """Those of its range, and those of the factors."""
    levels = list(compressor.levels(layer))
    exact = [level for level in map(compressor.level_of_factor, factors) if level is not None]
    if compressor.level_bounds is None:
        return list(dict.fromkeys([*levels, *exact]))
    low, high = compressor.level_bounds
    inside = [level for level in dict.fromkeys([*levels, *exact]) if low <= level <= high]
    return inside or levels  # of a layer that is too small for any of the range


def short_spec(compressor: Compressor) -> str:
    """A compressor as text, without options that have their defaults, and without a range of levels.

    That says which levels there are, and nothing of what one of them does or takes.

    Example:
        >>> from hvd_adaptive.compressors import parse
        >>> short_spec(parse("topk:density=0.02,values=bf16,levels=0.01-0.1"))
        'topk:density=0.02'
    """
    return specs.write(compressor.name, compressor, defaults=False, without="level_range")


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
        states: what compressors have learned, by their ``state_key``.

    Returns:
        ``float64[C]``.
    """
    errors = np.zeros(len(candidates))
    for compressor, mine, levels, state in _by_compressor(candidates, states):
        errors[mine] = compressor.errors(x, levels, LayerContext(shape=layer.shape, state=state))
    return errors


def sent_energies_of(
    x: Tensor,
    layer: Layer,
    candidates: Sequence[Candidate],
    states: Mapping[Compressor, CodecState] | None = None,
) -> Float64s:
    """Squared norm of what each candidate sends, ``float64[C]``; arguments as of :func:`errors_of`."""
    energies = np.zeros(len(candidates))
    for compressor, mine, levels, state in _by_compressor(candidates, states):
        context = LayerContext(shape=layer.shape, state=state)
        energies[mine] = compressor.sent_energies(x, levels, context)
    return energies


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
    """Each compressor once: the indices and levels of its candidates, and what it has learned."""
    groups: dict[Compressor, tuple[list[int], list[Level]]] = {}
    last: Compressor | None = None
    for index, row in enumerate(candidates):
        if row.compressor is not last:  # hashing options a hundred times takes long
            last = row.compressor
            indices, levels = groups.setdefault(last, ([], []))
        indices.append(index)
        levels.append(row.level)
    for compressor, (indices, levels) in groups.items():
        yield compressor, indices, levels, (states or {}).get(compressor.state_key)


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


def check_per_rank_levels(
    recipe: Recipe, compressors: Sequence[Compressor], alternatives: Sequence[object] = ()
) -> None:
    """ValueError if the recipe gives ranks levels of their own, which these compressors do not allow.

    What is summed must be the same on all ranks. With what is gathered, each rank sends its levels, but
    not its compressors.

    Args:
        recipe: of the planner.
        compressors: that layers have by themselves.
        alternatives: further ones that the planner may choose.
    """
    if Measurement.PER_RANK_ERRORS not in recipe.planner().needs:
        return
    summed = [
        each.name for each in compressors if not isinstance(each, GatheredCompressor | CastCompressor)
    ]
    if summed or alternatives:
        raise ValueError(
            f"planner={format_recipe(recipe)!r} gives each rank levels of its own, which works with "
            "one compressor per layer whose payloads are gathered, such as topk or qsgd: "
            + (f"{summed[0]!r} is summed" if summed else "there are candidates")
            + "; write per_worker=false, or another compressor"
        )
