"""How tests start the command as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.rank_launcher import ENVIRONMENT, ROOT

SCRIPTS = Path(__file__).parent / "scripts"
HVA = [sys.executable, "-m", "hvd_adaptive"]
TWO_RANKS = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]


def start(command: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in the folder of the scripts, with what is tested first on the path.

    Args:
        command: the words.
        changes: of the environment.
    """
    return subprocess.run(
        command, cwd=SCRIPTS, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **changes},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def hva(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """``hva WORDS``, alone."""
    return start([*HVA, *words], **changes)
