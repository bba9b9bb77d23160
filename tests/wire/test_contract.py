"""The wire: sizes, varints, frames, and what damaged frames are told."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.kernels import SelectionRule
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.cpu.compression import bound_sizes
from hvd_adaptive.wire import TooLargeError, ValueFormat, WireError
from hvd_adaptive.wire import frame as wire_frame
from hvd_adaptive.wire import sparse as wire_sparse
from hvd_adaptive.wire import varint as wire_varint

BUCKET, LAYERS = 5, 2


def gathered(sizes: list[int]) -> torch.Tensor:
    """What an allgather of one frame a rank gives; the body of rank r is filled with r + 1."""
    bodies = [torch.full((size,), rank + 1, dtype=torch.uint8) for rank, size in enumerate(sizes)]
    return torch.cat([wire_frame.frame(body, BUCKET, LAYERS) for body in bodies])


@given(st.integers(0, 2**63 - 1))
def test_a_varint_is_leb128_of_the_length_that_is_said(value: int) -> None:
    data = wire_varint.write_varint(value)
    assert len(data) == wire_varint.varint_bytes(value)
    assert sum((byte & 0x7F) << (7 * i) for i, byte in enumerate(data)) == value
    assert [byte >= 0x80 for byte in data] == [True] * (len(data) - 1) + [False]


@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_varint_takes_no_number_that_decoders_could_not_hold(value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        wire_varint.write_varint(value)


@given(st.integers(0, 10**7), st.floats(1e-6, 1.0))
def test_a_density_asks_for_the_nearest_count_and_at_least_one(numel: int, density: float) -> None:
    count = wire_sparse.count_of(numel, density)
    assert count == 0 if numel == 0 else 1 <= count <= numel
    assert abs(count - density * numel) <= 0.5 or count == 1


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_outside_0_to_1_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="density"):
        wire_sparse.count_of(100, density)


def indices_of(kind: str, numel: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rising indices that are easy or nasty for the index coding."""
    match kind:
        case "scattered":
            return np.sort(rng.choice(numel, count, replace=False))
        case "first":
            return np.arange(count)
        case "last":
            return np.arange(numel - count, numel)
        case "even":
            return np.arange(count) * (numel // count) + numel // count - 1
        case _:  # two lengths of gaps in turn: the worst for one parameter a block
            gaps = np.tile([0, 2 * (numel // count) - 2], count)[:count]
            return np.minimum(np.cumsum(gaps + 1) - 1, numel - count + np.arange(count))


@settings(deadline=None)  # the first call may compile
@given(
    st.sampled_from(["scattered", "first", "last", "even", "alternating"]),
    st.integers(1, 20_000),
    st.floats(0, 1),
    st.sampled_from(ValueFormat),
    st.integers(0, 2**32 - 1),
)
def test_no_layer_is_larger_than_its_bound(
    kind: str, numel: int, share: float, values: ValueFormat, seed: int
) -> None:
    count = max(1, int(share * numel))
    x = torch.zeros(numel)
    x[torch.from_numpy(indices_of(kind, numel, count, np.random.default_rng(seed)))] = 1.0
    body, stats = cpu.compress_(x, np.array([0, numel]), np.array([count]), values)
    assert stats[0, 2] == count
    assert body.numel() <= wire_sparse.max_sparse_bytes(numel, count, values)


@pytest.mark.parametrize("values", ValueFormat)
@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.02, 0.05, 0.07, 0.1])
def test_the_bound_is_within_3_percent_for_scattered_indices_or_7_with_signs(
    density: float, values: ValueFormat
) -> None:
    numel = 1_000_000
    count = wire_sparse.count_of(numel, density)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    body, _ = cpu.compress_(x, np.array([0, numel]), np.array([count]), values)
    bound = wire_sparse.max_sparse_bytes(numel, count, values)
    slack = 1.07 if values is ValueFormat.sign else 1.03
    assert body.numel() <= bound <= slack * body.numel()


@pytest.mark.parametrize(("values", "bits"), [("int8", 17), ("bf16", 25), ("fp16", 25), ("fp32", 41)])
def test_one_percent_costs_at_most_so_many_bits_a_value(values: str, bits: int) -> None:
    numel, count = 1_000_000, 10_000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    body, _ = cpu.compress_(x, np.array([0, numel]), np.array([count]), ValueFormat[values])
    assert body.numel() * 8 / count <= bits


@given(st.integers(1, 10**6), st.data(), st.sampled_from(ValueFormat))
def test_the_bound_grows_with_the_count(numel: int, data: st.DataObject, values: ValueFormat) -> None:
    count = data.draw(st.integers(0, numel - 1))
    bound = wire_sparse.max_sparse_bytes(numel, count, values)
    assert bound <= wire_sparse.max_sparse_bytes(numel, count + 1, values)


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.sampled_from(ValueFormat))
def test_the_kernel_and_the_wire_agree_on_the_bound(
    numel: int, count: int, values: ValueFormat
) -> None:
    bound = bound_sizes(np.array([0, numel]), np.array([count]), int(values), int(SelectionRule.topk))[
        0
    ]
    assert bound == wire_sparse.max_sparse_bytes(numel, count, values)


@pytest.mark.parametrize("sizes", [[0], [3], [1, 0, 70_000], [5] * 16])
def test_frames_come_back_as_they_were_sent(sizes: list[int]) -> None:
    bodies = wire_frame.split_frames(gathered(sizes), BUCKET, LAYERS, ranks=len(sizes))[0]
    assert [body.tolist() for body in bodies] == [[r + 1] * size for r, size in enumerate(sizes)]


def test_bodies_are_views_of_the_gathered_buffer() -> None:
    buffer = gathered([4, 4])
    wire_frame.split_frames(buffer, BUCKET, LAYERS, ranks=2)[0][1][0] = 99
    assert buffer[2 * wire_frame.HEADER_BYTES + 4] == 99


def test_a_header_in_reserved_room_is_the_frame() -> None:
    offsets, counts = np.array([0, 50]), np.array([7])
    x = torch.arange(50.0)
    body, _ = cpu.compress_(x.clone(), offsets, counts, ValueFormat.bf16)
    framed, _ = cpu.compress_(
        x.clone(), offsets, counts, ValueFormat.bf16, reserve=wire_frame.HEADER_BYTES
    )
    wire_frame.write_header(framed, BUCKET, 1)
    assert torch.equal(framed, wire_frame.frame(body, BUCKET, 1))


def test_a_frame_says_that_a_layer_was_not_finite() -> None:
    buffer = gathered([3, 3])
    assert not wire_frame.split_frames(buffer, BUCKET, LAYERS, ranks=2)[1]
    wire_frame.write_header(buffer[wire_frame.HEADER_BYTES + 3 :], BUCKET, LAYERS, nonfinite=True)
    assert wire_frame.split_frames(buffer, BUCKET, LAYERS, ranks=2)[1]


def test_a_buffer_without_room_for_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="15 bytes"):
        wire_frame.write_header(torch.zeros(15, dtype=torch.uint8), 0, 1)


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (0, "<H", 0x1234, f"magic number {0x1234} instead of {wire_frame.MAGIC}"),
        (2, "<B", 9, "format version 9 instead of 5"),
        (3, "<B", 2, "flags 2 instead of 0"),
        (4, "<I", 2**32 - 1, "its body ends at byte"),
        (4, "<I", 2, "1 bytes follow the last frame"),
        (8, "<I", 6, "bucket 6 instead of 5"),
        (12, "<I", 3, "number of layers 3 instead of 2"),
    ],
)
def test_a_damaged_header_is_named_with_rank_bucket_and_difference(
    offset: int, code: str, value: int, message: str
) -> None:
    buffer = gathered([3, 3])
    start = wire_frame.HEADER_BYTES + 3 + offset
    data = struct.pack(code, value)
    buffer[start : start + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(WireError, match=f"rank 1 for bucket 5.*{message}"):
        wire_frame.split_frames(buffer, BUCKET, LAYERS, ranks=2)


@pytest.mark.parametrize("size", [0, 15, 18, 19, 34, 37])
def test_frames_cut_short_are_found(size: int) -> None:
    with pytest.raises(WireError, match=r"of rank [01] for bucket 5"):
        wire_frame.split_frames(gathered([3, 3])[:size], BUCKET, LAYERS, ranks=2)


def test_bytes_of_more_ranks_than_expected_are_found() -> None:
    with pytest.raises(WireError, match="19 bytes follow"):
        wire_frame.split_frames(gathered([3, 3]), BUCKET, LAYERS, ranks=1)


def test_a_frame_that_is_too_large_is_told_to_all_ranks_in_its_place() -> None:
    small = wire_frame.frame(torch.zeros(3, dtype=torch.uint8), BUCKET, LAYERS)
    instead = wire_frame.too_large(3 * 2**30, BUCKET, LAYERS)
    message = f"rank 1 has {3 * 2**30} bytes to send for bucket 5.*at most {(2**31 - 1) // 2}"
    with pytest.raises(TooLargeError, match=message):
        wire_frame.split_frames(torch.cat([small, instead]), BUCKET, LAYERS, ranks=2)
    instead[4] = 7  # bytes of the body: this is no size
    with pytest.raises(WireError, match="flags 2"):
        wire_frame.split_frames(torch.cat([small, instead]), BUCKET, LAYERS, ranks=2)


def test_a_frame_is_as_large_as_is_said_beforehand() -> None:
    for sizes in ([100], [0, 7], [5, 5, 5]):
        codes = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        joined = (
            wire_frame.join_parts(codes)
            if len(codes) > 1
            else wire_frame.frame(codes[0], BUCKET, LAYERS)
        )
        assert joined.numel() == wire_frame.frame_bytes(sizes)
