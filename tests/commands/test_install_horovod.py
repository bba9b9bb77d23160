"""``hva install-horovod``, short of the minutes of a build: launch/setup.sh builds by the same file."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.commands import install_horovod
from hvd_adaptive.commands.install_horovod import BuildError
from tests.commands.launching import hva
from tests.harness.rank_launcher import ROOT

FILES = {
    "CMakeLists.txt": "project(horovod)\nset(CMAKE_CXX_STANDARD 14)\n",
    "horovod/torch/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
    install_horovod.CUDA_CMAKE: "set(CMAKE_CUDA_STANDARD 11)\nadd_library(kernels cuda_kernels.cu)\n",
    install_horovod.NVCC_FLAGS: """\
import os
def get_nvcc_flags():
    default_flags = ['-O3']
    cc_list_env = os.environ.get('HOROVOD_BUILD_CUDA_CC_LIST')
    return default_flags + [str(cc_list_env)]
""",
}


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    """What looks like Horovod's sources."""
    file = tmp_path / "horovod.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"horovod-{install_horovod.VERSION}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return file


@pytest.mark.parametrize(("torch", "standard"), [("2.1.0", 17), ("2.13.0+cpu", 17), ("2.14.1", 20)])
def test_sources_are_unpacked_and_patched_to_the_standard_of_torch(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, standard: int
) -> None:
    monkeypatch.setattr(install_horovod, "SHA256", hashlib.sha256(sdist.read_bytes()).hexdigest())
    source = install_horovod.unpack(sdist, tmp_path)
    install_horovod.patch(source, install_horovod.cxx_standard(torch))
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        patched = FILES[name].replace("CMAKE_CXX_STANDARD 14", f"CMAKE_CXX_STANDARD {standard}")
        assert (source / name).read_text() == patched != FILES[name]


def test_gpus_are_compiled_for_as_conda_forge_does(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_horovod, "SHA256", hashlib.sha256(sdist.read_bytes()).hexdigest())
    source = install_horovod.unpack(sdist, tmp_path)
    install_horovod.patch(source)
    lines = (source / install_horovod.CUDA_CMAKE).read_text().splitlines()
    assert lines[1:4] == [
        "if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 14)",
        "  set(CMAKE_CUDA_STANDARD 14)",
        "endif()",
    ]
    names: dict[str, Any] = {}
    exec((source / install_horovod.NVCC_FLAGS).read_text(), names)
    flags = names["get_nvcc_flags"]
    monkeypatch.setenv("NVCC_GENCODE", "-gencode arch=compute_100f,code=sm_100f")
    assert flags() == ["-O3", "-gencode", "arch=compute_100f,code=sm_100f"]
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "90")
    assert flags() == ["-O3", "90"]


def test_sources_that_a_patch_does_not_fit_are_refused(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_horovod, "SHA256", hashlib.sha256(sdist.read_bytes()).hexdigest())
    source = install_horovod.unpack(sdist, tmp_path)
    (source / install_horovod.CUDA_CMAKE).write_text("project(other)")
    with pytest.raises(BuildError, match="has no 'set"):
        install_horovod.patch(source)


def test_headers_that_gcc_13_leaves_out_are_included_beside_own_flags() -> None:
    made = install_horovod.build_environment({"CXXFLAGS": "-O1"})
    assert made["CXXFLAGS"] == "-O1 -include cstdint"


def test_other_sources_are_refused(sdist: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"is not Horovod 0\.28\.1: its SHA-256 is"):
        install_horovod.unpack(sdist, tmp_path)
    assert not (tmp_path / f"horovod-{install_horovod.VERSION}").exists()


def test_missing_tools_are_named_with_where_they_come_from() -> None:
    def which(tool: str) -> str | None:
        return None if tool in ("mpicc", "cmake") else f"/usr/bin/{tool}"

    with pytest.raises(BuildError, match="missing: mpicc, cmake") as caught:
        install_horovod.check_environment(which, {})
    assert "apt-get install libopenmpi-dev cmake" in str(caught.value)
    with pytest.raises(BuildError, match=r"missing: cmake\. "):
        install_horovod.check_environment(which, {"HOROVOD_WITHOUT_MPI": "1"})


def test_what_the_user_set_is_left_alone() -> None:
    made = install_horovod.build_environment({"MAKEFLAGS": "-j3", "HOROVOD_GPU_OPERATIONS": "NCCL"})
    assert (made["MAKEFLAGS"], made["HOROVOD_GPU_OPERATIONS"]) == ("-j3", "NCCL")
    assert made["HOROVOD_WITH_MPI"] == made["HOROVOD_WITH_GLOO"] == made["HOROVOD_WITH_PYTORCH"] == "1"


def test_a_cuda_compiler_that_is_only_a_script_is_built_with_its_toolkit(tmp_path: Path) -> None:
    toolkit, scripts = tmp_path / "cuda", tmp_path / "bin"
    for file in (toolkit / "bin" / "nvcc", toolkit / "include" / "cuda_runtime.h", scripts / "nvcc"):
        file.parent.mkdir(parents=True)
        file.touch(0o755)

    def home(path: Path, **variables: str) -> str | None:
        return install_horovod.cuda_home({"PATH": str(path), **variables}, str(toolkit))

    assert home(scripts) == str(toolkit)
    assert home(toolkit / "bin") is home(tmp_path) is home(scripts, HOROVOD_CUDA_HOME="/x") is None
    made = install_horovod.build_environment({"PATH": str(scripts), "CUDA_HOME": str(toolkit)})
    assert made["HOROVOD_CUDA_HOME"] == made["CUDA_HOME"] == str(toolkit)


def test_an_empty_path_ends_with_status_1_and_a_remedy(tmp_path: Path) -> None:
    done = hva("install-horovod", "--wheel-into", str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 1
    assert "hva install-horovod: missing: mpicc, mpirun, g++, make, cmake. On a cluster" in done.stderr


def test_setup_runs_the_same_file_before_anything_is_installed() -> None:
    found = re.search(
        r"^horovod_builder=\$root/(\S+)$", (ROOT / "launch" / "setup.sh").read_text(), re.M
    )
    assert found is not None
    file = str(ROOT / found[1])
    # without site-packages
    done = subprocess.run(
        [sys.executable, "-I", "-S", file, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--wheel-into" in done.stdout
