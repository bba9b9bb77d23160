"""A rank that runs out of data ends a run whose operations are among the ranks of a node."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from tests.failures.test_failure import LAUNCHERS, ROOT, environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_that_joins_is_named_where_nodes_reduce_first(steps: int) -> None:
    script = str(ROOT / "tests/failures/joining_rank.py")
    done = subprocess.run(
        [*LAUNCHERS["horovodrun"], "4", sys.executable, script, str(steps)],
        check=False, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=180,
    )  # fmt: skip
    assert done.returncode != 0
    assert "a rank has called hvd.join()" in done.stdout + done.stderr
