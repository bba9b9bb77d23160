"""Many damaged payloads; and whether the program that tries them finds faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_adaptive.collectives import SCHEMES
from hvd_adaptive.compressors import REGISTRY
from tests.wire import fuzz_payloads

PROGRAM = Path(fuzz_payloads.__file__)
CASES = int(os.environ.get("HVA_FUZZ_CASES", "30000"))
"""The program's own default is 100,000, which take minutes."""
PLANTED = """
import ctypes, json, sys, torch
from tests.wire.fuzz_payloads import Fuzzer, prepare, search
from hvd_adaptive.compressors.sparse import SparseCompressor
from hvd_adaptive.wire import WireError

right = SparseCompressor.decompress_layers_add_
torch.set_num_threads(1)
fuzzer, found = Fuzzer(1, prepare("topk:density=0.05,values=fp16")), {}

def plant(fault):
    def wrong(self, body, outs, scale):
        marks = right(self, body, outs, scale)
        for out in outs:
            exec(fault)
        return marks

    SparseCompressor.decompress_layers_add_ = wrong

for fault in json.loads(sys.argv[1]):
    plant(fault)
    found[fault] = search(fuzzer, range(3000))
print(json.dumps(found))
"""
FAULTS = {
    "ctypes.string_at(body.data_ptr() + body.numel(), 1)": "killed by SIGSEGV",
    "ctypes.string_at(body.data_ptr() - 1, 1)": "killed by SIGSEGV",
    "ctypes.memset(out.data_ptr() + 4 * out.numel(), 0, 1)": "killed by SIGSEGV",
    "ctypes.memset(out.data_ptr() - 1, 0, 1)": "killed by SIGSEGV",
    "raise IndexError('planted')": "IndexError: planted",
    "out += float('inf')": "is not finite and not marked|not that of adding",
    "out += 1": "not what the reference|not that of adding|something else than|lost something",
    "raise WireError('planted')": "undamaged payload is refused|the (sum|kernels) says?",
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=PROGRAM.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_damaged_payloads_are_refused_or_decode_to_numbers() -> None:
    done = run(str(PROGRAM), "--cases", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(r"(\d+) cases, (\d+) refused, (\d+) decoded", done.stdout)
    assert counts, done.stdout
    cases, refused, decoded = map(int, counts.groups())
    assert cases == CASES
    assert min(refused, decoded) > CASES / 10


def test_every_compressor_is_fuzzed() -> None:
    assert {spec.partition(":")[0] for spec in fuzz_payloads.members()} == {*REGISTRY, "halves"}


def test_every_operation_of_schemes_that_compress_twice_is_fuzzed() -> None:
    subjects = fuzz_payloads.prepare_shots("of topk:density=0.05 and")
    found = {
        scheme: {(each.rank, each.number) for each in subjects if each.spec.startswith(scheme)}
        for scheme, kind in SCHEMES.items()
        if kind.recompresses
    }
    # by rank: what owners get and what all get; between nodes and, at the end, in the node
    assert found["two_shot"] == {(rank, number) for rank in range(3) for number in range(2)}
    assert {number for _, number in found["hierarchical"]} == {2, 3, 4}
    assert set(found) == set(fuzz_payloads.SHOTS)
    found_one = fuzz_payloads.search(fuzz_payloads.Fuzzer(1, subjects), range(40))
    assert (found_one[0], found_one[2]) == (40, "")


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    done = run("-c", PLANTED, json.dumps(list(FAULTS)))
    assert done.returncode == 0, done.stdout + done.stderr
    for fault, (cases, _, finding) in json.loads(done.stdout).items():
        assert re.search(rf"^case \d+ of seed 1: .*({FAULTS[fault]})", finding), (fault, finding)
        assert cases < 3000


def test_a_compressor_that_there_is_not_and_senseless_numbers_are_named() -> None:
    assert "contains 'topq': " in run(str(PROGRAM), "--compressor", "topq").stderr
    assert "--cases and --jobs are 1 or more" in run(str(PROGRAM), "--cases", "0").stderr
