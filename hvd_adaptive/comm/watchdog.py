"""Ends all ranks when one is frozen: stopped, out of memory, or on a host that hangs.

Horovod names a rank that is late (``Missing ranks``), but over MPI not one that no longer answers: its
coordinator waits for it inside MPI, and so does everybody else, forever. So a thread of each rank
tells rank 0 every few seconds that it lives, over TCP, and hears the same from it. Silence for
``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` ends the run; without that setting nothing is opened or started.
A rank whose main thread is busy or waits is not silent: that one is Horovod's to name.

Under torch.distributed, where the same variable starts it, nothing names a rank that is late: all end
with the process group's timeout.

Rank 0 also remembers what happened first, so that the others can say why they end.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import json
import math
import os
import re
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from hvd_adaptive.comm.failure import has_failed

if TYPE_CHECKING:
    from hvd_adaptive.comm.process_set_control import ProcessSetControl

Message: TypeAlias = dict[str, Any]
"""JSON, one per line; an empty one is a sign of life. Nothing in it is executed."""
LONGEST: Final = 4096
"""Bytes of a message; who sends more is not one of ours."""
CONNECT_SECONDS: Final = 5.0
"""For an address to answer, and for a stranger to prove that he is none."""
ENDED: Final = "ended by itself, before the others"
"""What is said of a rank that left without an error."""
SIOCGIFADDR: Final = 0x8915
"""Linux's number of the request for an interface's address."""


class Event(NamedTuple):
    """What happened to a rank."""

    rank: int
    what: str
    """As in "failed: ValueError: bad data"."""


class Peer(NamedTuple):
    """A rank as messages name it."""

    rank: int
    host: str
    process: int


# --- what the others call -------------------------------------------------------------------------


def watch(control: ProcessSetControl) -> None:
    """Watch these ranks from now on; all of them call it.

    Once per process: a second optimizer's ranks are not watched again. As with Horovod's own check of
    stalls, rank 0's environment counts. Costs a small allgather.

    Elastic runs are left alone: there Horovod and its launcher replace ranks that are lost, which are
    then not the ranks that began.
    """
    world = control.world
    if world.is_elastic:
        return
    own = {"watched": bool(_watches), "rank": world.rank, "host": socket.gethostname()}
    own |= {"process": os.getpid(), "seconds": stall_seconds()}
    listener = None
    if control.rank == 0 and own["seconds"] and not own["watched"]:
        one_host = world.local_size == world.size
        listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=control.size)
        own |= {"port": listener.getsockname()[1], "token": secrets.token_hex(32)}
        own["addresses"] = ["127.0.0.1"] if one_host else own_addresses()
    everyone = control.allgather(own)
    first, seconds = everyone[0], everyone[0]["seconds"]
    if not seconds or any(each["watched"] for each in everyone):
        if listener is not None:
            listener.close()
        return
    peers = [Peer(each["rank"], each["host"], each["process"]) for each in everyone]
    token = first["token"].encode()
    if listener is not None:
        _begin(Coordinator(peers, seconds, token, listener))
    else:
        places = [(address, first["port"]) for address in first["addresses"]]
        _begin(Follower(peers, seconds, token, control.rank, places))


def stall_seconds() -> int:
    """After how many a rank counts as lost, read as Horovod reads it; 0 for never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0
    found = re.match(r"\s*\+?(\d+)", os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", ""))
    return int(found[1]) if found else 0


def failed(what: str) -> Event | None:
    """This rank fails; which did first? None where nobody knows, because nobody watches."""
    return _watches[0].ask({"failed": what[:500]}) if _watches else None


def why() -> Event | None:
    """What happened first to any rank: it failed, ended or was killed. None where nobody knows."""
    return _watches[0].ask({"why": True}) if _watches else None


def say(text: str) -> None:
    """Write to stderr in one piece, so that other ranks' lines do not get between."""
    try:
        sys.stderr.flush()
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # no file: a notebook, or what tests put there
        sys.stderr.write(text)
        return
    data = text.encode(errors="backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


# --- one a process --------------------------------------------------------------------------------

_watches: list[_Watch] = []


def _begin(watch: _Watch) -> None:
    _watches.append(watch)
    # Registered after Horovod's own, and so called before: what is said at the end can still be sent.
    atexit.register(watch.end)
    os.register_at_fork(after_in_child=_forget)
    watch.start()
    watch.ready.wait(CONNECT_SECONDS)


def _forget() -> None:
    """In a forked process, which has the connections but not the thread: it is no rank."""
    for watch in _watches:
        atexit.unregister(watch.end)
        watch.close()
    _watches.clear()


class _Line:
    """A connection: messages both ways.

    Args:
        connection: whose timeout says how long :meth:`receive` waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.position: int | None = None
        """Of the rank at the other end, once it has proved that it is one."""
        self.since = time.monotonic()
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """At once; OSError if the other end is gone, or has not read for very long."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            if self.connection.send(data) < len(data):
                raise ConnectionAbortedError("messages pile up")

    def receive(self) -> list[Message]:
        """What has come; OSError if the other end is gone, or no rank."""
        try:
            data = self.connection.recv(LONGEST)
        except (BlockingIOError, TimeoutError):
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > LONGEST:
            raise ConnectionAbortedError("closed, or not of ours")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise ConnectionAbortedError("not of ours") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ConnectionAbortedError("not of ours")
        return messages


class _Watch(threading.Thread):
    """What rank 0's side and the others' have in common.

    Args:
        peers: the ranks, by their position.
        seconds: of silence after which a rank counts as lost.
        token: what proves that one is of this run; it is never sent here.
        position: of this rank.
    """

    def __init__(self, peers: Sequence[Peer], seconds: int, token: bytes, position: int) -> None:
        super().__init__(name="hva-watchdog", daemon=True)
        self.peers, self.seconds, self.position = peers, seconds, position
        self.tick = min(5.0, seconds / 20)
        """Seconds from one sign of life to the next."""
        self.first: Event | None = None
        self.ready = threading.Event()
        """It watches, or what it needs is not to be had soon."""
        self._token = token
        self._silence: dict[int, float] = {}
        """Of those that are watched: seconds."""
        self._left: set[int] = set()
        self._heard: dict[int, float] = {}
        self._judged = time.monotonic()

    def run(self) -> None:
        """Until this process ends."""
        try:
            self.loop()
        except Exception as error:
            # silent from now on, but alive: the others must know
            say(f"hvd_adaptive: {self.name_of(self.position)} is no longer watched: {error!r}\n")
            self.leave(by_itself=False)

    def end(self) -> None:
        """This process ends; not by itself where it does so with an error, which was told already."""
        self.leave(by_itself=not has_failed())

    def loop(self) -> None:
        """Watch."""
        raise NotImplementedError

    def ask(self, question: Message) -> Event | None:
        """The first event of all, or the first failure if this rank has ``failed``."""
        raise NotImplementedError

    def leave(self, by_itself: bool = True) -> None:
        """This rank may be silent from now on.

        Args:
            by_itself: whether the others may end because of that.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of all connections without a word."""
        raise NotImplementedError

    def proof(self, *words: object) -> str:
        """Only who has the token can make it."""
        return hmac.new(self._token, repr(words).encode(), "sha256").hexdigest()

    def proves(self, message: Message, *words: object) -> bool:
        """Whether a message has the proof."""
        proof = message.get("proof")
        expected = self.proof(*words).encode()
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected)

    def name_of(self, position: int) -> str:
        """For messages."""
        peer = self.peers[position]
        return f"rank {peer.rank} (process {peer.process} on {peer.host})"

    def meet(self, position: int) -> None:
        """Watch it from now on."""
        if position not in self._left:
            self._silence[position] = 0.0
            self._heard[position] = time.monotonic()

    def hear(self, position: int) -> None:
        """It lives."""
        if position in self._silence:
            self.meet(position)

    def release(self, position: int) -> None:
        """It has left, and may be silent from now on."""
        self._left.add(position)
        self._silence.pop(position, None)

    def judge(self) -> list[int]:
        """Those that were silent for too long; to be called once a tick.

        A rank that was held up for just ``seconds`` is not lost: its last sign may be a tick old, and
        its next one comes a tick later. And the time for which this process itself was held up (a
        laptop sleeps, a user stops the whole job) says little of the others.
        """
        now = time.monotonic()
        elapsed, self._judged = min(now - self._judged, self.seconds / 2), now
        for position in self._silence:
            self._silence[position] += elapsed
        most = max(self._silence.values(), default=0.0)
        if most <= self.seconds + 2 * self.tick:
            return []
        # those of one host are silent at once, or nearly so
        return [each for each, silence in self._silence.items() if silence > most - 3 * self.tick]

    def verdict(self, lost: Sequence[int], connected: bool) -> str:
        """What is said of those that :meth:`judge` found."""
        peer, seconds = self.peers[lost[0]], time.monotonic() - self._heard[lost[0]]
        others = ", ".join(str(self.peers[each].rank) for each in lost[1:])
        state = "it is frozen, or its host or network is" if connected else "it ended without a word"
        before = ""
        if self.first is not None and self.first.rank not in [self.peers[each].rank for each in lost]:
            # which may be why it is silent
            before = f"; before that, rank {self.first.rank} {self.first.what}"
        return (
            f"hvd_adaptive: rank {peer.rank} has not answered for {seconds:.0f} s (process "
            f"{peer.process} on {peer.host}{others and '; nor have ranks '}{others}): {state}, so all "
            f"ranks end{before}\n"
        )


class Coordinator(_Watch):
    """Rank 0's: listens to all others.

    Args:
        peers, seconds, token: see :class:`_Watch`.
        listener: where they connect.
    """

    def __init__(
        self, peers: Sequence[Peer], seconds: int, token: bytes, listener: socket.socket
    ) -> None:
        super().__init__(peers, seconds, token, 0)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._lines: set[_Line] = set()
        self._failed: Event | None = None

    def loop(self) -> None:
        """Accept, listen, answer, judge."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.ready.set()
        told = time.monotonic()
        while True:
            asking = []
            for key, _ in self._selector.select(self.tick / 2):
                asking += self._read(key.data) if key.data else self._accept()
            # after all that was read: a failure that caused another's question goes before it
            for line, message in asking:
                event = self._failed if "failed" in message else self.first
                self._send(line, {"first": event})
            if time.monotonic() - told >= self.tick:
                told = time.monotonic()
                self._turn()

    def _turn(self) -> None:
        """Once a tick."""
        lost = self.judge()
        if lost:
            connected = {line.position for line in self._lines}
            text = self.verdict(lost, lost[0] in connected)
            _say_last(text)
            for line in list(self._lines):
                self._send(line, {"end": True})
            os._exit(1)
        now = time.monotonic()
        for line in list(self._lines):
            if line.position is not None:
                self._send(line, {})
            elif now - line.since > CONNECT_SECONDS:
                self._drop(line)

    def _accept(self) -> list[tuple[_Line, Message]]:
        """A connection, of which nothing is known yet; too many of those are refused."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no more files may be opened
            time.sleep(self.tick / 10)
            return []
        if len(self._lines) >= 2 * len(self.peers) + 16:
            connection.close()
            return []
        connection.setblocking(False)
        line = _Line(connection)
        self._lines.add(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        return []

    def _read(self, line: _Line) -> list[tuple[_Line, Message]]:
        """Note what a rank says; what it asks is returned."""
        if line not in self._lines:
            return []
        try:
            messages = line.receive()
        except OSError:
            self._drop(line)
            return []
        return [(line, message) for message in messages if self._note(line, message)]

    def _note(self, line: _Line, message: Message) -> bool:
        """Whether the message is a question."""
        if line.position is None:
            self._welcome(line, message)
            return False
        self.hear(line.position)
        rank = self.peers[line.position].rank
        if "left" in message:
            self.release(line.position)
            if message.get("by_itself"):
                self._happened(Event(rank, ENDED))
        elif "failed" in message:
            self._happened(Event(rank, f"failed: {message['failed']}"))
        return "failed" in message or "why" in message

    def _welcome(self, line: _Line, message: Message) -> None:
        position = message.get("position")
        known = type(position) is int and 0 < position < len(self.peers)
        if not known or not self.proves(message, "rank", position):
            self._drop(line)
            return
        assert isinstance(position, int)
        for other in [each for each in self._lines if each.position == position]:
            self._drop(other, expected=True)  # half open: it has come again
        line.position = position
        self.meet(position)
        self._send(line, {"proof": self.proof("first", position)})

    def _happened(self, event: Event) -> Event:
        """Keep the first one, and the first failure."""
        self.first = self.first or event
        if event.what.startswith("failed"):
            self._failed = self._failed or event
        return event

    def _send(self, line: _Line, message: Message) -> None:
        try:
            line.send(message)
        except OSError:
            self._drop(line)

    def _drop(self, line: _Line, expected: bool = False) -> None:
        """A rank whose connection is lost is still watched: it may come again, or is to be missed."""
        if line not in self._lines:
            return
        self._lines.remove(line)
        self._selector.unregister(line.connection)
        line.connection.close()
        if line.position in self._silence and not expected:
            rank = self.peers[line.position].rank
            self._happened(Event(rank, "ended without a word: it was killed, or crashed"))

    def ask(self, question: Message) -> Event | None:
        """As the others ask, without a connection."""
        rank = self.peers[0].rank
        if "failed" not in question:
            time.sleep(min(self.tick, 0.2))  # let the thread read what has come
            return self.first
        self._happened(Event(rank, f"failed: {question['failed']}"))
        return self._failed

    def leave(self, by_itself: bool = True) -> None:
        """The thread continues: while Horovod waits for the others, one of them may freeze."""
        if by_itself:
            self._happened(Event(self.peers[0].rank, ENDED))
        for line in list(self._lines):
            with contextlib.suppress(OSError):  # gone; the thread will see it
                line.send({"left": True, "first": self.first})

    def close(self) -> None:
        """Not by the selector, which the parent of a forked process shares."""
        self._listener.close()
        for line in self._lines:
            line.connection.close()


class Follower(_Watch):
    """Any other rank's: connected to the first one.

    Args:
        peers, seconds, token, position: see :class:`_Watch`.
        places: addresses and ports where rank 0 may be reached.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        seconds: int,
        token: bytes,
        position: int,
        places: Sequence[tuple[str, int]],
    ) -> None:
        super().__init__(peers, seconds, token, position)
        self._places = list(places)
        self._line: _Line | None = None
        self._replied = threading.Event()

    def loop(self) -> None:
        """Connect, tell, listen, judge."""
        end = time.monotonic() + self.seconds  # rank 0 may be held up, too
        while not self._connect():
            self.ready.set()
            time.sleep(self.tick)
            if time.monotonic() > end:
                self._give_up()
                return
        self.ready.set()
        told = -math.inf
        while self._line is not None or self._silence:
            if time.monotonic() - told >= self.tick:
                told = time.monotonic()
                self._turn()
            self._read()

    def _give_up(self) -> None:
        places = ", ".join(f"{address}:{port}" for address, port in self._places)
        say(
            f"hvd_adaptive: {self.name_of(self.position)} cannot reach rank {self.peers[0].rank} over "
            f"TCP ({places}): if this rank freezes, no other will notice\n"
        )

    def _turn(self) -> None:
        """Once a tick."""
        if self._line is None:
            self._connect()
        if self._line is not None:
            self._send({})
        if lost := self.judge():
            _say_last(self.verdict(lost, self._line is not None))
            os._exit(1)

    def _read(self) -> None:
        if self._line is None:
            time.sleep(self.tick)
            return
        try:
            messages = self._line.receive()
        except OSError:
            self._lose()
            return
        for message in messages:
            self._note(message)

    def _note(self, message: Message) -> None:
        if "end" in message:
            _say_last("")
            os._exit(1)
        self.hear(0)
        if message.get("first"):
            self.first = Event(*message["first"])
        if "left" in message:
            self.release(0)
        elif "first" in message:
            self._replied.set()

    def _connect(self) -> bool:
        """Find rank 0 at one of its addresses; the one that answered is kept."""
        for place in self._places:
            line = self._try(place)
            if line is not None:
                line.connection.settimeout(self.tick / 2)
                self._line, self._places = line, [place]
                self.meet(0)
                return True
        return False

    def _try(self, place: tuple[str, int]) -> _Line | None:
        """A connection to rank 0, if it is there and proves it."""
        try:
            connection = socket.create_connection(place, CONNECT_SECONDS)
        except OSError:
            return None
        line = _Line(connection)
        try:
            line.send({"position": self.position, "proof": self.proof("rank", self.position)})
            for message in line.receive():
                if self.proves(message, "first", self.position):
                    return line
        except OSError:
            pass  # closed at once: somebody else's port
        connection.close()
        return None

    def _send(self, message: Message) -> None:
        line = self._line
        try:
            if line is not None:
                line.send(message)
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Rank 0 has ended, or something between has; the launcher will know more."""
        line, self._line = self._line, None
        if line is not None:
            line.connection.close()
        if self._silence and self.first is None:
            self.first = Event(self.peers[0].rank, "ended without a word: it was killed, or crashed")

    def ask(self, question: Message) -> Event | None:
        """Rank 0's answer; what is known here if it does not answer soon."""
        if self._line is not None:
            self._replied.clear()
            self._send(question)
            self._replied.wait(1.0)
        return self.first

    def leave(self, by_itself: bool = True) -> None:
        """Goes on to listen, as rank 0 does."""
        self._send({"left": True, "by_itself": by_itself})

    def close(self) -> None:
        """For a forked process."""
        if self._line is not None:
            self._line.connection.close()


def _say_last(text: str) -> None:
    """Not by this thread alone: who reads what is written may be frozen, too."""

    def speak() -> None:
        sys.stdout.flush()
        say(text)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(2.0)


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, real networks first; the loopback's only where it has no other."""
    found: list[tuple[bool, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asker, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            address = socket.inet_ntoa(reply[20:24])
            if not address.startswith("127."):
                # of containers and virtual machines: other hosts have the same
                found.append((name.startswith(("docker", "br-", "virbr", "veth", "lxc")), address))
    return [address for _, address in sorted(found, key=lambda each: each[0])] or ["127.0.0.1"]
