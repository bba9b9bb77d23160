"""Scheme choice: for each bucket the collective scheme that is foreseen to be fastest.

Costs are measured once for each set of ranks and agreed on (see
:mod:`hvd_adaptive.engine.known_costs`), so all ranks choose alike and say nothing; after a trial, ranks
agree on what rank 0's steps took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import numpy as np

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives import AUTO, encoded_schemes
from hvd_adaptive.collectives.costs import CodecCosts, Workload
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.engine.known_costs import KnownCosts
from hvd_adaptive.engine.scheme_trial import SchemeTrial
from hvd_adaptive.feedback import parse as parse_rule
from hvd_adaptive.planning.explanation import in_ms

CLOSE = 1.5
"""Schemes that are foreseen to take up to this much longer than the fastest are tried."""


class SchemeChoice:
    """Replaces the scheme ``auto`` of buckets.

    Schemes that are foreseen to take about as long are tried (:mod:`hvd_adaptive.engine.scheme_trial`)
    in the first steps, each of all buckets; then what they took counts, too.

    Args:
        costs: of network and compressors.
    """

    def __init__(self, costs: KnownCosts) -> None:
        self._costs = costs
        self._transport = costs.transport
        self._trial: SchemeTrial | None = None
        self._result = ""
        self.reasons: tuple[str, ...] = ()
        """What was foreseen for each bucket of the last layout, as text."""

    def forget(self) -> None:
        """There are other ranks: a trial that has begun is given up."""
        self._trial, self._result = None, ""

    def choose(
        self, buckets: Sequence[Bucket], per_rank_levels: bool, tries: bool = False
    ) -> tuple[Bucket, ...]:
        """The buckets, each with a scheme that has a name. All ranks call it.

        Args:
            buckets: in launch order.
            per_rank_levels: whether other ranks have other levels.
            tries: whether the next steps may try schemes.
        """
        undecided = [bucket for bucket in buckets if bucket.scheme == AUTO]
        self.reasons = ()
        if not undecided:
            self.forget()
            return tuple(buckets)
        link = self._costs.link(part.compressor for each in undecided for part in each.segments)
        foreseen = {each.index: self._foresee(each, link, per_rank_levels) for each in undecided}
        if tries and self._transport.takes_time and not self._costs.excess:
            self._continue_trial(list(foreseen.values()))
        else:
            self._trial = None
        self.reasons = (f"network of {self._transport.size} ranks: {link}", self._of_nodes(link))
        if self._result:
            self.reasons += (self._result,)
        return tuple(
            self._chosen(bucket, foreseen[bucket.index]) if bucket.scheme == AUTO else bucket
            for bucket in buckets
        )

    def end_step(self, now: float) -> bool:
        """Note that a step has ended; whether buckets must be built again, of other schemes.

        All ranks call it at the end of the same step.

        Args:
            now: seconds of a clock.
        """
        if self._trial is None or not self._trial.end_step(now):
            return False
        if self._trial.ended:
            trial, self._trial = self._trial, None
            self._costs.excess = self._costs.control.decide(trial.excess)
            steps = _told(trial.step_seconds())
            self._result = f"steps with all buckets by one scheme, tried here: {steps}"
        return True

    def _continue_trial(self, foreseen: Sequence[Mapping[str, float]]) -> None:
        """Begin a trial where it is close, or go on with the one of the same schemes."""
        # one bucket's feedback may rule out what another's does not
        names = [name for name in foreseen[0] if all(name in each for each in foreseen)]
        sums = {name: sum(each[name] for each in foreseen) for name in names}
        close = {name: each for name, each in sums.items() if each <= CLOSE * min(sums.values())}
        if len(close) == 1:
            self._trial = None
        elif self._trial is None or self._trial.schemes != list(close):
            self._trial = SchemeTrial(close, len(foreseen))

    def _foresee(self, bucket: Bucket, link: LinkCosts, per_rank_levels: bool) -> dict[str, float]:
        """Seconds of a bucket by each scheme that can reduce it."""
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
        return {name: scheme.seconds(work, ranks, link) for name, scheme in schemes.items()}

    def _chosen(self, bucket: Bucket, foreseen: Mapping[str, float]) -> Bucket:
        if self._trial is not None:
            scheme, why = self._trial.scheme, "is being tried; "
        else:
            excess = self._costs.excess
            most = max(excess.values(), default=0.0)  # what was not tried was foreseen to be slow
            scheme = min(foreseen, key=lambda name: foreseen[name] + excess.get(name, most))
            why = ""
        self.reasons += (f"bucket {bucket.index}: {scheme} ({why}{_told(foreseen)} foreseen)",)
        return replace(bucket, scheme=scheme)

    def _of_nodes(self, link: LinkCosts) -> str:
        """What operations cost in nodes and between them, or why nothing is reduced in nodes."""
        if link.layers is None:
            return f"hierarchical is not considered: {self._transport.obstacle or 'costs unknown'}"
        return f"in a node: {link.layers.node}; between nodes: {link.layers.peers}"


def _told(seconds: Mapping[str, float]) -> str:
    """Of each scheme."""
    return ", ".join(f"{name} {in_ms(each)}" for name, each in seconds.items())


def _together(parts: Sequence[Workload]) -> Workload:
    """Several compressors' work as that of one."""
    numel, nbytes = sum(part.numel for part in parts), sum(part.nbytes for part in parts)
    rows = np.array([(part.numel, part.numel, part.nbytes, part.nbytes) for part in parts], float)
    costs = np.array([astuple(part.codec) for part in parts])
    means = (rows * costs).sum(0) / np.maximum(1, rows.sum(0))
    return Workload(numel, nbytes, CodecCosts(*means.tolist()))
