"""Random numbers of a scheme: whose they are, and what ranks that share them gain in an allgather."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import rng  # noqa: E402
from hvd_adaptive.buckets import Bucket, build_buckets  # noqa: E402
from hvd_adaptive.collectives.base import BucketIO, Buffers, RandomArguments  # noqa: E402
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank, LocalTransport  # noqa: E402
from hvd_adaptive.comm.topology import Topology  # noqa: E402
from hvd_adaptive.config import CompressionConfig  # noqa: E402
from hvd_adaptive.engine.exchange import Exchange  # noqa: E402
from hvd_adaptive.engine.routing import routes_of  # noqa: E402
from hvd_adaptive.feedback import FeedbackContext, parse  # noqa: E402
from hvd_adaptive.layers import Layer  # noqa: E402
from hvd_adaptive.telemetry import Meter  # noqa: E402

LAYERS = (Layer(0, "large", (50, 70)), Layer(1, "small", (1200,)))


def bucket_of(spec: str, scheme: str = "allgather") -> Bucket:
    config = CompressionConfig.of(spec, {"small": spec}, "none", scheme)
    (bucket,) = build_buckets(LAYERS, routes_of(config, LAYERS, frozenset()), 1 << 30)
    return bucket


def arguments(spec: str, rank: int, ranks: int, step: int = 3) -> RandomArguments:
    bucket: Any = bucket_of(spec)
    nothing: Any = None
    io = BucketIO(
        *(nothing, Buffers(bucket), {}, step, ranks, rank, rank, 1 / ranks, torch.clone, 11),
        observe_energy=lambda bucket, energy, sent: None,
        topology=Topology.flat(ranks),
    )
    return io.random_arguments(bucket, bucket.segments[0])


def test_each_rank_has_keys_of_its_own_unless_rounding_is_correlated() -> None:
    order = [layer.index for layer in bucket_of("qsgd").layers]
    for rank in (0, 3):
        found = arguments("qsgd", rank, 4)
        assert found["dithers"] is None
        np.testing.assert_array_equal(found["keys"], rng.layer_keys(11, rank, 3, order))
        shared = arguments("qsgd:correlated=true", rank, 4)
        keys = rng.layer_keys(11, rng.SHARED, 3, order)
        np.testing.assert_array_equal(shared["keys"], keys)
        np.testing.assert_array_equal(shared["dithers"], rng.dithers(keys, rank, 4))
    assert arguments("signsgd", 0, 4)["keys"] is None


def test_one_rank_alone_rounds_as_without_the_option() -> None:
    plain, correlated = arguments("qsgd", 0, 1), arguments("qsgd:correlated=true", 0, 1)
    np.testing.assert_array_equal(plain["keys"], correlated["keys"])
    assert plain["dithers"] is correlated["dithers"] is None


def test_all_ranks_rotate_alike_and_otherwise_in_every_step() -> None:
    keys = {
        arguments("qsgd:rotate=hadamard", rank, 4, step)["rotation"]
        for rank in (0, 3)
        for step in (1, 2)
    }
    assert keys == {rng.rotation_key(11, 1), rng.rotation_key(11, 2)}
    assert len(keys) == 2


def gradients(rank: int) -> list[Tensor]:
    """The same part on all ranks, and noise."""
    common, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(rank)
    return [
        torch.randn(layer.shape, generator=common) + 0.1 * torch.randn(layer.shape, generator=own)
        for layer in LAYERS
    ]


def reduced(spec: str, ranks: int, steps: int, scheme: str) -> list[list[Tensor]]:
    """The means that rank 0 got in each step; all ranks got the same ones."""
    bucket = bucket_of(spec, scheme)

    def work(rank: LocalRank) -> list[list[Tensor]]:
        exchange = Exchange(LocalTransport(rank, hvd.Average), Meter(), "test", rank=rank.rank)
        rule = parse(bucket.feedback)
        assert rule is not None
        state = rule.new_state(FeedbackContext(lambda _: 0.1, lambda: ranks))
        state.attach([bucket], {})
        exchange.attach([bucket], {bucket.index: state})
        found = []
        for step in range(steps):
            every = gradients(rank.rank)
            grads = [every[layer.index].clone() for layer in bucket.layers]
            exchange.begin_step(step)
            exchange.start(bucket, grads)
            exchange.finish()
            found.append(grads)
        return found

    outcomes = LocalGroup(ranks).run(work)
    for outcome in outcomes[1:]:
        for mine, first in zip(outcome, outcomes[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))
    return outcomes[0]


def error(spec: str, ranks: int, scheme: str, steps: int = 8) -> float:
    """Mean squared error of the reduced gradients."""
    order = [layer.index for layer in bucket_of(spec).layers]
    every = [gradients(rank) for rank in range(ranks)]
    errors = [
        float((found - torch.stack([grads[index] for grads in every]).mean(0)).square().sum())
        for grads_of_step in reduced(spec, ranks, steps, scheme)
        for index, found in zip(order, grads_of_step, strict=True)
    ]
    return sum(errors) / steps


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
@pytest.mark.parametrize("scheme", ["allgather", "two_shot:level=8"])
def test_the_mean_of_correlated_codes_has_less_error(scheme: str, rotate: str, ranks: int) -> None:
    spec = f"qsgdinf:bits=3,rotate={rotate}"
    plain, correlated = (error(each, ranks, scheme) for each in (spec, f"{spec},correlated=true"))
    # of n equal ranks 1/n would be left; a tenth of these values differs
    assert correlated < (0.7 if ranks < 8 else 0.35) * plain


@pytest.mark.parametrize("spec", ["qsgdinf:bits=4,rotate=hadamard", "signsgd:rotate=hadamard"])
@pytest.mark.parametrize("scheme", ["allgather", "two_shot"])
def test_rotated_gradients_come_back_rotated_back(scheme: str, spec: str) -> None:
    exact = [torch.stack([gradients(rank)[i] for rank in range(4)]).mean(0) for i in range(2)]
    order = [layer.index for layer in bucket_of(spec).layers]
    (found,) = reduced(spec, 4, 1, scheme)
    for index, layer in zip(order, found, strict=True):
        cosine = torch.nn.functional.cosine_similarity(layer.flatten(), exact[index].flatten(), dim=0)
        assert float(cosine) > (0.97 if "qsgdinf" in spec else 0.6)
