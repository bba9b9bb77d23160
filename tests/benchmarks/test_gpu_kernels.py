"""The benchmark of GPU kernels, where there is no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.micro import gpu_kernels
from benchmarks.report import report

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "benchmarks.micro.gpu_kernels"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_nothing_written() -> None:
    file = report.RESULTS / "gpu_kernels.json"
    before = file.read_bytes(), file.stat().st_mtime_ns
    done = subprocess.run(PROGRAM, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no GPU here" in done.stderr
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_operation_runs_under_the_interpreter() -> None:
    command = [*PROGRAM, "--interpret"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("nothing was measured") == 8


def test_a_target_that_is_missed_is_named() -> None:
    slow, fast = ({name: {"memcpys": n} for name in gpu_kernels.TARGETS} for n in (9.0, 1.0))
    figures = {"sizes": {"100": fast | {"topk, 1 %": {"memcpys": 3.5}}, "9": slow}}
    assert gpu_kernels.missed(figures) == ["topk, 1 %: 3.50 memcpys, more than 3.0"]
