"""Histograms, sums, and the errors and sizes that are estimated from them."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_adaptive.compressors.sparse import DGC, GlobalTopK, RedSync, Threshold, TopK
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.kernels.selection import errors_from_spectrum
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire import sparse as wire_sparse
from tests.kernels.inputs import KINDS, MODULES, bits, compress, layers, numbers, usual


@MODULES
@pytest.mark.parametrize("kind", KINDS)
def test_the_spectrum_counts_exponent_and_seven_bits(kernels: ModuleType, kind: str) -> None:
    x = numbers(kind, 70_001, 16)
    expected = np.bincount((bits(x) & 0x7FFFFFFF) >> 16, minlength=1 << 15)
    assert np.array_equal(kernels.spectrum(torch.from_numpy(x)), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "denormal"])
@pytest.mark.parametrize("numel", [1, 1000, 200_000])
def test_errors_from_one_spectrum_are_within_one_percent_of_compressing(kind: str, numel: int) -> None:
    x = numbers(kind, numel, 17)
    energy = float(np.square(x.astype(np.float64)).sum())
    shares = [0, 1e-9, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 1]
    counts = np.array([int(np.ceil(share * numel)) for share in shares])
    hist = cpu.spectrum(torch.from_numpy(x))
    estimated = errors_from_spectrum(hist, energy, numel, counts)
    for k, estimate in zip(counts, estimated, strict=True):
        _, rest, _ = compress(cpu, x, int(k), ValueFormat.fp32)
        truth = float(np.square(rest.astype(np.float64)).sum())
        assert estimate == pytest.approx(truth, rel=0.01, abs=1e-300)


ERROR_MEMBERS = [
    "topk",
    "globaltopk",
    "dgc",
    "redsync",
    "threshold",
    "topk:sign",
    "redsync:sign",
    "threshold:sign",
]


@pytest.mark.parametrize("name", ERROR_MEMBERS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "denormal"])
@pytest.mark.parametrize("numel", [0, 1, 1000, 66_000])
def test_error_tables_are_within_one_percent_of_compressing(name: str, kind: str, numel: int) -> None:
    member = {member.name: member for member in (TopK, GlobalTopK, DGC, RedSync, Threshold)}
    name, _, values = name.partition(":")
    compressor = member[name](values=values or "fp32")
    x = torch.from_numpy(numbers(kind, numel, 17))
    levels = [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.25, 0.4, 0.7, 1.0]
    if name == "threshold":
        levels = [0.0, 1e-30, 0.01, 0.3, 0.999, 1.0, 1.003, 1.0075, 2.0, 3.0, 1e30]
    errors = compressor.errors(x, levels)
    for level, error in zip(levels, errors, strict=True):
        rest = x.clone()
        compressor.compress_(rest, level)
        truth = float(rest.double().square().sum())
        rel = 0.02 if name == "dgc" else 0.01
        negligible = 1e-3 if name == "dgc" else 1e-9
        energy = float(x.double().square().sum())
        assert error == pytest.approx(truth, rel=rel, abs=negligible * energy)


@pytest.mark.parametrize("member", [TopK, DGC, RedSync])
@pytest.mark.parametrize("values", ["bf16", "sign"])
def test_error_tables_of_a_large_layer_are_within_one_percent(member: type[TopK], values: str) -> None:
    x = torch.from_numpy(numbers("normal", 2_500_000, 29))
    compressor = member(values=values)
    levels = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
    for level, error in zip(levels, compressor.errors(x, levels), strict=True):
        rest = x.clone()
        compressor.compress_(rest, level)
        assert error == pytest.approx(float(rest.double().square().sum()), rel=0.01)


@MODULES
@pytest.mark.parametrize("kind", KINDS)
def test_summaries_count_and_sum_what_there_is(kernels: ModuleType, kind: str) -> None:
    x = numbers(kind, 70_001, 30)
    tensor, wide = torch.from_numpy(x), np.abs(x.astype(np.float64))
    hist, *norms = kernels.summary(tensor)
    assert np.array_equal(hist, kernels.spectrum(tensor))
    np.testing.assert_allclose(norms, [wide.sum(), np.square(wide).sum(), wide.max()])
    moments = kernels.moments(tensor)
    assert np.array_equal(moments[..., 0].sum(0), hist)
    assert moments[1, :, 0].sum() == np.signbit(x).sum()
    np.testing.assert_allclose(moments.sum((0, 1)), [x.size, wide.sum(), np.square(wide).sum()])
    bins = np.flatnonzero(hist)[[0, -1]] if np.count_nonzero(hist) > 1 else np.flatnonzero(hist)
    fine = kernels.refined_spectrum(tensor, bins)
    assert np.array_equal(fine.sum(1), hist[bins])
    inside = (bits(x) & 0x7FFFFFFF)[(bits(x) & 0x7FFFFFFF) >> 16 == bins[-1]] & 0xFFFF
    assert np.array_equal(fine[-1], np.bincount(inside, minlength=1 << 16))


@usual
@given(layers, st.lists(st.integers(0, 5000), max_size=6))
@example(("normal", 0, 0), [0, 3])
@example(("zero", 300, 0), [300, 0])
def test_position_bits_are_those_of_the_stream_and_the_same_in_both_modules(
    layer: tuple[str, int, int], wanted: list[int]
) -> None:
    x, counts = numbers(*layer), np.array(wanted, dtype=np.int64)
    table = cpu.position_bits(torch.from_numpy(x), counts)
    assert np.array_equal(table, reference.position_bits(torch.from_numpy(x), counts))
    for count, (found, position_bits) in zip(wanted, table.tolist(), strict=True):
        body, _, stats = compress(cpu, x, count, ValueFormat.sign)
        assert found == stats[2]
        assert body.numel() == wire_sparse.sparse_bytes(found, position_bits, ValueFormat.sign)


@MODULES
def test_position_bits_of_what_is_not_finite_are_none_and_counts_are_checked(
    kernels: ModuleType,
) -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    assert not kernels.position_bits(x, np.array([1, 2])).any()
    for counts in ([-1], [[1]]):
        with pytest.raises(ValueError, match="expected a row of counts, each 0 or more"):
            kernels.position_bits(torch.ones(4), np.array(counts))


@MODULES
def test_bins_that_there_are_not_are_refused(kernels: ModuleType) -> None:
    for bins in ([-1], [1 << 15], [3, 3]):
        with pytest.raises(ValueError, match="different bins from 0 to 32767"):
            kernels.refined_spectrum(torch.ones(4), np.array(bins))


def test_errors_of_a_tensor_that_is_not_finite_are_nan() -> None:
    x = torch.tensor([1.0, float("inf")])
    errors = errors_from_spectrum(cpu.spectrum(x), float("inf"), 2, np.array([0, 1, 2]))
    assert np.isnan(errors).all()
    for compressor in (TopK(), DGC(), RedSync(values="sign"), Threshold()):
        assert np.isnan(compressor.errors(x, [0.1, 0.2])).all()


def test_a_histogram_of_another_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="counts 5 elements"):
        errors_from_spectrum(cpu.spectrum(torch.ones(4)), 4.0, 5, np.array([1]))
