"""``hva install-horovod``: build Horovod against the torch that is installed.

Horovod's last release does not compile against torch 2.1 or newer without a change, which is made here.
Needs nothing but Python's standard library: ``launch/setup.sh`` runs this file before anything else is
installed, as ``python install_horovod.py --wheel-into FOLDER``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

# The one place where Horovod's version is pinned.
VERSION: Final = "0.28.1"
SHA256: Final = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

BUILD_PACKAGES: Final = (
    "setuptools>=64",
    "wheel",
    "cffi",
    "cloudpickle",
    "packaging",
    "psutil",
    "pyyaml",
)
TOOLS: Final = {
    "mpicc": "libopenmpi-dev",
    "mpirun": "openmpi-bin",
    "g++": "g++",
    "make": "make",
    "cmake": "cmake",
}
"""Programs that a build needs, and Debian's packages that have them."""

EPILOG: Final = """\
Uses the MPI, compiler and CMake on PATH; on a cluster, load their modules first. Takes some minutes.
Variables named HOROVOD_... are passed to the build: HOROVOD_GPU_OPERATIONS=NCCL for GPUs,
HOROVOD_WITHOUT_MPI=1 for Gloo alone. GPUs are compiled for as nvcc can, or for those that are named by
HOROVOD_BUILD_CUDA_CC_LIST=80,90, or by NVCC_GENCODE="-gencode arch=compute_100f,code=sm_100f".

examples:
  hva install-horovod
  HOROVOD_GPU_OPERATIONS=NCCL hva install-horovod --wheel-into wheels
"""


class BuildError(Exception):
    """What went wrong, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = f"Build Horovod {VERSION} against the torch that is installed, and install it."
    parser.epilog = EPILOG
    parser.add_argument(
        "--wheel-into", type=Path, metavar="FOLDER", help="only build a wheel, and leave it there"
    )
    parser.add_argument(
        "--sdist", type=Path, metavar="FILE", help="Horovod's sources, if not from PyPI"
    )


def run(options: argparse.Namespace) -> int:
    """Build, and install unless only a wheel is wanted."""
    if options.sdist is not None and not options.sdist.is_file():
        said = f"there is no file {options.sdist}; write the path of horovod-{VERSION}.tar.gz, or leave"
        print(f"hva install-horovod: {said} --sdist out to download it", file=sys.stderr)
        return 2
    try:
        check_environment(shutil.which, os.environ)
        with tempfile.TemporaryDirectory() as folder:
            into = options.wheel_into or Path(folder) / "wheel"
            wheel = build(Path(folder), into, options.sdist)
            if options.wheel_into is None:
                install(wheel)
    except BuildError as error:
        print(f"hva install-horovod: {error}", file=sys.stderr)
        return 1
    return 0


def check_environment(which: Callable[[str], str | None], environment: Mapping[str, str]) -> None:
    """Find what is missing before minutes have passed.

    Args:
        which: finds a program.
        environment: variables of the build.

    Raises:
        BuildError: torch or a tool is missing.
    """
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(
            f"{sys.executable} has no torch: pip install torch, and run this again"
        ) from None
    without_mpi = "HOROVOD_WITHOUT_MPI" in environment
    missing = {
        tool: package
        for tool, package in TOOLS.items()
        if which(tool) is None and not (without_mpi and tool.startswith("mpi"))
    }
    if missing:
        raise BuildError(
            f"missing: {', '.join(missing)}. On a cluster, load the modules of an MPI, a C++ compiler "
            f"and CMake; on Debian or Ubuntu: apt-get install {' '.join(missing.values())}; conda: "
            "install -c conda-forge openmpi cxx-compiler cmake make"
        )


def build(work: Path, into: Path, sdist: Path | None = None) -> Path:
    """Build a wheel.

    Args:
        work: an empty folder.
        into: where the wheel is left; made first, because to find after minutes that it cannot be
            written would be late.
        sdist: Horovod's sources; None downloads them.

    Raises:
        BuildError: a step failed.
    """
    into.mkdir(parents=True, exist_ok=True)
    _pip("install", *BUILD_PACKAGES)
    source = unpack(sdist or _download(work), work)
    patch(source, cxx_standard(importlib.metadata.version("torch")))
    # what pip builds of is the folder of sources alone: nothing of this process's folder comes along
    built = work / "built"
    command = [
        "wheel",
        "-v",
        "--no-cache-dir",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(built),
        ".",
    ]
    _pip(*command, cwd=source, environment=build_environment(os.environ))
    [wheel] = built.glob("*.whl")
    # by rename, so that nobody who looks there meanwhile sees half a wheel
    hidden = into / f".{wheel.name}"
    shutil.copyfile(wheel, hidden)
    return hidden.rename(into / wheel.name)


def unpack(sdist: Path, work: Path) -> Path:
    """The folder of the sources, if they are Horovod's of this version.

    Raises:
        BuildError: they are not.
    """
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SHA256:
        raise BuildError(f"{sdist} is not Horovod {VERSION}: its SHA-256 is {found}, not {SHA256}")
    with tarfile.open(sdist) as archive:
        archive.extractall(work)
    return work / f"horovod-{VERSION}"


CUDA_CMAKE: Final = "horovod/common/ops/cuda/CMakeLists.txt"
NVCC_FLAGS: Final = "cmake/build_utils.py"


def cxx_standard(torch: str) -> int:
    """What torch's headers need: C++17 since 2.1, C++20 since 2.14.

    Args:
        torch: its version.

    Example:
        >>> cxx_standard("2.13.0+cpu"), cxx_standard("2.14.1+cu130")
        (17, 20)
    """
    major, minor = (int(part) for part in torch.split(".")[:2])
    return 20 if (major, minor) >= (2, 14) else 17


def patch(source: Path, standard: int = 17) -> None:
    """Make the release compile with today's torch, compilers and CUDA, as conda-forge does.

    https://github.com/conda-forge/horovod-feedstock/tree/main/recipe has patches of the same names.

    Args:
        source: the folder of the sources.
        standard: of C++.
    """
    # 3998.patch, https://github.com/horovod/horovod/pull/3998, with C++17; see cxx_standard
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        _replace(source / name, "CMAKE_CXX_STANDARD 14", f"CMAKE_CXX_STANDARD {standard}")
    # 4313.patch, https://github.com/horovod/horovod/pull/4313: nvcc takes no headers of GCC 14 as C++11
    _replace(
        source / CUDA_CMAKE,
        "set(CMAKE_CUDA_STANDARD 11)\n",
        "set(CMAKE_CUDA_STANDARD 11)\n"
        "if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 14)\n"
        "  set(CMAKE_CUDA_STANDARD 14)\n"
        "endif()\n",
    )
    # use_nvcc_gencode.patch: Horovod asks nvcc for its architectures and reads numbers alone, but some
    # of CUDA 13's have suffixes; NVCC_GENCODE says which to compile for, as conda's nvcc sets it
    _replace(
        source / NVCC_FLAGS,
        "    cc_list_env = os.environ.get('HOROVOD_BUILD_CUDA_CC_LIST')\n",
        "    cc_list_env = os.environ.get('HOROVOD_BUILD_CUDA_CC_LIST')\n"
        "    if cc_list_env is None and os.environ.get('NVCC_GENCODE'):\n"
        "        return default_flags + os.environ['NVCC_GENCODE'].split()\n",
    )


def _replace(file: Path, old: str, new: str) -> None:
    """Replace every ``old``.

    Raises:
        BuildError: there is none, so the sources are not those that the patch is for.
    """
    text = file.read_text(encoding="utf-8")
    if old not in text:
        raise BuildError(f"{file} of Horovod {VERSION} has no {old!r} to patch")
    file.write_text(text.replace(old, new), encoding="utf-8")


def build_environment(before: Mapping[str, str]) -> dict[str, str]:
    """The variables of the build; what is set already is left alone.

    Args:
        before: this process's.

    Example:
        >>> made = build_environment({"HOROVOD_WITHOUT_MPI": "1"})
        >>> made["HOROVOD_WITH_GLOO"], "HOROVOD_WITH_MPI" in made
        ('1', False)
    """
    always = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    # 3957.patch of conda-forge, https://github.com/horovod/horovod/pull/3957, adds headers that those
    # of GCC 13 no longer include (https://gcc.gnu.org/gcc-13/porting_to.html); here, in all files
    always["CXXFLAGS"] = f"{before.get('CXXFLAGS', '')} -include cstdint".strip()
    for name in ("MPI", "GLOO"):
        if f"HOROVOD_WITHOUT_{name}" not in before:
            always[f"HOROVOD_WITH_{name}"] = "1"
    toolkit = cuda_home(before)
    if toolkit is not None:
        always |= {"HOROVOD_CUDA_HOME": toolkit, "CUDA_HOME": toolkit}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    unless_set = {
        # CMake 4 refuses the bundled gloo, which asks for the behavior of 2.8
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Horovod's own default is eight compilers at once, whatever the machine
        "MAKEFLAGS": f"-j{cores}",
    }
    return {**unless_set, **before, **always}


def cuda_home(environment: Mapping[str, str], usual: str = "/usr/local/cuda") -> str | None:
    """The CUDA toolkit to build with; None where Horovod finds the right one, or none is there.

    Horovod takes the nvcc on PATH and seeks the toolkit around it. Where that nvcc is a script that
    starts another one, there is no toolkit around it, and the build fails after minutes.

    Args:
        environment: variables of the build; HOROVOD_CUDA_HOME is the user's own answer.
        usual: where a toolkit is by default.
    """
    found = shutil.which("nvcc", path=environment.get("PATH"))
    if found is None or "HOROVOD_CUDA_HOME" in environment:
        return None
    if (Path(found).resolve().parents[1] / "include" / "cuda_runtime.h").exists():
        return None
    places = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), usual]
    return next((each for each in places if each and Path(each, "bin", "nvcc").exists()), None)


def install(wheel: Path) -> None:
    """Install a wheel, also where another build of the same version is installed.

    Raises:
        BuildError: it cannot be installed, or imported afterwards.
    """
    _pip("install", str(wheel))
    _pip("install", "--force-reinstall", "--no-deps", str(wheel))
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.torch as h; h.init"], cwd="/", check=False
    )
    if done.returncode != 0:
        raise BuildError("Horovod was installed and cannot be imported: see 'hva doctor'")
    print("Horovod is installed; 'hva doctor' shows whether ranks find each other")


def _download(work: Path) -> Path:
    _pip(
        "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod",
        "-d", str(work), f"horovod=={VERSION}",
    )  # fmt: skip
    return work / f"horovod-{VERSION}.tar.gz"


def _pip(
    *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    command: Sequence[str] = [sys.executable, "-m", "pip", *arguments]
    if subprocess.run(command, cwd=cwd, env=environment, check=False).returncode != 0:
        raise BuildError(
            f"'pip {arguments[0]}' failed, as it says above. Usual causes: no network, a compiler "
            "without the C++ that torch needs (17, since 2.14 20), too little memory (try "
            "MAKEFLAGS=-j1), an mpicc of another MPI, a CUDA toolkit without its runtime"
        )


def main() -> int:
    """As a program of its own."""
    parser = argparse.ArgumentParser(
        prog="install_horovod.py", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
