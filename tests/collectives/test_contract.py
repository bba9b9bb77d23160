"""What every scheme keeps: the mean of what was sent, the same operations on all ranks, its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive.buckets import Bucket, build_buckets  # noqa: E402
from hvd_adaptive.collectives import SCHEMES, scheme_named  # noqa: E402
from hvd_adaptive.collectives.shards import GRAIN  # noqa: E402
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank  # noqa: E402
from hvd_adaptive.comm.topology import Topology  # noqa: E402
from hvd_adaptive.config import CompressionConfig  # noqa: E402
from hvd_adaptive.engine.exchange import Exchange  # noqa: E402
from hvd_adaptive.engine.routing import routes_of  # noqa: E402
from hvd_adaptive.feedback import FeedbackContext, parse  # noqa: E402
from hvd_adaptive.layers import Layer, PayloadKind  # noqa: E402
from hvd_adaptive.telemetry import Meter  # noqa: E402
from tests.collectives.helpers import Recorder  # noqa: E402

FLAT = {str(size): Topology.flat(size) for size in (1, 2, 3, 4, 7, 16, 64)}
LAYERED = {
    "2x2": Topology.of_nodes(4, 2),
    "2x4": Topology.of_nodes(8, 4),
    "3x2": Topology.of_nodes(6, 2),
    "4x4": Topology.of_nodes(16, 4),
    "2x2 in turns": Topology(("a", "b", "b", "a")),
    "uneven": Topology(("a", "a", "b", "c", "c")),
}
GROUPS = FLAT | LAYERED


@dataclass(frozen=True)
class Member:
    """One scheme, and a compressor whose payloads it carries.

    Args:
        scheme: as text.
        spec: of the compressor; None for sparse gradients.
        payload_bytes: of one rank, for `LAYERS`; None where it depends on the data.
        exact: whether nothing is rounded.
    """

    scheme: str
    scheme: str
    spec: str | None
    payload_bytes: int | None
    exact: bool


LAYERS = (Layer(0, "large", (50, 70)), Layer(1, "small", (1200,)))
NUMEL = sum(layer.numel for layer in LAYERS)
MEMBERS = {
    "allreduce": Member("allreduce", "none", 4 * NUMEL, exact=True),
    "cast_two_shot": Member("cast_two_shot", "bf16", 2 * NUMEL, exact=False),
    "allgather": Member("allgather", "topk:density=0.1,values=fp32", None, exact=True),
    "two_shot": Member("two_shot", "topk:density=0.1,values=fp32", None, exact=True),
    "two_shot of quantized": Member("two_shot", "qsgd:bits=4", None, exact=True),
    "two_shot of a model": Member("two_shot", "globaltopk:density=0.1,values=fp32", None, exact=True),
    "two_shot, other level": Member("two_shot:level=0.02", "topk:density=0.1,values=fp32", None, True),
    "hierarchical": Member("hierarchical", "topk:density=0.1,values=fp32", None, exact=True),
    "hierarchical of quantized": Member("hierarchical:level=8", "qsgd:bits=4", None, exact=True),
    "hierarchical of a model": Member(
        "hierarchical", "globaltopk:density=0.1,values=fp32", None, exact=True
    ),
    "sparse": Member("sparse", None, None, exact=True),
}
CASES = [(name, group) for name in MEMBERS for group in FLAT] + [
    (name, group) for name in MEMBERS if name.startswith("hierarchical") for group in LAYERED
]


def test_every_scheme_has_a_row() -> None:
    assert {member.scheme.split(":")[0] for member in MEMBERS.values()} == set(SCHEMES)


def test_every_kind_of_payload_is_carried() -> None:
    assert {scheme.carries for scheme in SCHEMES.values()} == set(PayloadKind)


def buckets_of(member: Member) -> tuple[Bucket, ...]:
    sparse = frozenset() if member.spec else frozenset({LAYERS[0].name})
    layers = LAYERS if member.spec else LAYERS[:1]
    scheme = (
        member.scheme if scheme_named(member.scheme).carries is PayloadKind.ENCODED else "allgather"
    )
    overrides = {"small": member.spec or "none"}
    feedback = "none" if member.payload_bytes else "ef"
    config = CompressionConfig.of(member.spec or "none", overrides, feedback, scheme)
    return build_buckets(layers, routes_of(config, layers, sparse), 1 << 30)


def gradients(member: Member, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    if member.spec:
        return [torch.randn(layer.shape, generator=generator) for layer in LAYERS]
    rows = torch.randperm(50, generator=generator)[:5]
    values = torch.randn(5, 70, generator=generator)
    return [torch.sparse_coo_tensor(rows[None], values, LAYERS[0].shape)]


@dataclass
class Outcome:
    """One rank after a step."""

    transport: Recorder
    grads: list[Tensor]
    kept: list[Tensor]


def run(
    name: str, group: str, spoil: Callable[[int, list[Tensor]], None] | None = None
) -> list[Outcome]:
    member, topology = MEMBERS[name], GROUPS[group]
    size = topology.size
    (bucket,) = buckets_of(member)
    assert bucket.scheme == member.scheme

    def step(rank: LocalRank) -> Outcome:
        transport = Recorder(rank)
        exchange = Exchange(transport, Meter(), "test", rank=rank.rank)
        rule = parse(bucket.feedback)
        assert rule is not None
        state = rule.new_state(FeedbackContext(lambda _: 0.1, lambda: size))
        state.attach([bucket], {})
        exchange.attach([bucket], {bucket.index: state})
        grads = gradients(member, rank.rank)
        if spoil is not None:
            spoil(rank.rank, grads)
        exchange.begin_step(0)
        exchange.start(bucket, grads)
        exchange.finish()
        state.keep_owned([])  # what the rank owns waits like what it has not sent
        kept = [held for slots in state.kept().values() for held in slots.values()]
        return Outcome(transport, grads, kept)

    return LocalGroup(size, topology).run(step)


@pytest.mark.parametrize(("name", "group"), CASES)
def test_every_rank_gets_the_mean_of_what_was_sent(name: str, group: str) -> None:
    member = MEMBERS[name]
    outcomes = run(name, group)
    size = len(outcomes)
    for position in range(len(outcomes[0].grads)):
        results = [outcome.grads[position].to_dense() for outcome in outcomes]
        assert all(torch.equal(result, results[0]) for result in results)
        sent = torch.zeros(results[0].shape, dtype=torch.float64)
        for rank, outcome in enumerate(outcomes):
            sent += gradients(member, rank)[position].to_dense()
            if outcome.kept:
                sent -= outcome.kept[position].view(sent.shape)
        tolerance = 1e-5 if member.exact else 2.0**-7
        scale = float(sent.abs().max()) / size + 1.0
        torch.testing.assert_close(results[0].double(), sent / size, rtol=0.0, atol=tolerance * scale)


@pytest.mark.parametrize(("name", "group"), CASES)
def test_the_bytes_of_a_link_are_those_that_are_counted(name: str, group: str) -> None:
    member, per_node = MEMBERS[name], GROUPS[group].ranks_per_node
    outcomes = run(name, group)
    size = len(outcomes)
    payloads = [outcome.transport.payloads[0] for outcome in outcomes]
    if member.payload_bytes is not None:
        # slices of one size may need a little padding
        assert all(0 <= payload - member.payload_bytes < 2 * size for payload in payloads)
    scheme, mean = scheme_named(member.scheme), sum(payloads) / size
    if scheme.recompresses:
        # by rank, and by shot, payloads differ in size: their means do what the formula says
        gathered = sum(outcome.transport.payloads[1] for outcome in outcomes)
        sent = sum(outcome.transport.sent for outcome in outcomes) / size
        # a rank compresses its node's share
        payload = (per_node * mean + gathered) / 2
        assert sent == pytest.approx(scheme.link_bytes(payload, size, per_node), rel=0.05)
        # residuals at the first step, gradients, and sums, all dense; chunks of one size need padding
        dense = 3 * 4 * NUMEL * (per_node - 1) / per_node
        most = dense + (per_node - 1) * (3 * 4 * GRAIN + 32)
        assert all(dense <= outcome.transport.inside <= most for outcome in outcomes)
        return
    # payloads differ in size by rank; what a link carries then is what it would of their mean
    for outcome in outcomes:
        assert outcome.transport.sent == pytest.approx(scheme.link_bytes(mean, size), abs=2.0, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (name, group)
        for name, group in CASES
        if MEMBERS[name].spec and (group in LAYERED or group in ("2", "3", "16"))
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_all_ranks_launch_the_same_operations_whatever_gradients_hold(
    name: str, group: str, bad: float
) -> None:
    def spoil(rank: int, grads: list[Tensor]) -> None:
        if rank == GROUPS[group].size - 1:
            grads[0].fill_(bad)

    outcomes = run(name, group, spoil)
    usual = run(name, group)
    for outcome in outcomes:
        assert outcome.transport.operations == usual[0].transport.operations
        assert bool(outcome.grads[0].isfinite().all()) == (bad == 0.0)
        together = "globaltopk" in (MEMBERS[name].spec or "")
        assert bool(outcome.grads[1].isfinite().all()) == (bad == 0.0 or not together)


@pytest.mark.parametrize("name", SCHEMES)
def test_one_rank_alone_puts_nothing_on_a_link(name: str) -> None:
    assert scheme_named(name).link_bytes(1000.0, 1) == 0.0
