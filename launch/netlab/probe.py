"""The rates of a lab's links, as TCP sees them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .base import NAMESPACES, QUEUE_SECONDS, SWITCH, Lab, LabError, address, tracers

# Links are measured side by side up to this much together: more, and the cores would be measured.
_AT_ONCE = 1_000_000_000
_SETTLE_SECONDS, _MEASURE_SECONDS = 0.3, 1.0
_LEAST_UNDER_WAY = 32 * 1024
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Measured:
    """Rates in bits per second; those measured are of TCP's payload."""

    host: str
    shaped: int
    to_host: float
    from_host: float

    @property
    def within_a_tenth(self) -> bool:
        return all(0.9 <= rate / self.shaped <= 1.1 for rate in (self.to_host, self.from_host))


def probe(lab: Lab) -> list[Measured]:
    """Each link by itself and in both directions, between its host and the switch.

    Raises:
        LabError: a trace changes the rates meanwhile.
    """
    if tracers(lab):
        raise LabError("a trace is replayed, so the rates change", "Stop it first.")
    measured = []
    for hosts in _batches(lab):
        rates = [lab.rates[host] for host in hosts]
        to_host = _transfer([(lab.switch, lab.namespace(host), address(host)) for host in hosts], rates)
        from_host = _transfer([(lab.namespace(host), lab.switch, SWITCH) for host in hosts], rates)
        for host, to, back in zip(hosts, to_host, from_host, strict=True):
            measured.append(Measured(host, lab.rates[host], to, back))
    return measured


def _batches(lab: Lab) -> Iterator[list[str]]:
    batch: list[str] = []
    for host, rate in lab.rates.items():
        if batch and sum(lab.rates[other] for other in batch) + rate > _AT_ONCE:
            yield batch
            batch = []
        batch.append(host)
    yield batch


def _transfer(flows: Sequence[tuple[str, str, str]], shaped: Sequence[int]) -> list[float]:
    """Bits per second of each flow (from a namespace, to one, its address), all at the same time."""
    rates = [0.0] * len(flows)

    def receive(flow: int, connection: socket.socket) -> None:
        rates[flow] = _receive(connection)

    with contextlib.ExitStack() as stack:
        receivers = []
        for flow, (source, target, where) in enumerate(flows):
            sender, receiver = _connect(source, target, where, shaped[flow])
            stack.callback(sender.close)
            stack.callback(receiver.close)
            threading.Thread(target=_send, args=(sender,), daemon=True).start()
            thread = threading.Thread(target=receive, args=(flow, receiver), daemon=True)
            thread.start()
            receivers.append(thread)
        for thread in receivers:
            thread.join()
    if not all(rates):
        raise LabError("a link carries nothing", "Take the lab down and up again.")
    return rates


def _connect(source: str, target: str, where: str, shaped: int) -> tuple[socket.socket, socket.socket]:
    """A TCP connection between two namespaces, both ends in this process."""
    # A socket stays in the namespace in which it was made.
    with _inside(target):
        listener = socket.create_server((where, 0))
    with _inside(source):
        sender = socket.socket()
    # No more under way than the link's queue holds: on a slow one, recovering from a loss takes longer
    # than the whole measurement.
    in_queue = round(shaped / 8 * QUEUE_SECONDS)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(_LEAST_UNDER_WAY, in_queue // 2))
    with listener:
        listener.settimeout(10)
        sender.settimeout(10)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
    for end in (sender, receiver):
        # On closing, drop what is queued: it would be in the next measurement's way.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sender, receiver


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own, open(NAMESPACES / namespace) as other:
        if libc.setns(other.fileno(), _CLONE_NEWNET) != 0:
            raise LabError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.setns(own.fileno(), _CLONE_NEWNET)


def _send(connection: socket.socket) -> None:
    data = bytes(256 * 1024)
    # Until the receiver has seen enough and closes.
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(data)


def _receive(connection: socket.socket) -> float:
    """Closes the connection when it knows its rate."""
    buffer = bytearray(1024 * 1024)
    started = time.monotonic()
    received, since = 0, None
    with connection:
        connection.settimeout(5)
        while True:
            try:
                size = connection.recv_into(buffer)
            except OSError:
                return 0.0
            now = time.monotonic()
            if since is not None:
                received += size
                if now - since >= _MEASURE_SECONDS:
                    return received * 8 / (now - since)
            elif now - started >= _SETTLE_SECONDS:
                since = now
