"""The same weights, bit for bit, whichever library connects the ranks."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.torch_distributed.launching import results

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
]

AT_2_RANKS = (
    "none", "fp16", "predivided", "sum", "topk", "huffman", "two_shot", "two_shot_sparse",
    "cast_two_shot", "powersgd", "randomk", "ef21", "sparse",
)  # fmt: skip
# with more ranks the order in which libraries add decides on the last bit of what is summed
AT_4_RANKS = ("topk", "two_shot", "two_shot_sparse", "hierarchical")


@functools.cache
def weights(library: str, size: int) -> list[dict[str, Any]]:
    cases = [f"parity:{name}" for name in (AT_2_RANKS if size == 2 else AT_4_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        return results(library, size, Path(folder), cases)


@pytest.mark.parametrize(
    ("size", "name"), [(2, name) for name in AT_2_RANKS] + [(4, name) for name in AT_4_RANKS]
)
def test_weights_are_those_of_horovod_to_the_bit(size: int, name: str) -> None:
    ours, theirs = (
        {rank[f"parity:{name}"] for rank in weights(each, size)} for each in ("torch", "horovod")
    )
    assert len(ours) == 1, "ranks differ"
    assert ours == theirs
