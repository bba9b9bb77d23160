"""launch/netlab.sh: real namespaces, real TCP, real jobs. What needs no root is tested without it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

import pytest

from launch.netlab import main as netlab
from launch.netlab.base import (
    LabError,
    UsageError,
    default_name,
    end_processes,
    parse_rate,
    require_tools,
    share_out,
    show_rate,
)
from launch.netlab.trace import Change, parse_trace
from tests.harness.rank_launcher import lives

ROOT = Path(__file__).resolve().parents[2]
NETLAB = ROOT / "launch" / "netlab.sh"
RUN = ROOT / "launch" / "run.sh"

# What such a lab needs of the kernel, tried without this project's scripts; it leaves nothing behind.
KERNEL = """
ip link add left type veth peer name right && ip link set left gso_max_size 16384 &&
ip link add middle type bridge && tc qdisc add dev left root tbf rate 1mbit burst 5kb latency 1ms
"""

RECEIVE = """
import json, socket, time
with socket.create_server(("", 5001)) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
print("begun", flush=True)
with connection:
    arrived = []
    while data := connection.recv(1 << 20):
        arrived.append((time.time(), len(data)))
print(json.dumps(arrived))
"""

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001), 10) as connection:
    try:
        while True:
            connection.sendall(bytes(1 << 16))
    except OSError:
        pass
"""

CORES = """
import os, socket, sys
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
sys.stdout.write(f"{socket.gethostname()} {cores}\\n")  # in one piece: two ranks write into one pipe
"""
MACHINE = sorted(os.sched_getaffinity(0))

RANK = """
import os, socket, sys, time
from pathlib import Path
from mpi4py import MPI
world = MPI.COMM_WORLD
Path(sys.argv[1], f"rank{world.rank}").write_text(f"{socket.gethostname()} {os.environ.get('HVA_SPY')}")
Path(sys.argv[1], f"pid{world.rank}").write_text(str(os.getpid()))
world.barrier()
if sys.argv[2] == "fail" and world.rank == 1:
    os._exit(7)
if sys.argv[2] != "end":
    time.sleep(60)
"""


def why_not() -> str:
    """Why this machine cannot have a lab, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc", "setpriv", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", KERNEL], check=False, capture_output=True, text=True
    )
    return "" if tried.returncode == 0 else f"the kernel cannot do it: {tried.stderr.strip()}"


WHY_NOT = why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")


def environment(**changes: str) -> dict[str, str]:
    """This process's, as after activating the running interpreter's."""
    kept = {name: value for name, value in os.environ.items() if name != "HVA_NETLAB"}
    return {**kept, "VIRTUAL_ENV": sys.prefix, **changes}


class Lab:
    """One with a name of its own, so that other labs here are left alone.

    Most commands go to the Python behind netlab.sh, which does nothing but find it: that is quicker.
    """

    def __init__(self) -> None:
        self.name = f"test-{secrets.token_hex(3)}"
        self.command = [sys.executable, str(NETLAB.with_name("start_netlab.py")), "--name", self.name]
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *words],
            check=False,
            capture_output=True,
            env=environment(**changes),
            text=True,
            timeout=60,
        )

    def must(self, *words: str, **changes: str) -> str:
        done = self(*words, **changes)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *words: str, **changes: str) -> subprocess.Popen[str]:
        """In the background."""
        process = subprocess.Popen(
            [*self.command, *words],
            env=environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def stop_all(self) -> None:
        while self.started:
            process = self.started.pop()
            process.kill()
            process.communicate(timeout=60)

    @contextlib.contextmanager
    def transfer(self, source: str, target: str) -> Iterator[list[tuple[float, int]]]:
        """Sends as fast as it can; at the end, fills in when, by the clock, how many bytes arrived."""
        receiver = self.start("exec", target, sys.executable, "-c", RECEIVE)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = self.start("exec", source, sys.executable, "-c", SEND, target)
        arrived: list[tuple[float, int]] = []
        assert receiver.stdout.readline() == "begun\n"
        yield arrived
        sender.kill()
        output, errors = receiver.communicate(timeout=30)
        assert receiver.returncode == 0, errors
        arrived += [(when, size) for when, size in json.loads(output)]

    def rate(self, source: str, target: str) -> float:
        with self.transfer(source, target) as arrived:
            time.sleep(1.2)
            end = time.time()
        return rate_between(arrived, arrived[0][0] + 0.3, end)

    def left(self) -> list[str]:
        """What there is of it on the machine."""
        places = ("/run/netns", "/etc/netns", "/run/hva_netlab")
        return [str(path) for place in places for path in Path(place).glob(f"*{self.name}*")]


def rate_between(arrived: list[tuple[float, int]], start: float, end: float) -> float:
    sizes = [(when, size) for when, size in arrived if start <= when <= end]
    return 8 * sum(size for _, size in sizes[1:]) / (sizes[-1][0] - sizes[0][0])


def assert_rate(measure: Callable[[], float], rate: float, within: float = 0.1) -> None:
    """In one of six tries, ever further apart: other work may share the machine."""
    found: list[float] = []
    while not found or abs(found[-1] / rate - 1) > within:
        assert len(found) < 6, f"{found} instead of {rate}"
        time.sleep(len(found))
        found.append(measure())


def furthest_from_one(ratios: Sequence[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


@contextlib.contextmanager
def removed(lab: Lab) -> Iterator[Lab]:
    try:
        yield lab
    finally:
        lab.stop_all()
        lab.must("down")
    assert lab.left() == []


@pytest.fixture
def own() -> Iterator[Lab]:
    """A lab that is not up yet."""
    with removed(Lab()) as lab:
        yield lab


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with removed(Lab()) as lab:
        lab.must("up", "3", "200mbit")
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """Three hosts at 200mbit, on which nothing runs."""
    yield shared
    shared.stop_all()
    if shared.must("status").count("200mbit") != 7:
        shared.must("rate", "200mbit")


# ---------------------------------------------------------------- without root


class TestMisuse:
    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["up", "4"], "write: netlab.sh up N RATE[,RATE...]"),
            (["up", "four", "1gbit"], "'four' is no number of hosts"),
            (["up", "0", "1gbit"], "'0' is no number of hosts"),
            (["up", "4", "fast"], "'fast' is no rate"),
            (["up", "4", "10mbps"], "'10mbps' is no rate"),
            (["up", "4", "1kbit"], "the rate '1kbit' is out of bounds"),
            (["up", "3", "1gbit,2gbit"], "2 rates for 3 hosts"),
            (["rate", "12"], "'12' is no rate"),
            (["trace", "sin2", "--low", "1mbit"], "sin2 needs --low RATE and --high RATE"),
            (["trace", "/nowhere.csv"], "cannot read the trace /nowhere.csv"),
            (["trace", "sin2", "--fast"], "unrecognized arguments: --fast"),
            (["run", "2", "1gbit", "true"], "write: netlab.sh run"),
            (
                ["run", "2", "1gbit", "--trace", "sin2 --low 1mbit --high 2mbit --host h3", "--", "x"],
                "'h3'",
            ),
            (["--name", "a/b", "up", "2", "1gbit"], "'a/b' is no name for a lab"),
            (["start"], "unknown command 'start'"),
            (["status", "all"], "write: netlab.sh status"),
        ],
    )
    def test_is_refused_with_status_2_and_what_to_write_instead(
        self, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert netlab.main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("netlab.sh: ")
        assert complaint in said

    def test_without_a_command_the_manual_is_shown(self) -> None:
        refused = subprocess.run([NETLAB], check=False, capture_output=True, text=True)
        assert refused.returncode == 2
        shown = subprocess.run([NETLAB, "--help"], check=True, capture_output=True, text=True).stdout
        assert shown == refused.stderr
        assert "launch/netlab.sh [--name NAME] COMMAND" in shown
        assert "set -euo" not in shown

    def test_the_script_passes_its_words_and_the_exit_status_on(self) -> None:
        done = subprocess.run(
            [NETLAB, "up", "two words", "x"], check=False, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "'two words' is no number of hosts" in done.stderr

    @pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
    def test_without_root_both_scripts_say_so_before_any_work(self) -> None:
        nobody = ["unshare", "--user"]
        if subprocess.run([*nobody, "true"], check=False, capture_output=True).returncode != 0:
            pytest.skip("user namespaces are not allowed here")
        for command in ([NETLAB, "up", "2", "10mbit"], [RUN, "--netlab", "2,10mbit"]):
            done = subprocess.run(
                [*nobody, *map(str, command)],
                check=False,
                capture_output=True,
                env=environment(),
                text=True,
                timeout=30,
            )
            assert done.returncode == 1
            assert "needs root" in done.stderr
            assert "sudo" in done.stderr
            assert done.stdout == ""

    def test_a_missing_tool_is_named_with_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", os.environ["PATH"])
        monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
        with pytest.raises(LabError, match="tc is missing") as refused:
            require_tools()
        assert "sudo apt-get install iproute2" in refused.value.remedies[0]


class TestRates:
    def test_are_read_as_tc_reads_them(self) -> None:
        assert parse_rate("200mbit") == 200_000_000
        assert parse_rate("1.5Gbit") == 1_500_000_000
        assert parse_rate("1500kbit") == 1_500_000
        assert [show_rate(rate) for rate in (2e8, 12.5e6, 1e9, 5e8)] == [
            "200mbit",
            "12.5mbit",
            "1gbit",
            "500mbit",
        ]


class TestCores:
    @pytest.mark.parametrize(
        ("cores", "expected"),
        [
            ([4], ["4", "4", "4", "4"]),
            ([0, 1], ["0", "1", "0", "1"]),
            ([2, 3, 6, 7], ["2", "3", "6", "7"]),
            ([0, 1, 2, 4, 5, 6, 7, 8, 9], ["0,1", "2,4", "5,6", "7,8"]),
        ],
    )
    def test_every_host_gets_as_many(self, cores: list[int], expected: list[str]) -> None:
        hosts = ["h1", "h2", "h3", "h4"]
        assert share_out(cores, hosts) == dict(zip(hosts, expected, strict=True))

    def test_any_host_may_use_any_where_that_cannot_be(self) -> None:
        assert share_out([0, 1], ["h1", "h2", "h3"]) == {}


class TestTraceFiles:
    def first(self, number: int, *words: str) -> list[Change]:
        return list(islice(parse_trace(words).changes(), number))

    def test_rows_may_name_a_host_and_the_last_lasts_as_long_as_the_one_before(
        self, tmp_path: Path
    ) -> None:
        file = tmp_path / "trace.csv"
        file.write_text("seconds,rate,host\n0,10mbit\n1.5,20mbit,h2\n\n2, 5mbit,\n")
        trace = parse_trace([str(file)])
        assert list(trace.changes()) == [
            Change(0, 10_000_000, None),
            Change(1.5, 20_000_000, "h2"),
            Change(2, 5_000_000, None),
        ]
        assert trace.seconds == 2.5
        assert trace.hosts == {"h2"}
        assert parse_trace([str(file), "--seconds", "1"]).seconds == 1
        assert {row.host for row in self.first(3, str(file), "--host", "h1")} == {"h1", "h2"}

    def test_a_loop_begins_again_where_the_last_row_ends(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.csv"
        file.write_text("0,10mbit\n1,20mbit\n")
        assert [row.seconds for row in self.first(6, str(file), "--loop")] == [0, 1, 2, 3, 4, 5]
        assert parse_trace([str(file), "--loop"]).seconds == math.inf

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "has no rows"),
            ("0,10mbit\n1\n", "line 2: '1' is not seconds,rate"),
            ("0,10mbit\n1,fast\n", "line 2: '1,fast' is not seconds,rate"),
            ("2,10mbit\n1,20mbit\n", "line 2: the seconds must rise"),
            ("nan,10mbit\n", "line 1: the seconds must rise"),
            ("-1,10mbit\n", "line 1: the seconds must rise"),
        ],
    )
    def test_a_wrong_row_is_named(self, tmp_path: Path, text: str, complaint: str) -> None:
        file = tmp_path / "trace.csv"
        file.write_text(text)
        with pytest.raises(UsageError, match=complaint):
            parse_trace([str(file)])

    def test_sin2_goes_from_low_to_high_and_back_in_a_period(self) -> None:
        words = ["sin2", "--low", "50mbit", "--high", "400mbit", "--period", "20", "--every", "5"]
        assert [(row.seconds, row.rate) for row in self.first(5, *words)] == [
            (0, 50_000_000),
            (5, 225_000_000),
            (10, 400_000_000),
            (15, 225_000_000),
            (20, 50_000_000),
        ]

    def test_noise_depends_on_the_seed_alone_and_has_the_size_that_was_asked_for(self) -> None:
        words = ["sin2", "--low", "100mbit", "--high", "100mbit", "--noise", "0.05"]
        once, again = self.first(2000, *words), self.first(2000, *words, "--seed", "0")
        assert once == again
        assert once != self.first(2000, *words, "--seed", "1")
        off = [row.rate / 1e8 - 1 for row in once]
        assert sum(off) / 2000 == pytest.approx(0, abs=0.005)
        assert math.sqrt(sum(x * x for x in off) / 2000) == pytest.approx(0.05, rel=0.1)


# ---------------------------------------------------------------- links


@needs_namespaces
class TestLinks:
    def test_tcp_between_hosts_gets_the_shaped_rate_within_a_tenth_in_both_directions(
        self, lab: Lab
    ) -> None:
        for rate in ("50mbit", "200mbit"):
            lab.must("rate", rate)
            for source, target in (("h1", "h2"), ("h2", "h1")):
                assert_rate(partial(lab.rate, source, target), parse_rate(rate))

    def test_one_host_can_have_another_rate(self, lab: Lab) -> None:
        lab.must("rate", "20mbit", "h2")
        assert_rate(lambda: lab.rate("h1", "h2"), 20e6)
        assert_rate(lambda: lab.rate("h2", "h3"), 20e6)
        assert_rate(lambda: lab.rate("h1", "h3"), 200e6)

    def test_a_rate_can_fall_under_a_running_transfer_and_the_link_continues(self, lab: Lab) -> None:
        lab.start("trace", "sin2", "--low", "10mbit", "--high", "1gbit", "--period", "1")
        with lab.transfer("h1", "h2") as arrived:
            time.sleep(2.5)
        pauses = [later - earlier for (earlier, _), (later, _) in pairwise(arrived)]
        assert max(pauses) < 1.0

    def test_an_idle_link_saves_up_no_more_than_a_few_packets(self, lab: Lab) -> None:
        lab.must("rate", "10mbit")
        time.sleep(0.5)
        with lab.transfer("h1", "h2") as arrived:
            time.sleep(0.3)
        early = sum(size for when, size in arrived if when < arrived[0][0] + 0.1)
        # 0.1 s of 10mbit is 125 kB, and each end's bucket holds 20 kB.
        assert early < 125_000 + 2 * 20_480 + 16_384

    def test_probe_measures_each_link_by_itself(self, lab: Lab) -> None:
        lab.must("rate", "50mbit", "h2")

        def least_fitting() -> float:
            links = json.loads(lab.must("probe", "--json"))
            assert [(link["host"], link["shaped"]) for link in links] == [
                ("h1", 200e6),
                ("h2", 50e6),
                ("h3", 200e6),
            ]
            ratios = [link[way] / link["shaped"] for link in links for way in ("to_host", "from_host")]
            return furthest_from_one(ratios)

        assert_rate(least_fitting, 1.0, within=0.15)  # the worst of six

    def test_status_names_hosts_rates_and_processes(self, lab: Lab) -> None:
        lab.start("exec", "h2", "sleep", "30")
        wait_for(lambda: re.search(r"h2 .* 1  hva-", lab.must("status")) is not None)
        assert re.search(r"h3 +10\.83\.0\.3 +200mbit +200mbit +0 ", lab.must("status"))

    @needs_mpi
    @pytest.mark.skipif(len(MACHINE) < 2, reason="one core is all that any host can have")
    def test_what_runs_on_a_host_keeps_to_its_cores(self, own: Lab) -> None:
        half = len(MACHINE) // 2
        h1 = f"h1 {','.join(map(str, MACHINE[:half]))}"
        h2 = f"h2 {','.join(map(str, MACHINE[half : 2 * half]))}"
        own.must("up", "2", "200mbit")
        assert set(own.must("mpirun", sys.executable, "-c", CORES).splitlines()) == {h1, h2}
        # Also where the command itself was kept to others.
        own.command[:0] = ["taskset", "--cpu-list", str(MACHINE[-1])]
        assert own.must("exec", "h1", sys.executable, "-c", CORES).strip() == h1
        status = [line.split() for line in own.must("status").splitlines()[-2:]]
        assert {f"{words[0]} {words[-1]}" for words in status} == {h1, h2}

    def test_a_command_on_a_host_sees_its_name_and_its_status_is_passed_on(self, lab: Lab) -> None:
        assert lab.must("exec", "h2", "hostname") == "h2\n"
        assert "10.83.0.3" in lab.must("exec", "h2", "getent", "hosts", "h3")
        assert lab("exec", "h2", "sh", "-c", "exit 9").returncode == 9

    def test_an_unknown_host_is_refused_with_those_that_there_are(self, lab: Lab) -> None:
        for words in (["rate", "1gbit", "h9"], ["exec", "h9", "true"]):
            done = lab(*words)
            assert done.returncode == 2
            assert "there is no host 'h9'" in done.stderr
            assert "h1, h2, h3" in done.stderr

    def test_up_twice_is_refused_and_changes_nothing(self, lab: Lab) -> None:
        done = lab("up", "2", "10mbit")
        assert done.returncode == 1
        assert f"the lab '{lab.name}' is up already" in done.stderr
        assert lab.must("status").count("200mbit") >= 6


# ---------------------------------------------------------------- traces


def log_rows(text: str) -> list[dict[str, str]]:
    lines = [line.split(",") for line in text.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@needs_namespaces
class TestTraces:
    def test_a_trace_is_followed_within_half_a_second_and_then_undone(
        self, lab: Lab, tmp_path: Path
    ) -> None:
        file = tmp_path / "trace.csv"
        file.write_text("0,20mbit\n1.5,80mbit\n3,40mbit\n")

        def least_fitting() -> float:
            with lab.transfer("h1", "h2") as arrived:
                replaying = lab.start("trace", str(file))
                output, errors = replaying.communicate(timeout=60)
                assert replaying.returncode == 0, errors
            rows = [row for row in log_rows(output) if row["host"] == "h2"]
            assert [float(row["seconds"]) for row in rows] == [0, 1.5, 3]
            assert all(float(row["lag"]) < 0.5 for row in rows)
            begin, ratios = float(rows[0]["unix_time"]), []
            for row, end in zip(rows, (1.5, 3, 4.5), strict=True):
                since = begin + float(row["seconds"]) + 0.5
                found = rate_between(arrived, since, begin + end)
                ratios.append(found / float(row["bit_per_second"]))
            return furthest_from_one(ratios)

        assert_rate(least_fitting, 1.0, within=0.15)
        assert lab.must("status").count("200mbit") >= 6

    def test_times_do_not_drift_and_only_the_named_host_changes(self, lab: Lab, tmp_path: Path) -> None:
        log = tmp_path / "log.csv"
        words = ["--low", "10mbit", "--high", "90mbit", "--every", "0.1", "--seconds", "2"]
        started = time.monotonic()
        lab.must("trace", "sin2", *words, "--host", "h3", "--log", str(log))
        assert time.monotonic() - started >= 2
        rows = log_rows(log.read_text())
        assert {row["host"] for row in rows} == {"h3"}
        times = [float(row["seconds"]) for row in rows]
        assert times == sorted(times)
        assert times[-1] >= 1.5
        # A busy machine holds the program up at any moment, also between its looks at two clocks. What
        # drifts would be later in all rows of the second half, not in some.
        lags = [float(row["lag"]) for row in rows]
        clocks = [float(row["unix_time"]) for row in rows]
        walls = [clock - at - lag for clock, at, lag in zip(clocks, times, lags, strict=True)]
        half = len(rows) // 2
        assert median(walls[half:]) == pytest.approx(median(walls[:half]), rel=0, abs=0.01)
        assert min(lags[half:]) < 0.5

    def test_one_at_a_time_also_after_one_was_killed_and_a_signal_restores_the_rates(
        self, lab: Lab
    ) -> None:
        endless = ["trace", "sin2", "--low", "10mbit", "--high", "20mbit"]
        first = lab.start(*endless)
        wait_for(lambda: "a trace is replayed" in lab.must("status"))
        refused = lab(*endless)
        assert refused.returncode == 1
        assert "a trace is replayed" in refused.stderr
        assert lab("probe").returncode == 1
        first.kill()
        first.communicate(timeout=60)
        assert "a trace is replayed" not in lab.must("status")
        second = lab.start(*endless)
        wait_for(lambda: "a trace is replayed" in lab.must("status"))
        second.terminate()
        second.communicate(timeout=60)
        assert second.returncode == 0
        assert "10mbit" not in lab.must("status")


# ---------------------------------------------------------------- labs come and go


@needs_namespaces
class TestCleanUp:
    def test_down_of_one_lab_leaves_another_alone(self, lab: Lab, own: Lab) -> None:
        own.must("up", "2", "10mbit,20mbit")
        assert own.left() != []
        sleepers = [each.start("exec", "h1", "sleep", "60") for each in (lab, own)]
        tracing = own.start("trace", "sin2", "--low", "1mbit", "--high", "2mbit")
        wait_for(lambda: "a trace is replayed" in own.must("status"))
        wait_for(lambda: all(re.search(r"h1 .* 1  hva-", each.must("status")) for each in (lab, own)))
        own.must("down")
        assert own.left() == []
        assert not lives(sleepers[1].pid)
        assert not lives(tracing.pid)
        assert lives(sleepers[0].pid)
        assert_rate(lambda: lab.rate("h1", "h2"), 200e6)

    def test_what_was_asked_to_end_is_waited_for_also_when_it_is_no_longer_found(self) -> None:
        slow = "trap 'sleep 0.5; exit' TERM; echo ready; while :; do sleep 0.01; done"
        process = subprocess.Popen(["sh", "-c", slow], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        found = iter([[process.pid]])
        end_processes(lambda: next(found, []))
        assert not lives(process.pid)
        process.communicate(timeout=60)
        assert process.returncode == 0

    def test_down_kills_what_does_not_want_to_end_and_twice_is_fine(self, own: Lab) -> None:
        own.must("up", "1", "10mbit")
        stubborn = own.start(
            "exec", "h1", "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"
        )
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        assert "removed" in own.must("down")
        stubborn.communicate(timeout=60)
        assert stubborn.returncode == -signal.SIGKILL
        assert "was not up" in own.must("down")

    def test_what_a_killed_up_leaves_is_recognised_and_removed(self, own: Lab) -> None:
        dying = own.start("up", "60", "100mbit")
        wait_for(lambda: Path(f"/run/netns/hva-{own.name}-h5").exists())
        dying.kill()
        dying.communicate(timeout=60)
        for words in (["status"], ["up", "2", "10mbit"], ["exec", "h1", "true"]):
            done = own(*words)
            assert done.returncode == 1
            assert "half made" in done.stderr
            assert "netlab.sh down" in done.stderr
        own.must("down")
        assert own.left() == []

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
    def test_a_stopped_up_removes_what_it_had_made(self, own: Lab, number: int, status: int) -> None:
        stopped = own.start("up", "60", "100mbit")
        wait_for(lambda: Path(f"/run/netns/hva-{own.name}-h5").exists())
        stopped.send_signal(number)
        # Closing a terminal may send two, and users are impatient.
        time.sleep(0.01)
        stopped.send_signal(number)
        stopped.communicate(timeout=60)
        assert stopped.returncode == status
        assert own.left() == []

    def test_under_nohup_a_closed_terminal_ends_nothing(self, lab: Lab) -> None:
        lab.command[:0] = ["nohup"]
        try:
            tracing = lab.start("trace", "sin2", "--low", "10mbit", "--high", "20mbit")
        finally:
            del lab.command[0]
        wait_for(lambda: "a trace is replayed" in lab.must("status"))
        tracing.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert "a trace is replayed" in lab.must("status")

    def test_a_kernel_without_tbf_is_named_and_nothing_is_left(self, own: Lab, tmp_path: Path) -> None:
        fake = tmp_path / "tc"
        fake.write_text('#!/bin/sh\necho "Error: Specified qdisc kind is unknown." >&2\nexit 2\n')
        fake.chmod(0o755)
        done = own("up", "2", "10mbit", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert done.returncode == 1
        assert "qdisc kind is unknown" in done.stderr
        assert "modprobe" in done.stderr
        assert own.left() == []

    def test_a_namespace_of_somebody_else_is_not_taken(self, own: Lab) -> None:
        namespace = f"hva-{own.name}-h2"
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        try:
            done = own("up", "2", "10mbit")
            assert done.returncode == 1
            assert namespace in done.stderr
            own.must("down")
            assert Path(f"/run/netns/{namespace}").exists()
        finally:
            subprocess.run(["ip", "netns", "del", namespace], check=True)

    def test_without_a_lab_every_command_says_how_to_start_one(self, own: Lab) -> None:
        for words in (["status"], ["probe"], ["rate", "1gbit"], ["exec", "h1", "true"]):
            done = own(*words)
            assert done.returncode == 1
            assert "Start one: netlab.sh up" in done.stderr

    def test_the_name_comes_from_the_environment_or_from_user_and_folder(self, lab: Lab) -> None:
        named = {**os.environ, "HVA_NETLAB": lab.name}
        shown = subprocess.run(
            [NETLAB, "status"], check=True, capture_output=True, env=named, text=True
        )
        assert lab.name in shown.stdout
        assert re.fullmatch(r"[a-z0-9]+-[0-9a-f]{8}", default_name())


# ---------------------------------------------------------------- jobs


@pytest.fixture
def script(tmp_path: Path) -> Path:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return file


def pids(folder: Path) -> list[int]:
    """Of both ranks; empty until both have written theirs."""
    found = [file.read_text() for file in folder.glob("pid*")]
    return [int(text) for text in found if text] if len(found) == 2 and all(found) else []


@needs_namespaces
@needs_mpi
class TestJobs:
    def test_each_host_has_a_rank_with_the_whole_environment(
        self, lab: Lab, script: Path, tmp_path: Path
    ) -> None:
        lab.must("mpirun", sys.executable, str(script), str(tmp_path), "end", HVA_SPY="seen")
        shown = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
        assert shown == ["h1 seen", "h2 seen", "h3 seen"]

    @pytest.mark.parametrize("how", ["TERM", "KILL", "KILL mpirun"])
    def test_no_rank_outlives_a_stopped_or_killed_mpirun(
        self, lab: Lab, script: Path, tmp_path: Path, how: str
    ) -> None:
        job = lab.start("mpirun", "-np", "2", sys.executable, str(script), str(tmp_path), "sleep")
        wait_for(lambda: pids(tmp_path) != [])
        ranks = pids(tmp_path)
        assert all(map(lives, ranks))
        if how == "KILL mpirun":
            (mpirun,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[:1]
            assert Path(f"/proc/{mpirun}/comm").read_text() == "mpirun\n"
            os.kill(int(mpirun), signal.SIGKILL)
        else:
            job.send_signal(getattr(signal, f"SIG{how}"))
        job.communicate(timeout=60)
        assert job.returncode == {"KILL": -9, "KILL mpirun": 137}.get(how, job.returncode) != 0
        wait_for(lambda: not any(map(lives, ranks)))
        wait_for(lambda: len(re.findall(r" 0  hva-", lab.must("status"))) == 3)

    def test_run_has_a_lab_of_its_own_removes_it_and_passes_on_the_status_of_a_failing_rank(
        self, own: Lab, script: Path, tmp_path: Path
    ) -> None:
        trace = f"sin2 --low 40mbit --high 50mbit --log {tmp_path / 'log.csv'}"
        job = [sys.executable, str(script), str(tmp_path), "fail"]
        done = own("run", "2", "50mbit,20mbit", "--trace", trace, "--", *job)
        assert done.returncode == 7
        assert not any(map(lives, pids(tmp_path)))
        # 95 % of it, or a little less where others keep the cores busy.
        assert re.search(r"h1 +50mbit +4[0-9][.\d]*mbit", done.stdout)
        assert re.search(r"h2 +20mbit +(1[89]|2[01])[.\d]*mbit", done.stdout)
        assert {row["host"] for row in log_rows((tmp_path / "log.csv").read_text())} == {"h1", "h2"}
        assert own.left() == []

    def test_run_does_not_take_down_a_lab_that_was_there_before(self, lab: Lab) -> None:
        assert lab("run", "2", "50mbit", "--", "true").returncode == 1
        assert lab.must("status") != ""


# ---------------------------------------------------------------- run.sh


def run_sh(
    *words: str, moment: str = "", number: int = signal.SIGTERM, after: float = 0.0
) -> tuple[int, str]:
    """Its exit status and its output; so long after that shows the moment, the signal is sent."""
    with subprocess.Popen(
        [str(RUN), *words],
        # mpirun takes this long twice after a rank has ended with a status other than 0
        env=environment(OMPI_MCA_odls_base_sigkill_timeout="3"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        # A test must not wait forever, and its lab goes down with the job.
        alarm = threading.Timer(300, job.terminate)
        alarm.start()
        output = []
        for line in job.stdout:
            output.append(line)
            if moment and moment in line:
                time.sleep(after)
                job.send_signal(number)
                moment = ""
    alarm.cancel()
    return job.returncode, "".join(output)


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def ready() -> None:
    checked = subprocess.run(
        [str(ROOT / "launch" / "setup.sh"), "--check"],
        check=False,
        capture_output=True,
        env=environment(),
    )
    if checked.returncode != 0:
        pytest.skip(f"launch/setup.sh has not been run for {sys.prefix}")


def assert_nothing_left(output: str) -> None:
    """Of the lab that is named in the output, on the machine."""
    found = re.search(r"lab '(run-\w+)'", output)
    assert found is not None, output
    ran = Lab()
    ran.name = found[1]
    assert ran.left() == []


class TestRunScript:
    def test_shows_a_command_that_can_be_pasted(self) -> None:
        words = ["--netlab", "2,1gbit,50mbit", "--netlab-trace", "a b", "--epochs", "3"]
        status, shown = run_sh("--dry-run", *words)
        assert status == 0
        assert "netlab.sh run 2 1gbit\\,50mbit --trace a\\ b -- python" in shown
        assert re.search(r"train\.py --threads \d+ --compression auto --epochs 3$", shown)
        assert "OMPI_MCA_coll_tuned_allreduce_algorithm=4" in shown

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["--netlab"], "--netlab needs a value"),
            (["--netlab", "4"], "--netlab must be like 4,200mbit"),
            (["--netlab", "4,fast"], "--netlab must be like 4,200mbit"),
            (["--netlab", "4,1gbit", "-np", "2"], "without -np and -H"),
            (["--netlab-trace", "sin2"], "--netlab-trace goes with --netlab"),
        ],
    )
    def test_a_wrong_option_is_refused_before_anything_starts(
        self, words: list[str], complaint: str
    ) -> None:
        status, shown = run_sh(*words)
        assert status == 1
        assert complaint in shown

    @needs_namespaces
    @needs_mpi
    @pytest.mark.slow
    @pytest.mark.usefixtures("ready")
    def test_trains_on_slow_links_and_leaves_nothing(self) -> None:
        before = links()
        status, shown = run_sh("--netlab", "2,200mbit", "--preset", "mlp-digits", "--steps", "3")
        assert status == 0, shown
        assert re.search(r"h2 +200mbit +[\d.]+mbit +\d+\.\d% +[\d.]+mbit", shown)
        assert "held-out accuracy" in shown
        assert "at 1 Gbit/s between 2 hosts, by the model: dense " in shown
        assert_nothing_left(shown)
        assert links() == before

    @needs_namespaces
    @needs_mpi
    @pytest.mark.slow
    @pytest.mark.usefixtures("ready")
    @pytest.mark.parametrize(
        ("moment", "number", "expected"),
        [
            ("lab 'run-", signal.SIGINT, 130),
            ("rank(s) of", signal.SIGTERM, 143),
            ("rank(s) of", signal.SIGHUP, 129),
        ],
        ids=["while-the-links-are-probed", "while-it-trains", "when-the-terminal-is-closed"],
    )
    def test_a_signal_ends_the_ranks_and_the_lab(self, moment: str, number: int, expected: int) -> None:
        words = ["--netlab", "2,200mbit", "--preset", "mlp-digits", "--epochs", "5000"]
        status, shown = run_sh(*words, moment=moment, number=number)
        assert status == expected, shown
        assert_nothing_left(shown)

    @needs_namespaces
    @needs_mpi
    @pytest.mark.slow
    @pytest.mark.usefixtures("ready")
    @pytest.mark.parametrize("after", [0.02, 0.05])
    def test_a_signal_as_ranks_are_started_is_the_exit_status_too(self, after: float) -> None:
        """Ranks end with 1 while their Python is still loading."""
        words = ["--netlab", "2,200mbit", "--preset", "mlp-digits", "--epochs", "5000"]
        status, shown = run_sh(*words, moment="h2  ", number=signal.SIGINT, after=after)
        assert status == 130, shown
        assert_nothing_left(shown)
