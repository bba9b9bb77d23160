"""A Slurm of their own for the tests in this folder, or the reason why there is none.

Plain pytest installs nothing. HVA_INSTALL_SLURM=1, or CI=true, has Debian's Slurm installed first.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness.eager import PYTHONPATH
from tests.launch.idx_files import write_idx
from tests.slurm.cluster import Lab, why_not

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    "PYTHONPATH": PYTHONPATH,
    "VIRTUAL_ENV": sys.prefix,
    "HVA_HOME": str(ROOT),
    # Nodes with two cores each, on a machine that may have two in all.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # mpirun takes this long twice after a rank has ended with a status other than 0.
    "OMPI_MCA_odls_base_sigkill_timeout": "3",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
# Of another job, launch or lab, or what the scripts would take for the user's choice.
FOREIGN = ("SLURM", "SBATCH", "SRUN", "OMPI_", "PMIX_", "HOROVOD_", "HVA_", "OMP_", "NUMBA_")


def write_images(folder: Path) -> None:
    """Fashion-MNIST's files with noise for images: 400 to train on, 101 held out."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for part, count in (("train", 400), ("t10k", 101)):
        labels = random.integers(0, 10, count)
        # An image of class 3 is brightest in its fourth band of rows, so that there is much to learn.
        rows = np.arange(28) * 10 // 28
        bright = 160 * (rows == labels[:, None])
        images = random.integers(0, 90, (count, 28, 28)) + bright[:, :, None]
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A Slurm with two nodes; jobs submitted to it train on small data."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: run launch/setup.sh")
    if reason := why_not():
        pytest.skip(reason)
    data = tmp_path_factory.mktemp("data")
    write_images(data / "fashion-mnist")
    # Compiled once, instead of in all ranks of the first job; where it fails, those say it better.
    subprocess.run([sys.executable, "-m", "hvd_adaptive.commands.precompile"], cwd=ROOT, check=False)
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # By default it would end pytest before this could stop Slurm's daemons and jobs.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Lab({**own, **ENVIRONMENT, "HVA_DATA": str(data)}) as started:
        started.environment["HVA_RUNS"] = str(started.folder / "runs")
        yield started
    signal.signal(signal.SIGTERM, previous)
