"""A test that exists on rank 0 only, for tests/harness/test_harness.py."""

from __future__ import annotations

import os


def test_on_every_rank() -> None:
    pass


if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":

    def test_on_rank_0_only() -> None:
        pass
