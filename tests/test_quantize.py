"""Quantizers: both kernel modules give the same bytes, and the members keep their promises."""

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

from hvd_adaptive.adaptation.candidates import candidates_of, table_of
from hvd_adaptive.compressors import quantized
from hvd_adaptive.compressors.base import LayerBatch, LayerContext
from hvd_adaptive.compressors.quantized import (
    ALQ,
    AMQ,
    NUQSGD,
    QSGD,
    Natural,
    OneBit,
    QSGDInf,
    Quantizer,
    SignSGD,
    TernGrad,
)
from hvd_adaptive.kernels import huffman, quantize, quantize_reference
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire import quantized as wire_quantized
from hvd_adaptive.wire.quantized import Damage, Norm, QuantizationRule, Rounding, Tables
from test_kernels import KINDS, bits, damage, numbers, offsets_of, usual

MODULES = pytest.mark.parametrize("kernels", [quantize_reference, quantize], ids=["reference", "cpu"])
MEMBERS: list[Quantizer] = [
    QSGD(),
    QSGD(coding="huffman", block=100),
    QSGDInf(),
    NUQSGD(),
    Natural(),
    TernGrad(),
    TernGrad(clip=1.5, block=333, coding="huffman"),
    SignSGD(),
    OneBit(block=77),
    ALQ(),
    ALQ(coding="fixed", norm="max", start="uniform"),
    ALQ(coding="fixed", zero="true"),
    AMQ(),
    AMQ(norm="max", coding="fixed"),
]
RANDOM = [member for member in MEMBERS if not member.biased]
ALL = pytest.mark.parametrize("member", MEMBERS, ids=repr)
UNBIASED = pytest.mark.parametrize("member", RANDOM, ids=repr)
SIZES = (0, 1, 2, 511, 512, 513)
LARGE = (65535, 65536, 65537)
KEY = 0x123456789ABCDEF0
ONE_KEY = np.array([KEY], np.uint64)

RULES = [
    *(
        QuantizationRule(norm, rounding, block=block, clip=2.5)
        for norm in (Norm.l2, Norm.max, Norm.power, Norm.clipped)
        for rounding in (Rounding.uniform, Rounding.powers, Rounding.table)
        for block in ((512, 100) if norm is Norm.l2 else (512,))
    ),
    QuantizationRule(Norm.mean, Rounding.sign),
    QuantizationRule(Norm.sides, Rounding.sign, block=7),
]


def widths_of(rule: QuantizationRule) -> list[int]:
    return [1] if rule.rounding is Rounding.sign else list(range(1, 9))


def tables_of(rule: QuantizationRule, seed: int = 0) -> Tables:
    """The rule's levels, or random ones, with zero and without."""
    if not rule.carried:
        return rule.tables
    rng = np.random.default_rng(seed)
    magnitudes = {}
    for width in range(1, 9):
        count = 1 << (width - 1)
        magnitudes[width] = np.append(np.sort(rng.choice(2**20, count - 1, replace=False)) / 2**20, 1)
        if width > 1 and rng.random() < 0.5:
            magnitudes[width][0] = 0
    return Tables(magnitudes)


def compress(
    kernels: ModuleType, x: npt.NDArray[np.float32], width: int, rule: QuantizationRule, tables: Tables
) -> tuple[Tensor, Tensor, npt.NDArray[np.float64]]:
    """One layer: (body, remainder, stats)."""
    rest = torch.from_numpy(x.copy())
    body, stats = kernels.quantize_compress_(
        rest, np.array([0, x.size]), np.array([width]), rule, tables, keys=ONE_KEY
    )
    return body, rest, stats[0]


def sent(member: Quantizer, body: Tensor, numel: int) -> npt.NDArray[np.float64]:
    out = torch.zeros(numel)
    member.decompress_layers_add_(body, [out], 1.0)
    return out.double().numpy()


def gradient(numel: int, seed: int = 0) -> Tensor:
    """Heavier tails than normal, in blocks of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(2)
    return x * (1 + torch.arange(numel) // 512)


# --- the two modules are one ---------------------------------------------------------------------


def assert_same(x: npt.NDArray[np.float32], width: int, rule: QuantizationRule, tables: Tables) -> None:
    results = []
    for kernels in (quantize, quantize_reference):
        body, rest, stats = compress(kernels, x, width, rule, tables)
        out = torch.ones(x.size)
        kernels.quantize_decompress_add_(body, 0, [out], 0.7, rule, tables)
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
    body, rest, _ = compress(quantize, x, width, rule, tables)
    out = torch.zeros(x.size)
    quantize.quantize_decompress_add_(body, 0, [out], 1.0, rule, tables)
    assert bool(out.isfinite().all())
    assert bool(rest.isfinite().all())
    exact = rest.double() + out.double() - torch.from_numpy(x).double()
    assert bool((exact.abs() <= 2.0**-24 * rest.double().abs() + 1e-45).all())


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.norms == 1], ids=repr)
@pytest.mark.parametrize("squared", [True, False])
def test_cpu_and_reference_weigh_the_same(rule: QuantizationRule, squared: bool) -> None:
    for kind in KINDS:
        x = torch.from_numpy(numbers(kind, 5000, 6))
        (weights, beyond), (expected, expected_beyond) = (
            kernels.norm_histogram(x, rule, squared=squared)
            for kernels in (quantize, quantize_reference)
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
        packed = quantize_reference.pack(torch.from_numpy(codes[:numel]).long(), width, alphabet)
        size = wire_quantized.packed_bytes(numel, width, alphabet)
        assert packed.numel() == size == quantize._packed_bytes(numel, width, alphabet)
        groups = -(-numel // quantize._group(alphabet))
        out = np.zeros(size + 64, np.uint8)
        quantize._pack(codes.ctypes.data, groups, width, alphabet, out.ctypes.data)
        assert out[:size].tolist() == packed.tolist()
        back = np.zeros(numel + 64, np.uint8)
        start = out.ctypes.data
        quantize._unpack(start, start + size, 0, numel, width, alphabet, back.ctypes.data)
        assert np.array_equal(back[:numel], codes[:numel])
        half = numel // 2
        skip = quantize._unpack(
            start, start + size, half, numel - half, width, alphabet, back.ctypes.data
        )
        assert np.array_equal(back[skip : skip + numel - half], codes[half:numel])


@pytest.mark.parametrize("numel", SIZES)
@ALL
def test_wire_bytes_are_exact_or_a_bound(member: Quantizer, numel: int) -> None:
    for level in member.levels(Layer(0, "w", (numel,))):
        payload = member.compress_(gradient(numel), level)
        if member.shrinks:
            assert payload.nbytes <= member.wire_bytes(numel, level)
        else:
            assert payload.nbytes == member.wire_bytes(numel, level)


def test_three_levels_take_eight_fifths_of_a_bit() -> None:
    assert TernGrad().wire_bytes(512_000, 2) == 1 + 1 + 4 * 1000 + 102_400
    assert QSGD().wire_bytes(512_000, 3) == 1 + 1 + 4 * 1000 + 192_000


# --- what is sent and what stays -----------------------------------------------------------------


def tolerance(member: Quantizer, x: Tensor, draws: int) -> Tensor:
    """What the mean of ``draws`` may miss ``x`` by: Bernstein's bound for five standard errors."""
    rule = member.rule
    rows = quantize_reference._rows(x, rule.block)
    sizes = quantize_reference._sizes(x.numel(), rule.block, x.device)
    norms = quantize_reference._norms(rows, sizes, rule)[:, :1].double()
    shares = (rows / norms).clamp(-1, 1)
    signed = torch.from_numpy(
        member.tables([int(member.level)], None).signed(int(member.level))
    ).double()
    below = (torch.searchsorted(signed, shares, right=True) - 1).clamp(0, len(signed) - 2)
    low, high = signed[below], signed[below + 1]
    deviation = ((high - shares) * (shares - low)).clamp(min=0).sqrt()
    # and the resolution of the random numbers
    bound = 5 * deviation / math.sqrt(draws) + (high - low) * (10 / draws + 2.0**-23) + 1e-6
    return (bound * norms).view(-1)[: x.numel()]


@ALL
def test_the_expectation_is_the_tensor_unless_the_member_says_that_it_is_biased(
    member: Quantizer,
) -> None:
    draws, x = 2500, gradient(700)
    offsets = np.arange(draws + 1) * 700
    keys = np.random.default_rng(1).integers(2**64, size=draws, dtype=np.uint64)
    body, _ = member.compress_layers_(
        LayerBatch(x.repeat(draws), offsets, [member.level] * draws, keys=keys)
    )
    out = torch.zeros(draws, 700)
    member.decompress_layers_add_(body, list(out), 1.0)
    inside = (out.double().mean(0) - x.double()).abs() <= tolerance(member, x, draws)
    if member.biased:
        assert int(inside.sum()) < 690
    else:
        assert bool(inside.all())


@UNBIASED
def test_errors_of_compressing_average_to_what_errors_says(member: Quantizer) -> None:
    assert_errors(member)


@pytest.mark.parametrize("member", [SignSGD(), OneBit(), TernGrad(clip=1.5)], ids=repr)
def test_errors_say_what_biased_members_lose(member: Quantizer) -> None:
    assert_errors(member)


def assert_errors(member: Quantizer) -> None:
    x, draws = gradient(20_000), 40
    levels = member.levels(Layer(0, "w", (20_000,)))
    kept = x.clone()
    errors = member.errors(x, levels)
    assert torch.equal(x, kept)
    for level, error in zip(levels, errors, strict=True):
        truth = []
        for key in range(draws):
            rest = x.clone()
            member.compress_(rest, level, LayerContext(key=key * 0x9E3779B97F4A7C15 % 2**64))
            truth.append(float(rest.double().square().sum()))
        sampling = 4 * float(np.std(truth)) / math.sqrt(draws)
        assert error == pytest.approx(float(np.mean(truth)), rel=0.01, abs=sampling)


def test_errors_are_exact_where_nothing_is_random_and_nan_where_nothing_is_finite() -> None:
    x = gradient(3000)
    for member in (SignSGD(), OneBit()):
        rest = x.clone()
        member.compress_(rest, 1)
        expected = float(rest.double().square().sum())
        assert member.errors(x, [1])[0] == pytest.approx(expected, rel=1e-6)
    x[7] = torch.inf
    for member in MEMBERS:
        assert np.isnan(member.errors(x, [member.level])).all()


@ALL
@pytest.mark.parametrize("kind", KINDS)
def test_payload_and_remainder_are_x_up_to_a_rounding(member: Quantizer, kind: str) -> None:
    x = numbers(kind, 3001, 2)
    rest = torch.from_numpy(x.copy())
    payload = member.compress_(rest, member.level, LayerContext(key=KEY))
    decoded = sent(member, payload.data, x.size)
    assert np.isfinite(decoded).all()
    bound = 2.0**-24 * np.abs(rest.double().numpy()) + 1e-45
    assert (np.abs(decoded + rest.double().numpy() - x) <= bound).all()


@ALL
def test_the_key_decides_and_nothing_else(member: Quantizer) -> None:
    x = gradient(5000)
    first, again, other, upper = (
        member.compress_(x.clone(), member.level, LayerContext(key=key)).data
        for key in (KEY, KEY, 1, KEY ^ 1 << 40)
    )
    assert torch.equal(first, again)
    is_random = member.rule.rounding is not Rounding.sign
    assert torch.equal(first, other) != is_random
    assert torch.equal(first, upper) != is_random


def test_the_random_numbers_are_even_and_unrelated() -> None:
    u = quantize_reference.uniforms(2**16, KEY).double().numpy()
    shares = np.histogram(u, bins=64, range=(0, 1))[0] / 2**10
    assert np.abs(shares - 1).max() < 5 / 32
    others = [quantize_reference.uniforms(2**16, key) for key in (KEY + 1, KEY ^ 1 << 33, 0)]
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
    found = rounded(quantize, x, key)
    assert torch.equal(found.view(torch.int16), rounded(quantize_reference, x, key).view(torch.int16))
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


def test_natural_sends_powers_of_two() -> None:
    x = gradient(5000)
    for level in (8, 4, 2):
        decoded = sent(Natural(), Natural().compress_(x.clone(), level).data, 5000)
        assert (np.abs(np.frexp(decoded)[0][decoded != 0]) == 0.5).all()


def test_one_bit_is_the_mean_of_each_side() -> None:
    x = gradient(500)
    decoded = sent(OneBit(), OneBit().compress_(x.clone(), 1).data, 500)
    wide = x.double().numpy()
    expected = np.where(wide < 0, wide[wide < 0].mean(), wide[wide >= 0].mean())
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)


# --- buckets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.shrinks], ids=repr)
def test_layers_in_one_call_equal_one_call_each(member: Quantizer) -> None:
    sizes = [0, 1, 5000, 0, 513, 31]
    parts = [numbers("normal", size, size) for size in sizes]
    keys = np.arange(len(sizes)).astype(np.uint64) * np.uint64(KEY)
    x = torch.from_numpy(np.concatenate(parts))
    body, stats = member.compress_layers_(
        LayerBatch(x, offsets_of(parts), [member.level] * 6, keys=keys)
    )
    front = 1 + (wire_quantized.book_bytes(int(member.level)) if member.rule.carried else 0)
    together = body[front:].tolist()
    for part, key, energy in zip(parts, keys.tolist(), stats.energy, strict=True):
        one = member.compress_(torch.from_numpy(part.copy()), member.level, LayerContext(key=key)).data[
            front:
        ]
        assert together[: one.numel()] == one.tolist()
        together = together[one.numel() :]
        assert energy == pytest.approx(float(np.square(part.astype(np.float64)).sum()))
    assert not together


@ALL
def test_layers_may_have_levels_of_their_own_and_gradients_are_added_first(member: Quantizer) -> None:
    levels = member.levels(Layer(0, "w", (1000,)))
    parts = [numbers("normal", 1000, seed) for seed, _ in enumerate(levels)]
    grads = [torch.from_numpy(numbers("normal", 1000, 99 + i)).view(10, 100) for i in range(len(parts))]
    x = torch.from_numpy(np.concatenate(parts))
    total = x + torch.cat([grad.view(-1) for grad in grads])
    body, stats = member.compress_layers_(LayerBatch(x, offsets_of(parts), levels, grads, reserve=16))
    outs = [torch.zeros(10, 100) for _ in parts]
    assert not member.decompress_layers_add_(body[16:], outs, 0.5).any()
    decoded = 2 * torch.cat([out.view(-1) for out in outs])
    torch.testing.assert_close(decoded + x, total, rtol=0, atol=2e-6)
    np.testing.assert_allclose(stats.energy.sum(), float(total.double().square().sum()), rtol=1e-9)
    np.testing.assert_allclose(stats.sent.sum(), float(decoded.double().square().sum()), rtol=1e-6)


@ALL
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["gradient", "x", "overflow"])
def test_a_layer_that_is_not_finite_keeps_its_x_and_sends_a_mark(
    member: Quantizer, bad: float, where: str
) -> None:
    parts = [numbers("normal", size, size) for size in (500, 2000, 600)]
    grads = [numbers("normal", part.size, 11) for part in parts]
    if where == "overflow":
        parts[1][-1] = grads[1][-1] = 3e38
    else:
        (grads if where == "gradient" else parts)[1][-1] = bad
    x = torch.from_numpy(np.concatenate(parts))
    before = x.clone()
    body, stats = member.compress_layers_(
        LayerBatch(
            x, offsets_of(parts), [member.level] * 3, [torch.from_numpy(grad) for grad in grads]
        ),
    )
    assert np.array_equal(bits(x)[500:2500], bits(before)[500:2500])
    assert stats.nonfinite.tolist() == [False, True, False]
    assert stats.energy[1] == stats.sent[1] == 0
    outs = [torch.zeros(part.size) for part in parts]
    assert member.decompress_layers_add_(body, outs, 0.5).tolist() == [False, True, False]
    assert bool(outs[1].isnan().all())
    assert bool(outs[0].isfinite().all())


@ALL
def test_a_bucket_without_layers_has_no_layers(member: Quantizer) -> None:
    body, stats = member.compress_layers_(LayerBatch(torch.zeros(0), np.array([0]), [], []))
    assert body.numel() == 1
    assert stats.energy.shape == (0,)
    assert member.decompress_layers_add_(body, [], 1.0).shape == (0,)


def test_levels_are_bits_around_the_default() -> None:
    layer = Layer(0, "w", (10,))
    assert QSGD().levels(layer) == (8, 7, 6, 5, 4, 3, 2)
    assert QSGD(bits=1).levels(layer) == (2, 1)
    assert Natural().levels(layer) == (8, 7, 6, 5, 4)
    assert ALQ().levels(layer) == (6, 5, 4, 3, 2)
    assert AMQ().levels(layer) == (6, 5, 4, 3, 2, 1)
    assert TernGrad().levels(layer) == (2,)
    assert SignSGD().levels(layer) == OneBit().levels(layer) == (1,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QSGD(bits=9), "1 to 8 whole bits, got 9"),
        (lambda: Natural(bits=1), "2 to 8 whole bits"),
        (lambda: QSGD(coding="rice"), "fixed, huffman"),
        (lambda: QSGD(block=0), "1 to 65536 elements"),
        (lambda: SignSGD(block=10**6), "1 to 65536 elements"),
        (lambda: TernGrad(clip=-1.0), "clip"),
        (lambda: TernGrad(clip=math.nan), "clip"),
        (lambda: ALQ(norm="l1"), "l2, max"),
        (lambda: ALQ(updates="100,200"), "updates=100/2000/10000"),
        (lambda: ALQ(start="zero"), "uniform, exponential"),
        (lambda: ALQ(zero="maybe"), "auto, true, false"),
        (lambda: QSGD().compress_(torch.zeros(4), 2.5), "whole bits, got 2.5"),
        (lambda: SignSGD().wire_bytes(4, 2), "whole bits, got 2"),
    ],
)
def test_options_and_levels_that_do_not_fit_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


# --- learnt levels -------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [ALQ(), AMQ(), ALQ(norm="max", coding="fixed")], ids=repr)
def test_learnt_levels_are_learnt_from_x_plus_gradient_and_lose_less(member: Quantizer) -> None:
    x, grad = torch.zeros(60_000), gradient(60_000)
    state = member.new_state()
    assert isinstance(state, quantized.LearnedLevels)
    before = member.errors(grad, [3], LayerContext(state=state))
    state.collecting = True
    bad = torch.full((10,), torch.nan)
    member.compress_layers_(
        LayerBatch(torch.cat([x, bad]), np.array([0, 60_000, 60_010]), [3, 3], [grad, bad], state=state)
    )
    state.collecting = False
    state.adopt(state.fit([state.statistics()]))
    after = member.errors(grad, [3], LayerContext(state=state))
    assert after[0] < before[0]

    body, _ = member.compress_layers_(LayerBatch(x, np.array([0, 60_000]), [3], [grad], state=state))
    out = torch.zeros(60_000)
    member.decompress_layers_add_(body, [out], 1.0)  # without the state
    torch.testing.assert_close(out + x, grad, rtol=0, atol=1e-4)
    assert float(x.double().square().sum()) == pytest.approx(after[0], rel=0.2)


def test_members_that_differ_in_bits_share_a_state() -> None:
    assert ALQ(bits=4).state_key == ALQ(bits=2).state_key
    assert ALQ().state_key == ALQ(coding="fixed", zero="true").state_key
    assert ALQ().state_key != ALQ(coding="fixed").state_key  # levels without 0
    assert AMQ().state_key == AMQ(coding="fixed").state_key
    assert ALQ(norm="l2").state_key != ALQ().state_key


# --- Huffman coding ------------------------------------------------------------------------------


def optimal_bits(counts: npt.NDArray[np.int64]) -> int:
    """The bits of a Huffman code without a limit, by merging the two least again and again."""
    rest, total = sorted(int(count) for count in counts if count), 0
    while len(rest) > 1:
        merged = rest[0] + rest[1]
        total += merged
        rest = sorted([merged, *rest[2:]])
    return total


@usual
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=60))
def test_the_code_is_optimal_complete_and_reads_back(counts: list[int]) -> None:
    counts[0] += 1
    symbols = np.array(counts, np.int64)
    code = huffman.Code.of(symbols, 1, symbols.size)
    used = code.lengths[symbols > 0].astype(np.int64)
    assert not code.lengths[symbols == 0].any()
    if used.size > 1:
        assert (code.lengths * symbols).sum() == optimal_bits(symbols)
        assert np.sum(2.0**-used) == 1
    data = np.frombuffer(code.to_bytes() + b"123", np.uint8)
    read = huffman.Code.read(data, symbols.size)
    assert not isinstance(read, Damage)
    assert np.array_equal(read[0].lengths, code.lengths)
    assert read[1] == data.size - 3


def test_codewords_are_limited_to_fifteen_bits() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    for counts in (fibonacci, [1] * 2**15, [1] * 3000 + [2**40], list(range(1, 3000))):
        code = huffman.Code.of(np.array(counts, np.int64), 1, len(counts))
        assert code.lengths.max() <= 15
        assert np.sum(2.0 ** -code.lengths.astype(np.float64)) == 1


HUFFMAN = [
    QSGD(coding="huffman"),
    QSGDInf(coding="huffman"),
    NUQSGD(coding="huffman"),
    Natural(coding="huffman"),
    TernGrad(coding="huffman"),
    ALQ(zero="true"),  # else it would depend on the coding
    AMQ(),
    ALQ(zero="true", norm="l2"),
]


@pytest.mark.parametrize("member", HUFFMAN, ids=repr)
def test_huffman_coding_changes_the_bytes_and_nothing_else(member: Quantizer) -> None:
    sizes = [0, 1, 70_000, 513, 3361]
    plain = type(member)(**{**vars(member), "coding": "fixed"})
    for level in member.levels(Layer(0, "w", (10,))):
        for kind in ("normal", "zero", "mostly zero", "one huge"):
            parts = [numbers(kind, size, size) for size in sizes]
            results = []
            for one in (member, plain):
                x = torch.from_numpy(np.concatenate(parts))
                body, _ = one.compress_layers_(LayerBatch(x, offsets_of(parts), [level] * len(sizes)))
                outs = [torch.ones(size) for size in sizes]
                one.decompress_layers_add_(body, outs, 0.3)
                results.append((body.numel(), bits(x).tolist(), [bits(out).tolist() for out in outs]))
            same = results[0][1:] == results[1][1:]
            assert same  # of the lists themselves pytest would print a difference for minutes
            assert results[0][0] <= results[1][0]


@pytest.mark.parametrize("member", [*HUFFMAN[:3], *HUFFMAN[5:]], ids=repr)
def test_three_bits_come_within_two_percent_of_the_entropy(member: Quantizer) -> None:
    x = torch.randn(2**21, generator=torch.Generator().manual_seed(3))
    tables = member.tables([3], None)
    body, _ = quantize.quantize_compress_(
        x.clone(), np.array([0, x.numel()]), np.array([3]), member.rule, tables
    )
    alphabet = int(tables.alphabets[3])
    codes = quantize_reference.unpack(body[1 + member.rule.norm_bytes(x.numel()) :], 3, alphabet)
    shares = torch.bincount(codes).double() / codes.numel()
    entropy = float(-(shares[shares > 0] * shares[shares > 0].log2()).sum())
    payload = member.compress_(x, 3)
    assert payload.nbytes <= body.numel()
    # and 0.01 for the code itself; of less than 0.6 bits no group holds enough
    assert 8 * payload.nbytes / x.numel() <= 1.02 * entropy + 32 / 512 + 0.01


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("member", [HUFFMAN[0], HUFFMAN[2], *HUFFMAN[5:7]], ids=repr)
def test_sizes_are_the_mean_of_what_huffman_coding_sends(member: Quantizer, tails: str) -> None:
    rng = np.random.default_rng(11)
    drawn = rng.standard_normal(200_000) if tails == "normal" else rng.standard_t(3, 200_000)
    x, widths = torch.from_numpy(drawn.astype(np.float32)), range(2, 9)
    for width, size in zip(widths, member.sizes(x, widths).tolist(), strict=True):
        seen = [member.compress_(x.clone(), width, LayerContext(key=key)).nbytes for key in range(3)]
        assert size == pytest.approx(np.mean(seen), rel=0.02)


def test_sizes_follow_the_levels_that_were_learnt_and_bound_what_is_not_finite() -> None:
    member, x = ALQ(zero="true"), gradient(70_000)
    state = member.new_state()
    rising = np.append(0.0, np.geomspace(0.3, 1, 3))
    tables = {str(bits): state.table(bits).tolist() for bits in state.all_bits}
    state.adopt(tables | {"3": rising.tolist()})
    fresh, learnt = (member.sizes(x, [3], LayerContext(state=each))[0] for each in (None, state))
    assert learnt == pytest.approx(
        member.compress_(x.clone(), 3, LayerContext(state=state)).nbytes, rel=0.02
    )
    assert learnt < 0.95 * fresh
    x[5] = torch.nan
    assert member.sizes(x, [3, 2]).tolist() == [member.wire_bytes(70_000, bits) for bits in (3, 2)]


def test_a_planner_sees_what_huffman_coding_saves() -> None:
    layer, x = Layer(0, "w", (70_000,)), gradient(70_000)
    rows = candidates_of(layer, [QSGD(coding="huffman"), QSGD()])
    _, sizes = table_of(x, layer, rows)
    for row, size in zip(rows, sizes.tolist(), strict=True):
        sent = row.compressor.compress_(x.clone(), row.level)
        assert size == pytest.approx(sent.nbytes, rel=0.05)


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
        kernels.quantize_decompress_add_(body, 1, outs, 1.0, rule, rule.tables)
    except WireError as error:
        return str(error)
    return str([bits(out).tolist() for out in outs])


def test_cpu_and_reference_find_the_same_damage() -> None:
    rng = np.random.default_rng(15)
    bodies = [
        (member, body)
        for member, body in bodies_to_damage()
        if not member.shrinks and not member.rule.carried
    ]
    for i in range(1500):
        member, body = bodies[i % len(bodies)]
        broken = torch.from_numpy(damage(body, rng))
        if broken.numel():
            results = {outcome(k, broken, member.rule) for k in (quantize, quantize_reference)}
            assert len(results) == 1


def layer_of(width: int, norm: float, codes: bytes) -> bytes:
    return bytes([width]) + np.float32(norm).tobytes() + codes


DAMAGED = {
    "the bytes end before": [b"\x00", b"\x00\x04", b"\x00" + layer_of(4, 1, b"\x00" * 4)],
    "an impossible header": [b"\x00\x00", b"\x00\x09", b"\x00\x44", b"\x00\x84", b"\x00\xff"],
    "a norm is negative": [
        b"\x00" + layer_of(4, norm, b"\x00" * 5) for norm in (math.nan, math.inf, -1.0, -0.0)
    ],
    "a code stands for no level": [
        b"\x00" + layer_of(4, 1, b"\x00\xf0\x00\x00\x00"),
        b"\x00" + layer_of(2, 1, b"\x00\xf3"),
    ],
    "the bits after the last": [
        b"\x00" + layer_of(3, 1, b"\x00\x00\x00\x40"),
        b"\x00" + layer_of(7, 1, b"\x00" * 8 + b"\x80"),
    ],
    "bytes are left over": [b"\x00" + layer_of(4, 1, b"\x00" * 6)],
    "the books are cut short": [
        b"",
        b"\x01",
        b"\x01\x29\x01\x01",
        b"\x01\x14" + b"\x00" * 40,
        b"\x02\x24\x01\x01\x1d\x23",
    ],
    "the lengths of a Huffman": [
        b"\x01\x24",
        b"\x01\x24\x00" + b"\x00" * 40,
        b"\x01\x24\x09" + b"\x00" * 40,
        b"\x01\x24\x01\x11\x01" + b"\xe0" * 40,
        b"\x01\x24\x01\xf0\x0f",
    ],
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damage_is_named_and_nothing_is_written(message: str) -> None:
    for data in DAMAGED[message]:
        out = torch.zeros(10)
        with pytest.raises(WireError, match=message):
            QSGD().decompress_layers_add_(torch.tensor(list(data), dtype=torch.uint8), [out], 1.0)
        assert not out.any() or message == "bytes are left over"


def test_tables_that_do_not_rise_are_damage() -> None:
    good, _ = ALQ(coding="fixed", zero="true").compress_layers_(
        LayerBatch(gradient(10), np.array([0, 10]), [2])
    )
    for at, value in ((2, 0.5), (2, math.nan), (6, 0.9), (6, math.inf), (6, -1.0), (2, 1.0)):
        body = good.clone()
        body[at : at + 4] = torch.frombuffer(bytearray(np.float32(value).tobytes()), dtype=torch.uint8)
        if (at, value) == (2, 0.5):  # another table, without zero: two bits a code
            continue
        with pytest.raises(WireError, match="the levels do not rise"):
            ALQ().decompress_layers_add_(body, [torch.zeros(10)], 1.0)


def test_a_damaged_stream_is_named_with_its_layer() -> None:
    member = QSGD(coding="huffman")
    body, _ = member.compress_layers_(LayerBatch(gradient(9000), np.array([0, 9000]), [4]))
    for broken in (body[:-1], torch.cat([body, body[:1]])):
        with pytest.raises(WireError, match=r"(layer 0 of|left over)"):
            member.decompress_layers_add_(broken, [torch.zeros(9000)], 1.0)


@pytest.mark.parametrize(
    "module",
    [wire_quantized, quantized, quantize_reference, huffman],
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
        weights, _ = quantize.norm_histogram(x, compressor.rule, squared=squared)
        errors, counts = quantize.expected_error_at(weights, tables, widths)
        each_error, each_count = quantize_reference.expected_error_at(weights, tables, widths)
        np.testing.assert_allclose(errors, each_error, 1e-12)
        np.testing.assert_allclose(counts, each_count, 1e-9, 1e-12 * weights.sum())
        np.testing.assert_allclose(counts.sum(1), weights.sum(), 1e-9)
