"""What compressors and the network cost, measured where training runs and the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from hvd_adaptive.adaptation.candidates import short_spec
from hvd_adaptive.collectives import planned_link_bytes
from hvd_adaptive.collectives.measured_costs import MeasuredCosts, SumCosts, SummandCosts
from hvd_adaptive.comm.link_costs import LinkCosts, apart
from hvd_adaptive.comm.network import (
    CARRIED,
    LARGE_SECONDS,
    LEAST_BYTE,
    SMALL_REPEATS,
    operation_seconds,
)
from hvd_adaptive.comm.request import Request
from hvd_adaptive.compressors import CastCompressor, Compressor
from hvd_adaptive.compressors.base import GatheredCompressor, LayerContext
from hvd_adaptive.engine.known_costs import KnownCosts, usual_seconds

__all__ = ["CostMeasurement"]

SMALL = 64
"""Elements of the small sums that are timed."""
LARGE_REPEATS = 2
"""How often large sums of each dtype are timed, twice each."""
BY_CHANCE = 1.5
"""From how many times the seconds of another byte on a difference is believed: where 8 ranks share 2
cores, measured ones have a standard deviation of 15 %."""
SAMPLE = (512, 512)
"""Shape of what compressors are timed on."""
CAST_SAMPLE = 1 << 20
"""Elements of what casts are timed on: they are as fast as memory, so it must not fit into a cache."""


class CostMeasurement:
    """Times what is not known of network and compressors; all ranks then know what rank 0 has found.

    Args:
        known: of the network, and of compressors whose payloads are gathered.
        schemes: that buckets may get, as text.
        cap_bytes: dense bytes at which a bucket is closed.
        link: what the network costs, where that is assumed and not measured.
        compute_seconds: of forward and backward pass, where that is assumed.
    """

    def __init__(
        self,
        known: KnownCosts,
        schemes: Sequence[str],
        cap_bytes: float,
        link: LinkCosts | None = None,
        compute_seconds: float | None = None,
    ) -> None:
        self._known = known
        self._schemes, self._cap_bytes = tuple(schemes), cap_bytes
        self._link, self._compute_seconds = link, compute_seconds
        self._last: dict[str, Any] | None = None
        """What was measured last, as JSON."""
        self._looks, self._most_looks = 0, 1
        """How often in a row the network was only looked at when it was to be measured again, and may
        be: twice as often each time that measuring then finds what was known."""

    def __call__(self, compressors: Sequence[Compressor], again: bool) -> MeasuredCosts:
        """Measure; all ranks call it at the same time.

        Cost: 14 operations with 512 KiB on each link, or more on a fast one, for 0.09 s with sums of
        one dtype and 0.12 s with those of two; and 90 ms for each compressor. Where it is
        asked again and two such operations take what they took, it is those: but not twice in a row,
        because others may take longer than they did; unless measuring has found that they do not.

        Args:
            compressors: in the order in which they were named, the same each time.
            again: whether what is known of the network may be out of date.
        """
        if again:
            as_known = self._known.network_is_as_known()
            keeps = as_known and self._looks < self._most_looks
            kept = self._known.control.decide(lambda: self._last if keeps else None)
            if kept is not None:
                self._looks += 1
                return MeasuredCosts.from_dict(kept)
            self._known.forget_network()
        gathered = {short_spec(x): x for x in compressors if isinstance(x, GatheredCompressor)}
        self._known.link()
        dtypes = [each for each in dict.fromkeys(map(_summed_as, compressors)) if each is not None]
        sums = {str(dtype): costs for dtype, costs in self._sums(dtypes).items()}
        # compressors last: after seconds of computing, ranks that share cores take turns unevenly, and
        # for half a second sums took four times as long
        link = self._known.link(gathered.values())
        found = MeasuredCosts(
            self._known.transport.size,
            self._link or link,
            sums,
            {},
            self._schemes,
            self._cap_bytes,
            self._link is not None,
            self._compute_seconds,
        )
        added = {short_spec(x): x for x in compressors if short_spec(x) not in gathered}
        known = {} if self._last is None else self._last["codecs"]  # no network changes them
        missing = {spec: x for spec, x in added.items() if spec not in known}
        timed = self._known.timed(lambda: {spec: asdict(_summand(x)) for spec, x in missing.items()})

        def codecs() -> dict[str, dict[str, Any]]:
            rows = timed | known
            rows |= {spec: asdict(self._known.codec(x)) for spec, x in gathered.items()}
            return {short_spec(each): rows[short_spec(each)] for each in compressors}

        before = self._last
        self._last = self._known.control.decide(lambda: {**found.to_dict(), "codecs": codecs()})
        now = MeasuredCosts.from_dict(self._last)
        same = before is not None and _are_alike(MeasuredCosts.from_dict(before), now)
        self._looks, self._most_looks = 0, 2 * self._most_looks if same else 1
        return now

    def _sums(self, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, SumCosts]:
        """An allreduce of each dtype; its bytes are those of a payload.

        A small one takes as long whatever its dtype is: differences are chance, by which half precision
        would lose against single precision where messages are slow.
        """
        if self._link is not None:
            return dict.fromkeys(dtypes, SumCosts.of_ring(self._link))
        of_byte = planned_link_bytes(1.0, "allreduce", self._known.transport.size)
        large = CARRIED / max(of_byte, 1.0)
        small = min((self._sum_seconds(each, SMALL, SMALL_REPEATS) for each in dtypes[:1]), default=0.0)
        byte = dict.fromkeys(dtypes, math.inf)
        # twice, as what else the machine does may have met one of them only
        for dtype in (*dtypes, *reversed(dtypes)):
            count = int(large / dtype.itemsize)
            carried = (count - SMALL) * dtype.itemsize * of_byte
            seconds = self._sum_seconds(dtype, count, LARGE_REPEATS, LARGE_SECONDS / 2) - small
            byte[dtype] = min(byte[dtype], max(LEAST_BYTE, seconds / carried))
        return {dtype: SumCosts(small, each) for dtype, each in _told_apart(byte).items()}

    def _sum_seconds(self, dtype: torch.dtype, count: int, repeats: int, least: float = 0.0) -> float:
        """Of an allreduce of so many elements, the fastest of so many, and for so long, at least."""
        request = Request("allreduce", torch.zeros(count, dtype=dtype))
        name = f"{self._known.prefix}.sums.{dtype}.{count}"
        return operation_seconds(self._known.transport, name, request, repeats, least)


def _told_apart(byte: Mapping[torch.dtype, float]) -> dict[torch.dtype, float]:
    """Seconds of a byte by dtype, the same where the difference may be chance.

    To the network bytes are bytes; only adding may take longer in one dtype, by much or not at all.

    Example:
        >>> _told_apart({torch.float16: 2.8e-8, torch.float32: 2e-8})
        {torch.float16: 2e-08, torch.float32: 2e-08}
        >>> _told_apart({torch.float16: 3.2e-8, torch.float32: 2e-8})
        {torch.float16: 3.2e-08, torch.float32: 2e-08}
    """
    fastest = min(byte.values(), default=0.0)
    return {dtype: each if each > BY_CHANCE * fastest else fastest for dtype, each in byte.items()}


def _are_alike(one: MeasuredCosts, other: MeasuredCosts) -> bool:
    """Whether bytes cost about the same, by the same operations of as many ranks."""
    first, second = _of_bytes(one), _of_bytes(other)
    if first.keys() != second.keys():
        return False
    return not any(apart(first[key], second[key], BY_CHANCE) for key in first)


def _of_bytes(found: MeasuredCosts) -> dict[tuple[int, str], float]:
    """Seconds of a byte, by ranks and operation."""
    layers = found.link.layers
    links = {"all": found.link}
    if layers is not None:
        links |= {"node": layers.node, "peers": layers.peers}
    seconds = {dtype: each.link_byte for dtype, each in found.sums.items()}
    for group, link in links.items():
        seconds |= {f"{group} allgather": link.allgather_byte, f"{group} alltoall": link.alltoall_byte}
    return {(found.ranks, name): each for name, each in seconds.items()}


def _summed_as(compressor: Compressor) -> torch.dtype | None:
    """The dtype in which Horovod adds its payloads; None where it does not."""
    if isinstance(compressor, GatheredCompressor):
        return None
    dtype: torch.dtype | None = getattr(compressor, "wire_dtype", None) or torch.float32
    return None if dtype == torch.bfloat16 else dtype


def _summand(compressor: Compressor) -> SummandCosts:
    """A compressor whose payloads are added."""
    compress, decompress = _codec_seconds(compressor)
    dense = isinstance(compressor, CastCompressor)
    kind = compressor.name if dense else short_spec(compressor)
    # low rank takes two operations, one after the other
    operations = 1 if dense or compressor.selects else 2
    dtype = _summed_as(compressor)
    summed_as = "" if dtype is None else str(dtype)
    return SummandCosts(kind, compress, decompress, summed_as, operations, dense)


def _codec_seconds(compressor: Compressor) -> tuple[float, float]:
    """Seconds per element of compressing and of decompressing."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(compressor, CastCompressor):
        # what a bucket of casts takes, of whatever dtype: two copies
        x = torch.randn(CAST_SAMPLE, generator=generator)
        cast = torch.zeros_like(x, dtype=compressor.wire_dtype)
        compress, decompress = usual_seconds(
            lambda: torch._foreach_copy_([cast], [x]), lambda: torch._foreach_copy_([x], [cast])
        )
        return compress / len(x), decompress / len(x)
    x = torch.randn(SAMPLE[0] * SAMPLE[1], generator=generator)
    out, context = torch.zeros_like(x), LayerContext(shape=SAMPLE, state=compressor.new_state())
    payload = compressor.compress_(x.clone(), compressor.level, context)
    compress, decompress = usual_seconds(
        lambda: compressor.compress_(x.clone(), compressor.level, context),
        lambda: compressor.decompress_add_(payload, out),
    )
    return compress / len(x), decompress / len(x)
