"""Starts ranks with torchrun or horovodrun, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.lab import horovodrun
from tests.harness.rank_launcher import ENVIRONMENT, ROOT

RANK = Path(__file__).with_name("training_rank.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torchrun(
    size: int, *command: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks."""
    return _run([*TORCHRUN, str(size), *map(str, command)], environment or {})


def results(library: str, size: int, folder: Path, cases: Sequence[str]) -> list[dict[str, Any]]:
    """What each rank found in these cases."""
    command = [str(RANK), library, str(folder), *cases]
    if library == "torch":
        done = torchrun(size, *command)
    else:
        done = _run([*horovodrun(size), sys.executable, *command], {})
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    return [json.loads((folder / f"{library}{rank}.json").read_text()) for rank in range(size)]


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # what a trainer needs may be found there, too
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": places, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
