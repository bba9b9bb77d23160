"""``hva predict``: dense steps of an unchanged script, and the same predicted from a file."""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_adaptive.commands import run_command
from tests.commands.launching import HVA, hva, start


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A trace of six layers on four hosts, as ``--json`` writes it."""
    from tests.adaptation.test_prediction import trace_of

    recipe = "auto:accuracy=strict,timed_steps=28,period=40"
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"trace": trace_of(mbit=100.0, recipe=recipe).to_dict()}))
    return path


def predict(*words: str) -> int:
    try:
        return run_command("predict", list(words))
    except SystemExit as ended:
        return int(str(ended.code))


# ------------------------------------------------------------------------------------ on real ranks


@pytest.mark.distributed
def test_a_script_ends_after_its_dense_steps_and_can_be_predicted_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    path = tmp_path / "steps.json"
    done = start(
        [
            *("horovodrun", "-np", "2", *HVA, "predict", "--steps", "24", "--json", str(path), "--"),
            *("python", "synthetic_benchmark.py", "--num-batches-per-iter", "1000"),
        ]
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"hva predict: 2 ranks on 1 host, \d+ dense steps of ", said)
    assert "images/s" not in said  # it did not train on
    for word in ("fp16 (dense)", "topk at ", "two_shot", "32 ranks", "write --rate"):
        assert word in said
    stored = json.loads(path.read_text())
    assert stored["ranks"] == [2, 4, 8, 16, 32]
    assert len(stored["trace"]["dense"]["seconds"]) >= 12
    cells = [cell for row in stored["rows"] for cell in row["seconds"]]
    assert all(0 < cell["low"] <= cell["seconds"] <= cell["high"] for cell in cells)
    assert predict("--from", str(path), "--ranks", "2") == 0
    assert "2 ranks on 1 host" in capsys.readouterr().out


def test_one_rank_sends_nothing_and_says_so() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    done = hva("predict", "--", "mnist.py")
    assert done.returncode == 2
    assert "hva predict: one rank sends nothing: start it with horovodrun" in done.stderr


class Ranks:
    """In the place of Horovod."""

    @staticmethod
    def size() -> int:
        return 2

    @staticmethod
    def local_size() -> int:
        return 2

    @staticmethod
    def rank() -> int:
        return 0

    @staticmethod
    def shutdown() -> None:
        pass


def test_a_script_that_ends_too_early_is_told_how_many_steps_to_ask_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    from hvd_adaptive.commands import rehearsal

    at_the_end: list[Callable[[], object]] = []
    statuses: list[int] = []
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    monkeypatch.setattr(rehearsal.os, "_exit", statuses.append)

    class Optimizer(SimpleNamespace):
        def step(self) -> str:
            return "stepped"

    controller = SimpleNamespace(outlook=SimpleNamespace(plans=0))

    def fresh(**question: Any) -> Any:
        settings = {"steps": 40, "json": None, "question": question}
        made: Any = Optimizer(_reducer=SimpleNamespace(controller=controller))
        rehearsal.Rehearsal(Ranks, settings).watch(made)  # type: ignore[arg-type]
        return made

    optimizer = fresh()
    assert [optimizer.step() for _ in range(30)] == ["stepped"] * 30
    at_the_end.pop()()
    assert statuses == [1]
    said = capsys.readouterr().err
    assert "ended after 30 steps" in said
    assert "--steps with a number from 24 to 30" in said
    optimizer = fresh()
    optimizer.step()
    at_the_end.pop()()
    assert "after 1 steps" in (said := capsys.readouterr().err)
    assert "let it train for at least 24" in said
    assert "--steps" not in said

    with pytest.raises(SystemExit) as refused:
        fresh(ranks=[3])
    assert refused.value.code == 2
    assert "3 ranks: write at least 2, and multiples of 2" in capsys.readouterr().err

    endless = fresh()
    for _ in range(159):
        endless.step()
    with pytest.raises(SystemExit) as ended:
        endless.step()
    assert ended.value.code == 1
    assert "160 steps have shown nothing" in capsys.readouterr().err
    at_the_end.pop()()
    assert statuses == [1, 1]  # it has been said


# ------------------------------------------------------------------------------------- from a file


def test_a_file_is_predicted_from_for_other_ranks_and_links(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.json"
    words = ["--from", str(file), "--ranks", "4,64", "--json", str(again)]
    assert predict(*words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("hva predict: 4 ranks on 4 hosts, 10 dense steps of ")
    [heading] = [line for line in shown.splitlines() if line.startswith("ms per step")]
    assert heading.split() == ["ms", "per", "step", "4", "ranks", "64", "ranks"]
    methods = {line.split("  ")[0].rstrip("*") for line in shown.splitlines() if "(" in line}
    assert {"fp16 (dense)", "none (dense)", "auto"} <= methods
    assert "  qsgdinf at " in shown
    assert "from 4 ranks on" in shown or "from 2 ranks on" in shown
    slow = json.loads(again.read_text())
    assert slow["auto"][0]["compresses"]
    # from its own answer, on links so fast that nothing is worth compressing
    fast = ["--from", str(again), "--hosts", "4,64", "--rate", "100gbit", "--json", str(again)]
    assert predict(*fast) == 0
    shown = capsys.readouterr().out
    assert "links between hosts: 100,000 Mbit/s, as asked for" in shown
    assert "left dense" in shown
    quick = json.loads(again.read_text())
    assert quick["ranks"] == [4, 64]
    assert not quick["auto"][0]["compresses"]
    assert quick["trace"] == slow["trace"] | {"recipe": quick["trace"]["recipe"]}
    # on links of the rate on which they were traced, whatever that is, steps take what they took
    same = ["--from", str(file), "--ranks", "4,64", "--rate", "1gbit", "--traced-rate", "1gbit"]
    assert predict(*same, "--json", str(again)) == 0
    assert (
        "links between hosts: 1,000 Mbit/s, as asked for, 1,000 Mbit/s in these"
        in capsys.readouterr().out
    )
    assert json.loads(again.read_text())["rows"] == slow["rows"]


def test_limits_are_marked_and_follow_the_step_and_the_preset(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def marked(*words: str) -> int:
        assert predict("--from", str(file), "--ranks", "4", *words) == 0
        return sum("* " in line and "(" in line for line in capsys.readouterr().out.splitlines())

    early, late = marked("--at-step", "100"), marked("--at-step", "100000")
    assert early > late
    assert marked("--accuracy", "strict") >= marked("--accuracy", "fast")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which script? Write 'hva predict [OPTIONS] -- python train.py'"),
        (["--", "horovodrun", "-np", "2", "python", "x.py"], "write 'horovodrun -np 2 hva predict"),
        (["--", "pyhton", "x.py"], "there is no command 'pyhton': write 'hva predict -- python"),
        (["--steps", "5", "--", "x.py"], "--steps 5: write at least 24"),
        (["--rate", "fast", "--", "x.py"], "write a rate such as 200mbit or 10gbit"),
        (["--traced-rate", "1gbit", "--", "x.py"], "what --rate is to be compared with: write --rate"),
        (["--ranks", "4;8", "--", "x.py"], "write numbers with commas between"),
        (["--hosts", "4", "--", "x.py"], "--hosts goes with --from FILE"),
        (["--from", "FILE", "--", "x.py"], "--from FILE trains nothing"),
        (["--from", "FILE", "--ranks", "4", "--hosts", "2"], "say the same"),
        (["--from", "FILE", "--ranks", "1"], "1 ranks: write at least 2, and multiples of 1"),
        (["--from", "FILE", "--at-step", "0"], "--at-step must be at least 1"),
        (["--from", "nowhere.json"], "nowhere.json"),
        (["--from", "OTHER"], "is no file of hva predict --json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_refused_with_what_to_write(
    words: list[str], said: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    places = {"FILE": str(file), "OTHER": str(other)}
    assert predict(*(places.get(word, word) for word in words)) == 2
    assert said in capsys.readouterr().err


def test_ranks_of_a_host_stay_together(tmp_path: Path) -> None:
    from hvd_adaptive.commands.prediction_text import Question, answer
    from tests.adaptation.test_prediction import trace_of

    trace = replace(trace_of(), hosts=2)
    with pytest.raises(ValueError, match="multiples of 2, as many as each host has"):
        answer(trace, Question(ranks=(7,)))
    assert answer(trace, Question()).record["ranks"] == [4, 8, 16, 32, 64]
