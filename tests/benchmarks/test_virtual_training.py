"""A preset trains with the gradients of virtual ranks, as a user would start it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import lab

pytest.importorskip("horovod.torch", reason="Horovod is not installed")


def start(*words: str) -> subprocess.CompletedProcess[str]:
    command = [*lab.module("accuracy.virtual_training"), *words]
    return subprocess.run(
        command, cwd=lab.ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_virtual_ranks_train_a_preset_and_write_what_they_did(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = start(
        *("--virtual-ranks", "3", "--steps", "40", "--out", str(out)),
        *(
            "--preset",
            "mlp-digits",
            "--compression",
            "topk:density=0.05",
            "--planner",
            "lgreco:period=10",
        ),
    )
    assert done.returncode == 0, done.stderr
    assert "held out: loss" in done.stdout
    figures = json.loads(out.read_text())
    assert len(figures["losses"]) == len(figures["payload_bytes"]) == 40
    assert figures["losses"][-1] < 0.5 * figures["losses"][0]
    assert len(set(figures["payload_bytes"])) > 1, "the planner has changed nothing"
    assert figures["score"]["accuracy"] > 0.7


@pytest.mark.slow
def test_another_seed_is_another_training_and_the_same_one_the_same(tmp_path: Path) -> None:
    losses = []
    for run, seed in enumerate(("1", "2", "1")):
        out = tmp_path / f"{run}.json"
        words = ("--preset", "mlp-digits", "--seed", seed, "--out", str(out))
        assert start("--virtual-ranks", "2", "--steps", "3", *words).returncode == 0
        losses.append(json.loads(out.read_text())["losses"])
    assert losses[0] == losses[2]
    assert losses[0][0] != losses[1][0]


@pytest.mark.parametrize("words", [("--steps", "1"), ("--virtual-ranks", "0", "--steps", "1")])
def test_a_wrong_command_line_exits_with_2(words: tuple[str, ...]) -> None:
    done = start(*words)
    assert done.returncode == 2
    assert "virtual-ranks" in done.stderr
