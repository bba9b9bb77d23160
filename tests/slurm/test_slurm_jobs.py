"""The batch scripts of launch/slurm, submitted to a real Slurm with two nodes.

Jobs of a kind are submitted together, so that one's waiting is another's work.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.launching import HVA
from tests.commands.launching import SCRIPTS as UNCHANGED
from tests.slurm.cluster import ACTIVE, Job, Lab, LabError, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "launch" / "slurm"
FAILING = str(Path(__file__).with_name("failing_rank.py"))
LAUNCHERS = ("srun", "mpirun", "horovodrun")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TINY = ["--preset", "mlp-fashion", "--width", "64", "--batch-size", "8", "--log-every", "2",
        "--eval-examples", "40", "--threads", "1"]  # fmt: skip
# Without kernels, which take seconds to load.
SHORT = [*TINY, "--steps", "8", "--compression", "none"]
# Long enough to be signalled before its end. The star must reach the ranks as it is.
LONG = [*TINY, "--steps", "200", "--lr", "0.005", "--dropout", "0.3", "--override", "*.bias=none"]
# Steps that wait for Horovod, and leave the cores to others meanwhile.
SLOW = {"HOROVOD_CYCLE_TIME": "10"}

ON_TWO = ("--nodes=2", "--ntasks-per-node=1")
ON_ONE = ("--nodes=1", "--ntasks-per-node=2")


def submit(lab: Lab, *arguments: str, options: tuple[str, ...] = ON_TWO, **variables: str) -> Job:
    """Submits train.sbatch, without the trial of the ranks unless that is asked for."""
    return lab.submit(
        SCRIPTS / "train.sbatch", *arguments, options=options, **{"HVA_CHECK": "no", **variables}
    )


def folder_of(job: Job) -> Path:
    return Path(job.lab.environment["HVA_RUNS"]) / job.id


def assert_done(job: Job) -> None:
    assert job.wait() == ("COMPLETED", 0), job.explain()


# ------------------------------------------------------------------------- launchers, going on later


@pytest.fixture(scope="module")
def uninterrupted(lab: Lab) -> Job:
    """A run on two nodes, with all checks and the defaults."""
    return submit(lab, *LONG, options=ON_TWO, HVA_CHECK="yes", **SLOW)


@pytest.fixture(scope="module")
def interrupted(lab: Lab, uninterrupted: Job) -> dict[str, tuple[Job, dict[int, str]]]:
    """The same run under each launcher, signalled as it would be before its time limit.

    With each job, the processes that it had just before. One more gets SIGHUP.
    """
    jobs = {
        launcher: submit(lab, *LONG, options=ON_TWO, HVA_LAUNCHER=launcher, **SLOW)
        for launcher in LAUNCHERS
    }
    jobs["SIGHUP"] = submit(lab, *SHORT, "--steps", "200", **SLOW)
    signalled: dict[str, tuple[Job, dict[int, str]]] = {}

    def signal_those_under_way() -> bool:
        for name in jobs.keys() - signalled.keys():
            job = jobs[name]
            if re.search(r"step \d+/200", job.text()):
                signalled[name] = job, job.processes()
                job.signal("HUP" if name == "SIGHUP" else "USR1")
            elif job.state not in ACTIVE:
                raise LabError(f"it ended before it was signalled: {job.explain()}")
        return len(signalled) == len(jobs)

    def explain() -> str:
        return "\n".join(job.explain() for job in jobs.values())

    wait_until(signal_those_under_way, 300, explain)
    return signalled


@pytest.fixture(scope="module")
def on_one_node(lab: Lab, interrupted: dict[str, tuple[Job, dict[int, str]]]) -> dict[str, Job]:
    """While the jobs that were signalled wait to start again. With srun, the sweep below does it."""
    return {
        launcher: submit(lab, *SHORT, options=ON_ONE, HVA_LAUNCHER=launcher)
        for launcher in LAUNCHERS[1:]
    }


@pytest.fixture(scope="module")
def without_scripts(lab: Lab, on_one_node: dict[str, Job]) -> Job:
    """As a user without launch/slurm: srun is all that starts the ranks."""
    batch = lab.folder / "plain.sbatch"
    batch.write_text('#!/bin/sh\nexec srun --mpi=pmix --kill-on-bad-exit=1 "$@"\n')
    return lab.submit(
        batch, *HVA, "run", "--compression", "qsgd:bits=4", "--", sys.executable,
        str(UNCHANGED / "mnist.py"), "--epochs", "3", options=ON_TWO,
    )  # fmt: skip


@pytest.mark.usefixtures("without_scripts")
@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_training_ends_on_one_node(on_one_node: dict[str, Job], launcher: str) -> None:
    assert_done(on_one_node[launcher])
    text = on_one_node[launcher].text()
    assert "2 rank(s) of 1 thread(s)" in text
    assert re.search(r"held-out accuracy +\d", text)
    assert (folder_of(on_one_node[launcher]) / "checkpoints/step-000000008.pt").exists()


def test_training_ends_on_two_nodes_and_the_output_says_what_was_found(uninterrupted: Job) -> None:
    assert_done(uninterrupted)
    text = uninterrupted.text()
    for pattern in (
        r"nodes +2: n\[1-2\]; 2 with \d core\(s\), network \w+",
        r"ranks +2; at most 1\(x2\) a node, 1 core\(s\) each",
        r"launcher +srun; its MPI plugins: .*\bpmix\b",
        r"MPI +.*Open MPI",
        r"python +.*torch .*, horovod ",
        r"ranks tried +2, allreduce by Horovod and by mpi4py",
        r"command +srun --mpi=pmix --kill-on-bad-exit=1 .*train\.py",
    ):
        assert re.search(pattern, text), f"{pattern} is not in\n{text}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_signalled_before_its_limit_ends_like_one_that_was_not(
    uninterrupted: Job, interrupted: dict[str, tuple[Job, dict[int, str]]], launcher: str
) -> None:
    job, processes = interrupted[launcher]
    assert_done(job)
    text = job.text()
    assert job.show()["Restarts"] == "1", text
    stopped = re.search(r"stopped by SIGUSR1 at step (\d+);", text)
    assert stopped, text
    # horovodrun may put a tag behind it.
    assert re.search(rf"resumed at step {stopped[1]}\b", text), text
    assert 0 < int(stopped[1]) < 200
    assert_done(uninterrupted)
    names = [f"step-000000200{end}.pt" for end in ("", ".rank-0", ".rank-1")]
    for name in names:
        whole, resumed = (
            torch.load(folder_of(which) / "checkpoints" / name, weights_only=True)
            for which in (uninterrupted, job)
        )
        assert same(whole, resumed), name
        assert ("model" in whole) == (name == names[0])
    # What the tests of failing ranks look for after the end was there before it.
    assert sum("train.py" in line for line in processes.values()) >= 2, processes
    wait_until(lambda: not job.processes(), 20, lambda: f"left over: {job.processes()}")


def test_a_job_whose_script_gets_sighup_saves_and_does_not_continue_by_itself(
    interrupted: dict[str, tuple[Job, dict[int, str]]],
) -> None:
    job, _ = interrupted["SIGHUP"]
    # As where the terminal of a script started by hand is closed.
    assert job.wait() == ("FAILED", 129), job.explain()
    stopped = re.search(r"stopped by SIGHUP at step (\d+);", job.text())
    assert stopped, job.text()
    assert (folder_of(job) / f"checkpoints/step-{int(stopped[1]):09d}.json").exists()
    assert job.show()["Restarts"] == "0"
    wait_until(lambda: not job.processes(), 20, lambda: f"left over: {job.processes()}")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ------------------------------------------------------------------------------------ without scripts


def test_srun_starts_hva_run_with_an_unchanged_script_on_two_nodes(without_scripts: Job) -> None:
    assert_done(without_scripts)
    text = without_scripts.text()
    replaced, took, *_ = re.findall(r"^hva run: (.*)", text, re.M)
    assert replaced == "hvd.DistributedOptimizer is hvd_adaptive's: compression qsgd:bits=4", text
    assert re.match(r"steps of [\d.]+ ms: .* bytes sent \(dense: [\d,]+\)$", took), text
    accuracies = re.findall(r"accuracy ([\d.]+)", text)
    assert accuracies, text
    assert float(accuracies[-1]) > 0.8


# ---------------------------------------------------------------------------------------- a sweep


@pytest.fixture(scope="module")
def sweep(lab: Lab) -> Job:
    """Three tasks on one node: one that ends, one that cannot be, and the last, signalled once.

    Their Python is started as in a container: by a command before it, in mounts of its own.
    """
    lines = [
        "# comment",
        "--distributed horovod",
        "",
        "--compression nonsense",
        "--steps 200 --momentum '0.8'",
    ]
    file = lab.folder / "sweep"
    file.write_text("\n".join(lines) + "\n")
    array = lab.submit(
        SCRIPTS / "array.sbatch",
        *[*SHORT, "--lr", "0.005"],
        options=("--array=0-2", *ON_ONE),
        **SLOW,
        HVA_SWEEP=str(file),
        HVA_CHECK="no",
        HVA_CONTAINER="unshare --mount --",
        HVA_PYTHON=sys.executable,
    )
    array.task(2).wait_for(r"step \d+/200", 240)
    array.task(2).signal("USR1")
    return array


def wait_for_all(sweep: Job) -> list[tuple[str, int]]:
    return [sweep.task(number).wait() for number in range(3)]


def test_the_last_task_of_an_array_prints_one_table(sweep: Job) -> None:
    states = wait_for_all(sweep)
    texts = [sweep.task(number).text() for number in range(3)]
    assert [code for _, code in states] == [0, 2, 0], "\n".join(texts)
    table = (folder_of(sweep) / "table").read_text()
    printed = [text for text in texts if table in text]
    assert printed, "\n".join(texts)
    rows = [re.split(r" {2,}", line) for line in table.splitlines()]
    assert rows[0][:4] == ["task", "options", "state", "samples/s"]
    assert [row[2] for row in rows[1:4]] == ["done", "failed (2)", "done"]
    assert rows[1][1] == "--distributed horovod"
    assert all(float(row[3].replace(",", "")) > 0 for row in (rows[1], rows[3]))
    assert set(rows[2][3:]) == {"-"}
    assert table.splitlines()[4] == "PARTIAL: 2 of 3 done; task 1 failed (2)"


def test_only_the_signalled_task_of_an_array_starts_again(sweep: Job) -> None:
    wait_for_all(sweep)
    shown = [sweep.task(number).show() for number in range(3)]
    # Its own number is the array's, by which Slurm would have taken all tasks.
    assert shown[2]["JobId"] == sweep.id
    assert [each["Restarts"] for each in shown] == ["0", "0", "1"]
    assert "resumed at step" in sweep.task(2).text()


def test_ranks_run_on_one_node_under_srun_behind_the_words_that_start_a_container(
    sweep: Job,
) -> None:
    wait_for_all(sweep)
    text = sweep.task(0).text()
    assert re.search(rf"command +srun .* unshare --mount -- {re.escape(sys.executable)} ", text)
    assert "2 rank(s) of 1 thread(s)" in text


def test_a_sweep_can_be_collected_by_hand_at_any_time(sweep: Job, tmp_path: Path) -> None:
    wait_for_all(sweep)
    folder = shutil.copytree(folder_of(sweep), tmp_path / sweep.id)
    (folder / "task-0" / "status").unlink()
    results = tmp_path / "results.json"
    command = (sys.executable, str(SCRIPTS / "collect.py"), str(folder), "--json", str(results))
    shown = sweep.lab.run(*command, check=False)
    assert shown.returncode == 3
    # Slurm says that it is over, and it has left no status.
    assert "PARTIAL: 1 of 3 done; task 0 killed, task 1 failed (2)" in shown.stdout
    rows = json.loads(results.read_text())
    assert [row["state"] for row in rows] == ["killed", "failed (2)", "done"]
    assert rows[2]["figures"]["payload_bytes"] > 0


# -------------------------------------------------------------------------------------- failing ranks


@pytest.fixture(scope="module")
def failing(lab: Lab) -> dict[str, Job]:
    """Rank 1 fails, on two nodes; under horovodrun with an uneven number of ranks."""
    uneven = ("--nodes=2", "--ntasks=3", "--ntasks-per-node=2")
    return {
        "srun exit": submit(lab, "exit", HVA_SCRIPT=FAILING),
        "srun raise": submit(lab, "raise", HVA_SCRIPT=FAILING),
        "srun kill": submit(lab, "kill", HVA_SCRIPT=FAILING),
        "mpirun exit": submit(lab, "exit", HVA_SCRIPT=FAILING, HVA_LAUNCHER="mpirun"),
        "horovodrun exit": submit(
            lab, "exit", options=uneven, HVA_SCRIPT=FAILING, HVA_LAUNCHER="horovodrun"
        ),
    }


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("srun exit", 3),
        ("srun raise", 1),
        ("srun kill", 137),
        ("mpirun exit", 3),
        ("horovodrun exit", 3),
    ],
)
def test_a_failing_rank_ends_all_ranks_and_its_exit_code_reaches_slurm(
    failing: dict[str, Job], case: str, code: int
) -> None:
    job = failing[case]
    found = job.wait_for(r"rank 1 of (\d) fails at ([\d.]+)")
    ranks, failed = int(found[1]), float(found[2])
    assert ranks == (3 if case == "horovodrun exit" else 2)
    assert job.wait(60) == ("FAILED", code), job.explain()
    # A rank that no one ends would wait for 600 seconds.
    wait_until(lambda: not job.processes(), 20, lambda: f"left over: {job.processes()}")
    assert job.ended - failed < 30  # the test itself may have had to wait its turn
    assert f"the run failed with exit status {code}" in job.text()


STALL_SECONDS = 10
SAID_IN_TRAINING = {
    "freeze": r"hvd_adaptive: rank 1 has not answered for \d+ s \(process \d+ on n2\): it is frozen",
    "stall": r"Missing ranks:\s+1!: \[",
    "leave 0": "hvd_adaptive: rank 0 ends because rank 1 ended by itself, before the others",
    # srun ends the others as soon as it has named the task, which may be before they can speak
    "leave 3": "rank 0 ends because rank 1 ended by itself|task 1: Exited with exit code 3",
}


@pytest.fixture(scope="module")
def failing_in_training(lab: Lab) -> dict[str, Job]:
    """Rank 1, on the other node, stops to answer, is late, or leaves."""
    variables = {
        "HVA_SCRIPT": FAILING,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL_SECONDS // 2),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SECONDS),
    }
    return {how: submit(lab, how, **variables) for how in SAID_IN_TRAINING}


@pytest.mark.parametrize("how", SAID_IN_TRAINING)
def test_a_rank_that_freezes_stalls_or_leaves_under_srun_ends_the_job_and_is_named(
    failing_in_training: dict[str, Job], how: str
) -> None:
    job = failing_in_training[how]
    failed = float(job.wait_for(r"rank 1 of \d fails at ([\d.]+)", 180)[1])
    state, code = job.wait(60)
    assert state == "FAILED", job.explain()
    assert code != 0
    wait_until(lambda: not job.processes(), 20, lambda: f"left over: {job.processes()}")
    allowed = STALL_SECONDS + STALL_SECONDS // 2 if how in ("freeze", "stall") else 0
    assert job.ended - failed < 30 + allowed, job.explain()
    assert re.search(SAID_IN_TRAINING[how], job.text()), job.explain()


# ------------------------------------------------------------------------------ what cannot succeed


@pytest.fixture(scope="module")
def repository(lab: Lab) -> Path:
    """A copy of the scripts with an environment that has neither torch nor Horovod."""
    copy = lab.folder / "repository"
    shutil.copytree(ROOT / "launch", copy / "launch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    return copy


@pytest.fixture(scope="module")
def path_without_mpirun(lab: Lab) -> str:
    folder = lab.folder / "bin"
    folder.mkdir()
    for place in reversed(lab.environment["PATH"].split(":")):
        for file in Path(place).glob("*"):
            if file.name not in ("mpirun", "orterun", "mpiexec"):
                link = folder / file.name
                link.unlink(missing_ok=True)
                link.symlink_to(file)
    return str(folder)


@dataclass(frozen=True)
class Mistake:
    """What is submitted, what is said of it, and a remedy that is named after that."""

    said: str
    remedy: str
    variables: dict[str, str] = field(default_factory=dict)
    script: str = "train.sbatch"
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


BARE = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
ENV = {"HVA_CONTAINER": "env", "HVA_PYTHON": sys.executable}
# In braces: folders that exist once the lab does.
MISTAKES = {
    "no such plugin": Mistake(
        "srun has no MPI plugin 'nonsense', only: ", "HVA_LAUNCHER=mpirun", {"HVA_MPI": "nonsense"}
    ),
    "no such launcher": Mistake(
        "HVA_LAUNCHER is 'mpiexec'", "srun, mpirun or horovodrun", {"HVA_LAUNCHER": "mpiexec"}
    ),
    "no mpirun": Mistake(
        "no mpirun on n1", "HVA_MODULES", {"HVA_LAUNCHER": "mpirun", "PATH": "{without_mpirun}"}
    ),
    "no environment": Mistake(
        "no Python environment in ", "Run launch/setup.sh", {"HVA_HOME": "{empty}", **BARE}
    ),
    "no Horovod": Mistake(
        "there is no Horovod", "Run launch/setup.sh", {"HVA_HOME": "{repository}", **BARE}
    ),
    "wrong home": Mistake(
        "no common.sh in /nowhere/launch/slurm", "set HVA_HOME", {"HVA_HOME": "/nowhere"}
    ),
    "folder not shared": Mistake(
        "n2 lacks /dev/shm/runs/", "that all nodes mount", {"HVA_RUNS": "/dev/shm/runs"}
    ),
    "folder not writable": Mistake(
        "cannot write to /proc/runs/", "HVA_RUNS=", {"HVA_RUNS": "/proc/runs"}
    ),
    "no such interface": Mistake(
        "n1 lacks interface ib7; it has ", "ip link", {"HVA_INTERFACE": "ib7"}
    ),
    "no such module": Mistake("module", "HVA_MODULES", {"HVA_MODULES": "nonsense/1.0"}),
    "no such container program": Mistake(
        "HVA_CONTAINER starts with nonsense", "HVA_MODULES", {"HVA_CONTAINER": "nonsense exec x.sif"}
    ),
    "horovodrun with a container": Mistake(
        "cannot start ranks in a container", "Use srun", {"HVA_LAUNCHER": "horovodrun", **ENV}
    ),
    "no such script": Mistake(
        "cannot read /nowhere/train.py", "HVA_SCRIPT names", {"HVA_SCRIPT": "/nowhere/train.py"}
    ),
    "an option that the script gives": Mistake(
        "--resume=auto is given by this script", "HVA_FOLDER=", arguments=("--resume=auto",)
    ),
    # srun says its version and ends with 0.
    "no rank": Mistake(
        "srun ended with 0, but 0 of 2 ranks were started",
        "Try another HVA_LAUNCHER",
        {"HVA_LAUNCHER_OPTIONS": "--version"},
    ),
    "too few ranks": Mistake(
        "srun ended with 0, but 1 of 2 ranks were started",
        "Try another HVA_LAUNCHER",
        {"HVA_LAUNCHER_OPTIONS": "--nodes=1 --ntasks=1", "HVA_SCRIPT": FAILING},
        arguments=("save nothing",),
    ),
    "nothing saved": Mistake(
        "none has saved anything",
        "--checkpoint-dir",
        {"HVA_SCRIPT": FAILING},
        arguments=("save nothing",),
    ),
    "ranks that do not meet": Mistake(
        "the 2 ranks do not meet under srun",
        "run launch/setup.sh",
        {"HVA_CHECK": "yes", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"},
    ),
    "a task too many": Mistake(
        "the array has a task 7, but the list has 5 lines",
        "--array=0-4",
        script="array.sbatch",
        options=("--array=7",),
    ),
    "no GPU": Mistake(
        "n1 lacks GPUs, or nvidia-smi to see them",
        "sinfo -o",
        {"HVA_SCRIPT": FAILING},
        script="gpu.sbatch",
        options=("--gpus-per-node=1",),
    ),
    "no training on GPUs": Mistake(
        "launch/train.py trains on CPUs alone",
        "HVA_SCRIPT=/path/to/train.py",
        script="gpu.sbatch",
        options=("--gpus-per-node=1",),
    ),
}


@pytest.fixture(scope="module")
def without_progress(lab: Lab) -> Job:
    return submit(lab, "try later", HVA_SCRIPT=FAILING, HVA_MAX_RESTARTS_WITHOUT_PROGRESS="2")


@pytest.fixture(scope="module")
def mistaken(
    lab: Lab, repository: Path, path_without_mpirun: str, without_progress: Job
) -> dict[str, Job]:
    """While the job before them waits to start again."""
    empty = lab.folder / "empty"
    shutil.copytree(ROOT / "launch", empty / "launch")
    places = {"empty": empty, "repository": repository, "without_mpirun": path_without_mpirun}
    jobs = {}
    for name, mistake in MISTAKES.items():
        variables = {key: value.format(**places) for key, value in mistake.variables.items()}
        job = lab.submit(
            SCRIPTS / mistake.script,
            *mistake.arguments,
            options=(*ON_TWO, "--cpus-per-task=1", *mistake.options),
            **{"HVA_CHECK": "no", **variables},
        )
        jobs[name] = job.task(7) if mistake.script == "array.sbatch" else job
    return jobs


@pytest.mark.parametrize("name", MISTAKES)
def test_a_job_that_cannot_succeed_fails_at_once_with_the_remedy(
    mistaken: dict[str, Job], name: str
) -> None:
    mistake = MISTAKES[name]
    assert mistaken[name].wait() == ("FAILED", 1), mistaken[name].explain()
    text = mistaken[name].text()
    assert mistake.said in text
    assert mistake.remedy in text[text.index(mistake.said) :]


def test_a_job_that_saves_nothing_is_not_requeued_forever(without_progress: Job) -> None:
    assert without_progress.wait() == ("FAILED", 1), without_progress.explain()
    assert without_progress.show()["Restarts"] == "1"
    assert "2 runs in a row have saved nothing new" in without_progress.text()


def test_a_signal_before_any_rank_has_started_counts_as_a_run_that_saved_nothing(lab: Lab) -> None:
    """srun's prolog keeps the ranks from starting, as a slow start of a large job does."""
    prolog = lab.folder / "prolog"
    prolog.write_text("#!/bin/sh\nexec sleep 300\n")
    prolog.chmod(0o755)
    job = submit(lab, HVA_LAUNCHER_OPTIONS=f"--prolog={prolog}", HVA_MAX_RESTARTS_WITHOUT_PROGRESS="1")
    job.wait_for(r"^  command ")
    job.signal("USR1")
    assert job.wait(60) == ("FAILED", 1), job.explain()
    assert "1 runs in a row have saved nothing new" in job.text()
    wait_until(lambda: not job.processes(), 20, lambda: f"left over: {job.processes()}")
