"""Runs launch/train.py on hosts with slow links, job after job, and returns what each one wrote.

    with Lab(4, "200mbit") as lab:
        fast = lab.train(["--preset", "lstm-sotu", "--steps", "30"])
        lab.set_rate("50mbit")
        with lab.trace("sin2 --low 50mbit --high 400mbit --period 20"):
            slow = lab.train(["--preset", "lstm-sotu", "--steps", "30"])
        compute_only = lab.train_compute_only(["--preset", "lstm-sotu", "--steps", "30"])

The hosts are network namespaces on this machine (launch/netlab.sh), made once for all jobs and removed
at the end, also after an error, Ctrl-C or SIGTERM. Needs root, Linux and Open MPI 4: `why_not()` says
what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
NETLAB = [sys.executable, str(LAUNCH / "start_netlab.py")]
TRAIN = [sys.executable, str(LAUNCH / "train.py")]


def module(name: str) -> list[str]:
    """The command that runs a module of this package, to be started in ROOT."""
    return [sys.executable, "-m", f"benchmarks.{name}"]


SEVERAL = module("harness.several")

# Faster than the machine's cores can carry.
UNSHAPED = "100gbit"

# As launch/run.sh --netlab sets it for ranks that share a few cores.
THREADS = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
}
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",
}
# More ranks than cores, on this machine alone.
HERE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
# Open MPI chooses the allreduce by itself.
DEFAULT_ALLREDUCE: dict[str, str] = {}


class JobError(RuntimeError):
    """A job failed or took too long; the message ends with its last lines."""


def why_not() -> str:
    """Why this machine cannot have a lab, or nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces: sudo -E python ..."
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [tool for tool in ("ip", "tc", "mpirun") if shutil.which(tool, path=path) is None]
    return f"{', '.join(missing)} missing" if missing else ""


class Job:
    """Processes of train.py that have been started, one command for each.

    Args:
        commands: what to start, without ``--result``.
        environment: in addition to this process's.
        seconds: after which the job counts as hung.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], seconds: float
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hva-job-")
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._processes = [
            self._start(number, command, environment) for number, command in enumerate(commands)
        ]

    def _start(
        self, number: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with self._file(number, "log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--result", str(self._file(number, "json"))],
                # where the modules of this package are found
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the benchmark, which then ends its jobs.
                start_new_session=True,
            )

    def _file(self, number: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{number}.{kind}"

    @property
    def running(self) -> bool:
        """Whether one of them still is."""
        return any(process.poll() is None for process in self._processes)

    def results(self) -> list[Any]:
        """What each command wrote; waits for all of them.

        Raises:
            JobError: one failed, or they took too long.
        """
        try:
            for number, process in enumerate(self._processes):
                self._wait(number, process)
            return [
                json.loads(self._file(number, "json").read_text())
                for number in range(len(self._processes))
            ]
        finally:
            self.stop()

    def each(self, count: int) -> Iterator[dict[str, Any]]:
        """What the trainings of benchmarks/harness/several.py write, each as soon as it has ended.

        Raises:
            JobError: one failed, or took too long.
        """
        try:
            for number in range(count):
                self._end = time.monotonic() + self._seconds
                yield self._next(self._file(0, f"json.{number}"))
            self._wait(0, self._processes[0])
        finally:
            self.stop()

    def _next(self, file: Path) -> dict[str, Any]:
        while not file.exists():
            if not self.running and not file.exists():
                self._wait(0, self._processes[0])
                raise JobError(self._trouble(0, "wrote no result"))
            if time.monotonic() > self._end:
                raise JobError(self._trouble(0, f"took longer than {self._seconds:.0f} s"))
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def _wait(self, number: int, process: subprocess.Popen[bytes]) -> None:
        try:
            status = process.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise JobError(self._trouble(number, f"took longer than {self._seconds:.0f} s")) from None
        if status:
            raise JobError(self._trouble(number, f"failed with status {status}"))

    def _trouble(self, number: int, what: str) -> str:
        command = shlex.join(map(str, self._processes[number].args))  # type: ignore[arg-type]
        lines = self._file(number, "log").read_text(errors="replace").splitlines()
        return "\n    ".join([f"a job {what}: {command}; it said last:", *lines[-15:]])

    def stop(self) -> None:
        """Ends what still runs: first asked, then, after 10 s, killed."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def horovodrun(ranks: int) -> list[str]:
    """What starts ranks on this machine: Horovod's launcher, also if the environment is not active.

    Raises:
        FileNotFoundError: it is not installed.
    """
    beside = Path(sys.executable).with_name("horovodrun")
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise FileNotFoundError(
            "horovodrun is neither beside this Python nor in PATH: launch/setup.sh installs it"
        )
    return [found, "-np", str(ranks)]


def figures_here(ranks: int, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a benchmark's module with ``--worker FILE`` on ranks of this machine, under horovodrun.

    Returns:
        What rank 0 has written into that file.

    Raises:
        SystemExit: a rank failed; with all that they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [*horovodrun(ranks), *module(name), *arguments, "--worker", str(out)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**THREADS, **os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{done.stdout}\n{done.stderr}")
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def train_here(ranks: int, arguments: Sequence[str], seconds: float = 300.0) -> dict[str, Any]:
    """Runs train.py on ranks of this machine without a netlab: they exchange by shared memory.

    Args:
        ranks: how many.
        arguments: of train.py.
        seconds: after which the job counts as hung.

    Returns:
        What ``--result`` holds.

    Raises:
        JobError: it failed, or took too long.
    """
    command = ["mpirun", "-np", str(ranks), *TRAIN, "--threads", "1", *arguments]
    (result,) = Job([command], {**THREADS, **HERE}, seconds).results()
    return dict(result)


def train_each_here(
    ranks: int, trainings: Sequence[Sequence[str]], seconds: float = 300.0
) -> Iterator[dict[str, Any]]:
    """As :func:`train_here`, several trainings by the same ranks.

    Yields:
        What ``--result`` holds of each, as soon as it has ended.
    """
    command = ["mpirun", "-np", str(ranks), *SEVERAL, _of_one_thread(trainings)]
    return Job([command], {**THREADS, **HERE}, seconds).each(len(trainings))


def _of_one_thread(trainings: Sequence[Sequence[str]]) -> str:
    return json.dumps([["--threads", "1", *arguments] for arguments in trainings])


class Lab:
    """Hosts that are up within a ``with`` block.

    Args:
        hosts: how many; one rank on each.
        rate: of every link, or one per host with commas between, in tc's words, or :data:`UNSHAPED`.
        name: of the lab, if another program has to find it.
    """

    def __init__(self, hosts: int, rate: str, name: str | None = None) -> None:
        self.hosts = hosts
        self.name = name or f"bench-{secrets.token_hex(3)}"
        self._first_rate = rate
        self._jobs: list[Job] = []

    def __enter__(self) -> Lab:
        reason = why_not()
        if reason:
            raise SystemExit(f"no netlab: {reason}")
        # As Ctrl-C, or the hosts would stay.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self.netlab("up", str(self.hosts), self._first_rate)
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for job in self._jobs:
                job.stop()
        finally:
            self._down()

    def _down(self) -> None:
        subprocess.run([*NETLAB, "--name", self.name, "down"], check=False, stdout=subprocess.DEVNULL)

    def netlab(self, *words: str) -> str:
        """Runs a command of launch/netlab.sh on this lab.

        Returns:
            What it prints.

        Raises:
            JobError: it failed.
        """
        command = [*NETLAB, "--name", self.name, *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise JobError(f"netlab.sh {shlex.join(words)} failed: {done.stderr.strip()}")
        return done.stdout

    def set_rate(self, rate: str, *hosts: str) -> None:
        """Changes the rate of these hosts' links, or of all, also while jobs run."""
        self.netlab("rate", rate, *hosts)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] = RING,
        seconds: float = 300.0,
    ) -> Job:
        """Starts train.py, one rank on each host, and returns at once.

        Args:
            arguments: of train.py.
            environment: in addition to one thread per rank; for Open MPI's or Horovod's settings.
            seconds: after which the job counts as hung.
        """
        command = [*NETLAB, "--name", self.name, "mpirun", *TRAIN, "--threads", "1", *arguments]
        return self._keep(Job([command], {**THREADS, **environment}, seconds))

    def module(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] = RING,
        seconds: float = 300.0,
        launcher: Sequence[str] = (),
    ) -> Job:
        """Starts a module of this package, one rank on each host; it takes ``--result FILE``.

        Args:
            name: such as ``workers.turns_rank``.
            arguments: of the module.
            environment: in addition to one thread per rank.
            seconds: after which the job counts as hung.
            launcher: further arguments of mpirun, such as for several ranks on each host.
        """
        command = [*NETLAB, "--name", self.name, "mpirun", *launcher, *module(name), *arguments]
        return self._keep(Job([command], {**THREADS, **environment}, seconds))

    def train(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] = RING,
        seconds: float = 300.0,
    ) -> dict[str, Any]:
        """Runs train.py to its end, one rank on each host; see :meth:`start`.

        Returns:
            What ``--result`` holds.

        Raises:
            JobError: it failed, or took too long.
        """
        return dict(self.start(arguments, environment, seconds).results()[0])

    def train_each(
        self,
        trainings: Sequence[Sequence[str]],
        environment: Mapping[str, str] = RING,
        seconds: float = 300.0,
    ) -> Iterator[dict[str, Any]]:
        """As :meth:`train`, several trainings by the same ranks.

        Args:
            trainings: the arguments of each.
            environment: of all of them.
            seconds: after which one of them counts as hung.

        Yields:
            What ``--result`` holds of each, as soon as it has ended.
        """
        command = [*NETLAB, "--name", self.name, "mpirun", *SEVERAL, _of_one_thread(trainings)]
        return self._keep(Job([command], {**THREADS, **environment}, seconds)).each(len(trainings))

    def train_compute_only(
        self, arguments: Sequence[str], seconds: float = 300.0
    ) -> list[dict[str, Any]]:
        """Runs train.py on every host at the same time: so many runs of one rank, without exchange.

        As many processes share the machine's cores as in a run of all hosts: what is missing is the
        exchange, and nothing else. A rank alone registers no hooks in Horovod's own optimizer.

        Returns:
            What ``--result`` holds, of each host.
        """
        own = ["--threads", "1", "--distributed", "horovod", *arguments]
        commands = [
            [*NETLAB, "--name", self.name, "exec", f"h{host + 1}", *TRAIN, *own]
            for host in range(self.hosts)
        ]
        return self._keep(Job(commands, THREADS, seconds)).results()

    def _keep(self, job: Job) -> Job:
        self._jobs.append(job)
        return job

    @contextlib.contextmanager
    def trace(self, words: str, log: Path | None = None) -> Iterator[None]:
        """Replays a bandwidth trace within the block; then the rates from before return.

        Args:
            words: a trace as launch/netlab.sh has it: ``sin2 --low 50mbit --high 400mbit``.
            log: a CSV file of what was set when.
        """
        with tempfile.TemporaryDirectory(prefix="hva-trace-") as folder:
            file = log or Path(folder) / "log.csv"
            command = [*NETLAB, "--name", self.name, "trace", *shlex.split(words), "--log", str(file)]
            with (Path(folder) / "errors").open("w+") as errors:
                process = subprocess.Popen(command, stderr=errors, start_new_session=True)
                try:
                    yield
                    # A trace may be over by now, but must not have failed.
                    failed = process.poll()
                finally:
                    process.terminate()
                    process.wait()
                if failed:
                    errors.seek(0)
                    raise JobError(f"the trace '{words}' failed: {errors.read().strip()}")
