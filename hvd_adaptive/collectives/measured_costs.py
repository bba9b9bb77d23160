"""Costs as they were measured, and the seconds that follow for any number of ranks, and any network.

What is measured is a network among some ranks, and compressors. :meth:`MeasuredCosts.step_costs` puts
both together, by the schemes' own bytes on a link, to what
:class:`~hvd_adaptive.planning.step_time.StepModel` plays a step through with: ``auto`` for the ranks
that there are, and whoever predicts for others, of which :meth:`MeasuredCosts.at` and
:meth:`MeasuredCosts.with_rate` give the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Int64s
from hvd_adaptive.collectives import AUTO, encoded_schemes, planned_link_bytes
from hvd_adaptive.collectives.base import EncodedScheme
from hvd_adaptive.collectives.costs import CodecCosts, Workload
from hvd_adaptive.comm.link_costs import (
    CYCLE,
    LinkCosts,
    seconds_of_byte,
    small_seconds,
)
from hvd_adaptive.planning.step_time import (
    CompressorCosts,
    SchemeCosts,
    StepCosts,
    StepModel,
    StepSeconds,
    spread,
)

__all__ = ["MeasuredCosts", "SumCosts", "SummandCosts", "dense_step"]

NO_LINK, NO_CODEC = LinkCosts(0.0, 0.0, 0.0, 0.0), CodecCosts(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SumCosts:
    """What an allreduce costs.

    Args:
        latency: seconds of a small one.
        link_byte: seconds of a byte on a rank's link in one direction.
    """

    latency: float
    link_byte: float

    @classmethod
    def of_ring(cls, link: LinkCosts) -> SumCosts:
        """On an assumed network: as many bytes in two halves, and each half in as many operations."""
        return cls(2 * link.allgather, link.allgather_byte)


@dataclass(frozen=True, slots=True)
class SummandCosts:
    """What a compressor costs whose payloads are added: casts, low rank, random selection.

    Args:
        kind: layers of one kind share buckets.
        compress: seconds per element.
        decompress: seconds per element.
        summed_as: the dtype in which Horovod adds; empty where that is done in two shots.
        operations: that follow each other.
        dense: whether it sends every element.
    """

    kind: str
    compress: float
    decompress: float
    summed_as: str
    operations: int = 1
    dense: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What was measured among some ranks.

    Args:
        ranks: how many.
        link: gathering and exchanging among them.
        sums: allreduces, by dtype.
        codecs: compressors, by their specification.
        schemes: that buckets of encoded payloads may get, as text.
        cap_bytes: dense bytes at which a bucket is closed.
        assumed: whether nobody has measured the network.
        compute_seconds: of forward and backward pass, where that is assumed.

    Example:
        >>> measured = MeasuredCosts(
        ...     4, LinkCosts(1e-3, 1e-3, 1e-8, 1e-8), {"float16": SumCosts(1e-3, 1e-8)},
        ...     {"fp16": SummandCosts("fp16", 0.0, 0.0, "float16", dense=True),
        ...      "topk": CodecCosts(1e-9, 1e-9, 1e-9)}, ("auto",), 25e6)
        >>> for ranks in (4, 64):
        ...     costs = measured.at(ranks).step_costs()
        ...     [[f"{each.name} {each.byte:.2g}" for each in row.schemes]
        ...      for row in costs.compressors.values()]
        [['allreduce 1.5e-08'], ['allgather 3e-08', 'two_shot 1.5e-08']]
        [['allreduce 2e-08'], ['allgather 6.3e-07', 'two_shot 2e-08']]
    """

    ranks: int
    link: LinkCosts
    sums: Mapping[str, SumCosts]
    codecs: Mapping[str, CodecCosts | SummandCosts]
    schemes: tuple[str, ...]
    cap_bytes: float
    assumed: bool = False
    compute_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> MeasuredCosts:
        """From :meth:`to_dict`."""
        codecs = {
            spec: SummandCosts(**row) if "kind" in row else CodecCosts(**row)
            for spec, row in state["codecs"].items()
        }
        changed = {
            "link": LinkCosts.from_dict(state["link"]),
            "sums": {dtype: SumCosts(**row) for dtype, row in state["sums"].items()},
            "codecs": codecs,
            "schemes": tuple(state["schemes"]),
        }
        return cls(**{**state, **changed})

    # --- other ranks, and other networks ----------------------------------------------------------

    def at(self, ranks: int, cycle: float = CYCLE) -> MeasuredCosts:
        """What would be measured among another number of ranks: see :meth:`LinkCosts.at`.

        Args:
            ranks: as many on each node as now.
            cycle: seconds of a small operation that do not grow with the ranks.
        """
        sums = {
            dtype: replace(each, latency=small_seconds(each.latency, self.ranks, ranks, cycle))
            for dtype, each in self.sums.items()
        }
        return replace(self, ranks=ranks, link=self.link.at(self.ranks, ranks, cycle), sums=sums)

    def with_rate(
        self, rate: float, ranks_per_node: int = 1, before: float | None = None
    ) -> MeasuredCosts:
        """What would be measured between hosts with other links: see :meth:`LinkCosts.with_rate`."""
        byte = seconds_of_byte(rate)
        sums = {
            dtype: replace(each, link_byte=byte if before is None else before / rate * each.link_byte)
            for dtype, each in self.sums.items()
        }
        return replace(self, link=self.link.with_rate(rate, ranks_per_node, before), sums=sums)

    def with_slower_codecs(self, factor: float) -> MeasuredCosts:
        """What would be measured where compressors take so many times as long, as with fewer cores."""
        codecs = {spec: _slower(codec, factor) for spec, codec in self.codecs.items()}
        return replace(self, codecs=codecs)

    # --- seconds ----------------------------------------------------------------------------------

    def step_costs(self) -> StepCosts:
        """Of every compressor with every scheme that its payloads can be reduced by."""
        rows = {spec: self._row(codec) for spec, codec in self.codecs.items()}
        return StepCosts(rows, self.ranks, self.cap_bytes, self.assumed, self.compute_seconds)

    def _row(self, codec: CodecCosts | SummandCosts) -> CompressorCosts:
        if isinstance(codec, CodecCosts):
            schemes = tuple(_lines(each, codec, self.ranks, self.link) for each in self._encoded())
            return CompressorCosts(
                "encoded", codec.compress, schemes, compress_byte=codec.compress_byte
            )
        scheme = self._two_shots(codec) if not codec.summed_as else self._sum(codec)
        return CompressorCosts(codec.kind, codec.compress, (scheme,), codec.dense)

    def _encoded(self) -> list[EncodedScheme]:
        """The schemes that buckets of encoded payloads may get."""
        known = encoded_schemes(self.link.layers is not None)
        if AUTO in self.schemes:
            return list(known.values())
        names = {text.partition(":")[0] for text in self.schemes}
        # one that reduces in nodes reduces in two shots where there are none
        return [scheme for name, scheme in known.items() if name in names] or [known["two_shot"]]

    def _sum(self, codec: SummandCosts) -> SchemeCosts:
        """An allreduce of a payload's bytes."""
        summing = self.sums[codec.summed_as]
        byte = planned_link_bytes(1.0, "allreduce", self.ranks) * summing.link_byte
        return SchemeCosts("allreduce", codec.operations * summing.latency, byte, codec.decompress)

    def _two_shots(self, codec: SummandCosts) -> SchemeCosts:
        """bfloat16: an alltoall of all slices, their sum, and an allgather."""
        link, carried = self.link, planned_link_bytes(1.0, "cast_two_shot", self.ranks) / 2
        return SchemeCosts(
            "cast_two_shot",
            link.alltoall + link.allgather,
            carried * (link.alltoall_byte + link.allgather_byte),
            2 * codec.decompress,
        )


def _slower(codec: CodecCosts | SummandCosts, factor: float) -> CodecCosts | SummandCosts:
    """Every number of seconds of a compressor, times a factor."""
    compress, decompress = factor * codec.compress, factor * codec.decompress
    if isinstance(codec, CodecCosts):
        bytewise = factor * codec.decompress_byte, factor * codec.compress_byte
        return CodecCosts(compress, decompress, *bytewise)
    return replace(codec, compress=compress, decompress=decompress)


def _lines(scheme: EncodedScheme, codec: CodecCosts, ranks: int, link: LinkCosts) -> SchemeCosts:
    """A scheme's seconds as lines, which they are: read off where network or codec cost nothing."""

    def seconds(numel: int, nbytes: float, codec: CodecCosts, link: LinkCosts) -> float:
        return scheme.seconds(Workload(numel, nbytes, codec), ranks, link)

    unit, free = 1 << 20, NO_LINK
    if link.layers is not None:
        free = replace(NO_LINK, layers=replace(link.layers, node=NO_LINK, peers=NO_LINK))
    latency = seconds(0, 0.0, NO_CODEC, link)
    return SchemeCosts(
        scheme.name,
        latency,
        (seconds(0, unit, NO_CODEC, link) - latency) / unit,
        seconds(unit, 0.0, codec, free) / unit,
        seconds(0, unit, codec, free) / unit,
    )


def dense_step(
    numel: Int64s,
    compute: float,
    ranks: int,
    link: LinkCosts,
    *,
    itemsize: int = 4,
    cap_bytes: float = 25.0 * (1 << 20),
) -> StepSeconds:
    """A step that sends every element through rings over a network that is assumed.

    Args:
        numel: ``int64[L]``: elements of each layer, in the order in which their gradients arrive.
        compute: seconds of forward and backward pass.
        ranks: that reduce gradients.
        link: the network.
        itemsize: bytes that are sent of an element.
        cap_bytes: dense bytes at which a bucket is closed.

    Example:
        >>> found = dense_step(np.array([25_000_000]), 0.3, 4, LinkCosts.of_gigabit())
        >>> f"{found.total:.2f} s, of which {found.exposed:.2f} s exposed"
        '1.50 s, of which 1.20 s exposed'
    """
    sums, codecs = (
        {"sum": SumCosts.of_ring(link)},
        {"none": SummandCosts("none", 0.0, 0.0, "sum", dense=True)},
    )
    costs = MeasuredCosts(ranks, link, sums, codecs, (), cap_bytes, assumed=True).step_costs()
    order = np.arange(len(numel))
    model = StepModel(
        costs,
        compute,
        spread(compute, numel, order),
        order,
        numel,
        (("none",),) * len(numel),
        tuple(np.array([float(itemsize * each)]) for each in numel),
    )
    return model.seconds(np.zeros(len(numel), dtype=np.int64))
