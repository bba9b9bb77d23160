"""Quantizers of rotated layers: what is sent, what stays, and what the rotation gains."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.compressors import parse, rotation
from hvd_adaptive.compressors.base import LayerBatch, LayerContext
from hvd_adaptive.compressors.level_fitting import LearnedLevels
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.kernels import for_device
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire import quantized as wire
from tests.kernels.inputs import KINDS, bits, numbers, usual

SPECS = (
    "qsgd:bits=4,rotate=hadamard",
    "qsgdinf:bits=2,rotate=hadamard",
    "qsgdinf:bits=3,coding=huffman,rotate=hadamard",
    "nuqsgd:bits=3,rotate=hadamard",
    "terngrad:rotate=hadamard",
    "terngrad:clip=2.5,rotate=hadamard",
    "alq:bits=3,rotate=hadamard",
    "signsgd:rotate=hadamard",
    "onebit:rotate=hadamard",
)
SIZES = (0, 1, 2, 3, 100, 511, 1024, 1025, 5000)
EACH = pytest.mark.parametrize("spec", SPECS)


def quantizer(spec: str) -> Quantizer:
    member = parse(spec)
    assert isinstance(member, Quantizer)
    return member


def heavy(numel: int, seed: int = 0) -> Tensor:
    """Student's t of three degrees of freedom: as heavy as gradients' tails."""
    drawn = np.random.default_rng(seed).standard_t(3, numel)
    return torch.from_numpy(drawn.astype(np.float32))


def batch_of(xs: list[Tensor], member: Quantizer, key: int, rotation_key: int) -> LayerBatch:
    offsets = np.cumsum([0, *(x.numel() for x in xs)])
    keys = np.arange(len(xs), dtype=np.uint64) + np.uint64(key)
    levels = [member.level] * len(xs)
    return LayerBatch(torch.cat(xs), offsets, levels, keys=keys, rotation=rotation_key)


@usual
@given(
    st.sampled_from(SPECS),
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES)), min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
)
@example(SPECS[1], [("one huge", 5000), ("normal", 0), ("denormal", 3)], 1)
def test_payload_and_remainder_are_the_layers_but_for_rounding(
    spec: str, kinds: list[tuple[str, int]], key: int
) -> None:
    member = quantizer(spec)
    xs = [torch.from_numpy(numbers(kind, numel, seed)) for seed, (kind, numel) in enumerate(kinds)]
    batch = batch_of(xs, member, 1, key)
    body, stats = member.compress_layers_(batch)
    outs = [torch.zeros_like(x) for x in xs]
    assert not member.decompress_layers_add_(body, outs, 1.0).any()
    rests = batch.x.split([x.numel() for x in xs])
    for i, (x, out, rest) in enumerate(zip(xs, outs, rests, strict=True)):
        reach = torch.cat([x, out, rest]).double().norm()
        off = (x.double() - out.double() - rest.double()).abs().max() if x.numel() else 0.0
        assert float(off) <= 2.0**-21 * float(reach) + 1e-44
        for seen, true in ((stats.energy[i], x), (stats.sent[i], out)):
            assert seen == pytest.approx(float(true.double().square().sum()), rel=1e-5, abs=1e-80)


@EACH
@pytest.mark.parametrize("numel", SIZES)
def test_the_key_is_in_the_body_and_its_bytes_are_counted(spec: str, numel: int) -> None:
    member = quantizer(spec)
    payload = member.compress_(heavy(numel), member.level, LayerContext(rotation=0x0102030405060708))
    assert bytes(payload.data[: wire.ROTATION_BYTES].tolist()).hex() == "810807060504030201"
    bound = member.wire_bytes(numel, member.level)
    plain = quantizer(spec.replace(",rotate=hadamard", "").replace(":rotate=hadamard", ""))
    assert bound == plain.wire_bytes(numel, member.level) + wire.ROTATION_BYTES
    assert payload.nbytes == bound or (member.entropy_coded and payload.nbytes < bound)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "gradient"])
def test_a_layer_that_is_not_finite_keeps_its_bits_and_is_marked(
    spec: str, bad: float, where: str
) -> None:
    member = quantizer(spec)
    xs = [heavy(numel, numel) for numel in (500, 2000, 600)]
    grads = [heavy(x.numel(), 11) for x in xs]
    (xs if where == "x" else grads)[1][-1] = bad
    x, offsets = torch.cat(xs), np.array([0, 500, 2500, 3100])
    before = x.clone()
    body, stats = member.compress_layers_(LayerBatch(x, offsets, [member.level] * 3, grads, rotation=4))
    assert np.array_equal(bits(x)[500:2500], bits(before)[500:2500])
    assert stats.nonfinite.tolist() == [False, True, False]
    outs = [torch.zeros(each.numel()) for each in xs]
    assert member.decompress_layers_add_(body, outs, 0.5).tolist() == [False, True, False]
    assert bool(outs[1].isnan().all())
    for i in (0, 2):
        kept = x[offsets[i] : offsets[i + 1]]
        torch.testing.assert_close(2 * outs[i] + kept, xs[i] + grads[i], rtol=0, atol=2e-5)


@EACH
def test_bodies_of_one_key_are_summed_before_they_are_rotated_back(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = quantizer(spec)
    ranks = [[heavy(700, seed), heavy(1300, 50 + seed)] for seed in range(4)]
    for keys, times in (([7, 7, 7, 7], 1), ([7, 8, 7, 9], 3)):
        bodies = [
            member.compress_layers_(batch_of(xs, member, seed, key))[0]
            for seed, (xs, key) in enumerate(zip(ranks, keys, strict=True))
        ]
        expected = [torch.zeros(700), torch.zeros(1300)]
        for body in bodies:
            member.decompress_layers_add_(body, expected, 0.25)
        calls: list[int] = []
        module = for_device(torch.device("cpu")).rotation
        original = module.rotate_back_

        def counted(*args: object, original: object = original, calls: list[int] = calls) -> None:
            calls.append(1)
            original(*args)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(module, "rotate_back_", counted)
            found = [torch.full((700,), 3.0), torch.full((1300,), 3.0)]
            assert not member.decompress_layers_sum_(bodies, found, 0.25).any()
        assert len(calls) == times
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stand_out", [1, 30])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_heavy_tails_lose_less_when_they_are_rotated(width: int, stand_out: float) -> None:
    x = heavy(40_000)
    x[::997] *= stand_out
    plain, rotated = quantizer("qsgdinf"), quantizer("qsgdinf:rotate=hadamard")
    errors = []
    for member in (plain, rotated):
        rest = x.clone()
        member.compress_(rest, width, LayerContext(key=3, rotation=5))
        errors.append(float(rest.double().square().sum()))
    assert errors[1] < (0.6 if stand_out == 1 else 0.4) * errors[0]


@EACH
def test_errors_foresee_what_is_lost_of_the_rotated_layer(spec: str) -> None:
    member, x = quantizer(spec), heavy(20_000)
    x[:5] *= 100
    kept = x.clone()
    (error,) = member.errors(x, [member.level], LayerContext(rotation=9))
    assert torch.equal(x, kept)
    seen = []
    for key in range(30):
        rest = x.clone()
        member.compress_(rest, member.level, LayerContext(key=key, rotation=9))
        seen.append(float(rest.double().square().sum()))
    assert error == pytest.approx(np.mean(seen), rel=0.015)
    x[3] = math.nan
    assert np.isnan(member.errors(x, [member.level])).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not parse(spec).biased])
def test_the_mean_over_draws_is_the_layer_for_a_fixed_rotation_and_for_others(spec: str) -> None:
    member, x, draws = quantizer(spec), heavy(300, 2), 3000
    for rotations in ([5] * draws, list(range(draws))):
        total, squares = torch.zeros(300).double(), torch.zeros(300).double()
        for draw, key in enumerate(rotations):
            out = torch.zeros(300)
            context = LayerContext(key=7 * draw, rotation=key)
            member.decompress_add_(member.compress_(x.clone(), member.level, context), out)
            total += out
            squares += out.double().square()
        mean = total / draws
        deviation = (squares / draws - mean.square()).clamp(min=0).sqrt() / math.sqrt(draws)
        # of 300 means the largest is beyond five standard errors once in 6,000 runs; no run is random
        assert bool(((mean - x).abs() <= 5 * deviation + 1e-6).all())


def test_learned_levels_are_those_of_the_rotated_layer() -> None:
    member = quantizer("alq:bits=3,coding=fixed,rotate=hadamard")
    x = heavy(60_000)
    x[::501] *= 3
    tables = []
    for layer in (x, torch.randn(60_000, generator=torch.Generator().manual_seed(1))):
        state = member.new_state()
        assert isinstance(state, LearnedLevels)
        state.collecting = True
        member.compress_(layer.clone(), 3, LayerContext(state=state))
        state.adopt(state.fit([state.statistics()]))
        tables.append(state.table(3))
    # rotated, any layer has the levels of a normal distribution
    np.testing.assert_allclose(*tables, atol=0.03)


def test_a_body_without_a_key_or_with_one_too_many_is_refused() -> None:
    plain, rotated = quantizer("qsgdinf:bits=3"), quantizer("qsgdinf:bits=3,rotate=hadamard")
    x = heavy(100)
    plain_body, rotated_body = (each.compress_(x.clone(), 3).data for each in (plain, rotated))
    for body in (plain_body, rotated_body[:8], rotated_body[:0]):
        with pytest.raises(WireError, match="the key of the rotation"):
            rotated.decompress_layers_add_(body, [torch.zeros(100)], 1.0)
    with pytest.raises(WireError):
        plain.decompress_layers_add_(rotated_body, [torch.zeros(100)], 1.0)
    with pytest.raises(WireError, match="bytes end before"):
        rotated.decompress_layers_add_(rotated_body[:-1], [torch.zeros(100)], 1.0)


def test_an_unknown_rotation_is_named() -> None:
    for name in ("qsgd", "terngrad", "signsgd", "alq"):
        with pytest.raises(ValueError, match="none, hadamard"):
            parse(f"{name}:rotate=dft")


@pytest.mark.parametrize("module", [rotation, wire], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_give_what_they_show(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]
    assert results.failed == 0
