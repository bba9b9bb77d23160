"""Ranks that join, fail and leave under a real elastic launch: training continues on all that remain.

One launch lives through all of it, with several optimizers side by side (elastic_training.py), because
each start of a rank takes seconds; the tests then look at what it left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest

from benchmarks.harness.lab import horovodrun
from tests.failures.elastic_training import ESTIMATING, EXACT, OPTIONS
from tests.harness.eager import PYTHONPATH
from tests.harness.rank_launcher import ENVIRONMENT, ROOT, lives, warm_kernels

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SECONDS = 180
"""For each turn of the story, on a busy machine.

Where a rank is killed, those beside it learn so at once and leave the ring. Another one may then wait
for one that has left, whose process lives: until Gloo's timeout of 30 s, which is Horovod's default. A
shorter one would end all ranks where one that joins is slow to start.
"""
STEPS = 8
"""That all ranks must make before the next turn."""
EXACTLY = 1e-5
"""What rounding may do to weights and estimates in these few steps."""

_WAITS_IN_HOROVOD = r'"MainThread"\n +synchronize \(horovod/torch/mpi_ops\.py'
"""How a stack begins of a rank that waits for an operation."""

Result = TypeVar("Result")
Ranks: TypeAlias = dict[int, dict[str, Any]]
"""The last line of each process that lives, by process."""


SCRIPT = Path(__file__).with_name("elastic_training.py")


class Launch:
    """An elastic launch whose hosts change: different names of this machine."""

    def __init__(self, folder: Path, *hosts: str, program: Sequence[str]) -> None:
        self.folder = folder
        self.program = program
        self.hosts(*hosts)
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        script.chmod(0o755)
        command = [*horovodrun(len(hosts)), "--gloo", "--min-np", "1", "--max-np", "4",
                   "--network-interface", "lo", "--host-discovery-script", str(script),
                   sys.executable, *program]  # fmt: skip
        environment = {
            **os.environ,
            **ENVIRONMENT,
            # With it, Horovod's thread holds a lock that every rank's main thread wants while it waits
            # for one that has gone: until the others' sockets time out.
            "HOROVOD_DYNAMIC_PROCESS_SETS": "0",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
        }
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def hosts(self, *hosts: str) -> None:
        """What the discovery script finds from now on."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self.folder / "hosts")

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def lines(self) -> dict[int, list[dict[str, Any]]]:
        """What each process has written."""
        return {
            int(file.name.removeprefix("rank-")): [
                json.loads(line) for line in file.read_text().splitlines()
            ]
            for file in self.folder.glob("rank-*")
        }

    def ranks(self) -> Ranks:
        return {process: rows[-1] for process, rows in self.lines().items() if rows and lives(process)}

    def processes(self) -> list[int]:
        """Those that run the program, in the order in which they began."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if words[:-1] == [sys.executable, *self.program] and lives(int(folder.name)):
                found.append(int(folder.name))
        return sorted(found)

    def until(self, what: str, done: Callable[[Ranks], bool]) -> Ranks:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            ranks = self.ranks()
            if done(ranks):
                return ranks
            time.sleep(0.25)
        ranks, stacks = self.ranks(), self.stacks()
        message = f"never reached: {what}; the ranks are at {ranks}\n{stacks}\n{self.output}"
        if self.process.poll() is None and re.search(_WAITS_IN_HOROVOD, stacks):
            raise HorovodHangsError(message)
        pytest.fail(message)

    def stacks(self) -> str:
        """Where each rank is, which tells a rank that waits in Horovod from one that waits in ours."""
        spy = Path(sys.executable).with_name("py-spy")
        if not spy.exists():
            return "py-spy is not installed"
        dumps = [
            subprocess.run(
                [spy, "dump", "--pid", str(process)], capture_output=True, text=True, timeout=30,
                check=False,
            )
            for process in self.processes()
        ]  # fmt: skip
        return "\n".join(dump.stdout + dump.stderr for dump in dumps)

    def train(self, size: int) -> Ranks:
        """Until so many ranks have trained together for a while, all optimizers included.

        Counted from where they began together, too: that is one optimizer after the other, in their
        first step, and what comes sooner would find some optimizers with the new ranks, and some not.
        """
        start = max([row["step"] for row in self.ranks().values()], default=0)

        def trained(rows: list[dict[str, Any]]) -> bool:
            begun = next((row for row in reversed(rows) if row["what"] == "begin"), None)
            if begun is None or {begun["size"], rows[-1]["size"]} != {size}:
                return False
            return bool(rows[-1]["step"] >= max(start, begun["step"]) + STEPS)

        def done(ranks: Ranks) -> bool:
            lines = self.lines()
            there = [row["rank"] for process, row in ranks.items() if trained(lines[process])]
            return sorted(there) == list(range(size))

        return self.until(f"{size} ranks train from step {start} on", done)

    def close(self) -> None:
        """End what is left of it."""
        for process in [self.process.pid, *self.processes()]:
            if lives(process):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def kill(ranks: Ranks, rank: int) -> None:
    (process,) = (process for process, row in ranks.items() if row["rank"] == rank)
    os.kill(process, signal.SIGKILL)


@dataclass(frozen=True)
class Story:
    """What is left of the launch when it has ended."""

    folder: Path
    code: int
    output: str
    lines: dict[int, list[dict[str, Any]]]
    left_behind: list[int]
    killed_at: int
    """The step at which rank 0 was killed."""

    def of(self, what: str) -> list[dict[str, Any]]:
        """All processes' lines of one kind, in the order of their steps."""
        rows = [row for rows in self.lines.values() for row in rows if row["what"] == what]
        return sorted(rows, key=lambda row: int(row["step"]))


class HorovodHangsError(Exception):
    """A rank waits within Horovod for what never ends."""


def tell(launch: Launch) -> Story:
    """Let ranks fail, join, be killed and leave, and the training end."""
    launch.train(2)
    (launch.folder / "fail").touch()  # an error of the network: all survive and go back
    launch.until("a failure", lambda _: not (launch.folder / "fail").exists())
    launch.train(2)
    launch.hosts("localhost:1", "127.0.0.1:1", "127.1:1")  # one joins
    kill(launch.train(3), rank=2)
    ranks = launch.train(2)
    kill(ranks, rank=0)
    (last,) = launch.train(1).values()
    launch.hosts(f"{last['host']}:3")  # two join; Horovod starts nothing more on hosts that failed
    launch.train(3)
    launch.hosts(f"{last['host']}:2")  # one leaves
    launch.train(2)
    (launch.folder / "end").touch()
    code = launch.process.wait(SECONDS)
    end = time.monotonic() + 10
    while launch.processes() and time.monotonic() < end:
        time.sleep(0.25)
    return Story(
        launch.folder, code, launch.output, launch.lines(), launch.processes(),
        max(row["step"] for row in ranks.values()),
    )  # fmt: skip


def launched(
    tmp_path_factory: pytest.TempPathFactory,
    program: Callable[[Path], Sequence[str]],
    told: Callable[[Launch], Result],
) -> Result:
    """What one launch leaves behind, or a second one where a rank hangs within Horovod.

    Horovod's thread ends when a rank has gone, and refuses what is under way. An operation that is
    handed over at that very moment is neither refused nor run, and who waits for it waits forever.

    Args:
        tmp_path_factory: makes its folder.
        program: script and arguments, given the folder.
        told: lets ranks come and go.
    """
    warm_kernels()
    for attempt in (1, 2):
        folder = tmp_path_factory.mktemp("elastic")
        launch = Launch(folder, "localhost:1", "127.0.0.1:1", program=program(folder))
        try:
            return told(launch)
        except HorovodHangsError as error:
            if attempt == 2:
                pytest.fail(str(error))
            warnings.warn(f"launched again: {error}", stacklevel=1)
        finally:
            launch.close()
    raise AssertionError


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return launched(tmp_path_factory, lambda folder: [str(SCRIPT), str(folder)], tell)


def test_training_continues_to_its_end_with_equal_parameters_on_all_ranks(story: Story) -> None:
    assert story.code == 0, story.output
    ends = story.of("end")
    assert sorted((row["name"], row["rank"]) for row in ends) == sorted(
        (name, rank) for name in OPTIONS for rank in (0, 1)
    )
    assert all(row["equal"] and row["moved"] > 0 and row["size"] == 2 for row in ends), ends


def test_what_is_not_sent_yet_goes_back_with_the_weights_and_is_shared_with_a_rank_that_joins(
    story: Story,
) -> None:
    assert story.of("fails"), "nothing has failed"
    joined = next(row["step"] for row in story.of("commit") if row["size"] == 3)
    before_losses = [row for row in story.of("commit") if row["step"] <= joined]
    assert {row["size"] for row in before_losses} == {2, 3}
    for row in before_losses:
        assert all(row["off"][name] < EXACTLY for name in EXACT), row


def test_only_the_loss_of_a_rank_loses_what_was_not_sent(story: Story) -> None:
    for first, second in pairwise(story.of("commit")):
        if first["size"] == second["size"]:
            for name in EXACT:
                assert abs(first["off"][name] - second["off"][name]) < EXACTLY, (first, second)


@pytest.mark.parametrize("name", ESTIMATING)
def test_the_mean_of_estimates_stays_that_of_the_ranks_that_there_are(story: Story, name: str) -> None:
    for row in story.of("commit"):
        assert row["off"][name] < EXACTLY, row


@pytest.mark.parametrize("name", OPTIONS)
def test_telemetry_continues_when_rank_0_dies(story: Story, name: str) -> None:
    folder = story.folder / name
    records = [json.loads(line) for line in (folder / "telemetry.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "scalars" in record]
    assert max(steps) >= story.of("end")[-1]["step"] - 2, steps
    assert len([step for step in steps if step > story.killed_at]) >= 2 * STEPS, steps
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    shown = [record["texts"]["elastic"] for record in records if "elastic" in record.get("texts", {})]
    first, *later = [re.findall(r"\d+", text)[:3] for text in shown]
    assert first == ["0", "0", "2"]
    # the same ranks may have to begin once more, where Horovod has left something over
    assert [counts for counts in later if counts[:2] != ["0", "0"]] == [
        ["1", "0", "3"], ["0", "1", "2"], ["0", "1", "1"], ["2", "0", "3"], ["0", "1", "2"],
    ]  # fmt: skip


def test_rank_0_says_once_what_has_changed(story: Story) -> None:
    said = [line for line in story.output.splitlines() if "hvd_adaptive: step" in line]
    same = [line for line in said if "ranks: 0 joined, 0 left" in line]
    changed = [line for line in said if line not in same]
    assert len(same) >= len(OPTIONS), said
    assert len(changed) == 5 * len(OPTIONS), said
    lost = [line for line in said if "what those that left had not sent yet is lost" in line]
    assert all("0 left" not in line for line in lost)
    assert len(lost) == 3 * (len(EXACT) + len((*ESTIMATING, "dgc"))), lost
    restarted = [line for line in changed if "the planner starts again" in line]
    assert len(restarted) == 5 * len(("accordion", "lgreco")), restarted


def test_a_rank_that_leaves_ends_alone_and_no_process_is_left(story: Story) -> None:
    # Horovod ends a rank that it no longer needs by an exception that nobody catches
    removed = len(re.findall("has been removed from elastic job", story.output))
    assert removed == 1
    assert story.output.count("terminate called") == removed, story.output
    assert "Traceback" not in story.output, story.output
    assert story.left_behind == []


def page_program(folder: Path) -> list[str]:
    """The script of docs/elastic.md, as a reader would save it."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/elastic.md").read_text(), re.M | re.S)
    script = folder / "elastic.py"
    script.write_text(code)
    return [str(script), "1000000"]


def tell_page(launch: Launch) -> str:
    """Let one of two ranks be killed, and a third one join."""

    def until(what: str, pattern: str) -> None:
        launch.until(what, lambda _: re.search(pattern, launch.output, re.S) is not None)

    until("an epoch on 2 ranks", "on 2 ranks")
    os.kill(launch.processes()[-1], signal.SIGKILL)
    until("an epoch on the rank that is left", "on 2 ranks.*on 1 ranks")
    launch.hosts("localhost:1", "127.0.0.1:1", "127.1:1")
    until("an epoch with a new one", "on 1 ranks.*on 2 ranks")
    return launch.output


def test_the_script_of_the_page_goes_on_when_a_worker_is_killed_and_another_joins(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    output = launched(tmp_path_factory, page_program, tell_page)
    said = re.findall(r"hvd_adaptive: step \d+: (.*)", output)
    changes = [re.findall(r"\d+", line)[:3] for line in said]
    assert [each for each in changes if each[:2] != ["0", "0"]] == [["0", "1", "1"], ["1", "0", "2"]]
    assert all("the planner starts again: what it measured is of other ranks" in line for line in said)
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss (\S+) on", output)]
    assert losses[-1] < losses[0], losses
