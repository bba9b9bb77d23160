"""The sum of several bodies."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.kernels.cpu import decompression, memory
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.cpu.layers import most_values
from hvd_adaptive.kernels.cpu.memory import STREAMED, Room
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.wire import ValueFormat, WireError
from tests.kernels.inputs import MODULES, bits, compress, layers, numbers, offsets_of, usual


@usual
@given(
    st.lists(layers, min_size=1, max_size=5),
    st.sampled_from(ValueFormat),
    st.booleans(),
    st.sampled_from([1, 3, 20]),
    st.booleans(),
)
def test_a_sum_is_that_of_one_body_after_the_other_bit_for_bit(
    kinds: list[tuple[str, int, int]], values: ValueFormat, whole: bool, ranks: int, nonfinite: bool
) -> None:
    shapes = [numbers(*kind).size for kind in kinds]
    bodies = []
    for rank in range(ranks):
        parts = [numbers(kind, size, rank) for (kind, _, _), size in zip(kinds, shapes, strict=True)]
        if nonfinite and rank == ranks // 2 and shapes[-1]:
            parts[-1][0] = np.inf
        x, spans = torch.from_numpy(np.concatenate(parts)), [sum(shapes)] if whole else shapes
        counts = np.array([-(-size // (3 + 20 * (rank % 3))) for size in spans])
        bodies.append(cpu.compress_(x, offsets_of(parts), counts, values, whole=whole)[0])
    expected, marks = [torch.zeros(size) for size in shapes], np.zeros(len(shapes), np.uint8)
    for body in bodies:
        marks |= cpu.decompress_add_(body, expected, 0.3, values, whole)
    for kernels in (cpu, reference):
        outs = [torch.full((size,), 7.0) for size in shapes]
        found = kernels.decompress_sum_(bodies, outs, 0.3, values, whole)
        assert found.tolist() == marks.tolist()
        for out, other in zip(outs, expected, strict=True):
            assert torch.equal(out.isnan(), other.isnan())
            assert np.array_equal(bits(out.nan_to_num()), bits(other.nan_to_num()))


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_a_large_sum_goes_past_the_cache_wherever_it_begins(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel, ranks = 1_000_003, 5
    bodies = [
        compress(cpu, numbers("normal", numel, rank), 9000, ValueFormat.bf16)[0]
        for rank in range(ranks)
    ]
    expected, around = torch.zeros(numel), torch.full((numel + 16,), 7.0)
    for body in bodies:
        cpu.decompress_add_(body, [expected], 0.25)
    assert 4 * numel > STREAMED
    monkeypatch.setattr(decompression, "KEPT", 20_000)
    assert 9000 * ranks > decompression.KEPT  # not all at once
    cpu.decompress_sum_(bodies, [around[shift : shift + numel]], 0.25)
    assert np.array_equal(bits(around[shift : shift + numel]), bits(expected))
    assert around[:shift].tolist() + around[shift + numel :].tolist() == [7.0] * 16


def test_room_for_many_values_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT", 10_000)
    room = Room()
    few = room.of(9_000)
    assert [len(each) for each in few[:2]] == [10_000, 10_000]
    many = room.of(10_001)
    assert [len(each) for each in many[:2]] == [10_001, 10_001]
    assert all(now is then for now, then in zip(room.of(10_000), few, strict=True))


def test_the_most_values_of_a_layer_are_those_before_a_wrong_announcement() -> None:
    numels = np.array([300, 50, 3000, 2000])
    counts = [5, 0, 70, 90]
    parts = [
        compress(cpu, numbers("normal", int(numel), 1), count, ValueFormat.sign)[0].tolist()
        for numel, count in zip(numels, counts, strict=True)
    ]

    def most(*bodies: list[int], expected: int = -1) -> int:
        body = np.array([byte for part in bodies for byte in part], np.uint8)
        found: int = most_values(body.ctypes.data, body.ctypes.data + body.size, numels, expected)
        return found

    assert most(*parts) == 90
    assert most(*parts[:3], parts[3][:-1]) == 70
    assert most(*parts[:2], parts[1], parts[3]) == 90
    assert most(*parts, expected=int(ValueFormat.fp32)) == 0
    assert most() == 0


@MODULES
def test_a_sum_names_what_is_damaged_and_wants_a_body(kernels: ModuleType) -> None:
    good = compress(cpu, numbers("normal", 300, 1), 5, ValueFormat.fp32)[0]
    out = torch.zeros(300)
    with pytest.raises(WireError, match="layer 0"):
        kernels.decompress_sum_([good, good[:-1]], [out], 1.0)
    with pytest.raises(WireError):
        kernels.decompress_sum_([good, torch.cat([good, good])], [out], 1.0)
    with pytest.raises(ValueError, match="no body to sum"):
        kernels.decompress_sum_([], [out], 1.0)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.decompress_sum_([good], [out.double()], 1.0)
