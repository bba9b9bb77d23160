"""Connect the ranks: by Horovod, or by torch.distributed where torchrun started them.

Horovod is started so that computing goes before communication where both want the same core.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any

from hvd_adaptive.comm import launcher, torch_startup
from hvd_adaptive.comm.process_set_control import ProcessSetControl

# A tenth of a core where computing takes all of it: what sends is late, but never starves.
NICENESS = 10
YIELD = "OMPI_MCA_mpi_yield_when_idle"
"""What lets a rank that waits give its core away; Open MPI reads it once, at its start."""


def init(*args: Any, niceness: int = NICENESS, hierarchical: bool = False, **kwargs: Any) -> None:
    """Start Horovod as ``hvd.init()`` does, its own thread at a lower priority.

    MPI waits by polling. Horovod's thread, which waits for the other ranks in this way,
    takes its share of a core from the computation wherever there is no core to spare for it: a rank a
    core, or more ranks than cores. Ranks that compute then finish later, and those that wait for them
    take time from them for longer. At a lower priority it takes what computing leaves. Where cores are
    to spare, nothing changes.

    Where this host has more ranks than cores, Open MPI is also told to give the core away while it
    waits (``OMPI_MCA_mpi_yield_when_idle=1``), unless that variable is set: ``horovodrun`` says that
    every rank has a slot, and Open MPI takes a slot for a core. 16 ranks on 2 cores reduce a small
    tensor in 2.9 ms with it, in 813 ms without.

    Only threads that Horovod starts are affected: they inherit the priority, which takes Linux, but no
    privilege. Elsewhere this is ``hvd.init()``.

    Under ``torchrun``, and where Horovod is not installed, it initializes torch.distributed instead,
    unless that has been done: with gloo, and with NCCL for GPUs where there are some. Nothing there
    polls, so priorities stay as they are.

    Args:
        args: of ``hvd.init()``.
        niceness: how much is added to the thread's nice value, 0 to 19; 0 is ``hvd.init()``. Other
            processes that keep the cores busy, such as data loaders, go before communication, too;
            with one a core, steps were still no longer than with ``hvd.init()``.
        hierarchical: make the process sets that ``scheme="hierarchical"`` needs: one for the ranks of
            each node, and one for the ranks that have the same position on all nodes. Horovod's thread
            then asks in each of its cycles whether sets were added. Nodes are told apart by the names
            of their hosts, or by the environment variable ``HVA_NODE`` where it is set. Not in elastic
            runs. torch.distributed needs no such preparation.
        kwargs: of ``hvd.init()``; under torchrun of ``torch.distributed.init_process_group()``, such as
            ``backend`` or ``timeout``.

    Raises:
        ValueError: ``niceness`` is out of range, process sets cannot be made, or as from
            ``hvd.init()``.
        TypeError: ``niceness`` is not an integer, or another argument is of the wrong type.
        ModuleNotFoundError: mpirun, horovodrun or srun started several ranks, and Horovod is missing.

    Warns:
        RuntimeWarning: Horovod had started already; its thread keeps its priority.

    Example:
        >>> import horovod.torch as hvd, hvd_adaptive as hva
        >>> hva.init()
        >>> hvd.is_initialized()
        True
    """
    if type(niceness) is not int:
        raise TypeError(f"niceness must be an integer, got {niceness!r}")
    if not 0 <= niceness <= 19:
        raise ValueError(f"niceness must be 0 to 19, got {niceness}")
    if torch_startup.is_wanted():
        torch_startup.start(**_of_torch(args, kwargs))
    else:
        _start_horovod(args, kwargs, niceness, hierarchical)


def _of_torch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments, which must not be Horovod's."""
    wrong = [*(["a communicator"] if args else []), *({"comm", "process_sets"} & set(kwargs))]
    if wrong:
        raise TypeError(
            f"{' and '.join(wrong)} given to init(), but torch.distributed connects these ranks: leave "
            "it out, or pass arguments of torch.distributed.init_process_group()"
        )
    return kwargs


def _start_horovod(
    args: tuple[Any, ...], kwargs: dict[str, Any], niceness: int, hierarchical: bool
) -> None:
    """``hvd.init()`` at a lower priority."""
    import horovod.torch as hvd
    from horovod.torch.mpi_ops import init as start  # hvd.init may be this one: see `hva run`

    from hvd_adaptive.comm.node_groups import node_groups

    given = {**dict(zip(("comm", "process_sets"), args, strict=False)), **kwargs}
    _check_comm(given.get("comm"))
    _check_process_sets(given.get("process_sets"))
    if hierarchical and not hvd.is_initialized():
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # beside a list of process sets as well
    if hvd.is_initialized():
        warnings.warn(
            "Horovod has started already, so its thread keeps its priority: call hvd_adaptive.init() "
            "in the place of hvd.init()",
            RuntimeWarning,
            stacklevel=3,
        )
    elif niceness == 0 or sys.platform != "linux":
        yield_where_crowded()
        start(*args, **kwargs)
    else:
        yield_where_crowded()
        # A thread inherits the priority of the one that starts it, and nobody may raise it again.
        with ThreadPoolExecutor(1, initializer=_give_way, initargs=(niceness,)) as pool:
            pool.submit(start, *args, **kwargs).result()
    if hierarchical and not launcher.is_elastic():
        node_groups(ProcessSetControl("hva.init.nodes"))


def yield_where_crowded() -> bool:
    """Have Open MPI give its core away while it waits, if ranks outnumber cores; before MPI starts.

    Returns:
        Whether it was told to now: not where the user has said what to do.
    """
    local_ranks = launcher.find().local_size
    if local_ranks is None or local_ranks <= launcher.cores() or YIELD in os.environ:
        return False
    os.environ[YIELD] = "1"
    return True


def _check_comm(comm: Any) -> None:
    """Horovod says what is wrong with what is no list."""
    is_list = isinstance(comm, Collection)
    if isinstance(comm, str) or (is_list and not all(isinstance(rank, Integral) for rank in comm)):
        raise TypeError(
            f"comm must be a list of ranks, such as [0, 1], or an mpi4py communicator, got {comm!r}"
        )


def _check_process_sets(process_sets: Any) -> None:
    import horovod.torch as hvd

    wanted = (
        "process_sets must be 'dynamic' or a list of hvd.ProcessSet, such as [hvd.ProcessSet([0, 1])]"
    )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"{wanted}, got {process_sets!r}")
    elif process_sets is not None and not (
        isinstance(process_sets, Collection)
        and all(isinstance(each, hvd.ProcessSet) for each in process_sets)
    ):
        raise TypeError(f"{wanted}, got {process_sets!r}")


def _give_way(niceness: int) -> None:
    """Lower this thread's priority; on Linux each thread has its own."""
    thread = threading.get_native_id()
    lower = os.getpriority(os.PRIO_PROCESS, thread) + niceness
    os.setpriority(os.PRIO_PROCESS, thread, min(lower, 19))
