"""A real Slurm on one machine: a controller and two nodes, for the tests of launch/slurm.

Each node is a slurmd with its own hostname, /dev/shm and /etc/hosts. Without those, the two nodes'
PMIx servers would share files, and launchers would take both nodes for one machine.

    python tests/slurm/cluster.py            # starts it and says how to talk to it, until Ctrl-C
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

NODES = ("n1", "n2")
# Of each node; what needs more of them waits, so that not too much runs at once.
CORES = 2
PROGRAMS = [  # of util-linux, too
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "scancel",
    "sinfo",
    "unshare",
    "setpriv",
]
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STOPPED"}
# Those of Debian are in /usr/sbin, which is not in everybody's PATH.
PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"

# RequeueExit is left out on purpose: many sites do not set it, so the scripts must do without.
# A requeued job waits for longer than credentials live, which is two minutes by default.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=5
MinJobAge=3600
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2,sched_min_interval=0
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Root of a node: exec keeps the pid, so that stopping the process stops the slurmd.
NODE = """\
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
exec slurmd -D -N "$1"
"""


class LabError(RuntimeError):
    """The lab did not do what it should; the message has the daemons' logs."""


def wait_until(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Polls until `condition` holds.

    Raises:
        LabError: it did not within `seconds`; `what` says what was waited for.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"after {seconds:.0f} s: {what()}")
        time.sleep(0.1)


def processes_with(*settings: str) -> dict[int, str]:
    """The processes that have all of these NAME=VALUE in their environment, and their command lines."""
    wanted = {setting.encode() for setting in settings}
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end, or be a kernel's, while it is looked at.
        with contextlib.suppress(OSError):
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
    return found


@dataclass(frozen=True)
class Job:
    """A batch job, or one task of an array."""

    lab: Lab
    id: str
    output: Path

    def show(self) -> dict[str, str]:
        """What Slurm says of it; without entries once it has forgotten the job."""
        text = self.lab.run("scontrol", "-o", "show", "job", self.id, check=False).stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    @property
    def state(self) -> str:
        return self.show().get("JobState", "")

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, seconds: float = 240.0) -> tuple[str, int]:
        """Waits for the end.

        Returns:
            The state, and the exit code that Slurm keeps: 128 and the number after a signal.

        Raises:
            LabError: it continues after `seconds`.
        """
        wait_until(lambda: self.state not in ACTIVE, seconds, self.explain)
        shown = self.show()
        code, _, number = shown["ExitCode"].partition(":")
        return shown["JobState"], int(code) or (128 + int(number) if int(number) else 0)

    @property
    def ended(self) -> float:
        """When Slurm saw it end, in seconds since the epoch, to the second."""
        return datetime.fromisoformat(self.show()["EndTime"]).timestamp()

    def wait_for(self, pattern: str, seconds: float = 240.0) -> re.Match[str]:
        """Waits for a line of output."""

        def arrived() -> bool:
            ended = self.state not in ACTIVE  # before its output is read, which is whole then
            found = re.search(pattern, self.text(), re.MULTILINE)
            if not found and ended:
                raise LabError(f"the job ended without {pattern!r}:\n{self.explain()}")
            return found is not None

        wait_until(arrived, seconds, lambda: f"no {pattern!r}: {self.explain()}")
        found = re.search(pattern, self.text(), re.MULTILINE)
        assert found
        return found

    def task(self, number: int) -> Job:
        """A task of this array."""
        output = self.output.with_name(f"{self.output.name}-{number}")
        return Job(self.lab, f"{self.id}_{number}", output)

    def signal(self, name: str) -> None:
        """As --signal=B: does before the time limit: to the batch script alone."""
        self.lab.run("scancel", f"--signal={name}", "--batch", self.id)

    def processes(self) -> dict[int, str]:
        """Those of the job that live, on all nodes."""
        return processes_with(self.lab.mark, f"SLURM_JOB_ID={self.id}")

    def explain(self) -> str:
        return f"job {self.id} is {self.state}; its output:\n{self.text()}"


@dataclass
class Lab:
    """Starts with `with Lab() as lab:`, and at the end stops everything that it started."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: Path = field(init=False)
    _daemons: list[subprocess.Popen[bytes]] = field(init=False, default_factory=list)

    def __enter__(self) -> Lab:
        # Short, and not in pytest's folder: the path of a Unix socket has at most 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="hva", dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        try:
            self._cancel_all()
        finally:
            self._stop_daemons()
            left = self._kill_leftovers()
            shutil.rmtree(self.folder, ignore_errors=True)
        if left:
            raise LabError(f"these processes outlived their Slurm, and were killed: {left}")

    @property
    def mark(self) -> str:
        """In the environment of every process of this lab, daemons and jobs, and of no other."""
        return f"SLURM_CONF={self.folder}/slurm.conf"

    # ------------------------------------------------------------------------------- using it

    def run(
        self, *command: str, check: bool = True, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm's, in the lab's folder."""
        done = subprocess.run(
            command, env={**self._own_environment(), **(variables or {})}, cwd=self.folder,
            capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and done.returncode:
            raise LabError(f"{' '.join(command)} gave {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def submit(
        self, script: Path, *arguments: str, options: Sequence[str] = (), **variables: str
    ) -> Job:
        """Submits a batch script; its output is in a file of its own, or of each task of an array.

        Args:
            script: the batch script.
            arguments: the script's own.
            options: sbatch's.
            variables: of the job's environment, in addition to the lab's.
        """
        number = len(list(self.folder.glob("job-*")))
        output = self.folder / f"job-{number}"
        output.touch()
        array = any(option.startswith("--array") for option in options)
        done = self.run(
            "sbatch", "--parsable", f"--output={output}{'-%a' if array else ''}", *options,
            str(script), *arguments, variables=variables,
        )  # fmt: skip
        return Job(self, done.stdout.strip(), output)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        parts = []
        for file in sorted((self.folder / "log").iterdir()):
            lines = file.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {file.name}", *lines]))
        return "\n".join(parts)

    # ------------------------------------------------------------------------ starting, stopping

    def _own_environment(self) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return {**self.environment, "PATH": self.environment.get("PATH", "") + ":" + PATH, name: value}

    def _start(self) -> None:
        for name in ("state", "log"):
            (self.folder / name).mkdir()
        self._write_configuration()
        socket_path = f"{self.folder}/munge.sock"
        self._daemon(
            "munged", "-F", "-f", "-S", socket_path, f"--key-file={self.folder}/munge.key",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed",
            f"--log-file={self.folder}/log/munged.log",
        )  # fmt: skip
        self._wait_for_daemons(
            lambda: self.run("munge", "-n", "-S", socket_path, check=False).returncode == 0
        )
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("unshare", "--mount", "--uts", "sh", "-ec", NODE, "sh", node, str(self.folder))
        self._wait_for_daemons(lambda: self._idle_nodes() == len(NODES))

    def _write_configuration(self) -> None:
        ports = free_ports(1 + len(NODES))
        lines = [CONFIGURATION.format(folder=self.folder, port=ports[0]).rstrip()]
        lines += [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CORES}"
            " Gres=gpu:2 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # Slurm only counts them; a job that wants to see one finds none.
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        # The one folder that each node has for itself.
        (self.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        hosts = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(hosts + "".join(f"127.0.0.1 {node}\n" for node in NODES))
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))

    def _daemon(self, *command: str) -> None:
        number = len(self._daemons)
        with (self.folder / "log" / f"{number}-{command[0]}.out").open("wb") as output:
            # A test run that is killed must not leave daemons behind.
            guarded = ["setpriv", "--pdeathsig", "TERM", *command]
            daemon = subprocess.Popen(
                guarded, env=self._own_environment(), cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)

    def _wait_for_daemons(self, condition: Callable[[], bool]) -> None:
        def reached() -> bool:
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise LabError(f"{daemon.args!r} ended with {daemon.poll()}:\n{self.logs()}")
            return condition()

        wait_until(reached, 60, lambda: f"Slurm did not start:\n{self.logs()}")

    def _idle_nodes(self) -> int:
        shown = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).stdout
        return shown.split().count("idle")

    def _cancel_all(self) -> None:
        """While the daemons live: only they know all processes of a job."""
        if len(self._daemons) < 2 + len(NODES):
            return
        self.run("scancel", "--user=root", check=False)
        with contextlib.suppress(LabError):
            wait_until(lambda: not self.run("squeue", "-h", check=False).stdout.strip(), 30, str)

    def _stop_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _kill_leftovers(self) -> dict[int, str]:
        # A slurmstepd needs a moment to see that its job is over.
        with contextlib.suppress(LabError):
            wait_until(lambda: not processes_with(self.mark), 5, str)
        left = processes_with(self.mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the kernel hands out by itself."""
    start = 10_000 + int.from_bytes(os.urandom(2), "little") % 20_000
    found: list[int] = []
    for port in _wrapped(start, 10_000, 30_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def _wrapped(start: int, lowest: int, end: int) -> Iterator[int]:
    yield from range(start, end)
    yield from range(lowest, start)


# ----------------------------------------------------------------------------------- may it run?


def why_not(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why the lab cannot run here, and what to do about it; installs Slurm if it may."""
    if sys.platform != "linux":
        return "a Slurm lab needs Linux"
    if os.geteuid() != 0:
        return "a Slurm lab needs root: daemons and nodes with hostnames of their own"
    missing = _missing()
    if missing and (reason := _install(environment, missing)):
        return reason
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "sh", "-ec", "hostname n1; mount -t tmpfs tmpfs /dev/shm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        return f"no namespaces here (a container without the right to unshare?): {tried.stderr.strip()}"
    return None


def _missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def _install(environment: Mapping[str, str], missing: Sequence[str]) -> str | None:
    """Installs Debian's Slurm; the reason if it may not or cannot."""
    wanted = "apt-get install --no-install-recommends slurm-wlm munge"
    if environment.get("HVA_INSTALL_SLURM") != "1" and environment.get("CI") != "true":
        return f"no {', '.join(missing)}: set HVA_INSTALL_SLURM=1 to have it installed, or {wanted}"
    if shutil.which("apt-get") is None:
        return f"no {', '.join(missing)}, and no apt-get: install Slurm and munge yourself"
    options = ("-qq", "-o", "Acquire::Retries=1", "-o", "DPkg::Lock::Timeout=60")
    install = ("install", "-y", "--no-install-recommends", "slurm-wlm", "munge")
    for command in (("update",), install):
        try:
            done = subprocess.run(
                ["apt-get", *options, *command], capture_output=True, text=True, check=False,
                timeout=180, stdin=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"apt-get {command[0]} took over three minutes: no network?"
        # An old list of packages may still do.
        if done.returncode and command is install:
            return f"Slurm could not be installed: {done.stderr.strip()[-500:]}"
    left = _missing()
    return f"still missing after {wanted}: {', '.join(left)}" if left else None


def main() -> int:
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with Lab() as lab:
        print(f"export {lab.mark}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
