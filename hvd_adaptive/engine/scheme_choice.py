"""Scheme choice: for each bucket the collective scheme that is foreseen to be fastest.

Costs are measured once for each set of ranks and agreed on (see
:mod:`hvd_adaptive.engine.known_costs`), so all ranks choose alike and say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives import AUTO, encoded_schemes
from hvd_adaptive.collectives.costs import CodecCosts, Workload
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.engine.known_costs import KnownCosts
from hvd_adaptive.feedback import parse as parse_rule


class SchemeChoice:
    """Replaces the scheme ``auto`` of buckets.

    Args:
        costs: of network and compressors.
    """

    def __init__(self, costs: KnownCosts) -> None:
        self._costs = costs
        self._transport = costs.transport
        self.reasons: tuple[str, ...] = ()
        """What was foreseen for each bucket of the last layout, as text."""

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
        link = self._costs.link(part.compressor for each in undecided for part in each.segments)
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
            codec = self._costs.codec(segment.compressor)
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


def _together(parts: Sequence[Workload]) -> Workload:
    """Several compressors' work as that of one."""
    numel, nbytes = sum(part.numel for part in parts), sum(part.nbytes for part in parts)
    rows = np.array([(part.numel, part.numel, part.nbytes) for part in parts], float)
    costs = np.array(
        [(each.codec.compress, each.codec.decompress, each.codec.decompress_byte) for each in parts]
    )
    means = (rows * costs).sum(0) / np.maximum(1, rows.sum(0))
    return Workload(numel, nbytes, CodecCosts(*means.tolist()))
