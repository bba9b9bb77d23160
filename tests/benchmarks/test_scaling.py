"""The model of benchmarks/network/scaling.py: fit, rule and extrapolation, against closed forms."""

from __future__ import annotations

import re
import subprocess

import pytest

from benchmarks.harness import lab
from benchmarks.network import scaling
from benchmarks.network import scaling_model as model


def points(line: object, collective: str, operations: int = 1) -> list[object]:
    """What the line says of some ranks and payloads."""
    asked = [
        model.Point(collective, operations, ranks, nbytes, 0.0)
        for ranks in (1, 2, 4)
        for nbytes in (4096, 65536, 1 << 20)
    ]
    return [
        model.Point(collective, operations, each.ranks, each.nbytes, line.seconds(each))  # type: ignore[attr-defined]
        for each in asked
    ]


@pytest.mark.parametrize(
    ("collective", "operations"), [("allreduce", 1), ("allreduce", 2), ("allgather", 1)]
)
def test_a_fit_finds_the_line_that_made_the_points(collective: str, operations: int) -> None:
    line = model.Line(1e-3, 5e-5, 4.2e-8)
    found = model.fit(points(line, collective, operations))
    assert (found.fixed, found.alpha, found.beta) == pytest.approx((line.fixed, line.alpha, line.beta))
    far = model.Point(collective, operations, 1024, 10**6, 1.0)
    assert found.seconds(far) == pytest.approx(line.seconds(far))


def test_a_ring_sends_twice_what_it_holds_and_a_gather_everything_of_the_others() -> None:
    line = model.Line(0.0, 1e-5, 1e-9)
    ring = model.Point("allreduce", 1, 16, 1600, 0.0)
    gather = model.Point("allgather", 1, 16, 1600, 0.0)
    assert line.seconds(ring) == pytest.approx(2 * 15 * 1e-5 + 2 * 15 / 16 * 1600e-9)
    assert line.seconds(gather) == pytest.approx(15 * 1e-5 + 15 * 1600e-9)


def test_no_cost_is_negative_where_small_payloads_take_longer_than_large_ones() -> None:
    measured = [model.Point("allgather", 1, 2, nbytes, 1e-3 - 1e-10 * nbytes) for nbytes in (1, 10**6)]
    line = model.fit(measured)
    assert min(line.fixed, line.alpha, line.beta) >= 0
    assert line.beta == 0


@pytest.mark.parametrize(
    ("ranks", "nbytes", "machine", "counts"),
    [
        (1, 4096, 0.001, True),
        (1, 65536, 0.001, False),
        (2, 4096, 1.0, True),
        (8, 1_000_000, 0.1473, True),  # the wire needs 7 MB * 8 / (0.95 * 200e6) = 0.2947 s
        (8, 1_000_000, 0.1474, False),
    ],
)
def test_with_more_ranks_than_cores_the_wire_must_need_twice_what_the_machine_does(
    ranks: int, nbytes: int, machine: float, counts: bool
) -> None:
    point = model.Point("allgather", 1, ranks, nbytes, 1.0)
    assert model.limited_by_link(point, machine, 200e6, 2, 4096) is counts


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
    assert model.ScaledMethod(work, "hierarchical").busy(1024, 1e6) == pytest.approx(
        1e6 * (4e-9 + 64e-10)
    )


def test_what_wins_most_often_is_to_be_built_next() -> None:
    def case(**totals: float) -> dict[str, object]:
        named = {f"top-k, {kind}".replace("_", "-"): total for kind, total in totals.items()}
        times = {name: {"network ms": total - 1, "one core ms": 1.0} for name, total in named.items()}
        # what is summed anyway does not compete
        return {"ms": {**times, "fp16, allreduce": {"network ms": 0.1, "one core ms": 0.1}}}

    gathers = case(allgather=3.0, two_shot=5.0, hierarchical=4.0)
    shoots = case(allgather=3.0, two_shot=2.0, hierarchical=4.0)
    text = scaling.to_build_next({"1 M": {"slow": shoots, "fast": shoots}, "2 M": {"slow": gathers}})
    assert "3 cases" in text
    assert "`allgather` in 1 (top-k), `two-shot` in 2 (top-k), `hierarchical` in 0" in text
    assert text.endswith("`two-shot` is to be built next.")
    assert scaling.to_build_next({"1 M": {"slow": gathers}}).endswith("nothing has to be built.")


def test_every_bucket_costs_its_own_messages() -> None:
    line = model.Line(1e-3, 1e-5, 0.0)
    powersgd = model.ScaledMethod(model.Work(0.1, 0.0, 0.0), "allreduce", operations=2)
    assert powersgd.network_seconds(8, 1e6, line, buckets=3) == pytest.approx(3 * 2 * (1e-3 + 14e-5))


def measured(line: object, machine: float) -> dict[str, object]:
    """What a benchmark would find where the line is true, and the machine alone takes a share of it."""
    found: dict[str, object] = {}
    for network, share in (("200mbit", 1.0), ("unlimited", machine)):
        for scheme, (collective, operations) in scaling.COLLECTIVES.items():
            found.setdefault(network, {})[scheme] = {  # type: ignore[index]
                str(size): {
                    str(n): share * line.seconds(scaling.Point(collective, operations, n, size, 0.0))  # type: ignore[attr-defined]
                    for n in scaling.RANKS
                }
                for size in scaling.SIZES[collective]
            }
    return found


def test_a_true_model_has_no_error_on_the_ranks_and_the_payload_that_it_has_not_seen() -> None:
    line = model.Line(1e-3, 1e-4, model.byte_seconds(200e6))
    found = scaling.fits(measured(line, machine=0.1), cores=2)
    assert set(found) == set(scaling.COLLECTIVES)
    for networks in found.values():
        row = networks["200mbit"]
        assert row["worst error"] == pytest.approx(0, abs=1e-6)
        assert row["rate"] == pytest.approx(1)
        assert row["most ranks held out"] == 16


def test_where_the_machine_needs_as_long_as_the_link_only_as_many_ranks_as_cores_count() -> None:
    line = model.Line(1e-3, 1e-4, model.byte_seconds(200e6))
    points = scaling.divide(measured(line, machine=1.0), "200mbit", "allgather", cores=2)
    assert {point.ranks for point in points.fitted} == {1, 2}
    assert {point.nbytes for point in points.held_out} == {scaling.HELD_OUT_SIZE["allgather"]}
    assert {point.ranks for point in points.left_out} == {1, 4, 8, 16}


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
    assert re.search(r"loopback, 2 rank\(s\): 8 points .*\.{8}\n", shown.stdout), shown.stdout
    assert "fastest of all" in shown.stdout
