"""What compressors and the network cost, measured where training runs and the same on all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from hvd_adaptive.adaptation.candidates import short_spec
from hvd_adaptive.collectives import AUTO, encoded_schemes, planned_link_bytes
from hvd_adaptive.collectives.base import EncodedScheme
from hvd_adaptive.collectives.costs import CodecCosts, Workload
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import Request
from hvd_adaptive.comm.transport import Transport
from hvd_adaptive.compressors import CastCompressor, Compressor
from hvd_adaptive.compressors.base import GatheredCompressor, LayerContext
from hvd_adaptive.engine.scheme_choice import fastest, measure_codec
from hvd_adaptive.planning.step_time import CompressorCosts, SchemeCosts, StepCosts

__all__ = ["CostMeasurement"]

SMALL, LARGE = 64, 1 << 16
"""Elements of the sums that are timed."""
REPEATS = 4
SAMPLE = (512, 512)
"""Shape of what compressors are timed on."""
LEAST_BYTE = 1e-11
"""Seconds of a byte that no memory is faster than: what noise may not hide."""
NO_LINK, NO_CODEC = LinkCosts(0.0, 0.0, 0.0, 0.0), CodecCosts(0.0, 0.0, 0.0)


class CostMeasurement:
    """Times the network's operations and the compressors; all ranks then know what rank 0 has found.

    Args:
        transport: between the ranks.
        control: agreement between them.
        prefix: of the names of the operations.
        schemes: that buckets may get, as text.
        cap_bytes: dense bytes at which a bucket is closed.
        link: what the network costs, where that is assumed and not measured.
        compute_seconds: of forward and backward pass, where that is assumed.
    """

    def __init__(
        self,
        transport: Transport,
        control: Control,
        prefix: str,
        schemes: Sequence[str],
        cap_bytes: float,
        link: LinkCosts | None = None,
        compute_seconds: float | None = None,
    ) -> None:
        self._transport, self._control, self._prefix = transport, control, prefix
        self._schemes, self._cap_bytes = tuple(schemes), cap_bytes
        self._link, self._compute_seconds = link, compute_seconds
        self._count = itertools.count()

    def __call__(self, compressors: Sequence[Compressor]) -> StepCosts:
        """Measure; all ranks call it at the same time.

        Cost: some operations of 256 KiB at most, and some ms for each compressor.

        Args:
            compressors: in the order in which they were named.
        """
        prefix = f"{self._prefix}.{next(self._count)}"
        link = self._link or self._transport.link_costs(prefix)
        sums = {
            dtype: self._sums(prefix, dtype, link)
            for dtype in dict.fromkeys(map(_summed_as, compressors))
            if dtype is not None
        }
        costs = self._control.decide(lambda: self._costs(compressors, link, sums).to_dict())
        return StepCosts.from_dict(costs)

    def _costs(
        self,
        compressors: Sequence[Compressor],
        link: LinkCosts,
        sums: dict[torch.dtype, SchemeCosts],
    ) -> StepCosts:
        ranks, rows = self._transport.size, {}
        for each in compressors:
            dtype = _summed_as(each)
            if isinstance(each, GatheredCompressor):
                codec = measure_codec(each)
                schemes = tuple(_lines(row, codec, ranks, link) for row in self._encoded(link))
                row = CompressorCosts("encoded", codec.compress, schemes)
            elif dtype is None:
                row = _of_casts_in_two_shots(each, ranks, link)
            else:
                row = _of_summands(each, sums[dtype])
            rows[short_spec(each)] = row
        assumed = self._link is not None
        return StepCosts(rows, ranks, self._cap_bytes, assumed, self._compute_seconds)

    def _encoded(self, link: LinkCosts) -> list[EncodedScheme]:
        """The schemes that buckets of encoded payloads may get."""
        known = encoded_schemes(link.layers is not None)
        if AUTO in self._schemes:
            return list(known.values())
        names = {text.partition(":")[0] for text in self._schemes}
        # one that reduces in nodes reduces in two shots where there are none
        return [scheme for name, scheme in known.items() if name in names] or [known["two_shot"]]

    def _sums(self, prefix: str, dtype: torch.dtype, link: LinkCosts) -> SchemeCosts:
        """An allreduce of this dtype; its bytes are those of a payload."""
        per_byte = planned_link_bytes(1.0, "allreduce", self._transport.size)
        if self._link is not None:
            # a ring: as many bytes in two halves, and each half in as many operations
            return SchemeCosts("allreduce", 2 * link.allgather, per_byte * link.allgather_byte)
        small, large = (
            self._seconds(f"{prefix}.{dtype}.{size}", dtype, size) for size in (SMALL, LARGE)
        )
        byte = (large - small) / ((LARGE - SMALL) * dtype.itemsize)
        return SchemeCosts("allreduce", small, max(LEAST_BYTE, byte))

    def _seconds(self, name: str, dtype: torch.dtype, size: int) -> float:
        """The fastest of some sums; the first is not counted, in which connections are made."""
        seconds = []
        for repeat in range(1 + REPEATS):
            payload = torch.zeros(size, dtype=dtype)
            started = time.perf_counter()
            self._transport.wait(self._transport.submit(Request("allreduce", payload), name, repeat))
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])


def _summed_as(compressor: Compressor) -> torch.dtype | None:
    """The dtype in which Horovod adds its payloads; None where it does not."""
    if isinstance(compressor, GatheredCompressor):
        return None
    dtype: torch.dtype | None = getattr(compressor, "wire_dtype", None) or torch.float32
    return None if dtype == torch.bfloat16 else dtype


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


def _of_summands(compressor: Compressor, summing: SchemeCosts) -> CompressorCosts:
    """A compressor whose payloads an allreduce adds: casts, low rank, random selection."""
    compress, decompress = _codec_seconds(compressor)
    dense = isinstance(compressor, CastCompressor)
    kind = compressor.name if dense else short_spec(compressor)
    # low rank takes two operations, one after the other
    latency = summing.latency * (1 if dense or compressor.selects else 2)
    scheme = replace(summing, latency=latency, element_work=decompress)
    return CompressorCosts(kind, compress, (scheme,), dense)


def _of_casts_in_two_shots(compressor: Compressor, ranks: int, link: LinkCosts) -> CompressorCosts:
    """bfloat16: an alltoall of all slices, their sum, and an allgather."""
    compress, decompress = _codec_seconds(compressor)
    carried = planned_link_bytes(1.0, "cast_two_shot", ranks) / 2
    scheme = SchemeCosts(
        "cast_two_shot",
        link.alltoall + link.allgather,
        carried * (link.alltoall_byte + link.allgather_byte),
        2 * decompress,
    )
    return CompressorCosts(compressor.name, compress, (scheme,), True)


def _codec_seconds(compressor: Compressor) -> tuple[float, float]:
    """Seconds per element of compressing and of decompressing."""
    if compressor.name == "none":
        return 0.0, 0.0  # summed where the gradient is
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLE[0] * SAMPLE[1], generator=generator)
    out, context = torch.zeros_like(x), LayerContext(shape=SAMPLE, state=compressor.new_state())
    if isinstance(compressor, CastCompressor):
        half = torch.zeros_like(x, dtype=compressor.wire_dtype)
        compress = fastest(lambda: compressor.encode(x, half))
        return compress / x.numel(), fastest(lambda: out.copy_(half)) / x.numel()
    payload = compressor.compress_(x.clone(), compressor.level, context)
    compress = fastest(lambda: compressor.compress_(x.clone(), compressor.level, context))
    decompress = fastest(lambda: compressor.decompress_add_(payload, out))
    return compress / x.numel(), decompress / x.numel()
