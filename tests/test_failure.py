"""A rank that dies, raises or stalls ends all the others, soon, with a message that names it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rank_launcher import ENVIRONMENT, ROOT, lives, warm_kernels

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS, FAILING = 3, 1
STALL_SECONDS = 10
WITHIN_SECONDS = 20
"""Beyond the time after which a stalled rank counts as lost: what README promises."""

SAID = {
    "kill": rf"rank {FAILING} .*exited on signal 9",
    "raise": rf"hvd_adaptive: rank {FAILING} failed, and the others end with it: ValueError: bad data",
    "stall": rf"Missing ranks:\s+(\S*<std...>:)?{FAILING}: \[",
}
LAUNCHERS = {
    "horovodrun": ["horovodrun", "-np", str(RANKS)],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS)],
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_kernels()


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        **ENVIRONMENT,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(STALL_SECONDS // 2),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SECONDS),
    }


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_fails_ends_all_others_and_is_named(
    tmp_path: Path, launcher: str, how: str
) -> None:
    if shutil.which(LAUNCHERS[launcher][0], path=environment()["PATH"]) is None:
        pytest.skip(f"{launcher} is not installed")
    command = [*LAUNCHERS[launcher], sys.executable, str(ROOT / "tests/failing_rank.py"), how,
               str(FAILING), str(tmp_path)]  # fmt: skip
    started = time.time()
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    processes = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(RANKS)]
    while any(map(lives, processes)) and time.time() < started + 170:
        time.sleep(0.05)
    ended = time.time()
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    failed = float((tmp_path / "failed").read_text())
    allowed = WITHIN_SECONDS + (STALL_SECONDS + STALL_SECONDS // 2 if how == "stall" else 0)
    assert ended - failed < allowed, text
    assert re.search(SAID[how], text), text
    if how == "raise":
        assert "ends because another rank failed" in text
