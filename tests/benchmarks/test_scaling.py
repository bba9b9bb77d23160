"""The model of benchmarks/network/scaling.py: fit, rule and extrapolation, against closed forms."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest

from benchmarks.harness import lab
from benchmarks.network import scaling
from benchmarks.network import scaling_model as model
from hvd_adaptive.comm.link_costs import seconds_of_byte


def points(line: model.Line, collective: str, operations: int = 1) -> list[model.Point]:
    """What the line says of some ranks and payloads."""
    asked = [
        model.Point(collective, operations, ranks, nbytes, 0.0, machine=1e-8 * nbytes)
        for ranks in (2, 4)
        for nbytes in (4096, 65536, 1 << 20)
    ]
    return [replace(each, seconds=line.seconds(each)) for each in asked]


@pytest.mark.parametrize(
    ("collective", "operations"),
    [("allreduce", 1), ("allreduce", 2), ("allgather", 1), ("two-shot", 1)],
)
def test_a_fit_finds_the_line_that_made_the_points(collective: str, operations: int) -> None:
    line = model.Line(0.0, 0.0, 4.2e-8)
    found = model.fit(points(line, collective, operations))
    assert found.beta == pytest.approx(line.beta)
    far = model.Point(collective, operations, 1024, 10**6, 1.0)
    assert found.seconds(far) == pytest.approx(line.seconds(far))


def test_what_two_shots_lose_where_several_ranks_send_to_one_is_found_by_4_ranks() -> None:
    line = model.Line(0.0, 0.0, 4.2e-8, crowding=0.3)
    found = model.fit(points(line, "two-shot"))
    assert (found.beta, found.crowding) == (pytest.approx(line.beta), pytest.approx(0.3))
    assert model.fit(points(line, "allreduce")).crowding == 0.0
    two, four = (line.bytes_seconds("two-shot", ranks, 100) for ranks in (2, 4))
    assert four / two == pytest.approx(1.5 * 1.3)


def test_a_ring_sends_twice_what_it_holds_and_a_gather_everything_of_the_others() -> None:
    line = model.Line(0.0, 1e-5, 1e-9)
    ring = model.Point("allreduce", 1, 16, 1600, 0.0)
    gather = model.Point("allgather", 1, 16, 1600, 0.0)
    assert line.seconds(ring) == pytest.approx(2 * 15 * 1e-5 + 2 * 15 / 16 * 1600e-9)
    assert line.seconds(gather) == pytest.approx(15 * 1e-5 + 15 * 1600e-9)


def test_two_shots_send_what_a_ring_does() -> None:
    ring, shots = (model.volume(kind, 16, 1600) for kind in ("allreduce", "two-shot"))
    assert shots == pytest.approx(ring)


def test_a_collective_that_is_faster_than_on_links_without_a_limit_says_nothing_of_the_wire() -> None:
    slower, faster = (model.Point("allgather", 1, 2, 10**6, 1.0, machine) for machine in (0.6, 2.0))
    assert model.fit([slower, faster]) == model.fit([slower])
    assert model.fit([faster]).beta == 0


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_on_a_network_without_latency_gathering_loses_where_the_closed_form_says(
    density: float,
) -> None:
    """(N - 1) * sparse = 2 * (N - 1) / N * dense, at N = 2 * dense / sparse."""
    line = model.Line(0.0, 0.0, 1e-9)
    dense = model.ScaledMethod(model.Work(2.0, 0.0, 0.0), "allreduce")
    sparse = model.ScaledMethod(model.Work(3.0 * density, 0.0, 0.0), "allgather")
    ranks = range(2, 4096)
    slow = {n: sparse.step(n, 1e6, line, 1) for n in ranks}
    fast = {n: dense.step(n, 1e6, line, 1) for n in ranks}
    found = model.crossing(slow, fast)
    assert found == pytest.approx(2 * 2.0 / (3.0 * density), abs=1)


def test_gathering_that_never_loses_has_no_crossing() -> None:
    assert model.crossing({2: 1.0, 4: 2.0}, {2: 3.0, 4: 3.0}) is None
    assert model.crossing({2: 5.0, 4: 5.0}, {2: 3.0, 4: 3.0}) == 2


def test_a_core_decodes_every_rank_s_payload_or_the_slices_of_two() -> None:
    work = model.Work(nbytes=0.03, encode=2e-9, decode=1e-10)
    assert model.ScaledMethod(work, "allgather").busy(1024, 1e6) == pytest.approx(
        1e6 * (2e-9 + 1024e-10)
    )
    assert model.ScaledMethod(work, "two-shot").busy(1024, 1e6) == pytest.approx(
        1e6 * (2e-9 * 1025 / 1024 + 2e-10)
    )


def test_the_fastest_scheme_of_every_case_is_counted() -> None:
    def case(**totals: float) -> dict[str, object]:
        named = {f"top-k, {kind}".replace("_", "-"): total for kind, total in totals.items()}
        times = {name: {"network ms": total - 1, "one core ms": 1.0} for name, total in named.items()}
        # what is summed anyway does not compete
        return {"ms": {**times, "fp16, allreduce": {"network ms": 0.1, "one core ms": 0.1}}}

    gathers, shoots = case(allgather=3.0, two_shot=5.0), case(allgather=3.0, two_shot=2.0)
    text = scaling.fastest_schemes({"1 M": {"slow": shoots, "fast": shoots}, "2 M": {"slow": gathers}})
    assert text.endswith("in 3 cases: `allgather` in 1 (top-k), `two-shot` in 2 (top-k).")


def test_every_bucket_costs_its_own_messages() -> None:
    line = model.Line(1e-3, 1e-5, 0.0)
    powersgd = model.ScaledMethod(model.Work(0.1, 0.0, 0.0), "allreduce", operations=2)
    assert powersgd.network_seconds(8, 1e6, line, buckets=3) == pytest.approx(3 * 2 * (1e-3 + 14e-5))


def measured(line: model.Line) -> scaling.Seconds:
    """What a benchmark would find where the line is true, on a machine of 10 ns a byte."""
    found: scaling.Seconds = {}
    for network in ("200mbit", "unlimited"):
        for scheme, (collective, operations) in scaling.COLLECTIVES.items():
            found.setdefault(network, {})[scheme] = {
                str(size): {
                    str(n): 1e-8 * size
                    if network == "unlimited"
                    else line.seconds(model.Point(collective, operations, n, size, 0.0, 1e-8 * size))
                    for n in scaling.RANKS
                }
                for size in scaling.SIZES[collective]
            }
    return found


def test_a_true_model_has_no_error_on_the_ranks_and_the_payload_that_it_has_not_seen() -> None:
    found = scaling.fits(measured(model.Line(0.0, 0.0, seconds_of_byte(200e6))))
    assert set(found) == set(scaling.COLLECTIVES)
    for networks in found.values():
        row = networks["200mbit"]
        assert row["worst error"] == pytest.approx(0, abs=1e-6)
        assert row["rate"] == pytest.approx(1)
        assert row["most ranks held out"] == 16


def test_fits_see_at_most_4_ranks_and_not_the_payload_of_the_trial() -> None:
    found = measured(model.Line(0.0, 0.0, seconds_of_byte(200e6)))
    fitted, held_out = scaling.divide(found, "200mbit", "allgather")
    assert {point.ranks for point in fitted} == {2, 4}
    assert scaling.HELD_OUT_SIZE["allgather"] not in {point.nbytes for point in fitted}
    assert {point.ranks for point in held_out} == {2, 4, 8, 16}
    del found["unlimited"]["allgather"]
    assert scaling.divide(found, "200mbit", "allgather") == ([], [])


def test_what_is_sent_of_an_element_is_what_the_compressor_sends() -> None:
    assert scaling.work_of("fp16", layers=2, side=32, repeats=1).nbytes == 2
    assert scaling.work_of("randomk:density=0.25", layers=2, side=32, repeats=1).nbytes == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_the_quick_benchmark_runs_to_its_end() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    command = [*lab.module("network.scaling"), "--quick"]
    shown = subprocess.run(
        command, cwd=lab.ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    # in between it may say that others keep the cores busy
    assert re.search(r"loopback, 2 rank\(s\): 10 points .*\.{10}\n", shown.stdout), shown.stdout
    assert "fastest of all" in shown.stdout
