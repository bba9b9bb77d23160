"""launch/training/display.py: what rank 0 shows while a model trains, and at the end."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive.planning.plan import Plan
from hvd_adaptive.telemetry import Placement
from launch.training.display import (
    Costs,
    Progress,
    at_gigabit,
    library_notices,
    since_decided,
    table,
)
from launch.training.loop import Score


def test_the_parts_of_a_step_add_up_and_what_is_unknown_is_said() -> None:
    score = Score(0.5, 0.9, 100, is_text=False)
    known = table(Costs(0.1, 0.01, 0.02, 0.03, 100.0, 150.0), 1000, 32, 0.4, score)
    assert re.search(r"compute +40\.000 ms +40\.0%", known)
    assert "320.0" in known
    assert "compression ratio 10.0" in known
    crowded = Placement(ranks=16, hosts=1, sharing=16, cores=2)
    ended = table(Costs(0.1, 0.01, 0.07, 0.0, 100.0, 150.0), 1000, 32, 0.4, score, crowded)
    assert ended.splitlines()[-1] == "70 % exposed: 16 ranks on 2 cores, not the network"
    unknown = table(Costs(math.nan), 1000, 32, math.nan, score)
    assert unknown.count("not measured") == 9


@pytest.mark.parametrize(("shown", "lines"), [(True, 1), (False, 0)])
def test_what_the_library_logs_during_a_training_is_a_line_of_rank_0(
    shown: bool, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("hvd_adaptive")
    before = logger.level, logger.propagate, list(logger.handlers)
    with library_notices(Progress(0, 100, shown)):
        logger.info("step %d: auto: left dense (fp16)", 30)
    logger.info("nobody asked for this")
    assert capsys.readouterr().err == "step 30: auto: left dense (fp16)\n" * lines
    assert (logger.level, logger.propagate, logger.handlers) == before


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (1203, "since step 1,200, when that was decided, a step took 20 ms (median of 3)"),
        (1204, "since step 1,200, when that was decided, a step took 25 ms (median of 4)"),
        # resumed: this run knows its own steps only
        (1250, "since step 1,200, when that was decided, a step took 20 ms (median of 5)"),
        (1200, ""),
    ],
)
def test_what_auto_foresaw_stands_beside_what_steps_took_since_then(done: int, said: str) -> None:
    # it left all as it was since step 30
    plan = Plan((), step=30, reasons=("a step took 9 ms", "auto: left dense (fp16)"), decided=1200)
    seconds = [0.005, 0.03, 0.01, 0.02, 0.3]
    assert since_decided(plan, done, seconds) == said
    assert since_decided(replace(plan, reasons=("bucket 0: x",)), done, seconds) == ""


def test_what_dense_steps_would_take_at_1_gbit_is_foreseen() -> None:
    # 100 MB: each of 4 ranks sends 150 MB, which takes 1.2 s; a third of it is hidden at most
    foreseen = at_gigabit([1000, 25_000_000], 0.3, 4)
    found = re.search(r"dense ([\d.]+) ms per step, (\d+)% exposed; in fp16 ([\d.]+) ms", foreseen)
    assert found is not None, foreseen
    fp32, exposed, fp16 = (float(each) for each in found.groups())
    assert 1_300 < fp32 < 1_510
    assert exposed == round(100 * (1 - 300 / fp32))
    assert 700 < fp16 < 910
    assert at_gigabit([1000], 0.3, 1) == ""
    assert at_gigabit([1000], math.nan, 4) == ""
