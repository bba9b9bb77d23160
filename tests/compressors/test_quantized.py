"""Quantizers: what is sent, what stays, what is expected, and what damage is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_adaptive.adaptation.candidates import candidates_of, table_of
from hvd_adaptive.compressors.base import LayerBatch, LayerContext
from hvd_adaptive.compressors.learned import ALQ, AMQ
from hvd_adaptive.compressors.level_fitting import LearnedLevels
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.compressors.quantizers import QSGD, Natural, OneBit, SignSGD, TernGrad
from hvd_adaptive.kernels.cpu import quantized as cpu
from hvd_adaptive.kernels.reference import quantized as reference
from hvd_adaptive.kernels.reference.packing import in_rows, unpack
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire import quantized as wire_quantized
from hvd_adaptive.wire.quantized import Rounding
from tests.compressors.quantizers import ALL, HUFFMAN, KEY, MEMBERS, SIZES, UNBIASED, gradient, sent
from tests.kernels.inputs import KINDS, bits, numbers, offsets_of


@pytest.mark.parametrize("numel", SIZES)
@ALL
def test_wire_bytes_are_exact_or_a_bound(member: Quantizer, numel: int) -> None:
    for level in member.levels(Layer(0, "w", (numel,))):
        payload = member.compress_(gradient(numel), level)
        if member.entropy_coded:
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
    rows = in_rows(x, rule.block)
    sizes = reference.block_sizes(x.numel(), rule.block, x.device)
    norms = reference.block_norms(rows, sizes, rule)[:, :1].double()
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


@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.entropy_coded], ids=repr)
def test_layers_in_one_call_equal_one_call_each(member: Quantizer) -> None:
    sizes = [0, 1, 5000, 0, 513, 31]
    parts = [numbers("normal", size, size) for size in sizes]
    keys = np.arange(len(sizes)).astype(np.uint64) * np.uint64(KEY)
    x = torch.from_numpy(np.concatenate(parts))
    body, stats = member.compress_layers_(
        LayerBatch(x, offsets_of(parts), [member.level] * 6, keys=keys)
    )
    front = 1 + (wire_quantized.codebook_bytes(int(member.level)) if member.rule.carried else 0)
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


# --- learned levels -------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [ALQ(), AMQ(), ALQ(norm="max", coding="fixed")], ids=repr)
def test_learned_levels_are_learned_from_x_plus_gradient_and_lose_less(member: Quantizer) -> None:
    x, grad = torch.zeros(60_000), gradient(60_000)
    state = member.new_state()
    assert isinstance(state, LearnedLevels)
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
    body, _ = cpu.compress_(x.clone(), np.array([0, x.numel()]), np.array([3]), member.rule, tables)
    alphabet = int(tables.alphabets[3])
    codes = unpack(body[1 + member.rule.norm_bytes(x.numel()) :], 3, alphabet)
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


def test_sizes_follow_the_levels_that_were_learned_and_bound_what_is_not_finite() -> None:
    member, x = ALQ(zero="true"), gradient(70_000)
    state = member.new_state()
    rising = np.append(0.0, np.geomspace(0.3, 1, 3))
    tables = {str(bits): state.table(bits).tolist() for bits in state.all_bits}
    state.adopt(tables | {"3": rising.tolist()})
    fresh, learned = (member.sizes(x, [3], LayerContext(state=each))[0] for each in (None, state))
    assert learned == pytest.approx(
        member.compress_(x.clone(), 3, LayerContext(state=state)).nbytes, rel=0.02
    )
    assert learned < 0.95 * fresh
    x[5] = torch.nan
    assert member.sizes(x, [3, 2]).tolist() == [member.wire_bytes(70_000, bits) for bits in (3, 2)]


def test_a_planner_sees_what_huffman_coding_saves() -> None:
    layer, x = Layer(0, "w", (70_000,)), gradient(70_000)
    rows = candidates_of(layer, [QSGD(coding="huffman"), QSGD()])
    _, sizes = table_of(x, layer, rows)
    for row, size in zip(rows, sizes.tolist(), strict=True):
        sent = row.compressor.compress_(x.clone(), row.level)
        assert size == pytest.approx(sent.nbytes, rel=0.05)


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
    "the codebooks are cut short": [
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
