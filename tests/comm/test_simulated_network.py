"""A network that is a clock: seconds by hand, and planners that keep their time on it."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm.simulated_network import SimulatedNetwork, arrival, sine_squared

RANKS, COMPUTE, LATENCY = 4, 0.05, 0.001
SHAPE = (64, 500)
NUMEL = SHAPE[0] * SHAPE[1]
RING = 2 * (RANKS - 1) / RANKS
VOTE = RING * 7 * 8
"""Bytes on a link of the ballot that each step begins with: seven float64s."""


@given(
    nbytes=st.floats(1.0, 1e6),
    start=st.floats(0.0, 100.0),
    period=st.floats(4.0, 60.0),
)
def test_bytes_take_as_long_as_the_integral_of_the_rate(
    nbytes: float, start: float, period: float
) -> None:
    low, high = 1e4, 1e5

    def passed(now: float) -> float:
        """The integral of the squared sine, in closed form."""
        wave = now / 2 - period / (4 * math.pi) * math.sin(2 * math.pi * now / period)
        return low * now + (high - low) * wave

    end = arrival(nbytes, start, sine_squared(low, high, period))
    assert passed(end) - passed(start) == pytest.approx(nbytes, rel=1e-3)


def test_a_link_that_stands_still_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ValueError, match="a rate of 0 at 2 s: write bytes per second above 0"):
        arrival(1.0, 2.0, lambda now: 0)


def ranks_on(network: SimulatedNetwork, compression: str, **options: object) -> VirtualRanks:
    model = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    return VirtualRanks(
        RANKS,
        model.named_parameters(),
        compression,
        network=network,
        compute_seconds=COMPUTE,
        **options,  # type: ignore[arg-type]
    )


def seconds_of(virtual: VirtualRanks, steps: int) -> list[float]:
    network, found = virtual.group.network, []
    assert network is not None
    for step in range(steps):
        generator, before = torch.Generator().manual_seed(step), network.now()
        virtual.reduce(
            [{"weight": torch.randn(SHAPE, generator=generator).pow(3)} for _ in range(RANKS)]
        )
        found.append(network.now() - before)
    return found


@pytest.mark.parametrize("rate", [1e5, 1e7])
def test_a_dense_step_takes_computing_and_one_ring(rate: float) -> None:
    network = SimulatedNetwork(lambda now: rate, LATENCY)
    carried = VOTE + RING * 4 * NUMEL
    seconds = seconds_of(ranks_on(network, "none"), 3)
    assert seconds == pytest.approx([COMPUTE + 2 * LATENCY + carried / rate] * 3)
    assert network.carried == pytest.approx(3 * carried)


def test_payloads_of_all_others_cross_a_link_and_two_shots_are_two_collectives() -> None:
    rate, compression = 1e6, "qsgdinf:bits=2"
    found = {}
    for scheme, operations, share in (("allgather", 1, RANKS - 1), ("two_shot", 2, RING)):
        virtual = ranks_on(SimulatedNetwork(lambda now: rate, LATENCY), compression, scheme=scheme)
        found[scheme] = seconds_of(virtual, 1)[0]
        carried = VOTE + share * virtual.plan.wire_bytes
        expected = COMPUTE + (1 + operations) * LATENCY + carried / rate
        assert found[scheme] == pytest.approx(expected, rel=0.02)
    assert found["two_shot"] < 0.9 * found["allgather"]


@pytest.mark.parametrize("scheme", ["allgather", "two_shot"])
@pytest.mark.parametrize("mbit", [2.0, 10.0])
def test_kimad_keeps_the_time_that_it_is_given(scheme: str, mbit: float) -> None:
    """After dense steps, too, when a second direction appears all at once."""
    network = SimulatedNetwork(lambda now: 1e6 / 8 * mbit, LATENCY)
    asked = COMPUTE + 0.25 * 1.5 * 4 * NUMEL / (1e6 / 8 * mbit)
    planner = f"kimad:seconds={asked},period=5,warmup=5,share=0,probe=0"
    options = {"scheme": scheme, "feedback": "ef21", "dense_steps": 7, "planner": planner}
    seconds = seconds_of(ranks_on(network, "topk:density=0.05", **options), 80)
    assert fmean(seconds[50:]) == pytest.approx(asked, rel=0.15)
    assert max(seconds[50:]) < 1.2 * asked < seconds[0]


def test_nodes_of_several_ranks_have_no_link_each() -> None:
    network = SimulatedNetwork(lambda now: 1e6)
    with pytest.raises(ValueError, match="not one for 2: leave ranks_per_node out"):
        ranks_on(network, "none", ranks_per_node=2)
