"""Seconds of a training step, from what its buckets, compressors and schemes cost: a pure function.

A step has one thread that computes, and one network that does one operation after the other::

    compute   |--- forward, backward ---[c0]----[c1]---[c2]|  wait  [d0] wait [d1][d2]
    network                                 |--- b0 ---|--- b1 ---|-- b2 --|

Bucket ``b`` is launched when its last gradient is there and it has been compressed; compressing delays
all that follows. The network takes it when it is free. At the end buckets are waited for in launch
order, and decompressed. Time spent waiting is *exposed* communication.

Costs are lines: seconds per element, per payload byte, and per operation, measured where training runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s

__all__ = [
    "CompressorCosts",
    "SchemeCosts",
    "StepCosts",
    "StepModel",
    "StepSeconds",
    "arrival_order",
    "calibrated",
    "spread",
    "timeline",
]


@dataclass(frozen=True, slots=True)
class SchemeCosts:
    """What reducing a bucket by one scheme costs among the ranks that there are, as lines.

    Args:
        name: of the scheme.
        latency: seconds of the network that any bucket takes.
        byte: seconds of the network per byte of a rank's payload.
        element_work: seconds of computing per element after the first operation: decompressing.
        byte_work: the same per byte of a rank's payload.
    """

    name: str
    latency: float
    byte: float
    element_work: float = 0.0
    byte_work: float = 0.0


@dataclass(frozen=True, slots=True)
class CompressorCosts:
    """What sending with one compressor costs.

    Args:
        kind: layers of one kind share buckets.
        compress: seconds per element.
        schemes: that can reduce its payloads; each bucket gets the fastest.
        dense: whether it sends every element, rounded to half precision at most.
        compress_byte: seconds of compressing per byte of the payload, besides.
    """

    kind: str
    compress: float
    schemes: tuple[SchemeCosts, ...]
    dense: bool = False
    compress_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What is known of compressors and network.

    Args:
        compressors: by their specification.
        ranks: that reduce gradients.
        cap_bytes: dense bytes at which a bucket is closed.
        assumed: whether nobody has measured the network: then times of steps say nothing about it.
        compute_seconds: of forward and backward pass, where that is assumed.
    """

    compressors: Mapping[str, CompressorCosts]
    ranks: int
    cap_bytes: float = 25.0 * (1 << 20)
    assumed: bool = False
    compute_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> StepCosts:
        """From :meth:`to_dict`."""
        compressors = {
            spec: CompressorCosts(
                **{**row, "schemes": tuple(SchemeCosts(**each) for each in row["schemes"])}
            )
            for spec, row in state["compressors"].items()
        }
        return cls(**{**state, "compressors": compressors})


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where the time of a step goes.

    Args:
        compute: forward and backward pass, and whatever else is not communication.
        compress: compressing.
        exposed: waiting for the network.
        decompress: decompressing, and adding up.
        network: seconds in which the network is busy, exposed or not.
    """

    compute: float
    compress: float
    exposed: float
    decompress: float
    network: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.compress + self.exposed + self.decompress

    @property
    def exposed_share(self) -> float:
        """Of its seconds, what is waiting for the network: 0 to 1.

        Example:
            >>> StepSeconds(0.03, 0.0, exposed=0.01, decompress=0.0, network=0.02).exposed_share
            0.25
        """
        return self.exposed / max(self.total, 1e-12)


def timeline(
    compute: float, ready: Float64s, compress: Float64s, network: Float64s, decompress: Float64s
) -> StepSeconds:
    """Play a step through: buckets overlap with the backward pass as their order allows.

    Args:
        compute: seconds of forward and backward pass.
        ready: ``float64[B]``: when each bucket's last gradient is there, in seconds before the end of
            the backward pass (at most 0), rising.
        compress: ``float64[B]``: seconds of computing before a bucket is launched.
        network: ``float64[B]``: seconds that a bucket takes of the network.
        decompress: ``float64[B]``: seconds of computing after that.

    Example:
        >>> found = timeline(1.0, np.array([-0.5, 0.0]), np.zeros(2), np.array([0.6, 0.3]), np.zeros(2))
        >>> round(found.total, 6), round(found.exposed, 6)
        (1.4, 0.4)
    """
    launched = compute + ready + np.cumsum(compress)
    free, done = 0.0, np.zeros(len(network))
    for bucket, seconds in enumerate(network.tolist()):
        free = max(free, float(launched[bucket])) + seconds
        done[bucket] = free
    now, exposed = compute + float(compress.sum()), 0.0
    for bucket, seconds in enumerate(decompress.tolist()):
        wait = max(0.0, float(done[bucket]) - now)
        exposed += wait
        now += wait + seconds
    sums = [float(each.sum()) for each in (compress, decompress, network)]
    return StepSeconds(compute, sums[0], exposed, sums[1], sums[2])


_COMPRESSING = ("compress", "compress_byte")


@dataclass(frozen=True, eq=False)
class StepModel:
    """A model's step as a function of what each layer does.

    Layers stand in any order; a choice is one index per layer into ``specs`` and ``payloads``.

    Args:
        costs: of compressors and network.
        compute: seconds of forward and backward pass.
        ready: ``float64[L]``: when the bucket that a layer is sent in today has been launched, in
            seconds before the end of the backward pass (at most 0).
        order: ``int64[L]``: layers in the order in which their gradients arrive.
        numel: ``int64[L]``: elements of each layer.
        specs: the compressor of every candidate of every layer, as text.
        payloads: ``float64[C_l]`` per layer: bytes that one rank sends.
        network: factor of all seconds of the network; what dense steps have taken shows it.
    """

    costs: StepCosts
    compute: float
    ready: Float64s
    order: Int64s
    numel: Int64s
    specs: tuple[tuple[str, ...], ...]
    payloads: tuple[Float64s, ...]
    network: float = 1.0

    def seconds(self, choice: Int64s) -> StepSeconds:
        """Of a step in which every layer does what the choice says. Cost: O(layers)."""
        buckets = self._buckets(choice)
        rows = np.array([self._bucket(members, choice) for members in buckets]).reshape(-1, 4)
        ready, compress, network, decompress = rows.T
        return timeline(self.compute, np.maximum.accumulate(ready), compress, network, decompress)

    def prices(self, exposed: float = 1.0) -> tuple[Float64s, ...]:
        """Seconds that each candidate of each layer adds to a step: what a knapsack can add up.

        Args:
            exposed: share of the network's seconds that a step waits for.
        """
        found = []
        lines = {specs: self._lines(specs) for specs in set(self.specs)}
        for numel, specs, payloads in zip(self.numel, self.specs, self.payloads, strict=True):
            (compress, compress_byte), (byte, element_work, byte_work) = lines[specs]
            by_scheme = exposed * self.network * byte + byte_work
            by_scheme = by_scheme * payloads + element_work * float(numel)
            compressing = compress * float(numel) + compress_byte * payloads
            found.append(compressing + by_scheme.min(axis=0))
        return tuple(found)

    def _lines(self, specs: tuple[str, ...]) -> tuple[list[Float64s], list[Float64s]]:
        """Costs of each candidate: ``[C]`` of compressing, ``[S, C]`` of each of its schemes."""
        rows = [self.costs.compressors[spec] for spec in specs]
        most = max((len(row.schemes) for row in rows), default=0)
        # a scheme again where others have more
        schemes = [row.schemes + row.schemes[:1] * (most - len(row.schemes)) for row in rows]
        of_schemes = [
            np.array([[getattr(each, name) for each in row] for row in schemes], dtype=np.float64).T
            for name in ("byte", "element_work", "byte_work")
        ]
        compressing = [np.array([getattr(row, name) for row in rows]) for name in _COMPRESSING]
        return compressing, of_schemes

    @functools.cached_property
    def _places(self) -> Int64s:
        """Where each layer stands in the order."""
        return np.argsort(self.order)

    def _buckets(self, choice: Int64s) -> list[list[int]]:
        """Layers that are sent together, in launch order: a bucket is closed when it is full."""
        running: dict[str, tuple[list[int], float]] = {}
        closed: list[list[int]] = []
        for layer in self.order.tolist():
            kind = self.costs.compressors[self.specs[layer][choice[layer]]].kind
            members, nbytes = running.pop(kind, ([], 0.0))
            members.append(layer)
            nbytes += 4.0 * float(self.numel[layer])
            if nbytes >= self.costs.cap_bytes:
                closed.append(members)
            else:
                running[kind] = members, nbytes
        closed.extend(members for members, _ in running.values())
        return sorted(closed, key=lambda members: int(self._places[members[-1]]))

    def _bucket(self, members: Sequence[int], choice: Int64s) -> tuple[float, float, float, float]:
        """When it is ready, and its seconds of compressing, network and decompressing."""
        compress = 0.0
        schemes: dict[str, list[float]] = {}
        for layer in members:
            index, numel = int(choice[layer]), float(self.numel[layer])
            costs = self.costs.compressors[self.specs[layer][index]]
            nbytes = float(self.payloads[layer][index])
            compress += costs.compress * numel + costs.compress_byte * nbytes
            for each in costs.schemes:
                sums = schemes.setdefault(each.name, [0.0, 0.0, 0.0, 0.0])
                sums[0] = max(sums[0], each.latency)
                sums[1] += each.byte * nbytes
                sums[2] += each.element_work * numel + each.byte_work * nbytes
                sums[3] += 1
        able = [sums for sums in schemes.values() if sums[3] == len(members)]
        latency, carried, work, _ = min(
            able, key=lambda sums: self.network * (sums[0] + sums[1]) + sums[2]
        )
        ready = max(float(self.ready[layer]) for layer in members)
        return ready, compress, self.network * (latency + carried), work


# --- from what steps have shown -------------------------------------------------------------------


def arrival_order(buckets: Int64s) -> Int64s:
    """Layers in the order in which their gradients arrive: within a bucket, the last come first.

    Args:
        buckets: ``int64[L]``: of each layer, in launch order.

    Example:
        >>> arrival_order(np.array([1, 0, 0])).tolist()
        [2, 1, 0]
    """
    return np.lexsort((-np.arange(len(buckets)), buckets)).astype(np.int64)


def spread(seconds: float, numel: Int64s, order: Int64s) -> Float64s:
    """When gradients arrive, where nobody has seen it: in the last two thirds, by their elements.

    Args:
        seconds: of forward and backward pass.
        numel: ``int64[L]``: elements of each layer.
        order: ``int64[L]``: layers in the order in which they arrive.

    Returns:
        ``float64[L]``: seconds before the end; at most 0.

    Example:
        >>> spread(0.3, np.array([1, 3]), np.array([1, 0])).round(3).tolist()
        [-0.0, -0.05]
    """
    ready = np.zeros(len(numel))
    done = np.cumsum(numel[order]) / max(1, int(numel.sum()))
    ready[order] = -2 / 3 * seconds * (1 - done)
    return ready


_MOST_NETWORK = 16.0
"""By what factor a network may be slower, or faster, than its measured costs say."""
_NO_DIFFERENCE = 5e-4
"""Share of a step's seconds that explains nothing."""


def calibrated(model: StepModel, choice: Int64s, seconds: float, computing: float) -> StepModel:
    """The model that foresees for a choice what its steps have taken.

    Computing is what steps did not wait for, without compressing. The factor of the network is the one
    with which the rest is exposed; of several, as where all communication is hidden, the nearest to 1.

    Args:
        model: as measured.
        choice: what the steps did.
        seconds: of one of them.
        computing: of these, those that were not exposed communication.

    Example:
        >>> costs = StepCosts({"x": CompressorCosts("x", 0.0, (SchemeCosts("s", 0.0, 1.0),), True)}, 2)
        >>> numel, order = np.array([1]), np.array([0])
        >>> model = StepModel(costs, 0.0, np.zeros(1), order, numel, (("x",),), (np.array([2.0]),))
        >>> found = calibrated(model, np.array([0]), seconds=7.0, computing=1.0)
        >>> found.compute, round(found.network, 2)
        (1.0, 3.0)
    """
    work = model.seconds(choice)
    model = replace(model, compute=max(0.0, computing - work.compress - work.decompress))
    wanted = max(0.0, seconds - computing)
    return replace(model, network=network_factor(model, choice, wanted, _NO_DIFFERENCE * seconds))


def network_factor(model: StepModel, choice: Int64s, wanted: float, slack: float = 1e-5) -> float:
    """The factor of the network with which so many seconds are exposed; of several the nearest to 1.

    Args:
        model: as measured.
        choice: what the steps did.
        wanted: seconds of exposed communication.
        slack: seconds that are no difference.
    """

    def exposed(factor: float) -> float:
        return replace(model, network=factor).seconds(choice).exposed

    off = exposed(1.0) - wanted
    if abs(off) <= slack:
        return 1.0
    low, high = (1 / _MOST_NETWORK, 1.0) if off > 0 else (1.0, _MOST_NETWORK)
    bound = wanted + math.copysign(slack, off)
    for _ in range(24):
        factor = math.sqrt(low * high)
        if exposed(factor) < bound:
            low = factor
        else:
            high = factor
    return math.sqrt(low * high)
