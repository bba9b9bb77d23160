"""What runs on a lab's hosts: single commands, and Open MPI jobs over all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .base import SIGNALS, SUBNET, Lab, LabError, UsageError, end_processes, signals_held

_PR_SET_CHILD_SUBREAPER = 36


class Interrupted(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # When a terminal is closed, two may come: the second must not cut short what the first began.
    handle_signals(signal.SIG_IGN)
    raise Interrupted(number)


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """A SIGHUP that was ignored when the process started, as under nohup, stays ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def run_on(lab: Lab, host: str, command: Sequence[str]) -> NoReturn:
    """Becomes this command, on a host."""
    lab.require_hosts([host])
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no command '{command[0]}'")
    os.environ["HVA_NETLAB"] = lab.name
    words = lab.enter(host, command)
    # Python ignores it, and the command would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(words[0], words)


def mpirun(lab: Lab, arguments: Sequence[str], keep: Collection[int] = ()) -> int:
    """Runs a job over the hosts, and ends when nothing of it is left.

    Args:
        keep: children of this process that are not the job's.

    Returns:
        The job's exit status.
    """
    require_open_mpi()
    # What outlives mpirun becomes our child instead of init's, and can be found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(
        dir=lab.folder, prefix="job-", ignore_cleanup_errors=True
    ) as scratch:
        # Should this process be killed, the kernel tells mpirun to end, which ends its ranks.
        command = ["setpriv", "--pdeathsig", "TERM", *lab.enter("h1", ["mpirun", *arguments])]
        # A session of its own: Ctrl-C reaches the job once, from here. So it has no terminal to read.
        terminal = sys.stdin is None or sys.stdin.isatty()
        job = subprocess.Popen(
            command,
            env=mpi_environment(lab, scratch),
            start_new_session=True,
            stdin=subprocess.DEVNULL if terminal else None,
        )
        sent: set[int] = set()

        def pass_on(number: int, frame: FrameType | None) -> None:
            # At a second SIGHUP, mpirun would kill the ranks before they have saved.
            if number != signal.SIGHUP or number not in sent:
                job.send_signal(number)
            sent.add(number)

        handle_signals(pass_on)
        try:
            status = job.wait()
        finally:
            with signals_held():
                end_descendants(keep)
            handle_signals(interrupt)
    return status if status >= 0 else 128 - status


def require_open_mpi() -> None:
    if shutil.which("mpirun") is None:
        raise LabError("mpirun is missing", "On Debian or Ubuntu: sudo apt-get install openmpi-bin")
    asked = subprocess.run(["mpirun", "--version"], check=False, capture_output=True, text=True)
    version = asked.stdout.partition("\n")[0]
    if re.search(r"\(Open MPI\) 4\.", version) is None:
        raise LabError(
            f"mpirun is of '{version}'; only Open MPI 4 can be started on the hosts of a lab"
        )


def mpi_environment(lab: Lab, scratch: str) -> dict[str, str]:
    """What makes mpirun use the lab's hosts. By environment: --mca among its arguments goes before.

    All of it reaches every rank: the daemons that start them inherit it.
    """
    defaults = {
        # Not by shared memory, which hosts do not have in common.
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        # All hosts share this machine's cores: a rank that waits must give its core away.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_pml": "ob1",
    }
    own = {
        "HVA_NETLAB": lab.name,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl_tcp_if_include": SUBNET,
        "OMPI_MCA_oob_tcp_if_include": SUBNET,
        "OMPI_MCA_orte_default_hostfile": str(lab.folder / "hostfile"),
        # What a killed job leaves there is removed with the folder.
        "OMPI_MCA_orte_tmpdir_base": scratch,
        "OMPI_MCA_plm": "rsh",
        # With sh, because /run may be mounted noexec.
        "OMPI_MCA_plm_rsh_agent": f"sh {lab.folder / 'agent'}",
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    }
    return {**defaults, **os.environ, **own}


def end_descendants(keep: Collection[int]) -> None:
    """Ends what a job has left behind: nothing, unless mpirun itself was killed."""

    def left() -> list[int]:
        for child in _children(os.getpid()):
            if child not in keep:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
        return _descendants(os.getpid(), keep)

    # The daemons end by themselves, a little later than mpirun.
    deadline = time.monotonic() + 0.5
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    end_processes(left, patience=1.0)


def _children(process: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def _descendants(process: int, keep: Collection[int] = ()) -> list[int]:
    found = []
    for child in _children(process):
        if child not in keep:
            found += [child, *_descendants(child)]
    return found
