"""compression="auto" as one argument: what it stands for, and training with virtual ranks."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive import VirtualRanks  # noqa: E402
from hvd_adaptive.adaptation.automatic import expand  # noqa: E402
from hvd_adaptive.adaptation.controller import AdaptationController  # noqa: E402
from hvd_adaptive.collectives.measured_costs import MeasuredCosts  # noqa: E402
from hvd_adaptive.comm.link_costs import LinkCosts  # noqa: E402
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank, LocalTransport  # noqa: E402
from hvd_adaptive.compressors import parse  # noqa: E402
from hvd_adaptive.engine.cost_measurement import CostMeasurement  # noqa: E402
from hvd_adaptive.engine.exchange import Exchange  # noqa: E402
from hvd_adaptive.engine.known_costs import KnownCosts  # noqa: E402
from hvd_adaptive.planning import Auto, Plan  # noqa: E402
from hvd_adaptive.planning.explanation import LastChoice, chosen_by  # noqa: E402

SLOW = LinkCosts(2e-4, 2e-4, 8e-7, 8e-7)  # 10 Mbit/s
FAST = LinkCosts(1e-6, 1e-6, 1e-11, 1e-11)
RANKS = 3


def train(
    link: LinkCosts, steps: int, compression: str = "auto:accuracy=fast,delay=0.1", **options: Any
) -> tuple[VirtualRanks, list[Plan], list[float]]:
    """A classifier that learns a linear map; plans and losses of its steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    teacher = torch.randn(32, 8)
    rule = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ranks = VirtualRanks(
        RANKS,
        model.named_parameters(),
        compression,
        param_groups=lambda: rule.param_groups,
        link=link,
        compute_seconds=0.01,
        **options,
    )
    ranks.set_horizon(steps)
    plans, losses = [], []
    for _ in range(steps):
        gradients, loss = [], 0.0
        for _ in range(RANKS):
            x = torch.randn(8, 32)
            found = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
            found.backward()
            loss += found.item() / RANKS
            gradients.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad(set_to_none=True)
        ranks.reduce(gradients)
        rule.step()
        plans.append(ranks.plan)
        losses.append(loss)
    return ranks, plans, losses


def compressors_of(plan: Plan) -> set[str]:
    return {row.compressor.partition(":")[0] for row in plan}


def test_ranks_learn_from_a_step_while_operations_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: dict[int, list[str]] = {rank: [] for rank in range(RANKS)}

    def note(of: type, method: str, rank: Callable[[Any], int]) -> None:
        original = getattr(of, method)

        def noting(self: Any, *args: Any) -> Any:
            noted[rank(self)].append(method)
            return original(self, *args)

        monkeypatch.setattr(of, method, noting)

    note(Exchange, "start", lambda exchange: exchange.rank)
    note(Exchange, "finish", lambda exchange: exchange.rank)
    note(AdaptationController, "learn", lambda controller: controller._rank)
    train(SLOW, 5)
    steps = " ".join(noted[0]).split("finish")
    assert len(steps) == 6
    assert all(each.split()[0] == "start" and each.endswith("start learn ") for each in steps[:5]), (
        steps
    )
    assert noted[1] == noted[2] == noted[0]


def test_a_slow_network_makes_it_compress_and_the_model_still_learns() -> None:
    _, plans, losses = train(SLOW, 160)
    assert compressors_of(plans[5]) == {"fp16"}
    assert compressors_of(plans[60]) & {"qsgdinf", "topk"}
    assert plans[120].wire_bytes < 0.4 * plans[5].wire_bytes
    assert "topk" in {name for plan in plans for name in compressors_of(plan)}
    assert "topk" not in compressors_of(plans[-1])  # what waited has been sent
    assert sum(losses[-20:]) < 0.6 * sum(losses[:20])
    text = str(plans[120])
    assert "auto: " in text
    assert "limits (fast): delay" in text
    assert "second: " in text


def test_a_fast_network_makes_it_stay_dense() -> None:
    _, plans, _ = train(FAST, 60)
    assert all(compressors_of(plan) <= {"fp16", "none"} for plan in plans)
    assert any("left dense" in reason for reason in plans[-1].reasons)


def test_a_choice_is_news_once_and_again_where_it_is_another_one() -> None:
    dense = "auto: left dense (fp16): a step of {} ms is foreseen, of which {} % exposed"
    first, same = dense.format(16.5, 3), dense.format(17, 4)
    mended = ("a step took 9 ms, 7 ms were foreseen", "auto: qsgd on 2 layers", "limits: none")
    last = LastChoice()
    news = [last.news(each) for each in [(), (first,), (same,), mended, ("bucket 0: x",)]]
    assert news == ["", first.removeprefix("auto: "), "", "qsgd on 2 layers", ""]


def test_each_other_choice_is_logged_once_and_by_rank_0_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hvd_adaptive"):
        _, plans, _ = train(SLOW, 260)
    by_step = {plan.decided: chosen_by(plan.reasons) for plan in plans if chosen_by(plan.reasons)}
    assert len(by_step) > len({plan.step for plan in plans if plan.step in by_step})
    logged = [record.getMessage() for record in caplog.records]
    made = [f"step {step}: auto: {choice}" for step, choice in by_step.items()]
    assert logged[0] == made[0]
    assert 1 < len(logged) < len(made)
    assert [each for each in made if each in logged] == logged
    kinds = [re.sub(r"[\d.]+", "", each.partition("auto:")[2]) for each in logged]
    assert all(one != next_one for one, next_one in itertools.pairwise(kinds))


def test_named_candidates_are_what_it_chooses_from() -> None:
    _, plans, _ = train(
        SLOW, 40, "topk:density=0.02", planner="auto:noise=0.5", candidates=["terngrad", "powersgd"]
    )
    assert compressors_of(plans[-1]) <= {"topk", "terngrad", "powersgd", "fp16", "none"}
    assert plans[-1].reasons[0].startswith("auto: ")


def test_a_checkpoint_holds_what_it_has_learned() -> None:
    ranks, plans, _ = train(SLOW, 45)
    states = ranks.compression_state_dicts()
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    again = VirtualRanks(
        RANKS, model.named_parameters(), "auto:accuracy=fast", link=SLOW, compute_seconds=0.01
    )
    again.load_compression_state_dicts(states)
    again.reduce([{} for _ in range(RANKS)])
    assert again.plan.wire_bytes == plans[-1].wire_bytes
    # times that were observed differ, but not by what is saved
    saved = again.compression_state_dicts()[0]["controller"]["planner"]["budget"]
    assert saved["levels"] == states[0]["controller"]["planner"]["budget"]["levels"]


# --- arguments ------------------------------------------------------------------------------------


def test_auto_beside_a_planner_is_refused() -> None:
    with pytest.raises(ValueError, match="leave planner out"):
        expand("auto", "lgreco", (), "allgather", "allgather")


def test_a_named_scheme_stays_and_the_default_becomes_auto() -> None:
    assert expand("auto", None, (), "two_shot", "allgather").scheme == "two_shot"
    assert expand("auto", None, (), "allgather", "allgather").scheme == "auto"
    assert expand("topk", "auto", (), "allgather", "allgather").scheme == "allgather"


def test_adam_makes_the_metric_relative_and_a_named_metric_stays() -> None:
    groups = [{"betas": (0.9, 0.999)}]

    def metric(spec: str, **options: Any) -> str:
        recipe = expand(spec, None, (), "allgather", "allgather", **options).planner
        assert isinstance(recipe, Auto)
        return recipe.metric

    assert metric("auto", param_groups=groups) == "relative"
    assert metric("auto") == "l2"
    assert metric("auto:metric=l2", param_groups=groups) == "l2"


def test_dense_candidates_are_added_once() -> None:
    named = [parse("fp16"), "qsgd"]
    assert expand("topk", "auto", named, "allgather", "allgather").candidates == (*named, "none")
    assert expand("topk", "lgreco", named, "allgather", "allgather").candidates == named


# --- costs ----------------------------------------------------------------------------------------


def test_the_network_is_measured_once_for_schemes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(self: LocalTransport, prefix: str) -> LinkCosts:
        asked.append(prefix)
        return SLOW

    monkeypatch.setattr(LocalTransport, "link_costs", measure)
    ranks, plans, _ = train(SLOW, 60)
    assert any(row.scheme in ("allgather", "two_shot") for row in plans[-1])  # chosen for buckets, too
    assert len(asked) == RANKS
    trace = ranks.trace()
    assert trace is not None
    assert trace.measured.link == SLOW
    assert trace.ranks == RANKS


def test_what_is_measured_again_counts_for_schemes_and_seconds_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = iter([SLOW, SLOW, FAST, FAST])
    monkeypatch.setattr(LocalTransport, "link_costs", lambda self, prefix: next(links))

    def work(rank: LocalRank) -> tuple[LinkCosts, LinkCosts, LinkCosts, list[str]]:
        known = KnownCosts(rank.transport(), rank.control("c"), "costs")
        measurement = CostMeasurement(known, ("auto",), 25e6)
        compressors = [parse("qsgd:bits=4"), parse("fp16"), parse("powersgd")]
        first = measurement(compressors, False)
        kept = measurement(compressors, False)
        fresh = measurement(compressors, True)
        assert fresh.codecs["qsgd"] == known.codec(parse("qsgd:bits=4"))
        return first.link, kept.link, known.link(), list(fresh.codecs)

    found = LocalGroup(2).run(work)
    assert all(each[:3] == (SLOW, SLOW, FAST) for each in found)
    assert found[0][3] == ["qsgd", "fp16", "powersgd"]


def test_ranks_that_have_just_joined_measure_together_with_those_that_did_so_before() -> None:
    """Operations meet by name, so names must not tell how often a rank has measured."""

    def work(rank: LocalRank) -> MeasuredCosts:
        transport, control = rank.transport(), rank.control("c")
        compressors = [parse("qsgd:bits=4"), parse("fp16")]
        measurement = CostMeasurement(KnownCosts(transport, control, "costs"), ("auto",), 25e6)
        measurement(compressors, False)
        if rank.rank == 1:
            measurement = CostMeasurement(KnownCosts(transport, control, "costs"), ("auto",), 25e6)
        return measurement(compressors, True)

    first, second = LocalGroup(2).run(work)
    assert first == second
