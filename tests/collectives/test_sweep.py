"""Every gathered compressor with every rule and scheme, and with every number of ranks.

Cases are chosen so that each compressor, rule and scheme are met together, and each of these with each
number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive.buckets import Bucket, build_buckets  # noqa: E402
from hvd_adaptive.collectives import SCHEMES, scheme_named  # noqa: E402
from hvd_adaptive.collectives.base import Buffers, encoder_of  # noqa: E402
from hvd_adaptive.collectives.chunks import Chunks  # noqa: E402
from hvd_adaptive.collectives.shards import Part  # noqa: E402
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank  # noqa: E402
from hvd_adaptive.comm.topology import Topology  # noqa: E402
from hvd_adaptive.compressors import REGISTRY as COMPRESSORS  # noqa: E402
from hvd_adaptive.compressors import GatheredCompressor  # noqa: E402
from hvd_adaptive.config import CompressionConfig  # noqa: E402
from hvd_adaptive.engine.exchange import Exchange  # noqa: E402
from hvd_adaptive.engine.routing import routes_of  # noqa: E402
from hvd_adaptive.feedback import REGISTRY as RULES  # noqa: E402
from hvd_adaptive.feedback import FeedbackContext  # noqa: E402
from hvd_adaptive.feedback import parse as parse_rule  # noqa: E402
from hvd_adaptive.layers import Layer, PayloadKind  # noqa: E402
from hvd_adaptive.telemetry import Meter  # noqa: E402
from hvd_adaptive.wire import frame  # noqa: E402
from tests.collectives.helpers import Recorder  # noqa: E402

LAYERS = (Layer(0, "large", (50, 70)), Layer(1, "small", (1200,)))
OPTIONS = {"topk": "density=0.1", "globaltopk": "density=0.1", "dgc": "density=0.1"} | {
    "redsync": "density=0.1",
    "threshold": "threshold=1.0",
}
"""Of compressors whose defaults send too little of small layers."""
RANKS = (1, 2, 3, 4, 7, 16, 64)
NODES = {4: 2, 16: 4, 64: 4}
"""Ranks of a node, for the numbers of ranks with which hierarchical differs from two-shot."""


@dataclass(frozen=True)
class Case:
    """One compressor, rule, scheme, and number of ranks."""

    compressor: str
    rule: str
    scheme: str
    ranks: int

    @property
    def met(self) -> set[tuple[object, ...]]:
        """What is met together in it."""
        names = (self.compressor, self.rule, self.scheme)
        return {names, *((name, self.ranks) for name in names)}

    @property
    def topology(self) -> Topology:
        """Nodes where the scheme knows them."""
        per_node = NODES[self.ranks] if self.scheme == "hierarchical" else 1
        return Topology.of_nodes(self.ranks, per_node)

    @property
    def bucket(self) -> Bucket:
        """Both layers, compressed alike."""
        spec = f"{self.compressor}:{OPTIONS.get(self.compressor, '')}".rstrip(":")
        config = CompressionConfig.of(spec, {"small": spec}, self.rule, self.scheme)
        (bucket,) = build_buckets(LAYERS, routes_of(config, LAYERS, frozenset()), 1 << 30)
        return bucket


def fits(case: Case) -> bool:
    selects = COMPRESSORS[case.compressor].selects or not RULES[case.rule].needs_selection
    return selects and (case.scheme != "hierarchical" or case.ranks in NODES)


def chosen() -> list[Case]:
    """As few cases as are found by taking that that has most that is new, again and again."""
    gathered = [name for name, member in COMPRESSORS.items() if issubclass(member, GatheredCompressor)]
    encoded = [name for name, each in SCHEMES.items() if each.carries is PayloadKind.ENCODED]
    every = [
        case for row in itertools.product(gathered, RULES, encoded, RANKS) if fits(case := Case(*row))
    ]
    missing = set().union(*(case.met for case in every))
    cases = []
    while missing:
        best = max(every, key=lambda case: (len(case.met & missing), -case.ranks))
        cases.append(best)
        missing -= best.met
    return cases


CASES = chosen()


def gradients(rank: int, bucket: Bucket) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(layer.shape, generator=generator) ** 3 for layer in bucket.layers]


@dataclass
class Outcome:
    """One rank after a step."""

    transport: Recorder
    grads: list[Tensor]
    kept: list[Tensor]


def run(case: Case, bucket: Bucket) -> list[Outcome]:
    def step(rank: LocalRank) -> Outcome:
        transport = Recorder(rank)
        exchange = Exchange(transport, Meter(), "test", rank=rank.rank)
        rule = parse_rule(case.rule)
        assert rule is not None
        state = rule.new_state(FeedbackContext(lambda _: 0.1, lambda: case.ranks))
        state.attach([bucket], {})
        exchange.attach([bucket], {bucket.index: state})
        grads = gradients(rank.rank, bucket)
        exchange.begin_step(0)
        exchange.start(bucket, grads)
        exchange.finish()
        state.keep_owned([])
        kept = [held for slots in state.kept().values() for held in slots.values()]
        return Outcome(transport, grads, kept)

    return LocalGroup(case.ranks, case.topology).run(step)


def add_parts(
    parts: Sequence[Part], codes: Sequence[Tensor], flats: list[Tensor], buffers: Buffers
) -> None:
    """Decode one by one, and add in float64."""
    offsets = buffers.offsets
    for part, code in zip(parts, codes, strict=True):
        numels = np.diff(part.edges).tolist()
        outs = [torch.zeros(numel) for numel in numels]
        encoder_of(part.segment).decompress_layers_add_(code, outs, 1.0)
        for layer, start, out in zip(part.layers, part.edges[:-1].tolist(), outs, strict=True):
            at = start - int(offsets[layer])
            flats[layer][at : at + out.numel()] += out.double()


def decoded(bucket: Bucket, gathered: Tensor, members: int, in_shards: bool) -> list[Tensor]:
    """What the frames that were gathered last hold, summed in float64, by layer."""
    buffers = Buffers(bucket)
    flats = [torch.zeros(layer.numel, dtype=torch.float64) for layer in bucket.layers]
    bodies, _ = frame.split_frames(gathered, bucket.index, len(bucket.layers), members)
    offsets = buffers.offsets
    whole = [
        Part(
            segment,
            offsets[segment.start : segment.stop + 1],
            tuple(range(segment.start, segment.stop)),
        )
        for segment in bucket.segments
    ]
    for rank, body in enumerate(bodies):
        parts = buffers.shards(members).parts[rank] if in_shards else whole
        codes = frame.split_parts(body, len(parts) + in_shards)
        add_parts(parts, codes[: len(parts)], flats, buffers)
    return flats


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mean_is_that_of_the_payloads_and_links_carry_what_is_foreseen(case: Case) -> None:
    bucket, topology = case.bucket, case.topology
    outcomes = run(case, bucket)
    first = outcomes[0]
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome.grads, first.grads, strict=True))
    total = [torch.zeros(layer.numel, dtype=torch.float64) for layer in bucket.layers]
    if topology.is_layered:  # each rank of a node has another chunk
        per_node = topology.ranks_per_node
        for rank in topology.neighbors(0):
            chunks = Chunks(bucket, per_node, topology.local_rank(rank))
            gathered = outcomes[rank].transport.gathered[-1]
            pieces = decoded(chunks.own, gathered, case.ranks // per_node, in_shards=True)
            flat, start = torch.cat(pieces), chunks.start
            for layer, offset in zip(total, Buffers(bucket).offsets.tolist(), strict=False):
                a, b = max(start, offset), min(chunks.stop, offset + layer.numel())
                if b > a:
                    layer[a - offset : b - offset] += flat[a - start : b - start]
    else:
        total = decoded(
            bucket, first.transport.gathered[-1], case.ranks, scheme_named(case.scheme).recompresses
        )
    for position, layer in enumerate(total):
        found, wanted = first.grads[position].double().view(-1), layer / case.ranks
        limit = 1e-6 * (1 + float(wanted.abs().max()))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=limit)
    if case.rule == "ef":
        check_that_nothing_is_lost(bucket, outcomes)
    check_bytes(case, outcomes)


def check_that_nothing_is_lost(bucket: Bucket, outcomes: Sequence[Outcome]) -> None:
    """What steps and what waits are the gradients."""
    for position in range(len(bucket.layers)):
        left = len(outcomes) * outcomes[0].grads[position].double()
        for rank, outcome in enumerate(outcomes):
            left += outcome.kept[position].double().view(left.shape)
            left -= gradients(rank, bucket)[position].double()
        assert float(left.abs().max()) < 1e-4 * len(outcomes) ** 0.5


def check_bytes(case: Case, outcomes: Sequence[Outcome]) -> None:
    """By rank, and by shot, payloads differ in size: their means do what the formula says."""
    scheme, per_node = scheme_named(case.scheme), case.topology.ranks_per_node
    payloads = [outcome.transport.payloads for outcome in outcomes]
    payload = per_node * sum(each[0] for each in payloads) / case.ranks
    if scheme.recompresses:
        payload = (payload + sum(each[1] for each in payloads)) / 2
    sent = sum(outcome.transport.sent for outcome in outcomes) / case.ranks
    assert sent == pytest.approx(scheme.link_bytes(payload, case.ranks, per_node), rel=0.05)


def test_what_fits_together_is_met() -> None:
    met = set().union(*(case.met for case in CASES))
    gathered = [name for name, member in COMPRESSORS.items() if issubclass(member, GatheredCompressor)]
    assert all((name, ranks) in met for name in (*gathered, *RULES) for ranks in RANKS)
    for name, rule in itertools.product(gathered, RULES):
        if COMPRESSORS[name].selects or not RULES[rule].needs_selection:
            assert all((name, rule, each) in met for each in ("allgather", "two_shot", "hierarchical"))
