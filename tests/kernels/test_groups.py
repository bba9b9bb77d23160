"""Groups of 4,096 positions, whose bits stand in a table before the index stream."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.wire import ValueFormat, WireError
from hvd_adaptive.wire import sparse as wire_sparse
from tests.kernels.inputs import (
    MODULES,
    bits,
    compress,
    damage,
    finding,
    numbers,
    offsets_of,
    tensor_of,
    usual,
)
from tests.kernels.test_damaged_bodies import Guarded, Trap, layer_bytes, stream_of

FP16, SIGN = ValueFormat.fp16, ValueFormat.sign
WRONG = "a group of positions does not end where its table says"
COUNT, NUMEL = 8193, 30_000
"""Of three groups, of which the last has one value."""


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8192, 8193, 20_000])
def test_all_backends_send_and_add_the_same_about_the_end_of_a_group(count: int) -> None:
    x = numbers("wide", 3 * count, count)
    values = SIGN if count % 2 else FP16
    stream = int(reference.position_bits(torch.from_numpy(x), np.array([count]))[0, 1])
    found = []
    for kernels in (cpu, reference):
        body, rest, _ = compress(kernels, x, count, values)
        out = torch.ones(x.size)
        kernels.decompress_add_(body, [out], 0.5)
        found.append((body.tolist(), bits(rest).tolist(), bits(out).tolist()))
    assert found[0] == found[1]
    assert len(found[0][0]) == wire_sparse.sparse_bytes(count, stream, values)


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole"])
def test_so_they_do_for_layers_with_and_without_groups(whole: bool) -> None:
    parts = [numbers("normal", size, size) for size in (0, 5000, 1, 700)]
    x, offsets = torch.from_numpy(np.concatenate(parts)), offsets_of(parts)
    counts = np.array([4200]) if whole else np.array([0, 4097, 1, 9])
    found = []
    for kernels in (cpu, reference):
        rest = x.clone()
        body, _ = kernels.compress_(rest, offsets, counts, FP16, reserve=3, whole=whole)
        outs = [torch.ones(part.size) for part in parts]
        kernels.decompress_sum_([body[3:], body[3:]], outs, 0.5, FP16, whole)
        cleared = [torch.ones(part.size) for part in parts]
        kernels.clear_(body[3:], cleared, None, whole)
        found.append((body[3:].tolist(), *(bits(torch.cat([rest, *outs, *cleared])).tolist(),)))
    assert found[0] == found[1]


def test_so_they_do_where_a_body_is_compressed_again_or_cut() -> None:
    x, one = torch.from_numpy(numbers("normal", 14_000, 3)), np.array([0, 14_000])
    body, _ = reference.compress_(x.clone(), one, np.array([8500]), FP16)
    found = []
    for kernels in (cpu, reference):
        rest, cut_rest = x.clone(), x.clone()
        again, _ = kernels.recompress_(body, rest, one, np.array([4100]), FP16)
        cuts = np.array([0, 600, 13_000, 14_000])
        cut, _, ends = kernels.compress_cut_(cut_rest, one, np.array([5000]), FP16, cuts)
        out = torch.zeros(12_400)
        kernels.decompress_add_(cut[ends[0] : ends[1]], [out], 1.0)
        rests = bits(torch.cat([rest, cut_rest, out])).tolist()
        found.append((again.tolist(), cut.tolist(), ends.tolist(), rests))
    assert found[0] == found[1]


@MODULES
@pytest.mark.parametrize("zeros", [440, 505, 2 * 4096 + 7])
def test_a_code_may_be_longer_than_what_a_decoder_looks_at_together(
    kernels: ModuleType, zeros: int
) -> None:
    block = 256 * "1"
    groups = [16 * ("000000" + block), "000000" + "1" + zeros * "0" + "1"]
    table = len(groups[0]).to_bytes(4, "little")
    signs = 2 * np.float32(1).tobytes() + bytes(513)
    body = tensor_of(layer_bytes(4098, SIGN, stream_of("".join(groups)), signs, table))
    out = torch.zeros(20_000)
    kernels.decompress_add_(body, [out], 1.0)
    assert out.nonzero().view(-1).tolist() == [*range(4097), 4097 + zeros]


# --- damage --------------------------------------------------------------------------------------


def body_of(count: int, values: ValueFormat = FP16) -> tuple[bytes, int, list[int]]:
    """A layer's body, where its table is, and what is in it."""
    body, _, _ = compress(reference, numbers("normal", NUMEL, 2), count, values)
    data = bytes(body.tolist())
    size = wire_sparse.group_table_bytes(count)
    place = 3 + 2  # both varints
    return data, place, np.frombuffer(data[place : place + size], "<u4").tolist()


def with_table(data: bytes, place: int, entries: list[int]) -> Tensor:
    table = b"".join(entry.to_bytes(4, "little") for entry in entries)
    return tensor_of(data[:place] + table + data[place + len(table) :])


@MODULES
@pytest.mark.parametrize(("entry", "change"), [(0, -1), (0, 1), (1, -1), (1, 2**31)])
def test_each_entry_of_the_table_that_is_another_is_damage(
    kernels: ModuleType, entry: int, change: int
) -> None:
    data, place, table = body_of(COUNT)
    table[entry] += change
    body, out = with_table(data, place, table), torch.zeros(NUMEL)
    said = finding(kernels.decompress_add_, body, [out], 1.0)
    assert WRONG in said
    assert said == finding(reference.decompress_add_, body, [torch.zeros(NUMEL)], 1.0)
    assert not out.any()


@MODULES
def test_it_is_to_all_that_decodes_and_nothing_is_changed(kernels: ModuleType) -> None:
    data, place, _ = body_of(4097)
    body, out, x = with_table(data, place, [0]), torch.ones(NUMEL), torch.ones(NUMEL)
    summed = torch.ones(NUMEL)
    said = [
        finding(kernels.decompress_sum_, [tensor_of(data), body], [summed], 1.0),
        finding(kernels.clear_, body, [out]),
        finding(kernels.recompress_, body, x, np.array([0, NUMEL]), np.array([90]), FP16),
    ]
    assert all(WRONG in each for each in said)
    assert bool((out == 1).all())
    assert bool((x == 1).all())


@MODULES
def test_a_table_whose_sum_is_right_is_damage_all_the_same(kernels: ModuleType) -> None:
    data, place, (first, second) = body_of(COUNT)
    body = with_table(data, place, [first + 1, second - 1])
    out = torch.zeros(NUMEL)
    with pytest.raises(WireError, match=WRONG):
        kernels.decompress_add_(body, [out], 1.0)
    assert not out.any()


@MODULES
def test_a_body_that_ends_in_its_table_is_cut_short(kernels: ModuleType) -> None:
    data, place, _ = body_of(COUNT)
    for size in (place, place + 7):
        with pytest.raises(WireError, match="the bytes end before the layer does"):
            kernels.decompress_add_(tensor_of(data[:size]), [torch.zeros(NUMEL)], 1.0)


@usual
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2), st.integers(0, 3))
def test_any_table_but_the_right_one_is_refused_in_the_same_words(
    entries: list[int], kept: int
) -> None:
    data, place, table = body_of(COUNT, SIGN)
    entries = [table[i] if kept >> i & 1 else entries[i] for i in range(2)]
    body, said = with_table(data, place, entries), []
    for kernels in (cpu, reference):
        out = torch.zeros(NUMEL)
        said.append(finding(kernels.decompress_add_, body, [out], 1.0))
        assert bool(out.any()) == (entries == table)
    assert said[0] == said[1]
    assert (WRONG in said[0]) == (entries != table)


def test_damage_around_the_table_is_found_alike_and_nothing_is_read_past_the_end() -> None:
    data = np.frombuffer(body_of(COUNT)[0], np.uint8)
    head: npt.NDArray[np.uint8] = data[:40]
    rng, trap, other = np.random.default_rng(4), Trap(pages=12), Trap(pages=12)
    guarded = Guarded([NUMEL])
    for i in range(80):
        body = trap.hold(np.concatenate([damage(head, rng), data[40:]]))
        expected = finding(reference.decompress_add_, body, [torch.zeros(NUMEL)], 1.0)
        assert finding(cpu.decompress_add_, body, guarded.outs, 1.0) == expected
        pair = [body, other.hold(data)][:: 1 if i % 2 else -1]
        assert finding(cpu.decompress_sum_, pair, guarded.outs, 1.0) == expected
    assert guarded.intact()
