"""A script of one's own, by a wheel in a fresh folder and the scripts that its ``hva slurm`` writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.slurm.cluster import Lab, wait_until

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has this package from a wheel, and nothing else of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    release = ["-m", "launch.packages.release", "--url", "https://example.org/me/it", "--into"]
    run([*release, str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    run(["-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "to"), str(wheel)], folder)
    return folder / "to"


def run(words: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **variables}, capture_output=True,
        text=True, check=False, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_users_script_is_requeued_and_resumed_without_a_clone(lab: Lab, installed: Path) -> None:
    place = lab.folder / "work"
    place.mkdir()
    shutil.copy(ROOT / "tests" / "resume" / "own_script.py", place / "train.py")
    said = run(["-m", "hvd_adaptive", "slurm"], place, PYTHONPATH=str(installed))
    assert "8 files in slurm" in said
    job = lab.submit(
        place / "slurm" / "train.sbatch", "--steps", "80", "--pause", "0.1",
        # Whose code needs no compiled kernels, which this folder does not have.
        "--compression", "powersgd:rank=2",
        options=("--nodes=2", "--ntasks-per-node=1"),
        HVA_SCRIPT=str(place / "train.py"), HVA_HOME="", VIRTUAL_ENV="", PYTHONPATH=str(installed),
    )  # fmt: skip
    job.wait_for(r"step \d+ of 80, from 0", 240)
    job.signal("USR1")
    assert job.wait(240) == ("COMPLETED", 0), job.explain()
    text = job.text()
    assert re.search(r"ranks tried +2, allreduce by Horovod and by mpi4py", text)
    assert re.search(rf"python +{re.escape(sys.executable)}: ", text), text
    assert job.show()["Restarts"] == "1"
    resumed = re.search(r"of 80, from ([1-9]\d*)", text)
    assert resumed, text
    checkpoints = Path(lab.environment["HVA_RUNS"]) / job.id / "checkpoints"
    saved = torch.load(checkpoints / "step-000000080.rank-1.pt", weights_only=True)
    assert saved["compression"]["kept"]
    wait_until(lambda: not job.processes(), 20, lambda: f"left over: {job.processes()}")
