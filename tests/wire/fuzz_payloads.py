"""Damaged payloads against everything that reads them, between pages of memory that nobody may touch.

    python tests/wire/fuzz_payloads.py --cases 1000000 --jobs 2
    python tests/wire/fuzz_payloads.py --cases 20000 --seed 7 --compressor topk

A case takes a good payload, damages it (or not, in one of 16), and lets an operation have it. Payloads
and outputs lie each between two pages that cannot be read or written, at the beginning or at the end of
what is between them, so that one byte too far is a segmentation fault. Beyond that:

* what is refused is refused with WireError (or, a frame that says so, as too large), and what is not
  decodes to finite numbers, but for layers that are marked as not finite;
* undamaged payloads decode to what the reference decodes them to, and of every 40 cases one is given to
  the reference, too: it must find the same;
* sums are those of adding one by one, and sums that are compressed again those of two passes; clearing
  clears and does nothing else; a payload that is compressed again can be decoded, and with the
  remainder it is what it was;
* what a rank receives in each operation of the schemes that compress twice is fuzzed as a whole, frames
  and all: its step ends with an error, or with layers that are finite or NaN as a whole.

The first finding ends the program with status 1 and a line that repeats it. Case n of a seed is always
the same, for the same choice of compressors.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import itertools
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import wire
from hvd_adaptive.buckets import Bucket, build_buckets
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.compressors import REGISTRY, LinearCompressor, Payload, parse
from hvd_adaptive.compressors.base import GatheredCompressor, LayerBatch, LayerContext
from hvd_adaptive.compressors.layerwise import LayerwiseCompressor
from hvd_adaptive.compressors.sparse import SparseCompressor
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.feedback import FeedbackContext
from hvd_adaptive.feedback import parse as parse_rule
from hvd_adaptive.kernels.base import BACKENDS
from hvd_adaptive.kernels.cpu.memory import thread_buffers
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import TooLargeError, WireError
from hvd_adaptive.wire import frame as wire_frame
from hvd_adaptive.wire import varint as wire_varint
from hvd_adaptive.wire.sparse import CODE_BLOCK

SPECS = [
    *(f"topk:density=0.05,values={how}" for how in wire.ValueFormat.__members__),
    *(f"globaltopk:density=0.02,values={how}" for how in ("fp32", "int8", "sign")),
    "threshold:threshold=1.0,values=fp16",
    "dgc:density=0.3,values=int8",
    "redsync:density=0.01,values=sign",
    *(f"qsgd:bits={bits}" for bits in (1, 2, 3, 4, 8)),
    "qsgd:bits=3,block=7,coding=huffman",
    "qsgdinf:bits=2,coding=huffman",
    "nuqsgd:bits=5,block=65536",
    "natural:bits=8,coding=huffman",
    "natural:bits=3",
    "terngrad",
    "terngrad:clip=2.5,coding=huffman",
    "signsgd:block=64",
    "qsgdinf:bits=2,rotate=hadamard",
    "qsgdinf:bits=4,coding=huffman,rotate=hadamard",
    "onebit:block=1",
    "onebit",
    "alq:bits=3",
    "alq:bits=4,coding=fixed",
    "amq:bits=3",
    "amq:bits=1,coding=fixed",
    "randomk:density=0.1,values=fp16",
]
"""Beside every member of the registry that is not named here, as it is."""
SHOTS = {"two_shot": Topology.flat(3), "hierarchical": Topology.of_nodes(4, 2)}
"""Schemes of several operations, and ranks between which they are fuzzed."""
SHOT_SPECS = (
    ("qsgd:bits=4", "qsgd:bits=4"),
    ("topk:density=0.05", "topk:density=0.05"),
    ("topk:density=0.05,values=int8", "alq:bits=3"),
    ("onebit", "qsgdinf:bits=2,coding=huffman"),
    ("globaltopk:density=0.05,values=fp32", "globaltopk:density=0.05,values=fp32"),
)
"""Compressors of the two layers of a bucket."""
MOST_OPERATIONS = 8
SHOT_LAYERS = (Layer(0, "large", (40, 50)), Layer(1, "small", (1300,)))
LAYERS = ((300, 0, 1, 4000), (40,), (9, 2, 70), (), (3000,), (300_000, 5))
"""Sizes of the layers of a bucket; the last one's are summed past the cache."""
SMALL = 5000
"""Elements up to which the reference, which is slow, is asked, too."""
ASKED = 40
"""Of so many cases the reference is asked in one."""
BUCKET = 3
"""Index of the bucket that frames are of."""
NUMBERS = (0, 1, -1, 2**7, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63)
"""What counts and lengths are replaced with."""


class Finding(Exception):  # noqa: N818 - what is looked for
    """Something that must not be."""


# --- memory --------------------------------------------------------------------------------------


class Guard:
    """Memory between two pages that can be neither read nor written."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        # not shared: every worker has its own
        self.memory = mmap.mmap(-1, self.size + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for wall in (address, address + page + self.size):
            if libc.mprotect(wall, page, 0) != 0:  # PROT_NONE
                raise OSError(ctypes.get_errno(), "mprotect")
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.size, offset=page)
        self.floats = self.bytes.view(torch.float32)

    def hold(self, data: bytes | bytearray, at_end: bool) -> Tensor:
        """``data`` as uint8, its last byte before a wall or its first one behind one."""
        start = self.size - len(data) if at_end else 0
        self.memory[mmap.PAGESIZE + start : mmap.PAGESIZE + start + len(data)] = bytes(data)
        return self.bytes[start : start + len(data)]

    def hold_floats(self, count: int, at_end: bool, value: float) -> Tensor:
        """``count`` float32 of a value, likewise."""
        start = self.floats.numel() - count if at_end else 0
        return self.floats[start : start + count].fill_(value)


class ExactRoom:
    """In the place of the room to decode into: not an element more than was asked for."""

    def __init__(self) -> None:
        self._guards: list[Guard] = []

    def of(self, count: int) -> tuple[np.ndarray, ...]:
        """Indices, values, and heads of blocks."""
        sizes = {np.int32: count, np.float32: count, np.uint8: count // CODE_BLOCK + 1}
        if not self._guards or 4 * count > self._guards[0].size:
            self._guards = [Guard(4 * max(count, 1 << 16) + 8) for _ in sizes]
        arrays = []
        for guard, (dtype, length) in zip(self._guards, sizes.items(), strict=True):
            whole = guard.bytes.numpy().view(dtype)
            arrays.append(whole[whole.size - length :])
        return tuple(arrays)


# --- damage --------------------------------------------------------------------------------------


def place(rng: random.Random, size: int) -> int:
    """A byte of so many: the first ones, where counts are, more often than others."""
    share = rng.random()
    return rng.choice((int(size * share), int(size * share * share), min(size, int(12 * share))))


def flip_a_bit(rng: random.Random, body: bytearray, other: bytes) -> None:
    """One bit is the other one."""
    if body:
        body[min(place(rng, len(body)), len(body) - 1)] ^= 1 << rng.randrange(8)


def change_bytes(rng: random.Random, body: bytearray, other: bytes) -> None:
    """Some bytes are others: any, or all zeros or ones."""
    start, count = place(rng, len(body)), rng.randrange(1, 12)
    fill = rng.choice((b"\0", b"\xff", None))
    body[start : start + count] = (rng.randbytes(count) if fill is None else fill * count)[
        : len(body) - start
    ]


def cut(rng: random.Random, body: bytearray, other: bytes) -> None:
    """The end is missing."""
    del body[place(rng, len(body)) if rng.random() < 0.7 else max(0, len(body) - rng.randrange(9)) :]


def lengthen(rng: random.Random, body: bytearray, other: bytes) -> None:
    """More bytes follow."""
    count = rng.randrange(1, 20)
    body += bytes(count) if rng.random() < 0.5 else rng.randbytes(count)


def insert_or_delete(rng: random.Random, body: bytearray, other: bytes) -> None:
    """What follows stands a little further on or before."""
    start = place(rng, len(body))
    if rng.random() < 0.5:
        del body[start : start + rng.randrange(1, 4)]
    else:
        body[start:start] = rng.randbytes(rng.randrange(1, 4))


def splice(rng: random.Random, body: bytearray, other: bytes) -> None:
    """The end is another payload's."""
    start = place(rng, len(body))
    body[start:] = other[start if rng.random() < 0.5 else place(rng, len(other)) :]


def write_an_extreme(rng: random.Random, body: bytearray, other: bytes) -> None:
    """A number that no count or length should be, at any width or as a varint."""
    value = rng.choice(NUMBERS) + rng.choice((0, 0, -1, 1))
    if rng.random() < 0.5:
        written = wire_varint.write_varint(value & (2**63 - 1))
    else:
        width = rng.choice((1, 2, 4, 8))
        written = (value & (256**width - 1)).to_bytes(width, "little")
    start = place(rng, len(body))
    body[start : start + (len(written) if rng.random() < 0.7 else 1)] = written


def only_noise(rng: random.Random, body: bytearray, other: bytes) -> None:
    """Nothing of it is left; or nothing is there."""
    body[:] = rng.randbytes(rng.choice((0, 1, 2, 5, 20, 200)))
    if body and rng.random() < 0.5:
        body[0] &= 0x3F


DAMAGES = (
    *(flip_a_bit, change_bytes, cut, lengthen, insert_or_delete, splice, write_an_extreme) * 3,
    only_noise,
)


# --- what is fuzzed ------------------------------------------------------------------------------


class Halves(LayerwiseCompressor):
    """What a user may build on :class:`LayerwiseCompressor`: half precision."""

    name = "halves"
    biased = True
    level = 16.0

    def levels(self, layer: Any) -> tuple[float, ...]:
        del layer
        return (16.0,)

    def wire_bytes(self, numel: int, level: float, *, shape: Any = None) -> int:
        del level, shape
        return 9 + 2 * numel

    def encode(self, x: Tensor, level: float, key: int) -> Tensor:
        del level, key
        return x.clamp(-65504, 65504).half().view(torch.uint8)

    def decode(self, code: Tensor, numel: int) -> Tensor:
        if code.numel() != 2 * numel:
            raise WireError(f"halves: {code.numel()} bytes for {numel} elements")
        return code.clone().view(torch.float16).float()


@dataclass
class Subject:
    """A compressor and good payloads of one bucket's layers.

    Args:
        spec: the compressor's specification.
        compressor: itself.
        sizes: elements of each layer.
        bodies: good payloads, at least one.
        decoded: what the reference makes of each.
    """

    spec: str
    compressor: Any
    sizes: tuple[int, ...]
    bodies: list[bytes] = field(default_factory=list)
    decoded: list[Any] = field(default_factory=list)

    @property
    def offsets(self) -> np.ndarray:
        """Where each layer begins, in one vector."""
        return np.cumsum([0, *self.sizes])

    def compress(self, x: Tensor, scale: float) -> bytes:
        """A payload of ``x``, at the level of the options or another."""
        level = self.compressor.level
        if isinstance(self.compressor, SparseCompressor):
            level = level * scale if self.compressor.name == "threshold" else min(1.0, level * scale)
        body, _ = self.compressor.compress_layers_(
            LayerBatch(x, self.offsets, [level] * len(self.sizes))
        )
        return body.numpy().tobytes()


def members(only: str = "") -> dict[str, Any]:
    """Every compressor whose specification contains ``only``."""
    covered = {spec.partition(":")[0] for spec in SPECS}
    specs = [*SPECS, *(name for name in REGISTRY if name not in covered)]
    found: dict[str, Any] = {spec: parse(spec) for spec in specs}
    found[Halves.name] = Halves()
    return {spec: member for spec, member in found.items() if only in spec}


def prepare(only: str = "") -> list[Subject]:
    """Good payloads of these compressors, for every choice of layers."""
    subjects = [
        Subject(spec, member, sizes)
        for spec, member in members(only).items()
        for sizes in LAYERS
        if len(sizes) == 1 or not isinstance(member, LinearCompressor)
    ]
    for number, subject in enumerate(subjects):
        generator = torch.Generator().manual_seed(number)
        for scale in (1.0, 12.0, 0.1):
            x = torch.randn(sum(subject.sizes), generator=generator) ** 3
            if isinstance(subject.compressor, LinearCompressor):
                sent = subject.compressor.compress_(
                    x, subject.compressor.level, LayerContext(key=5)
                ).data
                subject.bodies.append(sent.view(torch.uint8).numpy().tobytes())
                continue
            if scale == 0.1 and len(subject.sizes) > 1:
                x[0] = torch.nan  # a mark
            subject.bodies.append(subject.compress(x, scale))
            with reference_kernels():
                subject.decoded.append(outcome(add, subject, as_tensor(subject.bodies[-1]), plain))
    return subjects


def as_tensor(data: bytes | bytearray) -> Tensor:
    """As uint8, in ordinary memory."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@contextmanager
def reference_kernels() -> Iterator[None]:
    """The reference in the place of the kernels for host memory."""
    before = BACKENDS["cpu"]
    BACKENDS["cpu"] = "reference"
    try:
        yield
    finally:
        BACKENDS["cpu"] = before


# --- operations: each returns what was found, and the tensors that it wrote to ---------------------

Place = Callable[[int, int, float], Tensor]
"""Room for an output: its number, its elements, and what it holds at first."""
Result = tuple[Any, list[Tensor]]


def plain(number: int, count: int, value: float) -> Tensor:
    """An output in ordinary memory."""
    del number
    return torch.full((count,), value)


def rooms(subject: Subject, where: Place, value: float) -> list[Tensor]:
    """An output for each layer."""
    return [where(number, count, value) for number, count in enumerate(subject.sizes)]


def check_sound(outs: Sequence[Tensor], marks: Sequence[bool]) -> None:
    """Finite, or not finite as a whole and marked."""
    for layer, (out, mark) in enumerate(zip(outs, marks, strict=True)):
        if mark and not bool(out.isnan().all()):
            raise Finding(f"layer {layer} is marked as not finite and holds numbers")
        if not mark and not bool(out.isfinite().all()):
            raise Finding(f"layer {layer} is not finite and not marked")


def add(subject: Subject, body: Tensor, where: Place) -> Result:
    """decompress_layers_add_ to zeros."""
    outs = rooms(subject, where, 0.0)
    try:
        marks = subject.compressor.decompress_layers_add_(body, outs, 1.0).tolist()
    except WireError as error:
        # quantizers promise nothing of what they have written
        return refused(error), outs if isinstance(subject.compressor, SparseCompressor) else []
    check_sound(outs, marks)
    return marks, outs


def add_one(subject: Subject, body: Tensor, where: Place) -> Result:
    """decompress_add_ of one layer."""
    [out] = rooms(subject, where, 0.0)
    try:
        subject.compressor.decompress_add_(Payload(body, out.numel()), out)
    except WireError as error:
        return refused(error), []
    check_sound([out], [bool(out.numel()) and bool(out.isnan().all())])
    return "", [out]


def add_to_sum(subject: Subject, body: Tensor, where: Place) -> Result:
    """decompress_layers_sum_ of three ranks' bodies: as one after the other."""
    good = as_tensor(subject.bodies[0])
    bodies = [body, good, good] if body.numel() % 2 else [good, body, good]
    outs = rooms(subject, where, 3.0)
    added = [torch.zeros_like(out) for out in outs]
    try:
        expected: Any = [subject.compressor.decompress_layers_add_(b, added, 0.5) for b in bodies]
        expected = np.logical_or.reduce(expected).tolist() if subject.sizes else []
    except WireError as error:
        expected = refused(error)
    try:
        found: Any = subject.compressor.decompress_layers_sum_(bodies, outs, 0.5).tolist()
    except WireError as error:
        found = refused(error)
    if found != expected:
        raise Finding(f"the sum says {found}, adding one by one {expected}")
    if isinstance(found, str):
        return found, []
    for out, wanted in zip(outs, added, strict=True):
        found_bits, wanted_bits = out.nan_to_num(1e30), wanted.nan_to_num(1e30)
        # rotated bodies are summed before they are rotated back, which rounds elsewhere
        rotated = getattr(subject.compressor, "rotate", "none") != "none"
        limit = 2.0**-16 * float(wanted_bits.norm()) if rotated else 0.0
        if not bool(((found_bits - wanted_bits).abs() <= limit).all()):
            raise Finding("the sum is not that of adding one by one")
    return found, outs


def clear(subject: Subject, body: Tensor, where: Place) -> Result:
    """clear_layers_: zeros, and nothing else."""
    outs = rooms(subject, where, 7.0)
    found = ""
    try:
        subject.compressor.clear_layers_(body, outs)
    except WireError as error:
        found = refused(error)
    for out in outs:
        if not bool(((out == 7.0) | (out == 0.0)).all()):
            raise Finding("clearing has written something else than zeros")
    return found, outs


def recompress(subject: Subject, body: Tensor, where: Place) -> Result:
    """recompress_layers_, or recompress_ of one layer: sent and left make what they made before."""
    member, total = subject.compressor, sum(subject.sizes)
    x, level = where(0, total, 0.0), member.level * (2 if member.name == "threshold" else 0.3)
    try:
        if len(subject.sizes) == 1:
            less = member.recompress_(Payload(body, total), x, level).data
        else:
            levels = [level] * len(subject.sizes)
            less, _ = member.recompress_layers_(body, x, subject.offsets, levels)
    except WireError as error:
        return refused(error), [x]
    before, after = ([torch.zeros(size) for size in subject.sizes] for _ in range(2))
    marks = member.decompress_layers_add_(body, before, 1.0)
    if not np.array_equal(member.decompress_layers_add_(less, after, 1.0), marks):
        raise Finding("a payload that is compressed again has other marks")
    if not bool(x.isfinite().all()):
        raise Finding("compressing a payload again has left a remainder that is not finite")
    old, new = (torch.cat([*parts, torch.zeros(0)]).double() for parts in (before, after))
    bound = 2.0**-21 * torch.maximum(torch.maximum(old.abs(), new.abs()), x.double().abs()) + 1e-44
    if not bool(((old - new - x).abs() <= bound)[old.isfinite()].all()):
        raise Finding("a payload that is compressed again has lost something")
    return less.tolist(), [x]


def reduce(subject: Subject, body: Tensor, where: Place) -> Result:
    """reduce_layers_ of three ranks' bodies: as summing and compressing; a refusal changes nothing."""
    good, total = as_tensor(subject.bodies[0]), sum(subject.sizes)
    bodies = [body, good, good] if body.numel() % 2 else [good, body, good]
    member, levels = subject.compressor, [subject.compressor.level] * len(subject.sizes)
    results: list[Any] = []
    for way in (GatheredCompressor.reduce_layers_, type(member).reduce_layers_):
        x = where(len(results), total, 0.5)
        try:
            reduced = way(member, bodies, LayerBatch(x, subject.offsets, levels), keeps=True)
            results.append([reduced.nonfinite.tolist(), reduced.body.tolist()])
        except WireError as error:
            results.append(refused(error))
            if not bool((x == 0.5).all()):
                raise Finding("bodies that are refused have changed what was kept") from error
    if results[0] != results[1]:
        raise Finding("reducing in one pass is not what reducing in two passes is")
    if not bool(x.isfinite().all()):
        raise Finding("reducing has left a remainder that is not finite")
    return results[1], [x]


def frames(subject: Subject, body: Tensor, where: Place) -> Result:
    """As an allgather's result: frames, parts, and decoding."""
    try:
        bodies, _ = wire_frame.split_frames(body, BUCKET, 2 * len(subject.sizes), ranks=2)
        codes = [code for each in bodies for code in wire_frame.split_parts(each, 2)]
    except (WireError, TooLargeError) as error:
        return refused(error), []
    results = [add(subject, code, where)[0] for code in codes]
    return next((each for each in results if isinstance(each, str)), results), []


def add_linear(subject: Subject, body: Tensor, where: Place) -> Result:
    """decompress_add_ of what is summed: the number of values decides, and they may be anything."""
    dtype, [numel] = subject.compressor.wire_dtype or torch.float32, subject.sizes
    [out] = rooms(subject, where, 0.0)
    aligned = body.data_ptr() % dtype.itemsize == 0 and body.numel() % dtype.itemsize == 0
    values = body.reshape(-1, dtype.itemsize).view(dtype).view(-1) if aligned else body
    payload = Payload(values, numel, subject.compressor.level, key=5)
    try:
        subject.compressor.decompress_add_(payload, out)
    except WireError as error:
        if aligned and body.numel() == len(subject.bodies[0]):
            raise Finding(f"values in the right number are refused: {error}") from error
        return refused(error), []
    if not aligned or body.numel() != len(subject.bodies[0]):
        raise Finding(f"{body.numel()} bytes are taken for {len(subject.bodies[0])}")
    return "", [out]


# --- schemes ---------------------------------------------------------------------------------------


@dataclass
class ShotSubject(Subject):
    """What one rank receives in one operation of a bucket's step; its payload is the whole of it.

    Args:
        bucket: the bucket.
        topology: the nodes of the ranks.
        rank: which of them.
        number: of the operation.
        sent: of each operation, what each rank contributes.
        received: of each operation, what this rank gets.
        result: the bits of the reduced layers.
    """

    bucket: Any = None
    topology: Topology = SHOTS["two_shot"]
    rank: int = 0
    number: int = 0
    sent: list[dict[int, Tensor]] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    result: list[list[int]] = field(default_factory=list)

    @property
    def is_dense(self) -> bool:
        """Whether what is received are sums in float32, inside a node, which may be anything."""
        return self.topology.is_layered and self.number == len(self.received) - 1

    def receive(self, subject: Subject, body: Tensor, where: Place) -> Result:
        """One rank's step in which ``body`` is what it receives in the operation."""
        del subject, where
        grads = gradients(self.bucket, self.rank)
        try:
            kept = replayed(self, grads, body)
        except (WireError, TooLargeError) as error:
            return refused(error), []
        marks = [bool(grad.isnan().all()) for grad in grads]
        if not self.is_dense:
            check_sound(grads, marks)
        if not bool(kept.isfinite().all()):
            raise Finding("what is kept is not finite")
        if body.numpy().tobytes() == self.bodies[0] and self.result != bits_of(grads):
            raise Finding("undamaged operations do not reduce as in the group of ranks")
        return marks, grads


def bits_of(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The bits of float32 tensors."""
    return [each.view(torch.int32).flatten().tolist() for each in tensors]


def gradients(bucket: Bucket, rank: int) -> list[Tensor]:
    """Of one rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(layer.shape, generator=generator) ** 3 for layer in bucket.layers]


def replayed(subject: ShotSubject, grads: list[Tensor], body: Tensor) -> Tensor:
    """One rank's step with what the others have sent, and ``body``; returns what is kept."""
    from hvd_adaptive.comm.local_group import LocalGroup, LocalRank, LocalTransport
    from hvd_adaptive.engine.exchange import Exchange
    from hvd_adaptive.telemetry import Meter

    class Replay(LocalTransport):
        """Gives back what was received, but for this rank's own part and the damaged operation."""

        operation = -1

        def submit(self, request: Any, name: str, step: int) -> Callable[[], Tensor]:
            del name, step
            self.operation += 1
            result = subject.received[self.operation]
            if self.operation == subject.number:
                result = body
            elif request.operation == "allgather":
                sent = subject.sent[self.operation] | {self.rank: request.tensor}
                result = torch.cat([sent[each] for each in self.members(request.group)])
            return lambda: result

    group = LocalGroup(subject.topology.size, subject.topology)
    exchange = Exchange(
        Replay(LocalRank(group, subject.rank), hvd_average()), Meter(), "fuzz", rank=subject.rank
    )
    return stepped(exchange, subject.bucket, subject.topology.size, grads)


def hvd_average() -> int:
    """The operation of means."""
    import horovod.torch as hvd

    return int(hvd.Average)


def stepped(exchange: Any, bucket: Any, ranks: int, grads: list[Tensor]) -> Tensor:
    """Reduce one bucket's gradients in place; returns all that feedback keeps."""
    rule = parse_rule("ef")
    assert rule is not None
    state = rule.new_state(FeedbackContext(lambda _: 0.1, lambda: ranks))
    state.attach([bucket], {})
    exchange.attach([bucket], {bucket.index: state})
    exchange.begin_step(0)
    exchange.start(bucket, grads)
    exchange.finish()
    state.keep_owned([])
    return torch.cat([held for slots in state.kept().values() for held in slots.values()])


Recording = tuple[list[dict[int, Tensor]], list[dict[int, Tensor]], list[list[list[int]]]]
"""Of each operation, what each rank sent and what it got; of each rank, the reduced layers' bits."""


def recorded(bucket: Bucket, topology: Topology) -> Recording:
    """An undamaged step of all ranks."""
    from hvd_adaptive.comm.local_group import LocalGroup, LocalTransport
    from hvd_adaptive.engine.exchange import Exchange
    from hvd_adaptive.telemetry import Meter

    sent, received = ([{} for _ in range(MOST_OPERATIONS)] for _ in range(2))

    class Recorder(LocalTransport):
        operation = -1

        def submit(self, request: Any, name: str, step: int) -> Callable[[], Tensor]:
            self.operation += 1
            number, finish = self.operation, super().submit(request, name, step)
            sent[number][self.rank] = request.tensor.clone()

            def wait() -> Tensor:
                result = finish()
                received[number][self.rank] = result.clone()
                return result

            return wait

    def step(rank: Any) -> list[list[int]]:
        exchange = Exchange(Recorder(rank, hvd_average()), Meter(), "fuzz", rank=rank.rank)
        grads = gradients(bucket, rank.rank)
        stepped(exchange, bucket, topology.size, grads)
        return bits_of(grads)

    return sent, received, LocalGroup(topology.size, topology).run(step)


def prepare_shots(only: str = "") -> list[Subject]:
    """Every operation of bytes of every rank's step, for each scheme and pair of compressors."""
    from hvd_adaptive.engine.routing import routes_of

    subjects: list[Subject] = []
    for (scheme, topology), (spec, small) in itertools.product(SHOTS.items(), SHOT_SPECS):
        name = f"{scheme} of {spec} and {small}"
        if only not in name:
            continue
        config = CompressionConfig.of(spec, {"small": small}, "ef", scheme)
        (bucket,) = build_buckets(SHOT_LAYERS, routes_of(config, SHOT_LAYERS, frozenset()), 1 << 30)
        sent, received, results = recorded(bucket, topology)
        for number, rank in itertools.product(range(MOST_OPERATIONS), range(topology.size)):
            own = [each[rank] for each in received if each]
            if number >= len(own) or own[number].dtype != torch.uint8:
                continue
            where = (bucket, topology, rank, number, sent, own, results[rank])
            body = own[number].numpy().tobytes()
            subjects.append(ShotSubject(name, None, (1,), [body], [], *where))
    return subjects


def refused(error: ValueError) -> str:
    """What a refusal said."""
    return f"refused: {error}"


def operations(subject: Subject) -> list[Callable[[Subject, Tensor, Place], Result]]:
    """What takes this subject's payloads."""
    if isinstance(subject, ShotSubject):
        return [subject.receive]
    if isinstance(subject.compressor, LinearCompressor):
        return [add_linear]
    found = [add, add_to_sum, frames]
    if isinstance(subject.compressor, GatheredCompressor) and not subject.compressor.whole_model:
        found.append(reduce)
    if len(subject.sizes) == 1:
        found.append(add_one)
    if isinstance(subject.compressor, SparseCompressor):
        found += [clear, recompress]
    return found


def outcome(
    act: Callable[[Subject, Tensor, Place], Result], subject: Subject, body: Tensor, where: Place
) -> tuple[Any, list[list[int]]]:
    """What an operation found, and the bits of what it wrote."""
    found, written = act(subject, body, where)
    return found, [out.view(torch.int32).tolist() for out in written]


# --- cases ---------------------------------------------------------------------------------------


class Fuzzer:
    """Runs cases, each known by its number."""

    def __init__(self, seed: int, subjects: list[Subject]) -> None:
        self.seed = seed
        self.subjects = subjects
        self.large = [s for s in subjects if sum(s.sizes) > SMALL]
        self.shots = [s for s in subjects if isinstance(s, ShotSubject)]
        rest = [s for s in subjects if sum(s.sizes) <= SMALL]
        self.small = [s for s in rest if not isinstance(s, ShotSubject)]
        most = max(len(body) for s in subjects for body in s.bodies)
        self.payload = Guard(8 * most + 4096)
        self.outs = [Guard(4 * max(sum(s.sizes) for s in subjects) + 64) for _ in range(4)]
        thread_buffers._decoded = ExactRoom()  # type: ignore[assignment]
        thread_buffers._candidates = ExactRoom()  # type: ignore[assignment]

    def case(self, number: int) -> bool:
        """One case; returns whether the payload was refused."""
        rng = random.Random((self.seed << 64) + number)
        subject = rng.choice(self._some_subjects(rng.random()))
        act = rng.choice(operations(subject))
        which = rng.randrange(len(subject.bodies))
        body = bytearray(subject.bodies[which])
        if act is frames:
            body = bytearray(framed(subject, which))
        damaged = rng.random() >= 1 / 16
        for _ in range(rng.choice((1, 1, 1, 2, 3)) if damaged else 0):
            rng.choice(DAMAGES)(rng, body, rng.choice(self.subjects).bodies[0])
        del body[self.payload.size :]
        where = self._places(rng)
        found = act(subject, self.payload.hold(body, rng.random() < 0.5), where)
        if not damaged:
            self._check_undamaged(act, subject, which, found)
        elif rng.randrange(ASKED) == 0 and sum(subject.sizes) <= SMALL:
            self._ask_the_reference(act, subject, body, found)
        return isinstance(found[0], str) and found[0].startswith("refused")

    def _some_subjects(self, share: float) -> Sequence[Subject]:
        """Those that take long less often: a whole step takes ten times as long as a decoder."""
        few = self.large if share < 0.02 else self.shots if share < 0.15 else []
        return few or self.small or self.shots or self.large

    def _places(self, rng: random.Random) -> Place:
        ends = [rng.random() < 0.5 for _ in self.outs]
        return lambda number, count, value: self.outs[number].hold_floats(count, ends[number], value)

    def _check_undamaged(self, act: Any, subject: Subject, which: int, found: Result) -> None:
        if isinstance(found[0], str) and found[0].startswith("refused"):
            raise Finding(f"an undamaged payload is {found[0]}")
        if act is add:
            marks, written = subject.decoded[which]
            if (marks, written) != (found[0], [out.view(torch.int32).tolist() for out in found[1]]):
                raise Finding("an undamaged payload is not what the reference decodes it to")

    def _ask_the_reference(self, act: Any, subject: Subject, body: bytearray, found: Result) -> None:
        written = [out.view(torch.int32).tolist() for out in found[1]]
        with reference_kernels():
            expected = outcome(act, subject, as_tensor(body), plain)
        if found[0] != expected[0]:
            raise Finding(f"the kernels say {found[0]}, the reference {expected[0]}")
        if written != expected[1]:
            raise Finding("the kernels have written something else than the reference")


def framed(subject: Subject, which: int) -> bytes:
    """What an allgather of two ranks gives, each of which sends two parts."""
    frame = wire_frame.join_parts([as_tensor(subject.bodies[which]), as_tensor(subject.bodies[0])])
    wire_frame.write_header(frame, BUCKET, 2 * len(subject.sizes))
    return 2 * frame.numpy().tobytes()


# --- processes -----------------------------------------------------------------------------------


class Board:
    """What a worker is doing, in memory that outlives it: case, refusals, and what was found."""

    COUNTS = struct.Struct("<qqqq")
    TEXT = 4096

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.COUNTS.size + self.TEXT)

    def note(self, case: int, done: int, refused_: int, text: str = "") -> None:
        """Of the case that begins, or of what it found."""
        data = text.encode()[: self.TEXT]
        self._memory[: self.COUNTS.size] = self.COUNTS.pack(case, done, refused_, len(data))
        self._memory[self.COUNTS.size : self.COUNTS.size + len(data)] = data

    def read(self) -> tuple[int, int, int, str]:
        """What was noted last."""
        case, done, refused_, length = self.COUNTS.unpack(self._memory[: self.COUNTS.size])
        text = self._memory[self.COUNTS.size : self.COUNTS.size + length]
        return case, done, refused_, text.decode(errors="replace")


def work(fuzzer: Fuzzer, cases: range, board: Board) -> int:
    """Run cases until one finds something; returns the exit status."""
    faulthandler.enable()
    refusals = 0
    for done, number in enumerate(cases):
        board.note(number, done, refusals)
        try:
            refusals += fuzzer.case(number)
        except Exception as error:
            if not isinstance(error, Finding):
                traceback.print_exc()
            board.note(number, done, refusals, f"{type(error).__name__}: {error}")
            return 1
    board.note(-1, len(cases), refusals)
    return 0


def search(fuzzer: Fuzzer, cases: range, jobs: int = 1) -> tuple[int, int, str]:
    """Run cases in processes of their own, which may crash: (cases run, refused, what was found)."""
    boards, workers = [Board() for _ in range(jobs)], {}
    for job, board in enumerate(boards):
        worker = os.fork()
        if worker == 0:
            try:
                os._exit(work(fuzzer, cases[job::jobs], board))
            finally:
                os._exit(2)  # not what waits in the parent's buffers or at its exit
        workers[worker] = board
    found = ""
    while workers:
        worker, status = os.wait()
        board = workers.pop(worker)
        if status == 0 or found:
            continue
        case, _, _, text = board.read()
        if os.WIFSIGNALED(status):
            text = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        found = f"case {case} of seed {fuzzer.seed}: {text or f'exit status {status >> 8}'}"
        for other in workers:
            os.kill(other, signal.SIGKILL)
    counts = [board.read() for board in boards]
    return sum(each[1] for each in counts), sum(each[2] for each in counts), found


def main(arguments: Sequence[str] | None = None) -> int:
    """Search; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, help="how many (default: 100,000)")
    parser.add_argument(
        "--seed", type=int, default=1, help="another one gives other cases (default: 1)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--compressor", default="", help="only those whose specification contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    given = parser.parse_args(arguments)
    if given.cases < 1 or given.first < 0 or given.jobs < 1:
        parser.error("--cases and --jobs are 1 or more, --first is 0 or more")
    torch.set_num_threads(1)
    start = time.perf_counter()
    subjects = prepare(given.compressor) + prepare_shots(given.compressor)
    if not subjects:
        parser.error(f"no compressor's specification contains {given.compressor!r}: {', '.join(SPECS)}")
    cases = range(given.first, given.first + given.cases)
    done, refusals, found = search(Fuzzer(given.seed, subjects), cases, given.jobs)
    seconds = time.perf_counter() - start
    print(
        f"{done} cases, {refusals} refused, {done - refusals} decoded, in {seconds:.0f} s", flush=True
    )
    if found:
        only = f" --compressor {given.compressor}" if given.compressor else ""
        case = found.split()[1]
        print(f"FOUND: {found}")
        print(f"again: python {sys.argv[0]} --seed {given.seed} --first {case} --cases 1{only}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
