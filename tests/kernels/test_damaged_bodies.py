"""Damaged bodies: what is found, and that nothing is written or read outside."""

from __future__ import annotations

import ctypes
import mmap
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.wire import ValueFormat, WireError
from hvd_adaptive.wire.varint import write_varint
from tests.kernels.inputs import (
    MODULES,
    bits,
    compress,
    counts_of,
    damage,
    finding,
    numbers,
    offsets_of,
    tensor_of,
)


def layer_bytes(
    count: int, values: ValueFormat, stream: bytes, data: bytes, table: bytes = b""
) -> bytes:
    header = write_varint(count << 4 | values << 1)
    return header + write_varint(len(stream)) + table + stream + data


ONE = np.float32(1).tobytes()
FP32 = ValueFormat.fp32


def stream_of(text: str) -> bytes:
    """Bits written in the order in which they are read, as bytes."""
    text = text.replace(" ", "")
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


DAMAGED = {
    "the bytes end before": [
        b"",
        b"\x80",
        layer_bytes(1, FP32, stream_of("000000 1"), ONE[:3]),
        layer_bytes(1, FP32, stream_of("000000"), ONE),
        layer_bytes(3, FP32, stream_of("000000 1 1"), ONE * 3),
        layer_bytes(1, FP32, b"", ONE),
        write_varint(16) + write_varint(2**62) + b"1234567890",
    ],
    "a varint is longer": [b"\x88\x00", b"\x80" * 9 + b"\x01", b"\xff" * 12, b"\x10\x81\x00"],
    "more values than": [
        layer_bytes(11, FP32, bytes(4), ONE * 11),
        write_varint(1 << 4 | 1) + b"\x01\x40" + ONE,
        write_varint(2**59) + b"\x01\x40",
    ],
    "not in the expected format": [
        layer_bytes(1, ValueFormat.fp16, stream_of("000000 1"), b"\x00\x3c"),
        write_varint(ValueFormat.int8 << 1),
        write_varint(1 << 4 | 5 << 1) + b"\x01\x40" + ONE,
        write_varint(7 << 1),
    ],
    "a code's parameter": [layer_bytes(1, FP32, stream_of("101000 1 00000"), ONE)],
    "a gap is longer": [
        layer_bytes(1, FP32, stream_of("000000") + bytes(40), ONE),
        layer_bytes(2, FP32, stream_of("000000 1") + bytes(30), ONE * 2),
        layer_bytes(1, FP32, stream_of("000001 00001 0000"), ONE),
        layer_bytes(1, FP32, stream_of("000001") + bytes(40), ONE),
    ],
    "an index is past the end": [
        layer_bytes(1, FP32, stream_of("000000 00000 00000 1"), ONE),
        layer_bytes(2, FP32, stream_of("000000 00000 00001 1"), ONE * 2),
        layer_bytes(1, FP32, stream_of("110000 01 111"), ONE),
        layer_bytes(1, FP32, stream_of("000001 0001 110"), ONE),
    ],
    "the index stream is not as long": [layer_bytes(1, FP32, stream_of("000000 1") + b"\x00", ONE)],
    "the padding": [layer_bytes(1, FP32, stream_of("000000 1 1"), ONE)],
    "a value or a scale": [
        layer_bytes(1, FP32, stream_of("000000 1"), np.float32(np.nan).tobytes()),
        layer_bytes(1, FP32, stream_of("000000 1"), np.float32(-np.inf).tobytes()),
    ],
    "bytes are left over": [b"\x00\x00", layer_bytes(1, FP32, stream_of("000000 1"), ONE + b"1")],
}


@MODULES
@pytest.mark.parametrize("message", DAMAGED)
def test_damage_is_named_and_nothing_is_written(kernels: ModuleType, message: str) -> None:
    for data in DAMAGED[message]:
        out = torch.zeros(10)
        body = tensor_of(data)
        with pytest.raises(WireError, match=f"{message}.*layer 0 of 10 elements"):
            kernels.decompress_add_(body, [out], 1.0, FP32)
        assert not out.any() or message == "bytes are left over"


@MODULES
@pytest.mark.parametrize("how", [ValueFormat.fp16, ValueFormat.bf16, ValueFormat.int8])
def test_values_that_no_encoder_sends_are_damage(kernels: ModuleType, how: ValueFormat) -> None:
    data = {"fp16": b"\x00\x7c", "bf16": b"\xc0\x7f", "int8": b"\x00\x00\xc0\x7f\x01"}[how.name]
    body = layer_bytes(1, how, stream_of("000000 1"), data)
    with pytest.raises(WireError, match="a value or a scale is NaN or Inf"):
        kernels.decompress_add_(tensor_of(body), [torch.zeros(4)], 1.0)


def written(gaps: list[int]) -> str:
    """A block of gaps as wire/sparse.py describes it, bit by bit."""
    mean, logs = sum(gaps) // len(gaps), sum((gap + 1).bit_length() - 1 for gap in gaps)
    middle, texts = max(1, mean.bit_length() - 1), []
    for r in (middle - 1, middle, middle + 1):
        texts.append(f"{r:05b}"[::-1] + "0" + "".join("0" * (gap >> r) + "1" for gap in gaps))
        texts[-1] += "".join(f"{gap % 2**r:0{r}b}"[::-1] for gap in gaps if r)
    r = logs // len(gaps)
    digits = [f"{gap + 2**r:b}" for gap in gaps]  # each begins with the one
    texts.append(f"{r:05b}"[::-1] + "1" + "".join("0" * (len(each) - 1 - r) + "1" for each in digits))
    texts[-1] += "".join(each[:0:-1] for each in digits)
    return min(texts, key=len)


@MODULES
@settings(max_examples=60, deadline=None)  # the first one loads kernels
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90), st.integers(0, 4000)), min_size=1))
@example([0] * 300)
@example([1, 0, 0, 2, 0, 0, 1, 0] * 40 + [3000] * 2)
@example([60000])
@example([0, 1, 5, 2, 90] * 1700)
def test_positions_are_sent_as_they_are_described(kernels: ModuleType, gaps: list[int]) -> None:
    indices = np.cumsum(np.array(gaps) + 1) - 1
    x = np.zeros(indices[-1] + 1, np.float32)
    x[indices] = 1
    blocks = [written(gaps[start : start + 256]) for start in range(0, len(gaps), 256)]
    groups = [len("".join(blocks[start : start + 16])) for start in range(0, len(blocks), 16)]
    table = b"".join(bits.to_bytes(4, "little") for bits in groups[:-1])
    stream = stream_of("".join(blocks))
    expected = layer_bytes(len(gaps), FP32, stream, ONE * len(gaps), table)
    assert bytes(compress(kernels, x, len(gaps), FP32)[0].tolist()) == expected


def test_positions_that_crowd_take_fewer_bits_than_scattered_ones() -> None:
    rng = np.random.default_rng(18)
    rows = rng.random((2000, 100)) * np.where(rng.random((2000, 1)) < 0.1, 1, 0.01)
    x = torch.from_numpy(rows.astype(np.float32))
    crowded, scattered = (
        cpu.position_bits(each, np.array([2000]))[0, 1]
        for each in (x, x.view(-1)[rng.permutation(200_000)])
    )
    # Entropy: 5.2 bits, as 2,000 of 20,000 in 200 of 2,000 rows have; one Rice parameter takes 8.4.
    assert crowded / 2000 < 5.9
    assert 8.0 < scattered / 2000 < 8.2


@MODULES
def test_formats_that_there_are_not_are_damage_whatever_is_expected(kernels: ModuleType) -> None:
    for code in (5, 6, 7):
        body = write_varint(1 << 4 | code << 1) + b"\x01\x40" + ONE * 4
        with pytest.raises(WireError, match="in none that there is"):
            kernels.decompress_add_(tensor_of(body), [torch.zeros(4)], 1.0)


@MODULES
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ONE + np.float32(np.inf).tobytes() + b"\x01", "a value or a scale"),
        (np.float32(np.nan).tobytes() + ONE + b"\x01", "a value or a scale"),
        (ONE * 2 + b"\x05", "the padding of the index stream or of the signs"),
        (ONE * 2, "the bytes end before"),
    ],
)
def test_damaged_signs_are_found(kernels: ModuleType, data: bytes, message: str) -> None:
    body = layer_bytes(2, ValueFormat.sign, stream_of("000000 1 1"), data)
    with pytest.raises(WireError, match=message):
        kernels.decompress_add_(tensor_of(body), [torch.zeros(4)], 1.0)


@MODULES
def test_layers_before_the_damaged_one_are_added_and_no_others(kernels: ModuleType) -> None:
    good = layer_bytes(1, FP32, stream_of("000000 001"), ONE)
    bad = layer_bytes(1, FP32, stream_of("000000 1"), ONE[:2])
    outs = [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(WireError, match="layer 1 of 4"):
        kernels.decompress_add_(torch.tensor(list(good + bad), dtype=torch.uint8), outs, 3.0)
    assert outs[0].tolist() == [0, 0, 3, 0]
    assert not outs[1].any()


class Trap:
    """Memory that ends at a page which nobody may read: one byte too far and the process dies."""

    def __init__(self, pages: int) -> None:
        self.size = pages * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert libc.mprotect(address + self.size, mmap.PAGESIZE, 0) == 0  # PROT_NONE
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.size)

    def hold(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """``data`` as a tensor whose last byte is the last that may be read."""
        place = self.bytes[self.size - data.size :]
        place.numpy()[:] = data
        return place


class Guarded:
    """Outputs with zones between them that no decoder may write to."""

    ZONE = 64

    def __init__(self, sizes: list[int]) -> None:
        self.all = torch.full((sum(sizes) + self.ZONE * (len(sizes) + 1),), 7.0)
        self.zones = np.ones(self.all.numel(), bool)
        self.outs = []
        start = self.ZONE
        for size in sizes:
            self.outs.append(self.all[start : start + size])
            self.zones[start : start + size] = False
            start += size + self.ZONE

    def intact(self) -> bool:
        return bool((self.all.numpy()[self.zones] == 7.0).all())


def bodies_to_damage(sizes: list[int]) -> list[npt.NDArray[np.uint8]]:
    """Good bodies of all formats and several densities for the same layers."""
    parts = [numbers("normal", size, 12) for size in sizes]
    bodies = []
    for values in ValueFormat:
        for share in (0.002, 0.05, 0.7):
            x = torch.from_numpy(np.concatenate(parts))
            body, _ = cpu.compress_(x, offsets_of(parts), counts_of(parts, share), values)
            bodies.append(body.numpy())
    return bodies


SIZES_TO_DAMAGE = [300, 0, 1, 4000]


def outcome(kernels: ModuleType, body: Tensor) -> tuple[str, list[list[int]]]:
    outs = [torch.zeros(size) for size in SIZES_TO_DAMAGE]
    x, cleared = torch.ones(sum(SIZES_TO_DAMAGE)), [torch.ones_like(out) for out in outs]
    offsets = offsets_of([out.numpy() for out in outs])
    message = ""
    for act in (
        lambda: kernels.decompress_add_(body, outs, 1.0),
        lambda: kernels.clear_(body, cleared),
        lambda: kernels.recompress_(body, x, offsets, np.array([9, 5, 1, 90]), ValueFormat.bf16),
    ):
        try:
            message += str(act())
        except WireError as error:
            message += str(error)
    return message, [bits(out).tolist() for out in [*outs, *cleared, x]]


def test_cpu_and_reference_find_the_same_damage() -> None:
    rng = np.random.default_rng(15)
    bodies = bodies_to_damage(SIZES_TO_DAMAGE)
    for i in range(1500):
        body = torch.from_numpy(damage(bodies[i % len(bodies)], rng))
        assert outcome(cpu, body) == outcome(reference, body)


@pytest.mark.parametrize("zeros", [24, 26, 30, 45])
@pytest.mark.parametrize("head", ["111000", "010000", "110001", "101101"])
def test_cpu_and_reference_say_the_same_of_a_gap_that_is_too_long(zeros: int, head: str) -> None:
    # the second gap's zeros are all in the word that the first was read from
    stream = stream_of(head + "1" + 7 * "0" + zeros * "0" + "1" + 25 * "01")
    body = tensor_of(layer_bytes(2, FP32, stream, ONE * 2))
    said = [
        finding(kernels.decompress_add_, body, [torch.zeros(3000)], 1.0) for kernels in (cpu, reference)
    ]
    assert said[0] == said[1] != ""


def add_each(bodies: list[Tensor], outs: list[Tensor], scale: float) -> None:
    for body in bodies:
        cpu.decompress_add_(body, outs, scale)


def test_two_bodies_at_once_are_checked_as_one_by_one_and_never_read_past_their_ends() -> None:
    rng = np.random.default_rng(17)
    bodies, found = bodies_to_damage(SIZES_TO_DAMAGE), 0
    trap, other, guarded = Trap(pages=8), Trap(pages=8), Guarded(SIZES_TO_DAMAGE)
    for i in range(20_000):
        pair = [
            trap.hold(damage(bodies[i % len(bodies)], rng)),
            other.hold(bodies[i * 7 % len(bodies)]),
        ]
        pair = pair[:: 1 if i % 2 else -1]
        expected = [torch.zeros(size) for size in SIZES_TO_DAMAGE]
        message = finding(add_each, pair, expected, 1.0)
        assert finding(cpu.decompress_sum_, pair, guarded.outs, 1.0) == message
        if message:
            found += 1
            continue
        for out, wanted in zip(guarded.outs, expected, strict=True):
            assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
    assert guarded.intact()
    assert found > 10_000
