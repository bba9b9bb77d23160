"""Sums of sparse layers that are compressed again in one pass: bytes and remainders of two passes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import GatheredCompressor, LayerBatch
from hvd_adaptive.kernels import SelectionRule
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.cpu import sparse_reduction
from hvd_adaptive.kernels.cpu.candidates import count_sample, floor_of_sample
from hvd_adaptive.kernels.floats import BINS
from hvd_adaptive.kernels.selection import LARGE, SMALL
from hvd_adaptive.kernels.two_passes import sum_and_compress
from hvd_adaptive.wire import ValueFormat, WireError
from tests.kernels.inputs import (
    FORMATS,
    KINDS,
    MIDDLE,
    MODULES,
    RULES,
    bits,
    counts_of,
    damage,
    finding,
    layers,
    numbers,
    offsets_of,
    shares,
    thresholds_of,
    usual,
)

Parts = list[npt.NDArray[np.float32]]


class Owner:
    """A shard, what some ranks sent of it, and what its owner kept."""

    def __init__(
        self,
        parts: Parts,
        ranks: int,
        share: float,
        values: ValueFormat = ValueFormat.bf16,
        rule: SelectionRule = SelectionRule.topk,
        kept: float = 0.3,
    ) -> None:
        self.offsets, self.counts = offsets_of(parts), counts_of(parts, share)
        self.values, self.rule = values, rule
        self.thresholds = thresholds_of(rule, len(parts), MIDDLE)
        self.kept = torch.from_numpy(np.concatenate([np.float32(kept) * part[::-1] for part in parts]))
        self.bodies = [
            self.body_of([np.roll(part, 3 * rank) for part in parts]) for rank in range(ranks)
        ]

    def body_of(self, parts: Parts) -> Tensor:
        x = torch.from_numpy(np.concatenate(parts))
        how = (self.offsets, self.counts, self.values)
        body, _ = cpu.compress_(x, *how, rule=self.rule, thresholds=self.thresholds)
        return body

    def in_one(self, keeps: bool) -> tuple[list[int], list[int], Tensor]:
        """Bytes and marks of the kernel, and what it left."""
        x = self.kept.clone()
        how = (x, self.offsets, self.counts, self.values, keeps, 3, self.rule, self.thresholds)
        data, marks = cpu.reduce_(self.bodies, *how)
        return data[3:].tolist(), marks.tolist(), x

    def in_two(self, keeps: bool) -> tuple[list[int], list[int], Tensor]:
        """The same of adding and compressing."""
        x = self.kept.clone()
        how = (x, self.offsets, self.counts, self.values, keeps, 3, self.rule, self.thresholds, False)
        data, marks = sum_and_compress(cpu.decompress_sum_, cpu.compress_, self.bodies, *how)
        return data[3:].tolist(), marks.tolist(), x

    def check(self) -> None:
        """One pass gives what two give, bit for bit."""
        for keeps in (True, False):
            data, marks, x = self.in_one(keeps)
            expected = self.in_two(keeps)
            assert (data, marks) == expected[:2]
            if keeps:
                assert np.array_equal(bits(x), bits(expected[2]))
            else:
                assert np.array_equal(bits(x), bits(self.kept))


@usual
@given(
    st.lists(layers, min_size=1, max_size=5),
    st.sampled_from(ValueFormat),
    st.sampled_from(SelectionRule),
    st.sampled_from([1, 2, 3, 8]),
    shares,
    st.sampled_from([0.0, -0.0, 0.3, -1.0]),
)
def test_one_pass_gives_the_bytes_and_the_remainders_of_two(
    kinds: list[tuple[str, int, int]],
    values: ValueFormat,
    rule: SelectionRule,
    ranks: int,
    share: float,
    kept: float,
) -> None:
    Owner([numbers(*kind) for kind in kinds], ranks, share, values, rule, kept).check()


@RULES
@FORMATS
@pytest.mark.parametrize("share", [0.003, 0.4])
def test_so_does_one_of_layers_that_are_summed_tile_by_tile(
    rule: SelectionRule, values: ValueFormat, share: float
) -> None:
    sizes, kind = (SMALL + 1, 5, 99_991), KINDS[(int(100 * share) + 3 * rule + values) % len(KINDS)]
    Owner([numbers(kind, size, 5) for size in sizes], 5, share, values, rule).check()


@RULES
def test_so_does_one_of_a_layer_with_a_thin_sample(rule: SelectionRule) -> None:
    Owner([numbers("normal", LARGE + 77, 6)], 3, 0.003, rule=rule).check()


def test_a_floor_that_was_guessed_too_high_is_found_out() -> None:
    numel, stride = 200_000, 16 * 13
    x = numbers("normal", numel, 7)
    lines = np.arange(numel) % stride < 16
    x[lines] *= np.float32(50)  # all that is large is in the sample, which takes it for a 13th
    assert lines.sum() < 0.1 * numel
    owner = Owner([x], 1, 0.2, kept=0.0)
    owner.check()
    # the first guess really is too high
    sums = torch.zeros(numel)
    cpu.decompress_sum_(owner.bodies, [sums], 1.0)
    floor = _guess(sums, int(owner.counts[0]))
    assert 0 < int((torch.from_numpy(bits(sums.abs())) >= floor).sum()) < owner.counts[0]


def _guess(x: Tensor, k: int) -> int:
    """Where top-k begins to collect a large layer."""
    hist = np.zeros(BINS, np.int32)
    sample = count_sample(x.data_ptr(), 0, x.numel(), hist)
    return int(floor_of_sample(sample, x.numel(), k, k, int(SelectionRule.topk), hist))


@pytest.mark.parametrize("where", [0, 70_001, 99_999])
@pytest.mark.parametrize("wrong", ["marked", "kept", "overflow"])
def test_a_layer_that_is_not_finite_is_marked_and_what_was_kept_is_as_after_two_passes(
    where: int, wrong: str
) -> None:
    parts = [numbers("normal", size, 8) for size in (3000, 100_000, 40)]
    owner, large = Owner(parts, 3, 0.05), [part.copy() for part in parts]
    if wrong == "kept":
        owner.kept[3000 + where] = -torch.inf
    else:
        large[1][where] = np.nan if wrong == "marked" else 3.3e38
        owner.bodies[1:] = [owner.body_of(large)] * 2
    owner.check()
    _, marks, x = owner.in_one(keeps=True)
    assert marks == [0, 1, 0]
    before = owner.kept[3000:-40]
    if wrong == "marked":
        assert torch.equal(x[3000:-40], before)
    finite = before.isfinite()
    torch.testing.assert_close(x[3000:-40][finite], before[finite], rtol=1e-5, atol=1e-6)


def test_damage_is_what_summing_finds_and_leaves_what_was_kept() -> None:
    rng, found = np.random.default_rng(9), 0
    parts = [numbers("normal", size, 9) for size in (300, 70_000, 0, 5000)]
    owner = Owner(parts, 3, 0.01, ValueFormat.int8)
    good = list(owner.bodies)
    for trial in range(150):
        owner.bodies = list(good)
        owner.bodies[trial % 3] = torch.from_numpy(damage(good[trial % 3].numpy(), rng))
        outs = [torch.zeros(part.size) for part in parts]
        expected = finding(cpu.decompress_sum_, owner.bodies, outs, 1.0, owner.values)
        x = owner.kept.clone()
        message = finding(cpu.reduce_, owner.bodies, x, owner.offsets, owner.counts, owner.values)
        assert message == expected
        assert torch.equal(x, owner.kept) == bool(message)
        found += bool(message)
    assert found > 75


def test_bodies_that_hold_too_much_and_layers_that_are_one_vector_take_two_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Owner([numbers("normal", 70_000, 10)], 4, 0.01)
    expected = owner.in_one(keeps=True)[0]
    how = (owner.offsets, owner.counts, owner.values)
    calls = []

    def noted(*arguments: object) -> tuple[Tensor, npt.NDArray[np.uint8]]:
        calls.append(len(arguments))
        return sum_and_compress(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sparse_reduction, "sum_and_compress", noted)
    assert cpu.reduce_(owner.bodies, owner.kept.clone(), *how)[0].tolist() == expected
    assert not calls
    assert cpu.reduce_(owner.bodies, owner.kept.clone(), *how, whole=True)[0].tolist() == expected
    monkeypatch.setattr(sparse_reduction, "KEPT", 2799)
    assert cpu.reduce_(owner.bodies, owner.kept.clone(), *how)[0].tolist() == expected
    assert len(calls) == 2


def test_one_layer_that_overflows_takes_nothing_from_the_others_of_one_vector() -> None:
    whole, x = parse("globaltopk:density=0.1,values=fp32"), torch.zeros(200)
    assert isinstance(whole, GatheredCompressor)
    x[3], x[150] = 3e38, 1.0
    batch = LayerBatch(x, np.array([0, 100, 200]), [0.1, 0.1])
    body, _ = whole.compress_layers_(batch)
    kept = torch.full((200,), 0.25)
    reduced = whole.reduce_layers_([body, body], LayerBatch(kept, batch.offsets, batch.levels), True)
    assert reduced.nonfinite.tolist() == [True, False]
    assert kept[150] == 2.25
    reduced.undo([1])
    assert torch.equal(kept, torch.full((200,), 0.25))


@MODULES
def test_what_does_not_fit_together_is_refused(kernels: ModuleType) -> None:
    x, one, count = torch.zeros(4), np.array([0, 4]), np.array([1])
    with pytest.raises(ValueError, match="no body to sum"):
        kernels.reduce_([], x, one, count, ValueFormat.fp32)
    body = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="uint8"):
        kernels.reduce_([body, body.float()], x, one, count, ValueFormat.fp32)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.reduce_([body], x.double(), one, count, ValueFormat.fp32)
    with pytest.raises(WireError, match="bytes are left over"):
        kernels.reduce_([body, torch.zeros(2, dtype=torch.uint8)], x, one, count, ValueFormat.fp32)
