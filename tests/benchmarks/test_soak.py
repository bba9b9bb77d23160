"""The judgements of benchmarks/network/soak.py: a leak is seen, and noise is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import lab
from benchmarks.network import soak


def row(an_hour: float, noise: float, minutes: float = 20) -> dict[str, object]:
    """The summary of a rank of 400 MB that grows by so much."""
    seconds = np.arange(0, 60 * minutes, soak.SAMPLE_SECONDS)
    random = np.random.default_rng(0)
    megabytes = 400 + an_hour * seconds / 3600 + noise * random.standard_normal(len(seconds))
    count = len(seconds)
    samples = soak.Samples(list(seconds), list(megabytes), [20] * count, [9] * count)
    return soak.summary(samples, warm_up=240)  # type: ignore[no-any-return]


def test_the_slope_and_its_standard_error_are_those_of_least_squares() -> None:
    x, y = np.arange(40) * 60.0, np.random.default_rng(1).standard_normal(40)
    slope, error = soak.trend(x, y, 60)
    (expected, _), covariance = np.polyfit(x / 3600, y, 1, cov=True)
    assert (slope, error) == pytest.approx((expected, covariance[0, 0] ** 0.5))


@pytest.mark.parametrize(
    ("an_hour", "noise", "bad"),
    [
        (0.0, 0.1, False),
        (3.0, 0.1, False),  # under 1 % an hour
        (8.0, 0.1, True),
        (100.0, 20.0, True),  # much noise hides nothing: it makes the run worthless
    ],
)
def test_growth_is_told_from_noise(an_hour: float, noise: float, bad: bool) -> None:
    assert soak.grows(row(an_hour, noise)) is bad


def test_a_number_of_files_that_keeps_rising_is_a_leak_and_a_short_peak_is_none() -> None:
    assert soak.rises([10, 10, 11, 11, 12, 12])
    assert not soak.rises([10, 10, 10, 10, 12, 10])
    assert not soak.rises([12, 11, 10, 10, 10, 10])


def test_a_process_that_lives_on_and_a_file_are_found_left_behind(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    before = soak.belongings()
    token = "soak-test-5b1d"
    child = subprocess.Popen(
        ["cat"],
        env={**os.environ, "HVA_SOAK": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.stdout.readline()  # while a program takes the place of another its environment is empty
    try:
        (tmp_path / "tmp" / "forgotten").touch()
        left = soak.left_behind(before, token, tmp_path, shared=True)
    finally:
        child.kill()
        child.communicate()
    assert left == {"processes": [str(child.pid)], "its files": ["forgotten"]}
    (tmp_path / "tmp" / "forgotten").unlink()
    assert soak.left_behind(before, token, tmp_path, shared=True) == {}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_quick_benchmark_runs_to_its_end() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    command = [*lab.module("network.soak"), "--quick", "--shared"]
    shown = subprocess.run(
        command, cwd=lab.ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "left behind: nothing" in shown.stdout
