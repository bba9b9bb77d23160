"""A lab of netlab.sh: how it is made, changed and removed. Its parts import the standard library only.

A lab is N + 1 network namespaces: one a host, and one for the switch that joins them. Nothing of it is
in the machine's own namespace: no interface, route, subnet or firewall rule there can get in its way,
and removing the namespaces removes all of it. A host's link is a veth pair, shaped at both ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

STATE = Path("/run/hva_netlab")
NAMESPACES = Path("/run/netns")
HOSTS_FILES = Path("/etc/netns")

# All labs have the same addresses: none can see another's.
NETWORK = "10.83.0"
SUBNET = f"{NETWORK}.0/24"
SWITCH = f"{NETWORK}.254"
MOST_HOSTS = 200

# The token bucket is small, because it fills while a job computes, and what it holds is then sent at no
# cost: with a common 256 kB, a compressed gradient would hardly feel the link. It must hold any packet
# that is queued, also after a change of rate: one that is larger than the bucket stops the queue for
# ever. So the size of packets (those that the kernel has not yet cut to the MTU) is limited too.
LARGEST_PACKET = 16 * 1024
SMALLEST_BUCKET = 20 * 1024
BUCKET_SECONDS = 0.001  # a larger one at high rates, for which timers are too coarse
QUEUE_SECONDS = (
    0.1  # how long a packet waits at most; TCP takes a dropped one as the sign of a full link
)

# Below, a single packet takes longer than many a measurement.
SLOWEST, FASTEST = 1_000_000, 100_000_000_000
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
KERNEL_HINT = (
    "The kernel needs network namespaces, veth, bridge and tbf: sudo modprobe -a veth bridge sch_tbf",
    "In a container: start it with --privileged.",
)

# $0 is the host. Its name, too, must be its own: Open MPI tells hosts apart by it.
NAME_AND_RUN = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'


class LabError(Exception):
    """What was wrong, and the remedies, a line each."""

    status = 1

    def __init__(self, message: str, *remedies: str) -> None:
        super().__init__(message)
        self.remedies = remedies


class UsageError(LabError):
    """The command line asks for what cannot be."""

    status = 2


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals wait until the end of this: a second Ctrl-C must not leave half a lab behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- rates


def parse_rate(text: str) -> int:
    """Bits per second.

    Raises:
        UsageError: no rate, or one out of bounds.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    if found is None:
        raise UsageError(f"'{text}' is no rate", "Write 12.5mbit or 1gbit (bits a second).")
    bits = round(float(found[1]) * UNITS[found[2]])
    if not SLOWEST <= bits <= FASTEST:
        raise UsageError(f"the rate '{text}' is out of bounds", "From 1mbit to 100gbit is possible.")
    return bits


def show_rate(bits: float) -> str:
    for unit in "gmk":
        if bits >= UNITS[unit]:
            return f"{bits / UNITS[unit]:.4g}{unit}bit"
    return f"{bits:.0f}bit"


# ---------------------------------------------------------------- other programs


def require_tools() -> None:
    """Raises LabError where this user, or this machine, cannot make a lab."""
    if os.geteuid() != 0:
        raise LabError("this needs root, to make network namespaces", "Put sudo -E before the command.")
    # Not everybody's root has them on its PATH.
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    tools = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux", "taskset": "util-linux"}
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            raise LabError(f"{tool} is missing", f"On Debian or Ubuntu: sudo apt-get install {package}")


def iproute(*command: str, lines: Sequence[str] = ()) -> str:
    """Runs ip or tc, with lines as a batch if there are any, and returns what it prints.

    Raises:
        LabError: it failed.
    """
    batch = ["-batch", "-"] if lines else []
    text = "\n".join([*lines, ""])
    done = subprocess.run([*command, *batch], input=text, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split())}", *KERNEL_HINT)
    return done.stdout


# ---------------------------------------------------------------- a lab, and where it is written down


@dataclass
class Lab:
    """What was made, and the rates that the links have while no trace is replayed."""

    name: str
    rates: dict[str, int]  # by host
    cores: dict[str, str] = field(default_factory=dict)  # by host, as taskset has them; else all
    complete: bool = False

    @property
    def folder(self) -> Path:
        return STATE / self.name

    @property
    def switch(self) -> str:
        return self.namespace("switch")

    def namespace(self, host: str) -> str:
        return f"hva-{self.name}-{host}"

    @property
    def namespaces(self) -> list[str]:
        return [self.switch, *map(self.namespace, self.rates)]

    def require_hosts(self, hosts: Collection[str]) -> None:
        for host in hosts:
            if host not in self.rates:
                raise UsageError(
                    f"there is no host '{host}'", f"The hosts are {', '.join(self.rates)}."
                )

    def enter(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs this one on a host, in the same process."""
        bound = ["taskset", "--cpu-list", self.cores[host]] if host in self.cores else []
        named = ["unshare", "--uts", "sh", "-c", NAME_AND_RUN, host]
        return [*bound, "ip", "netns", "exec", self.namespace(host), *named, *command]

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # By rename: nobody ever reads half of it, also not after a crash.
        new = self.folder / "lab.new"
        new.write_text(json.dumps(asdict(self)))
        new.rename(self.folder / "lab.json")


def address(host: str) -> str:
    return f"{NETWORK}.{host[1:]}"


def default_name() -> str:
    user = os.environ.get("SUDO_USER") or os.environ.get("USER") or "root"
    user = re.sub(r"[^a-z0-9]", "", user.lower())[:16] or "user"
    # The folder's last name would be nicer to read, but two clones may share it.
    return f"{user}-{zlib.crc32(bytes(Path(__file__).resolve().parents[2])):08x}"


def load(name: str) -> Lab | None:
    try:
        return Lab(**json.loads((STATE / name / "lab.json").read_text()))
    except FileNotFoundError:
        return None


def find(name: str) -> Lab:
    lab = load(name)
    if lab is None:
        labs = sorted(path.parent.name for path in STATE.glob("*/lab.json"))
        others = [f"Others are, see --name: {', '.join(labs)}"] if labs else []
        raise LabError(f"no lab '{name}' is up", "Start one: netlab.sh up 4 200mbit", *others)
    if not lab.complete:
        raise LabError(
            f"the lab '{name}' is only half made", "Remove what there is of it: netlab.sh down"
        )
    return lab


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One at a time makes, changes or removes. The folder of all labs, if empty, goes with the lock."""
    while True:
        STATE.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(STATE, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The one before may have removed what this one was waiting for.
            if STATE.exists() and os.path.samestat(os.fstat(handle), STATE.stat()):
                break
            os.close(handle)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            STATE.rmdir()
        os.close(handle)


# ---------------------------------------------------------------- up


def up(name: str, rates: Sequence[int]) -> Lab:
    """Makes a lab with one host a rate, or nothing.

    Raises:
        LabError: it is there already, or the machine cannot do it.
    """
    hosts = [f"h{number}" for number in range(1, len(rates) + 1)]
    cores = share_out(sorted(os.sched_getaffinity(0)), hosts)
    lab = Lab(name, dict(zip(hosts, rates, strict=True)), cores)
    with locked():
        old = load(name)
        if old is not None:
            state = "up already" if old.complete else "half made"
            raise LabError(
                f"the lab '{name}' is {state}", "Remove it (netlab.sh down), or use another --name."
            )
        for namespace in lab.namespaces:
            if (NAMESPACES / namespace).exists():
                raise LabError(
                    f"there is a namespace {namespace}, and it is not known where from",
                    f"Use another --name, or remove it: ip netns del {namespace}",
                )
        # Before anything is made, so that down knows what to look for, whatever happens now.
        lab.save()
        try:
            make(lab)
            lab.complete = True
            lab.save()
        except BaseException:
            with signals_held():
                remove(lab)
            raise
    return lab


def share_out(cores: Sequence[int], hosts: Sequence[str]) -> dict[str, str]:
    """Cores for each host, as many for one as for another; none where that cannot be.

    Without cores of their own, three of four hosts may have to share one of two for a while, and all
    wait for them.
    """
    if len(hosts) > len(cores) and len(hosts) % len(cores):
        return {}
    size = max(1, len(cores) // len(hosts))
    return {
        host: ",".join(str(cores[(first + each) % len(cores)]) for each in range(size))
        for host, first in zip(hosts, range(0, size * len(hosts), size), strict=True)
    }


def make(lab: Lab) -> None:
    iproute("ip", lines=[f"netns add {namespace}" for namespace in lab.namespaces])
    limit = f"gso_max_size {LARGEST_PACKET}"
    switch = ["link set lo up", "link add br0 type bridge"]
    for host in lab.rates:
        switch.append(f"link add {host} type veth peer name eth0 netns {lab.namespace(host)}")
        switch.append(f"link set {host} {limit} master br0 up")
    # The switch has an address so that a link can be measured by itself, without another host's.
    switch += [f"link set br0 {limit} up", f"address add {SWITCH}/24 dev br0"]
    iproute("ip", "-n", lab.switch, lines=switch)
    for host in lab.rates:
        own = [
            "link set lo up",
            f"link set eth0 {limit} up",
            f"address add {address(host)}/24 dev eth0",
        ]
        iproute("ip", "-n", lab.namespace(host), lines=own)
    shape(lab, lab.rates)
    write_files(lab)


def write_files(lab: Lab) -> None:
    table = "".join(f"{address(host)} {host}\n" for host in lab.rates)
    for host in lab.rates:
        # "ip netns exec" lays what is there over /etc.
        folder = HOSTS_FILES / lab.namespace(host)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
    (lab.folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in lab.rates))
    # Open MPI's remote shell: it gets a host and the words of a shell's command line.
    shells = (f'{host}) exec {shlex.join(lab.enter(host, ["sh", "-c"]))} "$*" ;;' for host in lab.rates)
    (lab.folder / "agent").write_text(
        "\n".join(["host=$1", "shift", "case $host in", *shells, "esac", ""])
    )


def shape(lab: Lab, rates: Mapping[str, int]) -> None:
    """Sets the rates of these hosts' links at both ends. What is queued on a link stays queued."""
    ends = [(lab.switch, host, host) for host in rates]
    ends += [(lab.namespace(host), "eth0", host) for host in rates]
    running = []
    # All at once: with many hosts, one after the other would take longer than a trace may be late.
    for namespace, devices in groupby(ends, key=lambda end: end[0]):
        lines = [
            f"qdisc replace dev {device} root {bucket(rates[host])}" for _, device, host in devices
        ]
        command = ["tc", "-n", namespace, "-batch", "-"]
        tc = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append((tc, "\n".join([*lines, ""])))
    complaints = [tc.communicate(text)[1] for tc, text in running]
    if any(tc.returncode for tc, _ in running):
        raise LabError(f"tc failed: {' '.join(''.join(complaints).split())}", *KERNEL_HINT)


def bucket(rate: int) -> str:
    size = max(SMALLEST_BUCKET, round(rate / 8 * BUCKET_SECONDS))
    return f"tbf rate {rate}bit burst {size} latency {round(QUEUE_SECONDS * 1000)}ms"


def change_rate(name: str, rate: int, hosts: Sequence[str]) -> None:
    """Of all hosts, where none is named."""
    with locked(), signals_held():
        lab = find(name)
        lab.require_hosts(hosts)
        changes = dict.fromkeys(hosts or lab.rates, rate)
        shape(lab, changes)
        lab.rates.update(changes)
        lab.save()


# ---------------------------------------------------------------- down


def down(name: str) -> bool:
    """Removes a lab, or what there is of it; returns whether there was anything."""
    with signals_held(), locked():
        lab = load(name)
        if lab is not None:
            remove(lab)
        else:
            # Of an up that was killed before it could write anything down.
            shutil.rmtree(STATE / name, ignore_errors=True)
    return lab is not None


def remove(lab: Lab) -> None:
    """Processes, namespaces with all that is in them, files. Can be repeated where it was cut short."""
    end_processes(lambda: [*tracers(lab), *processes_in(lab.namespaces)])
    for namespace in lab.namespaces:
        if (NAMESPACES / namespace).exists():
            iproute("ip", "netns", "del", namespace)
        shutil.rmtree(HOSTS_FILES / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):
        HOSTS_FILES.rmdir()
    # Last: down knows by it what there is to remove.
    shutil.rmtree(lab.folder, ignore_errors=True)


# ---------------------------------------------------------------- processes


def processes_in(namespaces: Collection[str]) -> list[int]:
    """Those whose network is one of these namespaces."""
    wanted = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            wanted.add(_identity(NAMESPACES / namespace))
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _identity(process / "ns" / "net") in wanted:
                found.append(int(process.name))
    return found


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def tracers(lab: Lab) -> list[int]:
    """The process that replays a trace, if there is one."""
    try:
        with (lab.folder / "trace").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return [int(file.read())]
    except (FileNotFoundError, ValueError):
        pass  # none, or one that has only just begun
    return []


def end_processes(find_them: Callable[[], Collection[int]], patience: float = 2.0) -> None:
    """Asks them to end, after so many seconds kills those left, and returns when all are gone."""
    births: dict[int, str | None] = {}
    started = time.monotonic()
    while True:
        # Also those no longer found: a trace gives its lock back a little before its process ends.
        ending = {process for process, birth in births.items() if birth and birth == _birth(process)}
        processes = ending.union(find_them())
        if not processes:
            return
        waited = time.monotonic() - started
        if waited > patience + 5:
            raise LabError(
                f"the processes {sorted(processes)} do not end", "Are they stuck in the kernel (ps: D)?"
            )
        for process in processes:
            is_new = process not in births
            births.setdefault(process, _birth(process))
            with contextlib.suppress(ProcessLookupError):
                if waited > patience:
                    os.kill(process, signal.SIGKILL)
                elif is_new:
                    os.kill(process, signal.SIGTERM)
        time.sleep(0.02)


def _birth(process: int) -> str | None:
    """When it began, which tells it from another that was given its number; None once it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # After the name, which may hold spaces: the state (Z waits for its parent only), and on.
    state, *others = stat.rpartition(")")[2].split()
    return None if state in "ZX" else others[18]
