"""Buckets: which layers are sent together, in one order on all ranks.

A *bucket* is a run of layers whose payloads share one collective operation: all of them are summed, or
all are gathered as one byte buffer. Building buckets is pure: the same layers, routes and order give
the same buckets on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hvd_adaptive.arrays import Int64s
from hvd_adaptive.compressors.base import Compressor, Level
from hvd_adaptive.compressors.linear import CastCompressor
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.wire.frame import MAX_GATHERED_BYTES, frame_bytes

# A dense tensor at least this large is sent alone: its gradient then is the collective's buffer, and
# the copy into and out of a shared buffer is saved. Below it, one operation for many layers is worth
# more than the copy (an operation costs about 1 ms, copying 4 MiB takes less).
ALONE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Route:
    """What happens to one layer: which compressor, at which level, and what its payload is."""

    compressor: Compressor
    level: Level
    kind: PayloadKind
    scheme: str
    """The collective scheme, as text."""
    wire_dtype: torch.dtype | None = None
    """dtype of a summed payload; None where the payload is bytes."""
    feedback: str = "none"
    """The feedback rule, as text."""
    keeps: bool = True
    """False if what the layer does not send is dropped, though its bucket keeps that of others."""
    sum_level: Level = 0.0
    """Of sums that the scheme compresses again; 0 where it is that of the layer, or of the scheme."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers ``start:stop`` of a bucket: one compressor codes all of them in one call."""

    compressor: Compressor
    levels: tuple[Level, ...]
    start: int
    stop: int
    keeps: bool = True
    """Whether what is not sent is kept, as the bucket's feedback says."""
    sum_levels: tuple[Level, ...] = ()
    """Of the layers' sums, where a scheme compresses them again; 0 takes that of the layer."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Layers whose payloads are sent together.

    Args:
        index: position in the launch order.
        kind: of its payloads.
        layers: its layers; those of one compressor stand side by side.
        segments: its compressors and which of the layers are theirs.
        dtype: dtype of the bucket's flat buffer.
        device: device of the bucket's flat buffer.
        feedback: the feedback rule of all its layers, as text.
        scheme: the collective scheme, as text.
    """

    index: int
    kind: PayloadKind
    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    dtype: torch.dtype
    device: torch.device
    feedback: str
    scheme: str

    @property
    def numel(self) -> int:
        """Number of elements of all layers."""
        return sum(layer.numel for layer in self.layers)

    @property
    def offsets(self) -> Int64s:
        """``int64[L + 1]``: where the layers begin in its flat buffer, and where the last one ends."""
        return np.cumsum([0, *(layer.numel for layer in self.layers)], dtype=np.int64)

    def wire_bytes(self, segment: Segment, levels: Sequence[Level] | None = None) -> list[int]:
        """What the compressor of a segment foresees of each of its layers.

        Args:
            segment: one of the bucket's.
            levels: in the place of the segment's own.
        """
        layers = self.layers[segment.start : segment.stop]
        return [
            segment.compressor.wire_bytes(layer.numel, level, shape=layer.shape)
            for layer, level in zip(layers, levels or segment.levels, strict=True)
        ]

    @property
    def dense_bytes(self) -> int:
        """Bytes that the gradients themselves take."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Key:
    """What layers of one bucket have in common."""

    kind: PayloadKind
    dtype: torch.dtype
    device: torch.device
    feedback: str
    scheme: str
    whole_model: Compressor | None
    """A compressor that takes all layers of the model together."""


def build_buckets(
    layers: Sequence[Layer],
    routes: Mapping[str, Route],
    cap_bytes: float,
    groups: Sequence[Sequence[str]] = (),
) -> tuple[Bucket, ...]:
    """Cut ``layers``, given in the order in which their gradients become ready, into buckets.

    A bucket holds layers of one payload kind, dtype and device, and is closed once it holds
    ``cap_bytes``. Layers of one of the ``groups`` (names) stay together whatever their size; the
    layers that are in no group are then sent as without groups.

    Args:
        layers: layers in ready order.
        routes: route of each layer, by name.
        cap_bytes: dense bytes at which a bucket is closed.
        groups: names of layers to keep together.

    Returns:
        Buckets in launch order: by the position of the layer that completes them.
    """
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    open_runs: dict[tuple[_Key, int | None], list[tuple[int, Layer]]] = {}
    closed: list[list[tuple[int, Layer]]] = []
    for position, layer in enumerate(layers):
        key = _key(layer, routes[layer.name])
        group = group_of.get(layer.name) if key.whole_model is None else None
        compressed = not isinstance(routes[layer.name].compressor, CastCompressor)
        if group is None and is_sent_alone(layer, key, compressed):
            closed.append([(position, layer)])
            continue
        run = open_runs.setdefault((key, group), [])
        run.append((position, layer))
        if (
            group is None
            and key.whole_model is None
            and sum(member.nbytes for _, member in run) >= cap_bytes
        ):
            closed.append(open_runs.pop((key, group)))
    closed.extend(open_runs.values())
    closed.sort(key=lambda run: run[-1][0])
    return tuple(
        _bucket(index, [layer for _, layer in run], routes) for index, run in enumerate(closed)
    )


def check_gathered(buckets: Sequence[Bucket], ranks: int) -> None:
    """Raise where all ranks would gather more than MPI's 32-bit displacements reach.

    Everything that decides is the same on all ranks. Compressors whose data decide how much they send
    are left out: what is too much then shows when it is there
    (:func:`hvd_adaptive.wire.frame.too_large`).

    Args:
        buckets: of one layout.
        ranks: that take part.

    Raises:
        ValueError: names the bucket, its layers, the bytes, and what to write instead.
    """
    for bucket in buckets:
        total = _gathered_bytes(bucket, ranks)
        if total > MAX_GATHERED_BYTES:
            first, last = bucket.layers[0].name, bucket.layers[-1].name
            raise ValueError(
                f"bucket {bucket.index} ({first} to {last}) would gather up to {total} bytes from "
                f"{ranks} ranks, but MPI reaches {MAX_GATHERED_BYTES}: use a level that sends "
                "less, fp16 or another compressor that is summed, or, with several layers, a "
                f"bucket_cap_mb below the bucket's {bucket.dense_bytes >> 20} MB"
            )


def _gathered_bytes(bucket: Bucket, ranks: int) -> int:
    """The most that an allgather or alltoall of the bucket holds, where that is known; else 0."""
    if bucket.kind is PayloadKind.CAST:
        return -(-bucket.numel // ranks) * ranks * bucket.dtype.itemsize
    if bucket.kind is not PayloadKind.ENCODED:
        return 0
    codes = [
        sum(bucket.wire_bytes(segment))
        for segment in bucket.segments
        if not segment.compressor.size_varies
    ]
    return ranks * frame_bytes(codes)


def is_sent_alone(layer: Layer, key: _Key, compressed: bool) -> bool:
    """Whether the layer gets a bucket of its own: sparse ones, and large ones summed as they are."""
    if key.kind is PayloadKind.SPARSE:
        return True
    as_it_is = (
        key.kind is PayloadKind.SUMMABLE
        and key.dtype == layer.dtype
        and key.feedback == "none"
        and not compressed
    )
    return as_it_is and layer.nbytes >= ALONE_BYTES


def _key(layer: Layer, route: Route) -> _Key:
    compressor = route.compressor
    return _Key(
        route.kind,
        route.wire_dtype or torch.float32,
        layer.device,
        route.feedback,
        route.scheme,
        compressor if compressor.whole_model else None,
    )


def _bucket(index: int, layers: Iterable[Layer], routes: Mapping[str, Route]) -> Bucket:
    by_compressor: dict[tuple[Compressor, bool], list[Layer]] = {}
    for layer in layers:
        route = routes[layer.name]
        by_compressor.setdefault((route.compressor, route.keeps), []).append(layer)
    ordered: list[Layer] = []
    segments: list[Segment] = []
    for (compressor, keeps), members in by_compressor.items():
        levels = tuple(routes[layer.name].level for layer in members)
        sums = tuple(routes[layer.name].sum_level for layer in members)
        end = len(ordered) + len(members)
        segments.append(
            Segment(compressor, levels, len(ordered), end, keeps, sums if any(sums) else ())
        )
        ordered.extend(members)
    key = _key(ordered[0], routes[ordered[0].name])
    return Bucket(
        index,
        key.kind,
        tuple(ordered),
        tuple(segments),
        key.dtype,
        key.device,
        key.feedback,
        key.scheme,
    )
