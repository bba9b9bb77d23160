"""scheme="auto": the choice follows the costs, is the same on all ranks, and says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import VirtualRanks, merge_compression_states  # noqa: E402
from hvd_adaptive.buckets import Bucket  # noqa: E402
from hvd_adaptive.checkpoint import check_state  # noqa: E402
from hvd_adaptive.collectives import encoded_schemes  # noqa: E402
from hvd_adaptive.collectives.costs import CodecCosts, Workload  # noqa: E402
from hvd_adaptive.comm.link_costs import LayerCosts, LinkCosts  # noqa: E402
from hvd_adaptive.comm.local_group import LocalGroup, LocalTransport  # noqa: E402
from hvd_adaptive.comm.network import measure_link  # noqa: E402
from hvd_adaptive.comm.request import Request  # noqa: E402
from hvd_adaptive.comm.topology import Topology  # noqa: E402
from hvd_adaptive.compressors import parse  # noqa: E402
from hvd_adaptive.engine import known_costs, layout, scheme_choice  # noqa: E402
from hvd_adaptive.engine.scheme_choice import CLOSE, SchemeChoice  # noqa: E402

QUICK = CodecCosts(1e-9, 1e-9, 1e-9)
ETHERNET = LinkCosts(5e-4, 5e-4, 4e-8, 4e-8)  # 200 Mbit/s
"""What is given to the tests in the place of a measurement."""
FAST = LinkCosts(1e-5, 1e-5, 1e-10, 1e-10)
NODES_OF_4 = replace(ETHERNET, layers=LayerCosts(4, FAST, replace(ETHERNET, alltoall_byte=5e-8)))
"""Nodes of four ranks, well connected, on that Ethernet."""


def seconds(
    ranks: int, link: LinkCosts, nbytes: float = 1e6, numel: int = 2_000_000
) -> dict[str, float]:
    work = Workload(numel, nbytes, QUICK)
    return {name: each.seconds(work, ranks, link) for name, each in encoded_schemes().items()}


def test_two_shots_take_as_long_with_any_number_of_ranks() -> None:
    few, many = seconds(4, ETHERNET), seconds(64, ETHERNET)
    assert many["allgather"] > 15 * few["allgather"]
    assert many["two_shot"] < 1.4 * few["two_shot"]


def test_small_payloads_go_in_one_operation_and_large_ones_of_many_ranks_in_two() -> None:
    small = seconds(16, ETHERNET, nbytes=500, numel=1000)
    assert small["allgather"] < small["two_shot"]
    large = seconds(16, ETHERNET)
    assert large["two_shot"] < large["allgather"] / 4
    two = seconds(2, ETHERNET)
    assert two["allgather"] < two["two_shot"]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.zeros(32, 33))
        self.wide = nn.Parameter(torch.zeros(512, 1024))


def gradients(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "wide": torch.randn(512, 1024, generator=generator),
        "tiny": torch.randn(32, 33, generator=generator),
    }


def chosen(
    monkeypatch: pytest.MonkeyPatch, ranks: int, link: LinkCosts, **options: object
) -> VirtualRanks:
    monkeypatch.setattr(LocalTransport, "link_costs", lambda self, prefix: link)
    monkeypatch.setattr(known_costs, "measure_codec", lambda compressor: QUICK)
    options = {"compression": "qsgd:bits=4", "bucket_cap_mb": 0.1, "scheme": "auto", **options}
    group = VirtualRanks(ranks, Layers().named_parameters(), **options)  # type: ignore[arg-type]
    group.reduce([gradients(rank) for rank in range(ranks)])
    group.reduce([gradients(rank) for rank in range(ranks)])
    return group


def test_each_bucket_gets_the_scheme_that_is_foreseen_to_be_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = chosen(monkeypatch, 8, ETHERNET)
    schemes = {row.layer: row.scheme for row in group.plan}
    assert schemes == {"wide": "two_shot", "tiny": "allgather"}
    text = str(group.plan)
    assert "network of 8 ranks: allgather 0.5 ms + 200 Mbit/s, alltoall 0.5 ms + 200 Mbit/s" in text
    assert any("two_shot (allgather " in reason for reason in group.plan.reasons)
    assert group.plan.record()["reasons"] == list(group.plan.reasons)


def test_where_messages_are_slow_and_bytes_are_not_one_operation_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = chosen(monkeypatch, 8, replace(ETHERNET, alltoall=0.5))
    assert {row.scheme for row in group.plan} == {"allgather"}


def test_planners_go_on_planning_where_the_scheme_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"compression": "topk:density=0.05", "planner": "lgreco:period=2"}
    auto = chosen(monkeypatch, 4, ETHERNET, **options)
    named = chosen(monkeypatch, 4, ETHERNET, **options, scheme="two_shot")
    for group in (auto, named):
        for _ in range(12):
            group.reduce([gradients(rank) for rank in range(4)])
            group.compression_state_dicts()  # waits for the planner
    assert auto.plan.version >= 2
    assert [row.level for row in auto.plan] == [row.level for row in named.plan]


def with_slow_alltoalls(monkeypatch: pytest.MonkeyPatch, **options: object) -> VirtualRanks:
    """Ranks that foresee two shots to be faster, by little, and find each alltoall to take 10 ms."""
    submit, clock = LocalTransport.submit, [0.0]

    def slow(self: LocalTransport, request: Request, name: str, step: int) -> Any:
        clock[0] += 0.01 * (request.operation == "alltoall")
        return submit(self, request, name, step)

    monkeypatch.setattr(layout, "perf_counter", lambda: clock[0])

    monkeypatch.setattr(LocalTransport, "submit", slow)
    monkeypatch.setattr(LocalTransport, "takes_time", True)
    link = LinkCosts(5e-4, 5e-4, 4e-9, 4e-9)
    foreseen = seconds(4, link, nbytes=266e3, numel=525_344)
    assert 1.0 < foreseen["allgather"] / foreseen["two_shot"] < CLOSE
    return chosen(monkeypatch, 4, link, **{"bucket_cap_mb": 25.0, **options})


def continued(group: VirtualRanks, steps: int) -> list[str]:
    """The scheme of every further step."""
    schemes = []
    for _ in range(steps):
        schemes.append(next(iter(group.plan)).scheme)
        group.reduce([gradients(rank) for rank in range(4)])
    return schemes


def test_where_a_forecast_is_close_schemes_are_tried_and_the_faster_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = with_slow_alltoalls(monkeypatch)
    assert "is being tried" in str(group.plan)
    turns = ["allgather"] * 2 + ["two_shot"] * 8 + ["allgather"] * 4
    assert continued(group, 20) == turns + ["allgather"] * 6
    assert "steps with all buckets by one scheme, tried here: allgather " in str(group.plan)
    (costs,) = {str(state["costs"]) for state in group.compression_state_dicts()}
    assert "'tried': {'allgather': 0.0" in costs


def test_what_one_bucket_cannot_do_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    foresee = SchemeChoice._foresee

    def foreseen(self: SchemeChoice, bucket: Bucket, *rest: Any) -> dict[str, float]:
        only_first = {"hierarchical": 1e-9} if bucket.index == 0 else {}
        return only_first | foresee(self, bucket, *rest)

    monkeypatch.setattr(scheme_choice, "CLOSE", 1e9)
    monkeypatch.setattr(SchemeChoice, "_foresee", foreseen)
    group = with_slow_alltoalls(monkeypatch, bucket_cap_mb=0.1)
    assert "bucket 1: " in str(group.plan)
    assert {*continued(group, 13)} == {"allgather", "two_shot"}


def test_what_was_tried_is_part_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    group = with_slow_alltoalls(monkeypatch)
    continued(group, 14)
    states = group.compression_state_dicts()
    resumed = with_slow_alltoalls(monkeypatch)
    resumed.load_compression_state_dicts(states)
    assert continued(resumed, 3) == ["allgather"] * 3
    states[0]["costs"]["tried"]["two_shot"] = "slow"
    with pytest.raises(ValueError, match="tried"):
        check_state(states[0])
    del states[0]["costs"]["tried"]  # as older versions wrote it
    check_state(states[0])


def test_a_named_scheme_and_a_planner_are_not_disturbed_by_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = with_slow_alltoalls(monkeypatch, scheme="two_shot")
    assert continued(named, 8) == ["two_shot"] * 8
    planned = with_slow_alltoalls(
        monkeypatch, compression="topk:density=0.1", planner="lgreco:period=1000", scheme="auto"
    )
    assert len(set(continued(planned, 8))) == 1


def test_a_scheme_can_be_given_to_some_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = chosen(monkeypatch, 8, ETHERNET, scheme={"wide": "allgather", "*": "two_shot"})
    assert {row.layer: row.scheme for row in group.plan} == {"wide": "allgather", "tiny": "two_shot"}
    assert group.plan.reasons == ()


def test_reducing_in_nodes_is_considered_where_its_costs_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = chosen(monkeypatch, 8, NODES_OF_4, ranks_per_node=4)
    assert {row.layer: row.scheme for row in group.plan} == {
        "wide": "hierarchical",
        "tiny": "allgather",
    }
    text = "\n".join(group.plan.reasons)
    assert "in a node: allgather 0.01 ms + 80,000 Mbit/s, " in text
    assert "hierarchical (allgather " in text
    slow = replace(NODES_OF_4, layers=LayerCosts(4, ETHERNET, ETHERNET))
    group = chosen(monkeypatch, 8, slow, ranks_per_node=4)
    assert {row.scheme for row in group.plan} == {"two_shot", "allgather"}


def test_where_it_is_not_considered_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = chosen(monkeypatch, 4, ETHERNET)
    assert "hierarchical is not considered: every node has one rank" in group.plan.reasons
    # clipping looks at a rank's whole gradient
    options = {"compression": "topk:density=0.05", "feedback": "dgc:clip=1.0", "ranks_per_node": 4}
    clipped = chosen(monkeypatch, 8, NODES_OF_4, **options)
    assert {row.scheme for row in clipped.plan} == {"two_shot", "allgather"}
    assert not any("hierarchical " in reason for reason in clipped.plan.reasons)


def test_costs_are_measured_in_nodes_and_between_them_at_the_same_time() -> None:
    groups: list[tuple[int, ...]] = []

    class Watched(LocalTransport):
        def submit(self, request: Request, name: str, step: int) -> Callable[[], Tensor]:
            groups.append(self.members(request.group))
            return super().submit(request, name, step)

    topology = Topology(("a", "b", "b", "a"))
    costs = LocalGroup(4, topology).run(lambda rank: measure_link(Watched(rank, hvd.Average), "x"))
    assert set(groups) == {(0, 1, 2, 3), (0, 3), (1, 2), (0, 1), (2, 3)}
    assert all(each.layers is not None and each.layers.ranks_per_node == 2 for each in costs)
    assert LinkCosts.from_dict(costs[0].to_dict()) == costs[0]
    flat = LocalGroup(2).run(lambda rank: measure_link(rank.transport(), "x"))
    assert all(each.layers is None for each in flat)


def test_a_resumed_run_keeps_its_schemes_and_goes_on_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = chosen(monkeypatch, 4, NODES_OF_4, ranks_per_node=2)
    states = first.compression_state_dicts()
    assert {row.scheme for row in first.plan} == {"hierarchical", "allgather"}
    slow = replace(ETHERNET, alltoall=9.0)  # what would be measured now
    monkeypatch.setattr(LocalTransport, "link_costs", lambda self, prefix: slow)

    def resumed(ranks: int, found: list[dict[str, Any]]) -> tuple[nn.Module, VirtualRanks]:
        model = Layers()
        group = VirtualRanks(
            ranks,
            model.named_parameters(),
            "qsgd:bits=4",
            bucket_cap_mb=0.1,
            scheme="auto",
            ranks_per_node=2,
        )
        group.load_compression_state_dicts(found)
        group.reduce([gradients(rank) for rank in range(ranks)])
        return model, group

    model, group = resumed(4, states)
    assert [row.scheme for row in group.plan] == [row.scheme for row in first.plan]
    assert group.plan.reasons == first.plan.reasons
    again, _ = resumed(4, states)
    assert torch.equal(again.wide.grad, model.wide.grad)
    _, others = resumed(6, [merge_compression_states(states)] * 6)
    assert {row.scheme for row in others.plan} == {"allgather"}


def test_costs_in_a_state_that_are_damaged_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = chosen(monkeypatch, 4, ETHERNET)
    states = group.compression_state_dicts()
    assert states[0]["costs"]["ranks"] == [4, 1]
    damaged = [state | {"costs": state["costs"] | {"ranks": [4, "x"]}} for state in states]
    with pytest.raises(ValueError, match=r"costs.'ranks'..1. must be a whole number"):
        check_state(damaged[0])
    older = [{key: state[key] for key in state if key != "costs"} for state in states]
    group.load_compression_state_dicts(older)


@pytest.mark.parametrize("spec", ["qsgd:bits=4", "topk:density=0.01", "alq:bits=3", "onebit"])
def test_a_compressor_is_timed(spec: str) -> None:
    costs = known_costs.measure_codec(parse(spec))
    assert costs.compress + costs.compress_byte > 0
    assert 0 <= costs.compress < 1e-5
    assert 0 <= costs.compress_byte < 1e-5
    assert 0 <= costs.decompress < 1e-5
    assert 0 <= costs.decompress_byte < 1e-4


@pytest.mark.parametrize(
    ("compression", "scheme", "message"),
    [
        ("qsgd:bits=4", "twoshot", "unknown scheme 'twoshot' .did you mean 'two_shot'"),
        ("topk", "allreduce", "carries no encoded payloads: use one of auto, allgather"),
        ("topk", "two_shot:level=-1", "level is the one of the second compression"),
        ("topk", "two_shot:level=3", "scheme 'two_shot:level=3': density is a share"),
        ("qsgd:bits=4", "two_shot:level=0.02", "a level is 1 to 8 whole bits, got 0.02"),
        ("topk", {"wide.*": "auto"}, "pattern 'wide..' matches no parameter"),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused(compression: str, scheme: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualRanks(2, Layers().named_parameters(), compression, scheme=scheme)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["overrides", "compression"])
def test_a_scheme_among_the_options_of_a_compressor_is_told_where_to_go(argument: str) -> None:
    text = "topk:density=0.01,scheme=two_shot"
    options: dict[str, Any] = {"compression": "topk", argument: text}
    if argument == "overrides":
        options[argument] = {"wide": text}
    message = rf"{argument}: .*as in scheme=.'PATTERN': 'two_shot', '.': 'allgather'."
    with pytest.raises(ValueError, match=message):
        VirtualRanks(2, Layers().named_parameters(), **options)
