"""Triton's kernels without a GPU: Numba's contracts under Triton's interpreter, and its compiler.

Whether a process interprets is decided when triton is imported, so each part has a process of its own.
``tests/gpu`` has what needs a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvd_adaptive.kernels import base, for_device

ROOT = Path(__file__).resolve().parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[gpu]'"
)

CONTRACTS = {
    "test_triton_members": "test",
    "test_contract": "mixed_sizes or without_layers or any_shape or left_alone",
    "test_damaged_bodies": "damage_is_named or no_encoder_sends",
    "test_groups": "not any_table and not nothing_is_read and not 8192 and not 20000",
    "test_rotation": "same_bits_and_back or cannot_be_rotated or stay_finite",
    "test_reduction": "overflows or fit_together",
    "test_selection": "recompressing_drops",
    "test_subset": "taken_from_where or cannot_be_drawn",
}
"""Modules, and which of their tests; the others ask the same of more numbers, or of Numba itself."""


def run(arguments: list[str], *, interpreted: bool) -> None:
    """Run a module in a process of its own; its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


@needs_triton
@pytest.mark.slow
def test_the_contracts_hold_under_the_interpreter() -> None:
    """In one process: each would import for 8 seconds."""
    files = [f"tests/kernels/{name}.py" for name in CONTRACTS]
    chosen = " or ".join(f"({name} and ({tests}))" for name, tests in CONTRACTS.items())
    plugins = ["-p", "tests.kernels.interpreted", "-p", "no:cacheprovider"]
    run(["pytest", "-q", *plugins, *files, "-k", chosen], interpreted=True)


@needs_triton
@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_and_rounds_as_written(tmp_path: Path) -> None:
    calls = str(tmp_path / "calls.json")
    run(["tests.kernels.triton_programs", "record", calls], interpreted=True)
    run(["tests.kernels.triton_programs", "compile", calls], interpreted=False)


def test_cuda_has_tritons_kernels_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    base._usable.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert for_device(torch.device("cuda")).backend == "reference"
    base._usable.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert for_device(torch.device("cuda")).backend == "triton"
    base._usable.cache_clear()
    assert for_device(torch.device("cpu")).backend == "cpu"


def test_training_on_cpus_does_not_import_triton() -> None:
    code = (
        "import sys, torch, hvd_adaptive.kernels as k; k.for_device(torch.device('cuda')); "
        "k.for_device(torch.device('cpu')).sparse.spectrum(torch.ones(9)); "
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
