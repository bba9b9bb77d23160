"""What would make training fail or slow. Pure: facts in, findings out.

A check is a function of all facts that returns its finding, or None, and a row of :data:`CHECKS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hvd_adaptive.commands.diagnosis.facts import Facts, Link, RankFacts

Severity: TypeAlias = Literal["failure", "slow", "note"]
"""Training would fail; it would be slow, or its planner worse informed; worth knowing."""

SETUP: Final = "hva install-horovod"
YIELD: Final = "OMPI_MCA_mpi_yield_when_idle"
RINGS: Final = "OMPI_MCA_coll_tuned_use_dynamic_rules"
CYCLE: Final = "HOROVOD_CYCLE_TIME"
STALL: Final = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 1)
LONG_COLLECTION: Final = 0.05
SLOW_MEMORY: Final = 1e9
LEAST_SHARED_MEMORY: Final = 64 << 20
"""Per rank: Open MPI takes some 4 MiB and more with the ranks; a container has 64 MiB in all."""
SHORTEST_CYCLE, LONGEST_CYCLE = 0.1, 5.0
"""Milliseconds; Horovod's default is 1."""
LONG_LATENCY: Final = 0.02


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Args:
        severity: what it means for training.
        what: what was seen, and on which rank.
        remedy: what to write or do.
    """

    severity: Severity
    what: str
    remedy: str


Check: TypeAlias = Callable[[Facts], Finding | None]


def horovod(facts: Facts) -> Finding | None:
    """Horovod can be imported."""
    bad = _first(facts, lambda rank: bool(rank.horovod_error))
    if bad is None:
        return None
    number, rank = bad
    if rank.versions.get("horovod") == "none":
        return Finding(
            "failure",
            f"rank {number} has no Horovod",
            f"{SETUP}; pip alone cannot build it. Under torchrun none is needed",
        )
    return Finding("failure", f"Horovod of rank {number} does not start: {rank.horovod_error}", SETUP)


def torch_of_horovod(facts: Facts) -> Finding | None:
    """Horovod was built with this torch."""
    bad = _first(
        facts, lambda rank: bool(rank.horovod_torch) and rank.horovod_torch != rank.versions["torch"]
    )
    if bad is None:
        return None
    number, rank = bad
    return Finding(
        "failure",
        f"rank {number}: Horovod was built with torch {rank.horovod_torch}, and torch "
        f"{rank.versions['torch']} is installed",
        f"{SETUP}; or pip install torch=={rank.horovod_torch.partition('+')[0]}",
    )


def oldest_versions(facts: Facts) -> Finding | None:
    """Python and torch are new enough."""
    for name, oldest in (("python", OLDEST_PYTHON), ("torch", OLDEST_TORCH)):
        bad = _first(facts, lambda rank, n=name, o=oldest: _numbers(rank.versions.get(n, "")) < o)  # type: ignore[misc]
        if bad is not None:
            wanted = ".".join(map(str, oldest))
            return Finding(
                "failure",
                f"rank {bad[0]} has {name} {bad[1].versions.get(name)}",
                f"install {name} {wanted} or newer, and then {SETUP}",
            )
    return None


def all_ranks_meet(facts: Facts) -> Finding | None:
    """Horovod sees as many ranks as the launcher has started."""
    rank = facts.first
    if rank.horovod_error or rank.size in (0, rank.launched_size) or not rank.launcher:
        return None
    if not rank.builds.get("MPI", True):
        return None  # missing_mpi says so
    return Finding(
        "failure",
        f"{rank.launcher} started {rank.launched_size} ranks, and Horovod sees {rank.size}: it was "
        "built with another MPI",
        f"load the MPI of this mpirun, and {SETUP}; under srun, write srun --mpi=pmix",
    )


def distutils(facts: Facts) -> Finding | None:
    """horovodrun can be imported."""
    rank = facts.first
    if rank.horovod_error or rank.distutils:
        return None
    what = "horovodrun imports distutils, which Python no longer has since 3.12; setuptools brings it"
    severity: Severity = "note" if rank.launcher in ("mpirun", "srun") else "failure"
    return Finding(severity, what, "pip install setuptools")


def missing_mpi(facts: Facts) -> Finding | None:
    """Horovod has MPI."""
    rank = facts.first
    if rank.horovod_error or rank.builds.get("MPI", True):
        return None
    remedy = f"install Open MPI (openmpi-bin libopenmpi-dev), and {SETUP}; or horovodrun --gloo"
    if rank.launcher in ("mpirun", "srun"):
        what = f"Horovod was built without MPI, and {rank.launcher} starts ranks that need it"
        return Finding("failure", what, remedy)
    return Finding("slow", "Horovod was built without MPI: only horovodrun --gloo starts ranks", remedy)


def mpi4py(facts: Facts) -> Finding | None:
    """mpi4py is there, and of Horovod's MPI."""
    remedy = (
        "pip install --force-reinstall --no-deps --no-binary mpi4py mpi4py, with Horovod's mpicc first"
    )
    cost = "planners then talk through Horovod's cycle, which takes longer"
    for number, rank in enumerate(facts.ranks):
        if not rank.builds.get("MPI", False):
            continue
        if rank.mpi_error:
            return Finding(
                "slow", f"rank {number} has no usable mpi4py ({rank.mpi_error}): {cost}", remedy
            )
        version = re.search(r"\d+\.\d+\.\d+", rank.mpirun)
        others = "Open MPI" in rank.mpirun and version is not None and version[0] not in rank.mpi
        if others or len(rank.mpi_files) > 1 or rank.mpi_size not in (0, rank.size):
            seen = f"mpi4py of rank {number} uses {rank.mpi or 'another MPI'}, mpirun is {rank.mpirun}"
            if len(rank.mpi_files) > 1:
                seen += f"; loaded are {' and '.join(rank.mpi_files)}"
            return Finding("slow", f"{seen}: {cost}", remedy)
    return None


def equal_versions(facts: Facts) -> Finding | None:
    """All ranks have the same packages."""
    first = facts.first
    for number, rank in enumerate(facts.ranks):
        for name, version in {**rank.versions, "kernels' sources": rank.sources}.items():
            here = {**first.versions, "kernels' sources": first.sources}.get(name)
            if version != here:
                return Finding(
                    "failure" if name in ("hvd_adaptive", "horovod", "torch") else "slow",
                    f"rank 0 ({first.host}) has {name} {here}, rank {number} ({rank.host}) {version}",
                    f"install the same {name} on all hosts, or start all ranks from one environment",
                )
    return None


def yields(facts: Facts) -> Finding | None:
    """Ranks that wait give their cores away where there are fewer cores than ranks."""
    for rank in facts.ranks:
        local = facts.local_ranks(rank)
        cores = facts.cores(rank)
        shared = "1 core" if cores == 1 else f"{cores} cores"
        if local <= cores or rank.launcher == "horovodrun --gloo":
            continue
        if rank.variables.get(YIELD, rank.variables.get("OMPI_MCA_mpi_oversubscribe", "0")) == "0":
            return Finding(
                "slow",
                f"{local} ranks share {shared} of {rank.host}, and a rank that waits keeps "
                "its core: operations take up to 300 times as long",
                f"export {YIELD}=1, or start Horovod with hvd_adaptive.init(), which sets it",
            )
    return None


def threads(facts: Facts) -> Finding | None:
    """Threads of all ranks have cores."""
    for rank in facts.ranks:
        local = facts.local_ranks(rank)
        wanted = max(1, facts.cores(rank) // local)
        if rank.torch_threads > wanted:
            return Finding(
                "slow",
                f"{local} ranks of {rank.torch_threads} threads share {facts.cores(rank)} cores",
                f"export OMP_NUM_THREADS={wanted} NUMBA_NUM_THREADS={wanted}",
            )
    return None


def cycle_time(facts: Facts) -> Finding | None:
    """Horovod looks for work neither too seldom nor all the time."""
    rank = facts.first
    text = rank.variables.get(CYCLE)
    if text is None:
        return None
    try:
        cycle = float(text)
    except ValueError:
        return Finding("slow", f"{CYCLE}={text} is no number of milliseconds", f"export {CYCLE}=1")
    if cycle > LONGEST_CYCLE:
        what = f"{CYCLE}={text}: every operation waits for up to {cycle:g} ms"
        return Finding("slow", what, f"export {CYCLE}=1, or unset it")
    if cycle < SHORTEST_CYCLE and facts.local_ranks(rank) >= facts.cores(rank):
        what = f"{CYCLE}={text}: Horovod's threads poll all the time, on cores that training needs"
        return Finding("slow", what, f"export {CYCLE}=1, or unset it")
    return None


def kernel_folder(facts: Facts) -> Finding | None:
    """There is a place for compiled kernels."""
    bad = _first(facts, lambda rank: not rank.kernels)
    if bad is None:
        return None
    what = f"rank {bad[0]} has no folder to keep compiled kernels in, and compiles at every start"
    return Finding("slow", what, "export NUMBA_CACHE_DIR=/a/folder/that/can/be/written")


def precompiled(facts: Facts) -> Finding | None:
    """Kernels have been compiled."""
    bad = _first(facts, lambda rank: bool(rank.kernels) and not rank.precompiled)
    if bad is None:
        return None
    what = f"kernels are not compiled yet on {bad[1].host}: the first steps wait for a minute or two"
    return Finding("slow", what, "hva precompile, on each host that has a folder of its own")


def slow_link(facts: Facts) -> Finding | None:
    """Links between hosts are as fast as gradients want."""
    slowest = min(facts.links, key=lambda link: link.rate, default=None)
    if slowest is None or slowest.rate >= facts.slow_rate:
        return None
    seconds = 8 * 100e6 / slowest.rate
    return Finding(
        "slow",
        f"{_shown(slowest)}: to send 100 MB of gradients takes {seconds:.1f} s",
        "compress: hva run --compression auto -- python train.py; check cable, switch and "
        "btl_tcp_if_include if the link should be faster",
    )


def latency(facts: Facts) -> Finding | None:
    """Small operations are answered soon."""
    if facts.latency <= LONG_LATENCY:
        return None
    return Finding(
        "slow",
        f"a small allgather among all ranks takes {1e3 * facts.latency:.0f} ms",
        f"export {YIELD}=1 if ranks outnumber cores; look for other programs on the hosts (top)",
    )


def rings(facts: Facts) -> Finding | None:
    """Open MPI reduces in rings between hosts."""
    rank = facts.first
    if len(facts.topology.nodes) < 2 or rank.launcher == "horovodrun --gloo":
        return None
    if "Open MPI" not in rank.mpi or RINGS in rank.variables:
        return None
    return Finding(
        "slow",
        f"{len(facts.topology.nodes)} hosts, and Open MPI's default algorithms, which take 1.5 times "
        "as long over TCP",
        f"export {RINGS}=1 OMPI_MCA_coll_tuned_allreduce_algorithm=4 "
        "OMPI_MCA_coll_tuned_allgatherv_algorithm=3",
    )


def niceness(facts: Facts) -> Finding | None:
    """Training has the priority of other programs."""
    bad = _first(facts, lambda rank: rank.nice > 0)
    if bad is None:
        return None
    what = f"rank {bad[0]} runs at nice {bad[1].nice}: whatever else runs on {bad[1].host} goes first"
    return Finding("slow", what, "start the launcher without nice")


def collector(facts: Facts) -> Finding | None:
    """Python's garbage collector does not stop the steps."""
    longest = max(rank.collection for rank in facts.ranks)
    if longest <= LONG_COLLECTION:
        return None
    what = (
        f"one run of Python's garbage collector takes {1e3 * longest:.0f} ms, for which all ranks wait"
    )
    return Finding("note", what, "gc.collect(); gc.freeze() before the training loop")


def stalls(facts: Facts) -> Finding | None:
    """A rank that hangs ends the run."""
    if len(facts.ranks) == 1 or STALL in facts.first.variables:
        return None
    what = "a rank that hangs lets all others wait forever"
    return Finding("note", what, f"export {STALL}=300")


def shared_memory(facts: Facts) -> Finding | None:
    """Ranks of a host find room in /dev/shm."""
    for rank in facts.ranks:
        local = facts.local_ranks(rank)
        if local > 1 and 0 <= rank.shared_memory < LEAST_SHARED_MEMORY * local:
            return Finding(
                "slow",
                f"/dev/shm of {rank.host} has {rank.shared_memory >> 20} MiB for {local} ranks and "
                "their data loaders",
                "docker run --shm-size=8g, or --ipc=host",
            )
    return None


def nccl(facts: Facts) -> Finding | None:
    """GPUs reduce by NCCL."""
    bad = _first(facts, lambda rank: rank.gpus > 0 and not rank.builds.get("NCCL", True))
    if bad is None:
        return None
    what = f"rank {bad[0]} has {bad[1].gpus} GPUs, and Horovod was built without NCCL"
    return Finding("slow", what, f"HOROVOD_GPU_OPERATIONS=NCCL {SETUP}")


def memory(facts: Facts) -> Finding | None:
    """Memory is as fast as memory is."""
    slowest = min(facts.ranks, key=lambda rank: rank.memcpy)
    if slowest.memcpy >= SLOW_MEMORY:
        return None
    what = f"a thread on {slowest.host} copies {slowest.memcpy / 1e9:.2f} GB/s: the host is overloaded"
    return Finding("slow", what, "look for other programs on it (top), and for a memory limit")


CHECKS: Final[dict[str, Check]] = {
    "horovod": horovod,
    "torch": torch_of_horovod,
    "versions": oldest_versions,
    "ranks": all_ranks_meet,
    "distutils": distutils,
    "mpi": missing_mpi,
    "mpi4py": mpi4py,
    "hosts": equal_versions,
    "yield": yields,
    "threads": threads,
    "cycle": cycle_time,
    "cache": kernel_folder,
    "kernels": precompiled,
    "link": slow_link,
    "latency": latency,
    "rings": rings,
    "nice": niceness,
    "collector": collector,
    "stall": stalls,
    "shm": shared_memory,
    "nccl": nccl,
    "memory": memory,
}
"""Every check, by the name that its finding has in the report."""


def examine(facts: Facts) -> dict[str, Finding]:
    """What all checks have found, the worst first.

    Example:
        >>> rank = RankFacts(size=1, variables={"HOROVOD_CYCLE_TIME": "50"})
        >>> examine(Facts((rank,)))["cycle"].remedy
        'export HOROVOD_CYCLE_TIME=1, or unset it'
    """
    found = {name: check(facts) for name, check in CHECKS.items()}
    order = ("failure", "slow", "note")
    rows = [(name, finding) for name, finding in found.items() if finding is not None]
    return dict(sorted(rows, key=lambda row: order.index(row[1].severity)))


def fails(findings: Iterable[Finding]) -> bool:
    """Whether training would fail."""
    return any(each.severity == "failure" for each in findings)


def _first(facts: Facts, bad: Callable[[RankFacts], bool]) -> tuple[int, RankFacts] | None:
    return next(((number, rank) for number, rank in enumerate(facts.ranks) if bad(rank)), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0])[:2])


def _shown(link: Link) -> str:
    rate = f"{link.rate / 1e6:,.0f} Mbit/s"
    return f"{link.hosts[0]} and {link.hosts[1]} are {rate} and {1e3 * link.latency:.3g} ms apart"
