"""What compressors and the network cost: what is timed, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_adaptive.collectives.costs import CodecCosts
from hvd_adaptive.comm.link_costs import CARRIED, measure_link
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank, LocalTransport
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import Compressor
from hvd_adaptive.engine import cost_measurement, known_costs
from hvd_adaptive.engine.cost_measurement import CostMeasurement
from hvd_adaptive.engine.known_costs import KnownCosts, seconds_of

QUICK = CodecCosts(1e-9, 1e-9, 1e-9)


def measured(ranks: int, *specs: str) -> list[Any]:
    """What each of some ranks then knows."""
    compressors = [parse(spec) for spec in specs]

    def measure(rank: LocalRank) -> Any:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        return CostMeasurement(known, ("auto",), 25e6)(compressors, again=False)

    return LocalGroup(ranks).run(measure)


def test_a_cast_costs_what_copying_costs() -> None:
    """Buckets of casts are copied: what clamps halves, for error feedback, takes ten times as long."""
    # the best of several, in turn: on a busy core a measurement can be one long wait, and so can all
    # that follow at once
    x, half = torch.randn(1 << 20), torch.empty(1 << 20, dtype=torch.float16)
    found, copies = [], []
    for _ in range(4):
        found.append(measured(1, "fp16", "none")[0].codecs)
        copies += [seconds_of(lambda: half.copy_(x)) for _ in range(5)]
    copying = min(copies) / len(x)
    for spec in ("fp16", "none"):
        assert 0.25 * copying < min(each[spec].compress for each in found) < 4 * copying
        assert 0.25 * copying < min(each[spec].decompress for each in found) < 4 * copying


@pytest.mark.parametrize("takes_time", [True, False])
def test_compressors_are_timed_on_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch, takes_time: bool
) -> None:
    """They compress at once in training; but virtual ranks stand for others that have a core each."""
    timed: list[Compressor] = []

    def watched(compressor: Compressor) -> CodecCosts:
        timed.append(compressor)
        return QUICK

    monkeypatch.setattr(known_costs, "measure_codec", watched)
    monkeypatch.setattr(LocalTransport, "takes_time", takes_time)
    found = measured(3, "topk:density=0.1", "qsgd:bits=4", "fp16")
    assert len(timed) == (6 if takes_time else 2)
    assert [each.to_dict() for each in found] == [found[0].to_dict()] * 3
    assert list(found[0].codecs.values())[:2] == [QUICK, QUICK]


def test_only_the_network_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network changes what a compressor takes, and a small step is a few ms."""
    calls = 0

    def counted(work: Any) -> float:
        nonlocal calls
        calls += 1
        return 1e-3

    monkeypatch.setattr(known_costs, "seconds_of", counted)
    monkeypatch.setattr(cost_measurement, "seconds_of", counted)
    compressors = [parse(spec) for spec in ("fp16", "topk:density=0.1", "none")]

    def measure(rank: LocalRank) -> list[Any]:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        costs = CostMeasurement(known, ("auto",), 25e6)
        return [costs(compressors, again).codecs for again in (False, True)]

    ((once, again),) = LocalGroup(1).run(measure)
    assert calls == 2 + 3 + 2
    assert once == again
    assert list(once) == ["fp16", *(spec for spec in once if "topk" in spec), "none"]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_is_timed_puts_as_many_bytes_on_a_link(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Little passes a link at once, however slow it is: all must be more than that, and alike."""
    carried: dict[str, set[int]] = {}
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        if self.rank == 0:
            size = request.tensor.numel() * request.tensor.element_size()
            received = size * (ranks if request.operation == "allgather" else 1)
            carried.setdefault(name, set()).add(self.traffic(request, received))
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)
    LocalGroup(ranks).run(lambda rank: measure_link(rank.transport(), "link"))
    measured(ranks, "fp16", "none")
    largest = sorted(max(each) for name, each in carried.items() if max(each) > CARRIED // 2)
    assert len(largest) == 4, "allgather, alltoall, and sums of two dtypes"
    assert largest[0] > 0.98 * CARRIED
    assert largest[-1] <= 1.02 * CARRIED
