"""What the network and compressors cost here: measured once, kept, and the same on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
import torch

from hvd_adaptive.collectives.costs import CodecCosts
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.transport import Transport
from hvd_adaptive.compressors import format_spec
from hvd_adaptive.compressors.base import Compressor, GatheredCompressor, LayerBatch
from hvd_adaptive.layers import Layer

__all__ = ["KnownCosts", "measure_codec", "seconds_of", "usual_seconds"]

Timed: TypeAlias = "dict[str, dict[str, Any]]"
"""What compressors take, by their text: fields of :class:`CodecCosts` or of the like."""

SAMPLE = 1 << 18
"""Elements on which a compressor's speed is measured."""
ROUNDS = 3
"""How often it is: the median counts."""
REPEATS, AT_LEAST = 3, 0.006
"""Calls and seconds of each time, at least: a turn of a core that ranks share."""


class KnownCosts:
    """What whoever chooses schemes, and whoever foresees seconds, know together.

    They are part of the checkpoint: a run that is resumed by as many ranks on as many nodes chooses as
    before.

    Args:
        transport: between the ranks.
        control: agreement between them.
        prefix: of the names of the operations that measure the network.
    """

    def __init__(self, transport: Transport, control: Control, prefix: str) -> None:
        self.transport, self.control, self.prefix = transport, control, prefix
        self._link: LinkCosts | None = None
        self._codecs: dict[str, CodecCosts] = {}
        self.excess: dict[str, float] = {}
        """Seconds that a bucket takes longer by a scheme than foreseen, of those that were tried."""

    def forget_network(self) -> None:
        """There are other ranks, or it has changed: it must be measured again."""
        self._link = None
        self.excess = {}

    def network_is_as_known(self) -> bool:
        """Whether it looks as it was measured, to this rank; all ranks call it."""
        look = self.transport.link_look(self.prefix)
        return self._link is not None and self._link.still(*look)

    @property
    def _ranks(self) -> list[int]:
        """How many there are, and how many of them share a node: costs are those of the same ranks."""
        return [self.transport.size, self.transport.topology.ranks_per_node]

    def state_dict(self) -> dict[str, Any] | None:
        """What was measured, the same on all ranks; None before."""
        if self._link is None:
            return None
        codecs = {spec: asdict(costs) for spec, costs in self._codecs.items()}
        tried = dict(self.excess)
        return {"ranks": self._ranks, "link": self._link.to_dict(), "codecs": codecs, "tried": tried}

    def load_state_dict(self, found: Mapping[str, Any] | None) -> None:
        """Go by what :meth:`state_dict` returned, where it is of as many ranks and nodes."""
        if found is None or list(found["ranks"]) != self._ranks:
            return
        self._link = LinkCosts.from_dict(found["link"])
        self._codecs = {spec: CodecCosts(**costs) for spec, costs in found["codecs"].items()}
        self.excess = dict(found.get("tried") or {})  # older states have none

    def codec(self, compressor: Compressor) -> CodecCosts:
        """Of a compressor that :meth:`link` was called with."""
        return self._codecs[_key(compressor)]

    def link(self, compressors: Iterable[Compressor] = ()) -> LinkCosts:
        """Measure what is not known yet; all ranks then know what rank 0 has found.

        Cost: see :func:`~hvd_adaptive.comm.network.measure_link`, once, and 90 ms per compressor.

        Args:
            compressors: whose :meth:`codec` will be asked for; all of gathered payloads.
        """
        missing = {key: each for each in compressors if (key := _key(each)) not in self._codecs}
        if self._link is not None and not missing:
            return self._link
        # no count in the names: ranks that have just joined know of no earlier measurement
        mine = self._link or self.transport.link_costs(self.prefix)
        measured = self.timed(
            lambda: {key: asdict(measure_codec(each)) for key, each in missing.items()}
        )

        def found() -> Timed:
            # a rank that has just joined knows none of them
            known = {key: asdict(each) for key, each in self._codecs.items()}
            return {"": mine.to_dict()} | measured | known

        agreed = self.control.decide(found)
        self._link = LinkCosts.from_dict(agreed.pop(""))
        self._codecs |= {key: CodecCosts(**costs) for key, costs in agreed.items()}
        return self._link

    def timed(self, measure: Callable[[], Timed]) -> Timed:
        """What timing compressors gives: on all ranks at once, as all of them compress at once.

        Where ranks share cores, or the memory, they take from each other what they do in training: one
        of them may have had its core for itself just then, or not at all, and the median counts.
        Virtual ranks stand for processes that have a core each, and only rank 0 measures.
        """
        alone = not self.transport.takes_time and self.transport.rank != 0
        rows: dict[str, list[dict[str, Any]]] = {}
        for found in self.control.allgather({} if alone else measure()):
            for key, row in found.items():
                rows.setdefault(key, []).append(row)
        return {key: _medians(each) for key, each in rows.items()}


def _key(compressor: Compressor) -> str:
    return format_spec(compressor.state_key)


def _medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one compressor, as each rank has timed it; what is no time is the same on all.

    Example:
        >>> _medians([{"compress": seconds, "kind": "fp16"} for seconds in (2e-9, 9e-9, 3e-9)])
        {'compress': 3e-09, 'kind': 'fp16'}
    """
    return {
        name: statistics.median(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }


def measure_codec(compressor: Compressor) -> CodecCosts:
    """Time a compressor on random numbers, in host memory. Cost: 90 ms.

    Compressing is timed at its own level and at the one of most bytes: half of all elements take top-k
    fifteen times as long to write as a hundredth of them to find and to write.
    """
    assert isinstance(compressor, GatheredCompressor), compressor
    x, out = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0)), torch.empty(SAMPLE)
    levels = compressor.levels(Layer(0, "", (SAMPLE,)))
    mildest = max((compressor.level, *levels), key=lambda level: compressor.wire_bytes(SAMPLE, level))
    own, mild = (
        LayerBatch(x.clone(), np.array([0, SAMPLE]), [level]) for level in (compressor.level, mildest)
    )
    body, large = (compressor.compress_layers_(batch)[0] for batch in (own, mild))

    def compress(batch: LayerBatch) -> None:
        batch.x.copy_(x)
        compressor.compress_layers_(batch)

    little, much, one, three = usual_seconds(
        lambda: compress(own),
        lambda: compress(mild),
        lambda: compressor.decompress_layers_sum_([body], [out], 1.0),
        lambda: compressor.decompress_layers_sum_([body] * 3, [out], 1.0),
    )
    payload = max(0.0, three - one) / 2
    more = large.numel() - body.numel()
    byte = max(0.0, much - little) / more if more > 0 else 0.0
    byte = min(byte, little / max(1, body.numel()))  # no less than its own level takes
    return CodecCosts(
        (little - byte * body.numel()) / SAMPLE,
        max(0.0, one - payload) / SAMPLE,
        payload / max(1, body.numel()),
        byte,
    )


def usual_seconds(*works: Callable[[], object]) -> list[float]:
    """Of each, timed in turn: whatever else the machine does at times meets only some of them."""
    rounds = [[seconds_of(work) for work in works] for _ in range(ROUNDS)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def seconds_of(work: Callable[[], object]) -> float:
    """Mean seconds of some calls after the first, which makes buffers."""
    work()
    calls, started = 0, time.perf_counter()
    while calls < REPEATS or time.perf_counter() - started < AT_LEAST:
        work()
        calls += 1
    return (time.perf_counter() - started) / calls
