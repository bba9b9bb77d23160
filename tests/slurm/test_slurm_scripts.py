"""What can be said of launch/slurm without a Slurm: manuals, style, and the table of a sweep."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "launch" / "slurm"
BATCH = sorted(SCRIPTS.glob("*.sbatch"))
EVERY = [*BATCH, *sorted(SCRIPTS.glob("*.sh"))]

LOG = """\
no checkpoint yet: starting at step 0
samples per second         1,738.1
step time: total              36.821 ms  100.0%
  = compute                   30.779 ms   83.6%
  + compress                   0.920 ms    2.5%
  + exposed communication      4.680 ms   12.7%
  + decompress                 0.442 ms    1.2%
gradients, dense           312,040 bytes per step and rank
  payload sent             11,272 bytes per step and rank, compression ratio 27.7
  traffic on this link     not measured
train loss, last           0.2937
held-out loss              0.3517
held-out accuracy          87.13% of 10,000 examples
"""


@pytest.fixture(scope="module")
def collect() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collect", SCRIPTS / "collect.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["collect"] = module
    spec.loader.exec_module(module)
    return module


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        command, cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True,
        timeout=50, check=False,
    )  # fmt: skip


def without_slurm(tmp_path: Path) -> str:
    """A PATH without squeue."""
    (tmp_path / "path").mkdir()
    return str(tmp_path / "path")


# ---------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("script", EVERY, ids=lambda path: path.name)
def test_a_script_parses_and_is_clean_for_shellcheck(script: Path) -> None:
    assert run("bash", "-n", str(script)).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = run("shellcheck", "-x", str(script))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_a_batch_script_documents_itself(script: Path) -> None:
    shown = run("bash", str(script), "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"launch/slurm/{script.name}" in shown.stdout
    assert "SBATCH" not in shown.stdout.replace("#SBATCH lines", "")


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_a_batch_script_that_slurm_did_not_start_says_how_to_submit_it(script: Path) -> None:
    shown = run("bash", str(script))
    assert shown.returncode == 1
    assert "Slurm did not start it" in shown.stderr
    assert f"sbatch {script}" in shown.stderr


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_a_batch_script_asks_for_what_going_on_later_needs(script: Path) -> None:
    asked = re.findall(r"^#SBATCH --(.*)$", script.read_text(), re.MULTILINE)
    assert {"signal=B:USR1@120", "requeue", "open-mode=append"} <= set(asked)


def test_every_variable_in_the_scripts_is_in_a_manual() -> None:
    text = "".join(script.read_text() for script in EVERY)
    manual = "".join(run("bash", str(script), "--help").stdout for script in BATCH)
    # The one that gpu.sbatch sets for common.sh.
    used = set(re.findall(r"\bHVA_[A-Z_]+", text)) - {"HVA_GPUS"}
    assert len(used) > 10
    assert used <= set(re.findall(r"\bHVA_[A-Z_]+", manual))


# ---------------------------------------------------------------------------------------- the table


def test_the_figures_of_a_log_are_read(collect: ModuleType) -> None:
    assert collect.read_figures(LOG) == {
        "samples_per_second": 1738.1,
        "step_ms": 36.821,
        "waiting_ms": 4.68,
        "payload_bytes": 11272,
        "train_loss": 0.2937,
        "held_out_loss": 0.3517,
        "accuracy_percent": 87.13,
    }


def test_of_several_tables_in_a_log_the_last_counts(collect: ModuleType) -> None:
    later = LOG.replace("0.3517", "0.1111")
    assert collect.read_figures(LOG + later)["held_out_loss"] == 0.1111


def test_the_tags_of_horovodrun_do_not_matter(collect: ModuleType) -> None:
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in LOG.splitlines())
    tagged = tagged.replace("examples\n", "examples[1,0]<stdout>:\n")
    assert collect.read_figures(tagged) == collect.read_figures(LOG)


def test_a_log_without_a_table_has_no_figures(collect: ModuleType) -> None:
    assert collect.read_figures("step 2/16: loss 2.3, 13 samples/s\n") == {}


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize("is_text", [False, True])
def test_every_figure_of_the_table_that_training_prints_is_read(
    collect: ModuleType, is_text: bool
) -> None:
    from launch.training.display import Costs, table
    from launch.training.loop import Score

    score = Score(0.5, 0.9, 100, is_text=is_text)
    printed = table(Costs(0.1, 0.01, 0.02, 0.03, 100.0, 150.0, 2.0), 1000, 32, 0.4, score)
    figures = collect.read_figures("\n" + printed)
    assert set(figures) == set(collect.FIGURES) - (set() if is_text else {"perplexity"})
    assert (figures["step_ms"], figures["waiting_ms"], figures["payload_bytes"]) == (100, 20, 100)
    assert figures["accuracy_percent"] == 90
    if is_text:
        assert figures["perplexity"] == pytest.approx(math.exp(0.5), abs=0.01)


def write_sweep(folder: Path) -> None:
    """Task 0 is done, 1 failed, 2 has begun, 3 has not."""
    (folder / "list").write_text("--compression none\n--lr 9\n--lr 8\n--lr 7\n")
    for number in range(3):
        (folder / f"task-{number}").mkdir(parents=True)
        (folder / f"task-{number}" / "log").write_text(LOG)
    (folder / "task-0" / "status").write_text("0\n")
    (folder / "task-1" / "status").write_text("137\n")


def test_a_partial_sweep_names_the_tasks_that_are_missing(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    results = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPTS / "collect.py"), str(tmp_path), "--json", str(results)]
    shown = run(*command, PATH=without_slurm(tmp_path))
    assert shown.returncode == 3, shown.stderr
    lines = shown.stdout.splitlines()
    assert re.match(r"0 +--compression none +done +1,738\.1 +36\.8 .* 87\.13%$", lines[1])
    # Its log has a table, of a run before the one that failed.
    assert re.match(r"1 +--lr 9 +failed \(137\) +- ", lines[2])
    said = "PARTIAL: 1 of 4 done; task 1 failed (137), task 2 unfinished, task 3 not started"
    assert lines[5] == said
    rows = json.loads(results.read_text())
    assert rows[0]["figures"]["accuracy_percent"] == 87.13
    assert [row["figures"] for row in rows[1:]] == [{}, {}, {}]


def test_what_slurm_still_has_decides_between_running_and_killed(
    collect: ModuleType, tmp_path: Path
) -> None:
    write_sweep(tmp_path)
    states = [task.state for task in collect.read_sweep(tmp_path, active={2, 3})]
    assert states == ["done", "failed (137)", "running", "waiting"]
    states = [task.state for task in collect.read_sweep(tmp_path, active=set())]
    assert states == ["done", "failed (137)", "killed", "not started"]


def test_a_complete_sweep_says_so(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "list").write_text("--compression none\n")
    command = [sys.executable, str(SCRIPTS / "collect.py"), str(tmp_path)]
    shown = run(*command, "--if-last", "0", PATH=without_slurm(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.endswith("complete: 1 of 1 done\n")
    assert (tmp_path / "table").read_text() == shown.stdout


def test_a_task_that_is_not_the_last_prints_nothing(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    command = [sys.executable, str(SCRIPTS / "collect.py"), str(tmp_path)]
    shown = run(*command, "--if-last", "1", PATH=without_slurm(tmp_path))
    assert (shown.returncode, shown.stdout) == (0, "")
    assert not (tmp_path / "table").exists()


def test_a_folder_that_is_no_sweep_is_an_error(tmp_path: Path) -> None:
    shown = run(sys.executable, str(SCRIPTS / "collect.py"), str(tmp_path))
    assert shown.returncode == 2
    assert "is no folder of a sweep" in shown.stderr


# ------------------------------------------------------------------------------------------- a rank


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (3, 3), (75, 0)])
def test_a_rank_under_srun_leaves_its_status_and_is_no_failure_if_it_continues_later(
    tmp_path: Path, status: int, seen: int
) -> None:
    shown = run(
        str(SCRIPTS / "rank.sh"), "srun", str(tmp_path), "bash", "-c", f"exit {status}",
        SLURM_PROCID="5", SLURMD_NODENAME="node",
    )  # fmt: skip
    assert shown.returncode == seen
    assert (tmp_path / "node.5").read_text().split()[1] == str(status)


def test_a_rank_under_mpirun_is_known_by_its_number_there(tmp_path: Path) -> None:
    shown = run(
        str(SCRIPTS / "rank.sh"), "mpirun", str(tmp_path), "bash", "-c", "exit 75",
        SLURM_PROCID="0", SLURMD_NODENAME="node", OMPI_COMM_WORLD_RANK="3",
    )  # fmt: skip
    assert shown.returncode == 75
    assert [file.name for file in tmp_path.iterdir()] == ["node.3"]


@pytest.mark.parametrize(
    ("variables", "most", "warned"),
    [
        ({}, "3", False),
        ({"HVA_MAX_RESTARTS_WITHOUT_PROGRESS": "5"}, "5", False),
        ({"HVA_MAX_FRUITLESS": "2"}, "2", True),
    ],
)
def test_the_old_name_of_the_limit_of_restarts_still_counts_and_is_warned_of(
    variables: dict[str, str], most: str, warned: bool
) -> None:
    shown = run("bash", "-c", "source launch/slurm/common.sh; most_restarts", **variables)
    assert shown.stdout.split() == [most]
    assert ("write HVA_MAX_RESTARTS_WITHOUT_PROGRESS" in shown.stderr) == warned
