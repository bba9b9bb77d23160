"""Dithers that ranks share: uniform on each, unbiased, and what their mean loses less."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.compressors import GatheredCompressor, parse
from hvd_adaptive.compressors.base import LayerBatch
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.kernels.cpu import quantized as cpu
from hvd_adaptive.kernels.reference import quantized as reference
from hvd_adaptive.wire.quantized import Rounding
from tests.compressors.quantizers import RULES, tables_of
from tests.kernels.inputs import bits, numbers, usual

NUMEL = 20_480
RANKS = (2, 3, 4, 8, 16)
SPECS = ("qsgd:bits=2", "qsgd:bits=4", "qsgdinf:bits=1", "qsgdinf:bits=3", "nuqsgd:bits=3", "terngrad")


def normal(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=generator) * torch.rand(NUMEL, generator=generator).pow(2)


# --- the words ------------------------------------------------------------------------------------


@usual
@given(st.integers(1, 70), st.integers(0, 2**64 - 1))
def test_ranks_have_all_places_and_the_second_of_a_pair_mirrors_the_first(ranks: int, key: int) -> None:
    keys = np.array([key], np.uint64)
    words = sorted(int(rng.dithers(keys, rank, ranks)[0]) for rank in range(ranks))
    if ranks % 2:
        assert words == [(place << 32) // ranks for place in range(ranks)]
        return
    plain, mirrored = words[: ranks // 2], words[ranks // 2 :]
    assert plain == [(place << 32) // (ranks // 2) for place in range(ranks // 2)]
    random = [reference.uniforms(64, key, dither=word).double() for word in words]
    for word, u in zip(plain, random, strict=False):
        (partner,) = (v for v in random[ranks // 2 :] if torch.equal(u + v, torch.ones(64) - 2.0**-24))
        assert 0 <= float(partner.min()) <= float(partner.max()) < 1
        assert (0xFFFFFFFF << 32 | -word & 0xFFFFFFFF) in mirrored


def test_every_two_ranks_are_a_pair_equally_often_and_every_place_is_taken_equally_often() -> None:
    ranks, draws = 6, 6000
    keys = rng.layer_keys(1, rng.SHARED, 5, range(draws))
    words = np.array([rng.dithers(keys, rank, ranks) for rank in range(ranks)])
    for row in words:
        _, counts = np.unique(row, return_counts=True)
        assert counts.size == ranks
        assert np.abs(counts - draws / ranks).max() < 5 * math.sqrt(draws / ranks)
    low = words & np.uint64(0xFFFFFFFF)
    mirrored = words > low
    places = np.where(mirrored, (np.uint64(1) << np.uint64(32)) - low, low) & np.uint64(0xFFFFFFFF)
    for first, second in itertools.combinations(range(ranks), 2):
        together = int((places[first] == places[second]).sum())
        assert abs(together - draws / (ranks - 1)) < 5 * math.sqrt(draws / (ranks - 1))


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_the_numbers_of_every_rank_are_uniform(ranks: int) -> None:
    keys = rng.layer_keys(0, rng.SHARED, 3, [0])
    for rank in range(ranks):
        (word,) = rng.dithers(keys, rank, ranks).tolist()
        u = reference.uniforms(2**16, int(keys[0]), dither=word).double().numpy()
        assert 0 <= u.min() <= u.max() < 1
        counts = np.histogram(u, bins=64, range=(0, 1))[0]
        # chi-squared of 63 degrees of freedom: mean 63, deviation 11.2; 140 is exceeded 1 time in 10^7
        assert float(((counts - 1024) ** 2 / 1024).sum()) < 140


def test_one_rank_has_the_numbers_as_they_are() -> None:
    keys = rng.layer_keys(0, rng.SHARED, 3, range(5))
    assert not rng.dithers(keys, 0, 1).any()


def test_the_examples_in_docstrings_give_what_they_show() -> None:
    results = doctest.testmod(rng)
    assert results.attempted > 0
    assert results.failed == 0


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.rounding is not Rounding.sign], ids=repr
)
def test_cpu_and_reference_round_alike_with_dithers(rule: object) -> None:
    tables = tables_of(rule)  # type: ignore[arg-type]
    offsets, keys = np.array([0, 700, 1300]), rng.layer_keys(0, rng.SHARED, 3, [4, 5])
    for rank, ranks in ((0, 2), (1, 2), (4, 7), (9, 64)):
        words = rng.dithers(keys, rank, ranks)
        results = []
        for kernels in (cpu, reference):
            x = torch.from_numpy(numbers("normal", 1300, 2))
            args = (x, offsets, np.array([3, 1]), rule, tables)
            body, _ = kernels.compress_(*args, keys=keys, dithers=words)
            results.append((body.tolist(), bits(x).tolist()))
        same = results[0] == results[1]
        assert same


def test_dithers_of_other_layers_are_refused() -> None:
    x, rule = torch.zeros(4), RULES[0]
    for kernels in (cpu, reference):
        with pytest.raises(ValueError, match="as many uint64"):
            kernels.compress_(
                *(x, np.array([0, 4]), np.array([2]), rule, rule.tables), dithers=np.zeros(2, np.uint64)
            )


# --- the mean of all ranks ------------------------------------------------------------------------


def decoded(member: Quantizer, xs: list[Tensor], step: int, correlated: bool) -> list[Tensor]:
    """What all ranks' payloads decode to."""
    outs = []
    for rank, x in enumerate(xs):
        keys = rng.layer_keys(0, rng.SHARED if correlated else rank, step, [0])
        words = rng.dithers(keys, rank, len(xs)) if correlated else None
        offsets = np.array([0, x.numel()])
        body, _ = member.compress_layers_(
            LayerBatch(x.clone(), offsets, [member.level], keys=keys, dithers=words)
        )
        out = torch.zeros_like(x)
        member.decompress_layers_add_(body, [out], 1.0)
        outs.append(out.double())
    return outs


def error_of_mean(member: Quantizer, xs: list[Tensor], correlated: bool, steps: int = 12) -> float:
    """The squared error of the mean, averaged over steps."""
    mean = torch.stack(xs).double().mean(0)
    errors = [
        float((torch.stack(decoded(member, xs, step, correlated)).mean(0) - mean).square().sum())
        for step in range(steps)
    ]
    return float(np.mean(errors))


def quantizer(spec: str) -> Quantizer:
    member = parse(spec)
    assert isinstance(member, Quantizer)
    return member


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_mean_of_equal_layers_is_off_by_less_than_a_step_over_the_ranks(
    spec: str, ranks: int
) -> None:
    """The sum of what is rounded up is one of the two whole numbers around its expectation."""
    member, x = quantizer(spec), heavy(1)
    outs = torch.stack(decoded(member, [x] * ranks, 0, correlated=True))
    gap = outs.amax(0) - outs.amin(0)
    error = (outs.mean(0) - x.double()).abs()
    split = gap > 0
    assert int(split.sum()) > 100
    resolution = 1e-6 * x.double().abs().max()
    assert bool((error <= gap / ranks + resolution)[split].all())


@pytest.mark.parametrize("spec", ["qsgdinf:bits=3", "qsgd:bits=4", "nuqsgd:bits=4"])
def test_the_error_of_the_mean_of_equal_layers_falls_with_the_square_of_the_ranks(spec: str) -> None:
    member, x = quantizer(spec), normal(2)
    for correlated, power in ((False, 1), (True, 2)):
        errors = [error_of_mean(member, [x] * ranks, correlated) for ranks in (4, 8, 16)]
        for before, after in itertools.pairwise(errors):
            # while a step is split among few ranks; 12 x 20,480 roundings leave 1 % of chance
            assert before / after == pytest.approx(2**power, rel=0.12)


def adverse(rank: int, ranks: int) -> Tensor:
    """Values that follow the ranks' places, were these not drawn anew."""
    return heavy(3) - rank / ranks


INPUTS = {
    "independent": lambda rank, ranks: heavy(10 + rank),
    "partly equal": lambda rank, ranks: heavy(1) + heavy(10 + rank),
    "opposite": lambda rank, ranks: heavy(1) * (1 - 2 * (rank % 2)),
    "adverse": adverse,
    "adverse, mirrored": lambda rank, ranks: adverse(ranks - rank, ranks),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_no_input_makes_the_mean_worse_than_independent_rounding(
    spec: str, kind: str, ranks: int
) -> None:
    member = quantizer(spec)
    xs = [INPUTS[kind](rank, ranks) for rank in range(ranks)]
    # the order of ranks differs by step: more steps where an order can be better or worse
    plain = error_of_mean(member, xs, correlated=False)
    # without mirrors, steps that are rare and of opposite signs are never taken together, which costs
    # a share of the variance that is as rare as they are
    assert error_of_mean(member, xs, correlated=True, steps=24) < (1.06 if ranks % 2 else 1.03) * plain


def test_opposite_values_that_are_rarely_rounded_cancel() -> None:
    member = quantizer("qsgd:bits=2")
    x = normal(4, 2048)
    xs = [x * (1 - 2 * (rank % 2)) for rank in range(8)]
    shared, plain = (error_of_mean(member, xs, correlated, steps=600) for correlated in (True, False))
    # 4 of the 7 possible partners are of the other sign, and then nothing is left of both
    assert shared / plain == pytest.approx(3 / 7, rel=0.1)


@pytest.mark.parametrize("spec", [*SPECS, "natural:bits=3", "amq:bits=3"])
def test_every_rank_and_the_mean_stay_unbiased(spec: str) -> None:
    member, ranks, draws, numel = quantizer(spec), 4, 3000, 200
    xs = [normal(rank, numel) for rank in range(ranks)]
    keys = rng.layer_keys(3, rng.SHARED, 0, range(draws))
    total = torch.zeros(draws, numel, dtype=torch.float64)
    for rank, x in enumerate(xs):
        words = rng.dithers(keys, rank, ranks)
        offsets = np.arange(draws + 1) * numel
        batch = LayerBatch(x.repeat(draws), offsets, [member.level] * draws, keys=keys, dithers=words)
        body, _ = member.compress_layers_(batch)
        out = torch.zeros(draws, numel)
        member.decompress_layers_add_(body, list(out), 1.0)
        assert_mean(out.double(), x)
        total += out
    assert_mean(total / ranks, torch.stack(xs).mean(0))


def assert_mean(draws: Tensor, x: Tensor) -> None:
    """Each element's mean is within five standard errors, but for steps that are taken rarely."""
    deviation = draws.std(0) / math.sqrt(len(draws))
    limit = 5 * deviation + 10 * float(x.abs().max()) / len(draws) + 1e-6
    assert bool(((draws.mean(0) - x).abs() <= limit).all())


def test_compressors_say_whether_they_share_random_numbers() -> None:
    assert quantizer("qsgd:correlated=true").correlated
    assert quantizer("terngrad:correlated=true").correlated
    for spec in ("qsgd", "terngrad", "signsgd", "topk"):
        member = parse(spec)
        assert isinstance(member, GatheredCompressor)
        assert not member.correlated
