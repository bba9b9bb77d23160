"""A rank that runs out of data ends a run whose operations are among the ranks of a node."""

from __future__ import annotations

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from tests.failures.test_failure import LAUNCHERS, ROOT, environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = (0, 3)


def launched(steps: int) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "tests/failures/joining_rank.py")
    return subprocess.run(
        [*LAUNCHERS["horovodrun"], "4", sys.executable, script, str(steps)],
        check=False, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


@functools.cache
def outcomes() -> dict[int, subprocess.CompletedProcess[str]]:
    """By the steps that all ranks make first; side by side, as each waits a while for its end."""
    with ThreadPoolExecutor(len(STEPS)) as pool:
        return dict(zip(STEPS, pool.map(launched, STEPS), strict=True))


@pytest.mark.parametrize("steps", STEPS)
def test_a_rank_that_joins_is_named_where_nodes_reduce_first(steps: int) -> None:
    done = outcomes()[steps]
    assert done.returncode != 0
    assert "a rank has called hvd.join()" in done.stdout + done.stderr
