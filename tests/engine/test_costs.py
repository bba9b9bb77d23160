"""What compressors and the network cost: what is timed, and where."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adaptive.collectives.costs import CodecCosts
from hvd_adaptive.comm import network
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank, LocalTransport
from hvd_adaptive.comm.network import (
    CARRIED,
    SETTLING,
    SETTLING_SECONDS,
    look_at_link,
    measure_link,
    operation_seconds,
    settle,
)
from hvd_adaptive.comm.request import Operation, Request
from hvd_adaptive.comm.transport import Transport
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import Compressor
from hvd_adaptive.engine import cost_measurement, known_costs
from hvd_adaptive.engine.cost_measurement import CostMeasurement
from hvd_adaptive.engine.known_costs import KnownCosts, seconds_of, usual_seconds

QUICK = CodecCosts(1e-9, 1e-9, 1e-9)
WAYS: dict[Operation, torch.dtype] = {
    "allgather": torch.uint8,
    "alltoall": torch.uint8,
    "allreduce": torch.float16,
}
"""Operations that are timed, and on what."""


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


def test_a_rank_that_was_held_up_while_it_timed_a_compressor_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {0: 14e-9, 1: 3e-9, 2: 2e-9}
    here = threading.local()

    def timed(compressor: Compressor) -> CodecCosts:
        return CodecCosts(times[here.rank], 1e-9, 2 * times[here.rank])

    monkeypatch.setattr(known_costs, "measure_codec", timed)
    monkeypatch.setattr(LocalTransport, "takes_time", True)
    topk = parse("topk:density=0.1")

    def measure(rank: LocalRank) -> CodecCosts:
        here.rank = rank.rank
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        known.link([topk])
        return known.codec(topk)

    assert LocalGroup(3).run(measure) == [CodecCosts(3e-9, 1e-9, 6e-9)] * 3


def test_what_meets_one_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([2.0, 30.0, 2.1, 3.0, 90.0, 3.1])
    monkeypatch.setattr(known_costs, "seconds_of", lambda work: next(taken))
    assert usual_seconds(list, list) == [2.1, 3.1]
    assert next(taken, None) is None


def test_compressing_costs_more_where_more_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own level and by the mildest one; the sum is what was measured at both."""
    monkeypatch.setattr(known_costs, "usual_seconds", lambda *works: [1e-3, 9e-3, 1e-3, 2e-3])
    topk = parse("topk:density=0.01,levels=0.001-0.5")
    found = known_costs.measure_codec(topk)
    for level, seconds in ((0.01, 1e-3), (0.5, 9e-3)):
        nbytes = topk.compress_(torch.randn(known_costs.SAMPLE), level).nbytes
        of_level = found.compress * known_costs.SAMPLE + found.compress_byte * nbytes
        assert of_level == pytest.approx(seconds, rel=0.02)
    same = known_costs.measure_codec(parse("signsgd"))  # which has one level
    assert (same.compress, same.compress_byte) == (1e-3 / known_costs.SAMPLE, 0.0)


def test_only_the_network_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network changes what a compressor takes, and a small step is a few ms."""
    calls = 0

    def counted(work: Any) -> float:
        nonlocal calls
        calls += 1
        return 1e-3

    monkeypatch.setattr(known_costs, "seconds_of", counted)
    compressors = [parse(spec) for spec in ("fp16", "topk:density=0.1", "none")]

    def measure(rank: LocalRank) -> list[Any]:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        costs = CostMeasurement(known, ("auto",), 25e6)
        return [costs(compressors, again).codecs for again in (False, True)]

    ((once, again),) = LocalGroup(1).run(measure)
    assert calls == known_costs.ROUNDS * (2 + 4 + 2)
    assert once == again
    assert list(once) == ["fp16", *(spec for spec in once if "topk" in spec), "none"]


def test_a_network_that_is_what_it_was_is_looked_at_only_but_not_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others than the operations that are looked at may take longer."""
    usual, slow = (2e-4, 8e-9), (2e-4, 8e-8)
    looks, measured_at = iter([usual, usual, usual, slow]), []
    see: list[tuple[float, float]] = []
    measure_all = LocalTransport.link_costs

    def look(self: LocalTransport, prefix: str) -> tuple[float, float]:
        if self.rank == 0:
            see.append(next(looks))
        return see[-1] if self.rank == 0 else slow  # only the first rank's counts

    def counted(self: LocalTransport, prefix: str) -> Any:
        if self.rank == 0:
            measured_at.append(len(see))
        return measure_all(self, prefix)

    monkeypatch.setattr(LocalTransport, "link_look", look)
    monkeypatch.setattr(LocalTransport, "link_costs", counted)

    def measure(rank: LocalRank) -> list[Any]:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        costs = CostMeasurement(known, ("auto",), 25e6)
        return [costs([parse("fp16")], again).to_dict() for again in (False, *[True] * 4)]

    found = LocalGroup(2).run(measure)
    assert measured_at == [0, 2, 4], "at first, the second time in a row, and where it has changed"
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_a_network_that_measuring_finds_as_it_was_is_looked_at_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measuring takes as long as dozens of small steps, and tells nothing of what is off otherwise."""
    usual, later = LinkCosts(2e-4, 2e-4, 8e-9, 8e-9), LinkCosts(2e-4, 2e-4, 8e-9, 8e-8)
    costs = [usual]
    measured: list[str] = []

    def measure_link(self: LocalTransport, prefix: str) -> LinkCosts:
        measured.append(prefix)
        return costs[0]

    monkeypatch.setattr(LocalTransport, "link_costs", measure_link)
    monkeypatch.setattr(LocalTransport, "link_look", lambda self, prefix: (2e-4, 8e-9))
    monkeypatch.setattr(cost_measurement, "operation_seconds", lambda *args: 1e-3)

    def measure(rank: LocalRank) -> list[int]:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        measure_costs = CostMeasurement(known, ("auto",), 25e6)
        times = []
        for call in range(16):
            costs[0] = usual if call < 9 else later  # which no look shows
            before = len(measured)
            link = measure_costs([parse("fp16")], call > 0).link
            assert link == (usual if call < 10 else later)
            times += [call] if len(measured) > before else []
        return times

    # one look goes before the second measurement, two before the third; that finds something else
    assert LocalGroup(1).run(measure) == [[0, 2, 5, 10, 12, 15]]


def test_costs_of_other_compressors_are_no_measurement_of_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured before may be of fewer dtypes."""
    measured: list[str] = []

    def measure_link(self: LocalTransport, prefix: str) -> LinkCosts:
        measured.append(prefix)
        return LinkCosts(2e-4, 2e-4, 8e-9, 8e-9)

    monkeypatch.setattr(LocalTransport, "link_costs", measure_link)
    monkeypatch.setattr(LocalTransport, "link_look", lambda self, prefix: (2e-4, 8e-9))
    monkeypatch.setattr(cost_measurement, "operation_seconds", lambda *args: 1e-3)

    def measure(rank: LocalRank) -> int:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        costs = CostMeasurement(known, ("auto",), 25e6)
        costs([parse("fp16")], False)
        assert len(costs([parse("fp16"), parse("none")], False).sums) == 2
        for _ in range(2):
            costs([parse("fp16"), parse("none")], True)
        return len(measured)

    assert LocalGroup(1).run(measure) == [2]


def test_a_network_whose_small_operations_are_late_is_measured_only_if_they_still_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that share cores are in each other's way for a second or three."""
    late = 4e-3
    looks = iter([(late, 1.2e-8), (late, 1.2e-8), (late, 1.7e-8)])
    measured: list[str] = []
    monkeypatch.setattr(LocalTransport, "link_look", lambda self, prefix: next(looks))
    costs_of = LocalTransport.link_costs

    def counted(self: LocalTransport, prefix: str) -> Any:
        measured.append(prefix)
        return costs_of(self, prefix)

    monkeypatch.setattr(LocalTransport, "link_costs", counted)

    def measure(rank: LocalRank) -> list[int]:
        known = KnownCosts(rank.transport(), rank.control("control"), "costs")
        costs = CostMeasurement(known, ("auto",), 25e6)
        times = []
        for again in (False, True, True, True):
            costs([parse("fp16")], again)
            times.append(len(measured))
        return times

    # at first; not where one is late for the first time; the next time; and by another network
    assert LocalGroup(1).run(measure) == [[1, 1, 2, 3]]


def test_a_look_takes_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[tuple[str, str]] = []
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        if self.rank == 0:
            submitted.append((name, request.operation))
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)
    monkeypatch.setattr(network, "UNEVEN", math.inf)  # however threads take turns here
    found = LocalGroup(3).run(lambda rank: look_at_link(rank.transport(), "look"))
    timed = [operation for name, operation in submitted if name != "look.settle"]
    assert timed == ["allgather"] * 4
    assert len(submitted) - len(timed) <= SETTLING
    assert all(name == "look.settle" for name, _ in submitted[: -len(timed)])
    assert all(small > 0 and byte > 0 for small, byte in found)


@pytest.mark.parametrize("time_link", [measure_link, look_at_link])
def test_ranks_settle_before_the_network_is_timed(
    monkeypatch: pytest.MonkeyPatch, time_link: Callable[[Transport, str], object]
) -> None:
    """Also right after a look, which may have ended before they were even."""
    names: list[str] = []
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        if self.rank == 0:
            names.append(name)
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)
    LocalGroup(2).run(lambda rank: time_link(rank.transport(), "link"))
    first = next(index for index, name in enumerate(names) if name != "link.settle")
    assert first > 0
    assert names[first].startswith("link.allgather")
    assert "link.settle" not in names[first:]


@pytest.mark.parametrize(("least", "times"), [(0.0, 3), (2.5, 4), (9.5, 11)])
def test_operations_are_repeated_for_as_long_as_the_first_rank_says(
    monkeypatch: pytest.MonkeyPatch, least: float, times: int
) -> None:
    """On a fast link three are over in no time; whatever the others' clocks say, all do as many."""
    here = threading.local()
    clock = SimpleNamespace(perf_counter=lambda: next(here.clock))
    monkeypatch.setattr(network, "time", clock)
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        here.names.append(name)
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)

    def work(rank: LocalRank) -> list[str]:
        here.clock, here.names = itertools.count(0.0, (1.0, 0.0, 50.0)[rank.rank]), []
        for operation, dtype in WAYS.items():
            request = Request(operation, torch.zeros(12, dtype=dtype))
            operation_seconds(rank.transport(), operation, request, 3, least)
        return list(here.names)

    assert LocalGroup(3).run(work) == [[name for name in WAYS for _ in range(times)]] * 3


def test_ranks_settle_for_as_long_as_the_first_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others' clocks say: all must start the same operations."""
    here = threading.local()
    ticks = SETTLING_SECONDS / 5.5, 0.0, 1.0
    clock = SimpleNamespace(perf_counter=lambda: next(here.clock))
    monkeypatch.setattr(network, "time", clock)
    submit = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        here.started += 1
        return submit(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)

    def work(rank: LocalRank) -> int:
        here.clock, here.started = itertools.count(0.0, ticks[rank.rank]), 0
        settle(rank.transport(), "network")
        return int(here.started)

    assert LocalGroup(3).run(work) == [7, 7, 7]


def test_ranks_settle_until_operations_are_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 8 ranks shared 2 cores, small ones took 10 to 60 ms for a second, and then 2 ms again."""
    taken = [0.002, *[0.03] * 34, *[0.002] * 100]
    ends = list(itertools.accumulate(taken))
    times = [each for pair in zip([0.0, *ends], ends, strict=False) for each in pair]
    here = threading.local()
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: next(here.clock)))
    submitted = LocalTransport.submit

    def watched(self: LocalTransport, request: Any, name: str, step: int) -> Any:
        here.started += 1
        return submitted(self, request, name, step)

    monkeypatch.setattr(LocalTransport, "submit", watched)

    def work(rank: LocalRank) -> int:
        here.clock, here.started = iter(times), 0
        settle(rank.transport(), "network")
        return int(here.started)

    # one slow one among the last ten is let pass; and one operation tells the others that it is enough
    assert LocalGroup(2).run(work) == [35 + 9 + 1] * 2


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
