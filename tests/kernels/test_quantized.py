"""What every backend of the quantized family keeps to; one row per backend: ``MODULES``."""

from __future__ import annotations

import doctest
import math
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.compressors import learned, quantizers
from hvd_adaptive.compressors.base import LayerBatch
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.kernels import quantization
from hvd_adaptive.kernels.cpu import quantized as cpu
from hvd_adaptive.kernels.cpu.packing import bytes_of_codes, group_size, pack_codes, unpack_codes
from hvd_adaptive.kernels.reference import packing
from hvd_adaptive.kernels.reference import quantized as reference
from hvd_adaptive.kernels.reference.packing import pack
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire import quantized as wire_quantized
from hvd_adaptive.wire.quantized import Norm, QuantizationRule, Rounding, Tables
from tests.compressors.quantizers import (
    KEY,
    LARGE,
    MEMBERS,
    RULES,
    SIZES,
    compress,
    tables_of,
    widths_of,
)
from tests.kernels.inputs import KINDS, bits, damage, numbers, offsets_of, usual

MODULES = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])


# --- the two modules are one ---------------------------------------------------------------------


def assert_same(x: npt.NDArray[np.float32], width: int, rule: QuantizationRule, tables: Tables) -> None:
    results = []
    for kernels in (cpu, reference):
        body, rest, stats = compress(kernels, x, width, rule, tables)
        out = torch.ones(x.size)
        kernels.decompress_add_(body, 0, [out], 0.7, rule, tables)
        results.append((body.tolist(), bits(rest).tolist(), bits(out).tolist(), stats))
    assert results[0][:3] == results[1][:3]
    np.testing.assert_allclose(results[0][3], results[1][3], rtol=1e-10)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_cpu_and_reference_give_the_same_bytes_remainders_and_sums(rule: QuantizationRule) -> None:
    tables = tables_of(rule)
    for kind in KINDS:
        for width in widths_of(rule):
            for numel in SIZES:
                assert_same(numbers(kind, numel, numel), width, rule, tables)


@pytest.mark.parametrize("numel", LARGE)
@pytest.mark.parametrize("rule", RULES[::2], ids=repr)
def test_they_do_for_large_layers(rule: QuantizationRule, numel: int) -> None:
    for kind in ("normal", "wide", "one huge"):
        for width in widths_of(rule)[::3]:
            assert_same(numbers(kind, numel, 5), width, rule, tables_of(rule))


single_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@usual
@given(st.lists(single_floats, max_size=40), st.sampled_from(RULES), st.integers(1, 8))
@example(
    [3.4028235e38, 3.4028235e38, -1.7e38, 1.0, 1e-45], QuantizationRule(Norm.max, Rounding.uniform), 1
)
@example([3.4028235e38] * 40, QuantizationRule(Norm.l2, Rounding.uniform), 4)
@example([3.4028235e38, -3e38, 1e38], QuantizationRule(Norm.power, Rounding.powers), 8)
@example([1e-45, -1e-45, 3e-45], QuantizationRule(Norm.clipped, Rounding.uniform, clip=0.1), 3)
def test_any_finite_float_survives_in_payload_and_remainder(
    values: list[float], rule: QuantizationRule, width: int
) -> None:
    x, width = np.array(values, np.float32), min(width, widths_of(rule)[-1])
    tables = tables_of(rule)
    assert_same(x, width, rule, tables)
    body, rest, _ = compress(cpu, x, width, rule, tables)
    out = torch.zeros(x.size)
    cpu.decompress_add_(body, 0, [out], 1.0, rule, tables)
    assert bool(out.isfinite().all())
    assert bool(rest.isfinite().all())
    exact = rest.double() + out.double() - torch.from_numpy(x).double()
    assert bool((exact.abs() <= 2.0**-24 * rest.double().abs() + 1e-45).all())


@usual
@given(
    st.integers(1, 7),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from([-1.0, 1.0]), st.integers(-1, 1))),
    st.integers(0, 2**32 - 1),
)
def test_values_on_and_beside_the_levels_of_any_table_are_rounded_alike(
    width: int, zero: bool, values: list[tuple[int, float, int]], seed: int
) -> None:
    rng, count = np.random.default_rng(seed), 1 << (width - 1)
    least = np.sort(rng.choice(2**16, count - 1, replace=False) + 1) / 2.0**17
    magnitudes = np.append(least, 1).astype(np.float32)
    if zero and width > 1:
        magnitudes[0] = 0
    x = np.ones(len(values) + 1, np.float32)
    for i, (level, sign, beside) in enumerate(values):
        at = magnitudes[level % count]
        x[i] = sign * np.nextafter(at, np.float32(2 * beside)) if beside else sign * at
    rule, tables = QuantizationRule(Norm.max, Rounding.table, block=64), Tables({width: magnitudes})
    assert_same(x, width, rule, tables)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.norms == 1], ids=repr)
@pytest.mark.parametrize("squared", [True, False])
def test_cpu_and_reference_weigh_the_same(rule: QuantizationRule, squared: bool) -> None:
    for kind in KINDS:
        x = torch.from_numpy(numbers(kind, 5000, 6))
        (weights, beyond), (expected, expected_beyond) = (
            kernels.norm_histogram(x, rule, squared=squared) for kernels in (cpu, reference)
        )
        np.testing.assert_allclose(weights, expected, rtol=1e-10)
        assert beyond == pytest.approx(expected_beyond, rel=1e-10)


# --- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alphabet", [2, 3, 4, 7, 15, 16, 31, 64, 127, 255, 256])
def test_packed_codes_come_back_at_their_true_width(alphabet: int) -> None:
    width = (alphabet - 1).bit_length()
    rng = np.random.default_rng(alphabet)
    for numel in (*range(20), 1000, 3359, 3361):
        codes = np.zeros(numel + 64, np.uint8)
        codes[:numel] = rng.integers(alphabet, size=numel)
        packed = pack(torch.from_numpy(codes[:numel]).long(), width, alphabet)
        size = wire_quantized.packed_bytes(numel, width, alphabet)
        assert packed.numel() == size == bytes_of_codes(numel, width, alphabet)
        groups = -(-numel // group_size(alphabet))
        out = np.zeros(size + 64, np.uint8)
        spent = codes.copy()
        pack_codes(spent.ctypes.data, groups, width, alphabet, out.ctypes.data)
        assert out[:size].tolist() == packed.tolist()
        back = np.zeros(numel + 64, np.uint8)
        start = out.ctypes.data
        unpack_codes(start, start + size, 0, numel, width, alphabet, back.ctypes.data)
        assert np.array_equal(back[:numel], codes[:numel])
        half = numel // 2
        skip = unpack_codes(start, start + size, half, numel - half, width, alphabet, back.ctypes.data)
        assert np.array_equal(back[skip : skip + numel - half], codes[half:numel])


def test_the_random_numbers_are_even_and_unrelated() -> None:
    u = reference.uniforms(2**16, KEY).double().numpy()
    shares = np.histogram(u, bins=64, range=(0, 1))[0] / 2**10
    assert np.abs(shares - 1).max() < 5 / 32
    others = [reference.uniforms(2**16, key) for key in (KEY + 1, KEY ^ 1 << 33, 0)]
    for other in (*(other.double().numpy() for other in others), np.roll(u, 1), np.roll(u, 512)):
        assert abs(np.corrcoef(u, other)[0, 1]) < 5 / 256


def rounded(kernels: ModuleType, x: Tensor, key: int = KEY) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.bfloat16)
    kernels.round_at_random_(out, x, key)
    return out


@settings(deadline=None)  # the first call may compile
@given(st.lists(st.floats(width=32), max_size=70), st.integers(0, 2**64 - 1))
@example([math.nan, math.inf, -math.inf, 3.4028235e38, -3.3895314e38, 1e-45, -0.0, 0.0], KEY)
def test_both_modules_round_to_the_same_bfloat16_next_to_each_value(
    values: list[float], key: int
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    found = rounded(cpu, x, key)
    assert torch.equal(found.view(torch.int16), rounded(reference, x, key).view(torch.int16))
    limit = torch.finfo(torch.bfloat16).max
    known = ~x.isnan()
    assert found[~known].isnan().all()
    bits = x.clamp(-limit, limit)[known].view(torch.int32)
    towards_zero = (bits >> 16 << 16).view(torch.float32)
    beyond = ((bits >> 16) + 1 << 16).view(torch.float32)
    got = found[known].float()
    assert ((got == towards_zero) | (got == beyond)).all()
    exact = (bits & 0xFFFF) == 0
    assert torch.equal(got[exact], towards_zero[exact])


@MODULES
def test_rounding_at_random_is_right_on_average(kernels: ModuleType) -> None:
    for value in (1.001, -1.001, 1e-30, -257.7):
        x = torch.full((1 << 16,), value)
        off = rounded(kernels, x).double().mean().item() / x[0].item() - 1
        assert abs(off) < 4 * 2**-8 / 2 / 2**8  # of the mean of 2^16 that differ by at most 2^-7


# --- damage --------------------------------------------------------------------------------------


SIZES_TO_DAMAGE = [300, 0, 1, 4000]


def bodies_to_damage() -> list[tuple[Quantizer, npt.NDArray[np.uint8]]]:
    parts = [numbers("normal", size, 12) for size in SIZES_TO_DAMAGE]
    bodies = []
    for member in MEMBERS:
        for level in member.levels(Layer(0, "w", (1,)))[::2]:
            x = torch.from_numpy(np.concatenate(parts))
            body, _ = member.compress_layers_(LayerBatch(x, offsets_of(parts), [level] * len(parts)))
            bodies.append((member, body.numpy()))
    return bodies


def outcome(kernels: ModuleType, body: Tensor, rule: QuantizationRule) -> str:
    outs = [torch.zeros(size) for size in SIZES_TO_DAMAGE]
    try:
        kernels.decompress_add_(body, 1, outs, 1.0, rule, rule.tables)
    except WireError as error:
        return str(error)
    return str([bits(out).tolist() for out in outs])


def test_cpu_and_reference_find_the_same_damage() -> None:
    rng = np.random.default_rng(15)
    bodies = [
        (member, body)
        for member, body in bodies_to_damage()
        if not member.entropy_coded and not member.rule.carried
    ]
    for i in range(1500):
        member, body = bodies[i % len(bodies)]
        broken = torch.from_numpy(damage(body, rng))
        if broken.numel():
            results = {outcome(k, broken, member.rule) for k in (cpu, reference)}
            assert len(results) == 1


@pytest.mark.parametrize(
    "module",
    [wire_quantized, quantizers, learned, packing, reference, quantization],
    ids=lambda module: module.__name__,
)
def test_the_examples_in_docstrings_give_what_they_show(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("compressor", MEMBERS, ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 1_000, 70_000])
def test_expectations_of_all_widths_in_one_scan_are_those_of_each(
    compressor: Quantizer, numel: int
) -> None:
    x = torch.randn(numel)
    x[: numel // 10] = 0.0
    tables = compressor.tables(compressor.widths, None)
    widths = [width for width in compressor.widths if tables.alphabets[width]]
    for squared in (True, False):
        weights, _ = cpu.norm_histogram(x, compressor.rule, squared=squared)
        errors, counts = cpu.expected_error_at(weights, tables, widths)
        each_error, each_count = reference.expected_error_at(weights, tables, widths)
        np.testing.assert_allclose(errors, each_error, 1e-12)
        np.testing.assert_allclose(counts, each_count, 1e-9, 1e-12 * weights.sum())
        np.testing.assert_allclose(counts.sum(1), weights.sum(), 1e-9)
