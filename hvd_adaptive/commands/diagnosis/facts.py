"""What a rank sees of its host, its packages and its settings."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import hvd_adaptive
from hvd_adaptive.comm import launcher
from hvd_adaptive.comm.topology import Topology, node_name

PACKAGES: Final = ("torch", "horovod", "mpi4py", "numpy", "numba")
SHOWN_VARIABLES: Final = re.compile(
    r"(HOROVOD_(?!RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|CONTROLLER|CPU_OP|GLOO_|SECRET)|HVA_|NCCL_|NUMBA_|OMP_)\w+"
    r"|OMPI_MCA_(mpi_|coll_|btl|pml|hwloc_base_binding)\w*"
)
"""Environment variables that change how training runs. None of them holds a secret."""
COPIED: Final = 1 << 25
"""Bytes that are copied to measure memory."""


@dataclass(frozen=True)
class RankFacts:
    """One rank; all fields are JSON's.

    Args:
        host: name of the node.
        launcher: what started it; empty for none.
        launched_rank: of the launcher.
        launched_size: ranks that the launcher started.
        local_size: of those, on this host; 0 where it is not known.
        versions: of packages, Python and hvd_adaptive; "none" where a package is missing.
        sources: hash of the kernels' sources.
        distutils: whether there is the module that horovodrun imports, which Python lacks since 3.12.
        horovod_error: why ``horovod.torch`` cannot be used; empty where it can.
        horovod_torch: the torch that Horovod was built with; empty where it does not say.
        builds: what Horovod was built with.
        size: ranks that Horovod sees; 0 where it has not started.
        mpi: version of the MPI library that mpi4py uses; empty where there is none.
        mpi_error: why mpi4py cannot be used; empty where it can.
        mpi_files: MPI libraries that this process has loaded.
        mpi_size: ranks that mpi4py sees; 0 where MPI has not started.
        mpirun: version of the ``mpirun`` on PATH; empty where there is none.
        cuda: CUDA version that torch was built with; empty for none.
        gpus: number of GPUs that torch can use.
        cores: number of cores that the process may use.
        bound_to: which ones these are; empty where the system does not tell.
        torch_threads: threads of torch's operations.
        numba_threads: threads of Numba's parallel loops.
        nice: the process's nice value.
        collection: seconds of one run of Python's garbage collector over what is loaded.
        memcpy: bytes per second that one thread copies.
        kernels: folder of the compiled kernels; empty where there is no place for one.
        precompiled: whether all of them are there.
        shared_memory: free bytes of /dev/shm; -1 where there is none.
        variables: settings in the environment, as the launcher passed them.
    """

    host: str = ""
    launcher: str = ""
    launched_rank: int = 0
    launched_size: int = 1
    local_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    sources: str = ""
    distutils: bool = True
    horovod_error: str = ""
    horovod_torch: str = ""
    builds: Mapping[str, bool] = field(default_factory=dict)
    size: int = 0
    mpi: str = ""
    mpi_error: str = ""
    mpi_files: tuple[str, ...] = ()
    mpi_size: int = 0
    mpirun: str = ""
    cuda: str = ""
    gpus: int = 0
    cores: int = 1
    bound_to: tuple[int, ...] = ()
    torch_threads: int = 1
    numba_threads: int = 1
    nice: int = 0
    collection: float = 0.0
    memcpy: float = 0.0
    kernels: str = ""
    precompiled: bool = False
    shared_memory: int = -1
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_message(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> RankFacts:
        """From :meth:`as_message`, through JSON."""
        lists = {name: tuple(message[name]) for name in ("mpi_files", "bound_to")}
        return cls(**{**message, **lists})


@dataclass(frozen=True)
class Link:
    """Between two hosts, as one rank of each sees it while all others are idle.

    Args:
        hosts: their names.
        latency: seconds of an exchange of some bytes.
        rate: bits per second in one direction.
    """

    hosts: tuple[str, str]
    latency: float
    rate: float


@dataclass(frozen=True)
class Facts:
    """All ranks, and what lies between them.

    Args:
        ranks: in their order.
        operations: what operations among all ranks cost; empty where there is one rank.
        latency: seconds of a small allgather among all ranks; 0 where there is one.
        links: between the first host and each other one.
        slow_rate: bits per second under which a link is worth a word.
    """

    ranks: tuple[RankFacts, ...]
    operations: str = ""
    latency: float = 0.0
    links: tuple[Link, ...] = ()
    slow_rate: float = 1e9

    @property
    def first(self) -> RankFacts:
        """Rank 0."""
        return self.ranks[0]

    @property
    def topology(self) -> Topology:
        """Which ranks share a host."""
        return Topology(tuple(each.host for each in self.ranks))

    def cores(self, rank: RankFacts) -> int:
        """Cores of a rank's host: mpirun binds each of few ranks to one of its own."""
        bound = {core for each in self.ranks if each.host == rank.host for core in each.bound_to}
        return max(rank.cores, len(bound))

    def local_ranks(self, rank: RankFacts) -> int:
        """Ranks on a rank's host: as the launcher says, or as they were counted."""
        return max(rank.local_size, self.topology.names.count(rank.host))


def collect() -> RankFacts:
    """What can be seen before Horovod starts. Cost: a second, most of it torch's import."""
    launch = launcher.find()
    variables = {name: text for name, text in os.environ.items() if SHOWN_VARIABLES.fullmatch(name)}
    folder, precompiled = _kernels()
    return RankFacts(
        host=node_name(),
        launcher=launch.launcher,
        launched_rank=launch.rank,
        launched_size=launch.size,
        local_size=launch.local_size or 0,
        sources=_tried(_hash_of_sources, ""),
        distutils=importlib.util.find_spec("distutils") is not None,
        horovod_torch=_horovod_torch(),
        mpirun=_mpirun(),
        cores=launcher.cores(),
        bound_to=_tried(lambda: tuple(sorted(os.sched_getaffinity(0))), ()),
        nice=os.nice(0),
        memcpy=_memcpy(),
        kernels=folder,
        precompiled=precompiled,
        shared_memory=_tried(lambda: shutil.disk_usage("/dev/shm").free, -1),
        variables=variables,
        **_of_torch(),
    )


def of_mpi() -> dict[str, Any]:
    """What mpi4py sees, once Horovod has started or has failed to."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"mpi_error": _line(error), "mpi_files": mpi_files()}
    version = MPI.Get_library_version().replace("\0", "").splitlines()[0].split(",")[0]
    started = MPI.Is_initialized() and not MPI.Is_finalized()
    size = MPI.COMM_WORLD.size if started else 0
    return {"mpi": version, "mpi_size": size, "mpi_files": mpi_files()}


def of_horovod(hvd: Any) -> dict[str, Any]:
    """What Horovod says of itself.

    Args:
        hvd: the module ``horovod.torch``.
    """
    builds = {
        "MPI": bool(hvd.mpi_built()),
        "Gloo": bool(hvd.gloo_built()),
        "NCCL": bool(hvd.nccl_built()),
        "CUDA": bool(hvd.cuda_built()),
    }
    return {"builds": builds, "size": int(hvd.size()) if hvd.is_initialized() else 0}


def mpi_files() -> tuple[str, ...]:
    """MPI libraries that this process has loaded; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return tuple(sorted(path for path in paths if re.search(r"/libmpi(ch)?\.so[.\d]*$", path)))


def _versions(torch: str) -> dict[str, str]:
    def version(name: str) -> str:
        return str(_tried(lambda: importlib.metadata.version(name), "none"))

    found = {name: version(name) for name in PACKAGES}
    if found["torch"] == torch.partition("+")[0]:
        found["torch"] = torch  # what PyPI calls 2.13.0 is 2.13.0+cu130, and Horovod writes that
    return {
        "hvd_adaptive": hvd_adaptive.__version__,
        "python": platform.python_version(),
        **found,
    }


def _horovod_torch() -> str:
    """Horovod writes the versions of what it was built with beside its modules."""

    def read() -> str:
        spec = importlib.util.find_spec("horovod")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        text = (Path(spec.submodule_search_locations[0]) / "metadata.json").read_text(encoding="utf-8")
        return str(json.loads(text)["pytorch"])

    return str(_tried(read, ""))


def _of_torch() -> dict[str, Any]:
    import torch

    gc.collect()
    started = time.perf_counter()
    gc.collect()
    return {
        "versions": _versions(torch.__version__),
        "collection": time.perf_counter() - started,
        "cuda": torch.version.cuda or "",
        "gpus": torch.cuda.device_count(),
        "torch_threads": torch.get_num_threads(),
        "numba_threads": _tried(_numba_threads, 1),
    }


def _numba_threads() -> int:
    import numba

    return int(numba.get_num_threads())


def _hash_of_sources() -> str:
    from hvd_adaptive.kernel_cache import hash_of_sources

    return hash_of_sources()


def _kernels() -> tuple[str, bool]:
    from hvd_adaptive import kernel_cache

    folder = kernel_cache.current_folder()
    return str(folder or ""), kernel_cache.is_complete()


def _mpirun() -> str:
    if shutil.which("mpirun") is None:
        return ""
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0].removeprefix("mpirun").translate({40: None, 41: None}).strip()


def _memcpy() -> float:
    import numpy as np

    source = np.zeros(COPIED, np.uint8)
    target = np.ones(COPIED, np.uint8)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - started)
    return COPIED / min(seconds)


def _tried(read: Callable[[], Any], otherwise: Any) -> Any:
    """What is no fault of its own where it cannot be read: a check says what is missing."""
    try:
        return read()
    except (AssertionError, AttributeError, ImportError, KeyError, OSError, ValueError):
        return otherwise


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
