"""``hva slurm``: the files that it writes. tests/slurm submits them to a Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hvd_adaptive.commands import run_command
from hvd_adaptive.commands.slurm import FILES

BATCH = sorted(file.name for file in FILES.glob("*.sbatch"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Written, in a place that a shell must have quoted."""
    folder = tmp_path / "my slurm"
    assert run_command("slurm", ["--output", str(folder)]) == 0
    return folder


def bash(*words: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HVA_"))
    }
    return subprocess.run(
        ["bash", *words], env=kept, capture_output=True, text=True, check=False, cwd="/"
    )


def test_a_clone_has_the_same_files_and_none_are_kept_twice() -> None:
    launch = FILES.parents[2] / "launch"
    assert (launch / "slurm").resolve() == FILES
    assert (launch / "lib" / "common.sh").resolve() == FILES / "shell.sh"


@pytest.mark.parametrize("name", BATCH)
def test_a_written_script_finds_its_helpers_from_any_folder_and_names_its_place(
    folder: Path, name: str
) -> None:
    shown = bash(str(folder / name), "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"{folder}/{name}" in shown.stdout
    refused = bash(str(folder / name))
    assert "Slurm did not start it" in refused.stderr
    assert f"sbatch {folder}/{name}" in refused.stderr


def test_what_is_written_is_executable_and_clean_for_shellcheck(folder: Path) -> None:
    scripts = [file for file in folder.iterdir() if file.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 6
    assert all(os.access(script, os.X_OK) for script in scripts)
    assert all(bash("-n", str(script)).returncode == 0 for script in scripts)
    if shutil.which("shellcheck") is not None:
        command = ["shellcheck", "-x", *(script.name for script in scripts)]
        checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_a_folder_that_was_moved_asks_for_its_place(folder: Path) -> None:
    moved = folder.rename(folder.with_name("moved"))
    said = bash(str(moved / "train.sbatch"))
    assert said.returncode == 1
    assert f"no common.sh in {folder}: set HVA_HOME to it" in said.stderr


def test_what_was_edited_is_not_overwritten_unless_forced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "train.sbatch"
    as_written = script.read_text()
    assert run_command("slurm", ["--output", str(folder)]) == 0
    script.write_text(re.sub("nodes=2", "nodes=8", as_written))
    assert run_command("slurm", ["--output", str(folder)]) == 1
    assert "train.sbatch. Name another --output, or overwrite" in capsys.readouterr().err
    assert "nodes=8" in script.read_text()
    assert run_command("slurm", ["--output", str(folder), "--force"]) == 0
    assert script.read_text() == as_written


def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_command("slurm", ["--output", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith("hva slurm: cannot write ")
