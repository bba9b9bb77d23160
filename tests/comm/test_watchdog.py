"""Who is silent is lost, and nobody else: strangers, busy ranks, a job that slept, a normal end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.eager import PYTHONPATH
from tests.harness.rank_launcher import ENVIRONMENT, lives

pytest.importorskip("horovod.torch", reason="Horovod is not installed")

from hvd_adaptive.comm.watchdog import (
    LONGEST,
    Coordinator,
    Event,
    Follower,
    Peer,
    own_addresses,
    stall_seconds,
)

PEERS = [Peer(0, "here", 100), Peer(1, "here", 101), Peer(5, "there", 105)]
TOKEN = b"of this run"


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def first() -> Iterator[Coordinator]:
    """Rank 0's side, with two ranks that may come."""
    listener = socket.create_server(("127.0.0.1", 0))
    watch = Coordinator(PEERS, 600, TOKEN, listener)
    watch.tick = 0.1
    watch.start()
    yield watch
    assert watch.is_alive()
    watch.leave()


def place_of(first: Coordinator) -> tuple[str, int]:
    place: tuple[str, int] = first._listener.getsockname()
    return place


def join(first: Coordinator, position: int, token: bytes = TOKEN) -> Follower:
    other = Follower(PEERS, 600, token, position, [place_of(first)])
    other.tick = 0.1
    other.start()
    assert other.ready.wait(30)
    return other


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95pickle.\n",
        b"x" * 2 * LONGEST,
        b"[" * 3000 + b"\n",
        b"[]\n",
        b'{"position": 1}\n',
        b'{"position": 1, "proof": 7}\n',
        b'{"position": 1, "proof": "%s"}\n' % (b"0" * 64),
        b'{"position": 0, "proof": "\xc3\xa9"}\n',
        b'{"position": true, "proof": ""}\n',
        b'{"end": true}\n',
        b'{"left": true, "failed": "of no rank"}\n',
    ],
)
def test_a_stranger_is_shown_the_door(first: Coordinator, words: bytes) -> None:
    with socket.create_connection(place_of(first), 30) as stranger:
        stranger.sendall(words)
        received = b"?"
        try:
            while received:
                received = stranger.recv(100)
                assert b"proof" not in received
        except ConnectionResetError:
            pass  # with something of ours unread
    assert not first._silence
    assert first.first is None


def test_strangers_who_say_nothing_are_only_so_many_and_not_for_long(first: Coordinator) -> None:
    strangers = [socket.create_connection(place_of(first), 30) for _ in range(40)]
    wait_until(lambda: len(first._lines) == 2 * len(PEERS) + 16)
    for line in list(first._lines):
        line.since -= 60
    wait_until(lambda: not first._lines)
    join(first, 1)
    for stranger in strangers:
        stranger.close()


def test_neither_side_takes_the_other_without_the_token(first: Coordinator) -> None:
    stranger = join(first, 1, b"of another run")
    assert stranger._line is None
    assert not stranger._silence
    assert not first._silence
    stranger.seconds = 0


def test_what_happened_first_is_what_all_are_told(first: Coordinator) -> None:
    one, two = join(first, 1), join(first, 2)
    assert two.ask({"why": True}) is None
    one.leave()
    wait_until(lambda: first.first)
    left = Event(1, "ended by itself, before the others")
    assert two.ask({"why": True}) == left
    assert two.ask({"failed": "ValueError: bad"}) == Event(5, "failed: ValueError: bad")
    assert one.ask({"failed": "KeyError: 1"}) == Event(5, "failed: ValueError: bad")
    assert first.ask({"failed": "KeyError: 0"}) == Event(5, "failed: ValueError: bad")
    assert first.ask({"why": True}) == left


def test_who_ends_with_others_is_neither_missed_nor_named_in_their_place(first: Coordinator) -> None:
    one, two = join(first, 1), join(first, 2)
    wait_until(lambda: len(first._silence) == 2)
    two.leave(by_itself=False)  # which is heard first
    wait_until(lambda: list(first._silence) == [1])
    first.leave(by_itself=False)
    one.leave()
    wait_until(lambda: first.first)
    assert first.first == Event(1, "ended by itself, before the others")


def test_who_was_killed_is_remembered_and_who_left_is_not_missed(first: Coordinator) -> None:
    one, two = join(first, 1), join(first, 2)
    wait_until(lambda: len(first._silence) == 2)
    one.leave()
    wait_until(lambda: list(first._silence) == [2])
    time.sleep(0.3)  # it continues to give signs of life
    assert list(first._silence) == [2]
    two.close()
    wait_until(lambda: first.first)
    assert list(first._silence) == [2]


def test_a_connection_that_was_lost_is_made_again(first: Coordinator) -> None:
    one = join(first, 1)
    [line] = first._lines
    line.connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: line not in first._lines)
    wait_until(lambda: len(first._lines) == 1)
    wait_until(lambda: first._silence[1] < 0.2)
    assert one.is_alive()


def test_silence_is_lost_only_after_its_time_and_not_by_ones_own_sleep() -> None:
    watch = Coordinator(PEERS, 100, TOKEN, socket.create_server(("127.0.0.1", 0)))
    for position in (1, 2):
        watch.meet(position)

    def after(seconds: float) -> list[int]:
        watch._judged -= seconds
        return watch.judge()

    assert after(10_000) == []  # this process slept, and so may have the others
    assert after(49) == []
    watch.hear(2)
    assert after(12) == [1]
    assert after(49) == [1]
    assert "rank 1 has not answered" in watch.verdict([1], True)
    watch._silence[2] = watch._silence[1]
    assert watch.judge() == [1, 2]
    assert "nor have ranks 5" in watch.verdict([1, 2], True)
    watch.first = Event(1, "ended without a word: it was killed, or crashed")
    assert watch.verdict([1], False).endswith("so all ranks end\n")
    watch.first = Event(0, "ended by itself, before the others")
    told = watch.verdict([1], True)
    assert told.endswith("; before that, rank 0 ended by itself, before the others\n")
    watch.close()


def test_a_rank_that_cannot_reach_the_first_says_so_once_and_continues(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = gone.getsockname()
    other = Follower(PEERS, 1, TOKEN, 2, [place])
    other.start()
    other.join(30)
    assert not other.is_alive()
    [line] = capfd.readouterr().err.splitlines()
    assert line == (
        "hvd_adaptive: rank 5 (process 105 on there) cannot reach rank 0 over TCP "
        f"(127.0.0.1:{place[1]}): if this rank freezes, no other will notice"
    )
    assert other.ask({"why": True}) is None
    other.leave()


def test_this_hosts_addresses_are_ones_that_can_be_listened_on() -> None:
    found = own_addresses()
    assert found
    assert "127.0.0.1" not in found or found == ["127.0.0.1"]
    for address in found:
        socket.create_server((address, 0)).close()


@pytest.mark.parametrize(
    ("text", "disabled", "seconds"),
    [("300", "0", 300), (" 10.7", "", 10), ("", "0", 0), ("-3", "0", 0), ("no", "0", 0), ("9", "1", 0)],
)
def test_the_stall_time_is_read_as_horovod_reads_it(
    monkeypatch: pytest.MonkeyPatch, text: str, disabled: str, seconds: int
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", text)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", disabled)
    assert stall_seconds() == seconds


# --- with real ranks ------------------------------------------------------------------------------

# What must not be taken for frozen, and what must not be held up. Horovod's own check is off: its first
# time is the longer one.
HEALTHY = """
import ctypes, json, os, sys, time
from mpi4py import MPI  # so that Horovod may be started twice
import horovod.torch as hvd, torch
import hvd_adaptive as hva
from hvd_adaptive.comm import watchdog

folder, seconds = sys.argv[1], float(sys.argv[2])

def wait_for(name):
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.05)

def tell(name, **what):
    with open(f"{folder}/new-{name}-{hvd.rank()}", "w") as file:
        json.dump(what, file)
    os.rename(file.name, f"{folder}/{name}-{hvd.rank()}")

def optimizer():
    model = torch.nn.Linear(3, 3)
    optimizer = hva.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer

hvd.init()
optimizer()
[watch] = watchdog._watches
child = os.fork()
if child == 0:
    assert not watchdog._watches
    wait_for("end")
    os._exit(0)
tell("ready", process=os.getpid())
wait_for("slept")
if hvd.rank() == 1:
    ctypes.PyDLL(None).usleep(int(0.5 * seconds * 1e6))  # with Python's lock
hvd.shutdown()
hvd.init()
optimizer()
assert watchdog._watches == [watch]
assert watch.is_alive()
assert watch.first is None, watch.first
assert hvd.rank() or set(watch._silence) == {1, 2}, watch._silence
hvd.allreduce(torch.ones(1))
os.waitpid(child, os.WNOHANG)
tell("done", at=time.time())
wait_for("end")
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_busy_sleeping_and_restarted_ranks_are_not_frozen_and_end_as_ever(tmp_path: Path) -> None:
    seconds, ranks = 6, 3  # of which the busy rank leaves half to a machine that is loaded
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "600",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds),
    }
    command = ["mpirun", "--oversubscribe", "-np", str(ranks), sys.executable, "-c", HEALTHY]
    with (tmp_path / "output").open("w+") as output:
        job = subprocess.Popen(
            [*command, str(tmp_path), str(seconds)], env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

        def all_did(what: str) -> bool:
            assert job.poll() is None, (tmp_path / "output").read_text()
            return len(list(tmp_path.glob(f"{what}-?"))) == ranks

        wait_until(lambda: all_did("ready"), 120)
        processes = [
            int(json.loads((tmp_path / f"ready-{rank}").read_text())["process"])
            for rank in range(ranks)
        ]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        time.sleep(1.5 * seconds)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        (tmp_path / "slept").touch()
        wait_until(lambda: all_did("done"), 120)
        asked = time.monotonic()
        (tmp_path / "end").touch()
        assert job.wait(60) == 0, (tmp_path / "output").read_text()
    assert time.monotonic() - asked < 20
    text = (tmp_path / "output").read_text()
    assert "hvd_adaptive" not in text
    assert "Traceback" not in text
    assert not any(map(lives, processes))
