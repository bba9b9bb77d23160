"""A file that rank 1 cannot import, for tests/harness/test_harness.py."""

from __future__ import annotations

import os

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    raise RuntimeError("broken on rank 1")


def test_never_runs() -> None:
    pass
