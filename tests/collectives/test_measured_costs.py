"""Costs among other ranks and on other links, against closed forms."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hvd_adaptive.collectives import SCHEMES
from hvd_adaptive.collectives.costs import CodecCosts
from hvd_adaptive.collectives.measured_costs import MeasuredCosts, SumCosts, SummandCosts
from hvd_adaptive.comm.link_costs import CYCLE, LayerCosts, LinkCosts, seconds_of_byte

SMALL, BYTE = CYCLE + 2e-4, 8e-9
LINK = LinkCosts(SMALL, SMALL, BYTE, BYTE)
FREE = CodecCosts(0.0, 0.0, 0.0)
MEASURED = MeasuredCosts(
    4,
    LINK,
    {"float16": SumCosts(SMALL, BYTE)},
    {
        "fp16": SummandCosts("fp16", 0.0, 0.0, "float16", dense=True),
        "bf16": SummandCosts("bf16", 0.0, 0.0, "", dense=True),
        "powersgd": SummandCosts("powersgd", 0.0, 0.0, "float16", operations=2),
        "topk": FREE,
    },
    ("auto",),
    25e6,
)
PAYLOAD = 1e6


def seconds(measured: MeasuredCosts, spec: str, scheme: str) -> float:
    """Of the network, for one payload."""
    rows = measured.step_costs().compressors[spec].schemes
    [line] = [each for each in rows if each.name == scheme]
    return line.latency + line.byte * PAYLOAD


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 1024])
def test_every_scheme_takes_its_own_bytes_and_a_tree_of_messages(ranks: int) -> None:
    there = MEASURED.at(ranks)
    assert there.ranks == ranks
    small = CYCLE + 1e-4 * math.log2(ranks)  # two messages follow each other among four ranks
    of_ring = 2 * (ranks - 1) / ranks * PAYLOAD * BYTE
    assert seconds(there, "fp16", "allreduce") == pytest.approx(small + of_ring)
    assert seconds(there, "powersgd", "allreduce") == pytest.approx(2 * small + of_ring)
    assert seconds(there, "bf16", "cast_two_shot") == pytest.approx(2 * small + of_ring)
    assert seconds(there, "topk", "two_shot") == pytest.approx(2 * small + of_ring)
    gathered = small + (ranks - 1) * PAYLOAD * BYTE
    assert seconds(there, "topk", "allgather") == pytest.approx(gathered)
    for spec, scheme in (("fp16", "allreduce"), ("topk", "allgather"), ("topk", "two_shot")):
        carried = SCHEMES[scheme]().link_bytes(PAYLOAD, ranks) * BYTE
        shots = 2 if scheme == "two_shot" else 1
        assert seconds(there, spec, scheme) == pytest.approx(shots * small + carried)


def test_what_is_measured_is_what_is_predicted_of_the_same_ranks() -> None:
    assert MEASURED.at(4) == MEASURED
    back = MEASURED.at(64).at(4).link
    assert back.allgather == pytest.approx(LINK.allgather)


def test_the_cycle_bounds_what_grows_with_the_ranks() -> None:
    assert MEASURED.at(1024, math.inf).link == LINK
    grown = MEASURED.at(1024, 0.0)
    assert grown.link.allgather == pytest.approx(5 * SMALL)
    assert grown.sums["float16"].latency == pytest.approx(5 * SMALL)


def test_another_rate_changes_what_bytes_cost_between_hosts() -> None:
    slow = MEASURED.with_rate(1e8)
    byte = seconds_of_byte(1e8)
    assert byte == pytest.approx(8 / 0.95e8)
    expected = SMALL + 1.5 * PAYLOAD * byte
    assert seconds(slow, "fp16", "allreduce") == pytest.approx(expected)
    assert seconds(slow, "topk", "allgather") == pytest.approx(SMALL + 3 * PAYLOAD * byte)


def test_what_operations_made_of_their_links_they_make_of_others() -> None:
    gigabit = 8 / 1e9  # seconds of a byte, of which two thirds, a half and four fifths were used
    link = LinkCosts(SMALL, SMALL, 1.5 * gigabit, 2 * gigabit, LayerCosts(2, LINK, LINK))
    measured = replace(MEASURED, link=link, sums={"float16": SumCosts(SMALL, 1.25 * gigabit)})
    slow = measured.with_rate(1e8, 2, before=1e9)
    assert slow.link.allgather_byte == pytest.approx(15 * gigabit)
    assert slow.link.alltoall_byte == pytest.approx(20 * gigabit)
    assert slow.sums["float16"].link_byte == pytest.approx(12.5 * gigabit)
    assert slow.link.layers is not None
    assert slow.link.layers.node == LINK
    assert slow.link.layers.peers.alltoall_byte == pytest.approx(10 * BYTE)
    assert (slow.link.allgather, slow.link.alltoall) == (SMALL, SMALL)
    assert slow.with_rate(1e9, 2, before=1e8).link.alltoall_byte == pytest.approx(2 * gigabit)


def test_ranks_of_a_host_share_its_link_where_all_send_to_all() -> None:
    shared = MEASURED.with_rate(1e9, ranks_per_node=4).link
    assert shared.alltoall_byte == pytest.approx(4 * shared.allgather_byte)


def test_nodes_keep_their_own_costs_while_the_number_of_nodes_grows() -> None:
    layers = LayerCosts(2, replace(LINK, allgather_byte=1e-10), LINK)
    nodes = replace(MEASURED, link=replace(LINK, layers=layers))
    there = nodes.at(32).with_rate(1e9, 2).link.layers
    assert there is not None
    assert there.node == layers.node
    assert there.peers.allgather == pytest.approx(CYCLE + 2e-4 * 4)  # from two nodes to sixteen
    assert there.peers.allgather_byte == pytest.approx(2 * seconds_of_byte(1e9))
    names = [each.name for each in nodes.at(32).step_costs().compressors["topk"].schemes]
    assert names == ["allgather", "two_shot", "hierarchical"]


def test_named_schemes_are_the_only_ones() -> None:
    named = replace(MEASURED, schemes=("two_shot:level=8",)).step_costs()
    assert [each.name for each in named.compressors["topk"].schemes] == ["two_shot"]


def test_slower_compressors_take_longer_for_elements_and_for_bytes() -> None:
    codecs = {
        "topk": CodecCosts(1.0, 2.0, 3.0, 4.0),
        "fp16": SummandCosts("fp16", 4.0, 5.0, "float16", 2),
    }
    slower = replace(MEASURED, codecs=codecs).with_slower_codecs(2.0).codecs
    assert slower == {
        "topk": CodecCosts(2.0, 4.0, 6.0, 8.0),
        "fp16": SummandCosts("fp16", 8.0, 10.0, "float16", 2),
    }


def test_measurements_survive_json() -> None:
    layers = replace(MEASURED, link=replace(LINK, layers=LayerCosts(2, LINK, LINK)))
    for measured in (MEASURED, layers):
        assert MeasuredCosts.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
