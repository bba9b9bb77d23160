"""Scheme choice: for each bucket the collective scheme that is foreseen to be fastest.

Costs are measured once for each set of ranks and agreed on, so all ranks choose alike and say nothing.
They are part of the checkpoint: a run that is resumed by as many ranks on as many nodes chooses as
before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives import AUTO, encoded_schemes
from hvd_adaptive.collectives.costs import CodecCosts, Workload
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.transport import Transport
from hvd_adaptive.compressors import Compressor, format_spec
from hvd_adaptive.compressors.base import GatheredCompressor, LayerBatch
from hvd_adaptive.feedback import parse as parse_rule

SAMPLE = 1 << 18
"""Elements on which a compressor's speed is measured."""
REPEATS = 3


class SchemeChoice:
    """Replaces the scheme ``auto`` of buckets.

    Args:
        transport: between the ranks.
        control: agreement between them.
        prefix: of the names of the operations that measure the network.
    """

    def __init__(self, transport: Transport, control: Control, prefix: str) -> None:
        self._transport, self._control, self._prefix = transport, control, prefix
        self._link: LinkCosts | None = None
        self._codecs: dict[str, CodecCosts] = {}
        self.reasons: tuple[str, ...] = ()
        """What was foreseen for each bucket of the last layout, as text."""

    def forget_ranks(self) -> None:
        """There are other ranks: the network must be measured again."""
        self._link = None

    @property
    def _ranks(self) -> list[int]:
        """How many there are, and how many of them share a node: costs are those of the same ranks."""
        return [self._transport.size, self._transport.topology.ranks_per_node]

    def state_dict(self) -> dict[str, Any] | None:
        """What was measured, the same on all ranks; None before."""
        if self._link is None:
            return None
        codecs = {spec: asdict(costs) for spec, costs in self._codecs.items()}
        return {"ranks": self._ranks, "link": self._link.to_dict(), "codecs": codecs}

    def load_state_dict(self, found: Mapping[str, Any] | None) -> None:
        """Choose by what :meth:`state_dict` returned, where it is of as many ranks and nodes."""
        if found is None or list(found["ranks"]) != self._ranks:
            return
        self._link = LinkCosts.from_dict(found["link"])
        self._codecs = {spec: CodecCosts(**costs) for spec, costs in found["codecs"].items()}

    def choose(self, buckets: Sequence[Bucket], per_rank_levels: bool) -> tuple[Bucket, ...]:
        """The buckets, each with a scheme that has a name. All ranks call it.

        Args:
            buckets: in launch order.
            per_rank_levels: whether other ranks have other levels.
        """
        undecided = [bucket for bucket in buckets if bucket.scheme == AUTO]
        self.reasons = ()
        if not undecided:
            return tuple(buckets)
        link = self._measured(part.compressor for each in undecided for part in each.segments)
        self.reasons = (f"network of {self._transport.size} ranks: {link}", self._of_nodes(link))
        return tuple(
            self._chosen(bucket, link, per_rank_levels) if bucket.scheme == AUTO else bucket
            for bucket in buckets
        )

    def _chosen(self, bucket: Bucket, link: LinkCosts, per_rank_levels: bool) -> Bucket:
        parts = []
        for segment in bucket.segments:
            layers = bucket.layers[segment.start : segment.stop]
            own = [segment.compressor.level] * len(layers) if per_rank_levels else None
            nbytes = sum(bucket.wire_bytes(segment, own))
            codec = self._codecs[format_spec(segment.compressor.state_key)]
            parts.append(Workload(sum(layer.numel for layer in layers), nbytes, codec))
        work = _together(parts)
        rule = parse_rule(bucket.feedback)
        # what looks at each rank's whole gradient cannot follow the sum of a node
        in_nodes = link.layers is not None and not (rule is not None and rule.needs_all)
        ranks, schemes = self._transport.size, encoded_schemes(in_nodes)
        seconds = {name: scheme.seconds(work, ranks, link) for name, scheme in schemes.items()}
        fastest = min(seconds, key=lambda name: seconds[name])
        foreseen = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in seconds.items())
        self.reasons += (f"bucket {bucket.index}: {fastest} ({foreseen} foreseen)",)
        return replace(bucket, scheme=fastest)

    def _of_nodes(self, link: LinkCosts) -> str:
        """What operations cost in nodes and between them, or why nothing is reduced in nodes."""
        if link.layers is None:
            return f"hierarchical is not considered: {self._transport.obstacle or 'costs unknown'}"
        return f"in a node: {link.layers.node}; between nodes: {link.layers.peers}"

    def _measured(self, compressors: Iterable[Compressor]) -> LinkCosts:
        """Measure what is not known yet; all ranks then know what rank 0 has found."""
        missing = {
            spec: each
            for each in compressors
            if (spec := format_spec(each.state_key)) not in self._codecs
        }
        if self._link is not None and not missing:
            return self._link
        mine = self._link or self._transport.link_costs(self._prefix)

        def found() -> dict[str, dict[str, Any]]:
            return {"": mine.to_dict()} | {
                spec: asdict(measure_codec(each)) for spec, each in missing.items()
            }

        agreed = self._control.decide(found)
        self._link = LinkCosts.from_dict(agreed.pop(""))
        self._codecs |= {spec: CodecCosts(**costs) for spec, costs in agreed.items()}
        return self._link


def _together(parts: Sequence[Workload]) -> Workload:
    """Several compressors' work as that of one."""
    numel, nbytes = sum(part.numel for part in parts), sum(part.nbytes for part in parts)
    rows = np.array([(part.numel, part.numel, part.nbytes) for part in parts], float)
    costs = np.array(
        [(each.codec.compress, each.codec.decompress, each.codec.decompress_byte) for each in parts]
    )
    means = (rows * costs).sum(0) / np.maximum(1, rows.sum(0))
    return Workload(numel, nbytes, CodecCosts(*means.tolist()))


def measure_codec(compressor: Compressor) -> CodecCosts:
    """Time a compressor on random numbers, in host memory. Cost: some ms."""
    assert isinstance(compressor, GatheredCompressor), compressor
    x, out = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)), torch.empty(SAMPLE)
    batch = LayerBatch(x.clone(), np.array([0, SAMPLE]), [compressor.level])
    body, _ = compressor.compress_layers_(batch)

    def compress() -> None:
        batch.x.copy_(x)
        compressor.compress_layers_(batch)

    compressing = fastest(compress)
    one = fastest(lambda: compressor.decompress_layers_sum_([body], [out], 1.0))
    three = fastest(lambda: compressor.decompress_layers_sum_([body] * 3, [out], 1.0))
    payload = max(0.0, three - one) / 2
    return CodecCosts(
        compressing / SAMPLE, max(0.0, one - payload) / SAMPLE, payload / max(1, body.numel())
    )


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
