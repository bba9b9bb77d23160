"""Both kernel modules keep the same promises, and give the same bytes."""

from __future__ import annotations

import ctypes
import doctest
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.compressors import sparse
from hvd_adaptive.compressors.sparse import DGC, GlobalTopK, RedSync, Threshold, TopK
from hvd_adaptive.kernels import SelectionRule, cpu, for_device, reference, subset
from hvd_adaptive.rng import mix
from hvd_adaptive.wire import ValueFormat, WireError, varint
from hvd_adaptive.wire import frame as wire_frame
from hvd_adaptive.wire import sparse as wire_sparse
from hvd_adaptive.wire.varint import write_varint

RULES = pytest.mark.parametrize("rule", SelectionRule, ids=lambda rule: rule.name)
MODULES = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
FORMATS = pytest.mark.parametrize("values", ValueFormat, ids=lambda values: values.name)
KINDS = (
    "normal",
    "equal",
    "zero",
    "mostly zero",
    "ternary",
    "denormal",
    "wide",
    "one huge",
    "rising",
    "one bin",
)
SIZES = (0, 1, 2, 31, 32, 33, 63, 255, 256, 257, 1000, 2047, 2048, 2049, 4500)
LARGE = (65535, 65536, 65537, 150_000)

# The first call of a kernel compiles, so a deadline would be about the cache.
usual = settings(deadline=None, max_examples=60)


def numbers(kind: str, numel: int, seed: int) -> npt.NDArray[np.float32]:
    """Float32 numbers of a kind that gradients have, or that selection could stumble over."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(numel)
    match kind:
        case "equal":
            x = np.full(numel, -0.3)
        case "zero":
            x = np.zeros(numel)
        case "mostly zero":
            x *= rng.random(numel) < 0.01
        case "ternary":
            x = rng.integers(-1, 2, numel).astype(np.float64)
        case "denormal":
            x *= 1e-43
        case "wide":
            x = np.sign(x) * np.exp(np.clip(25 * x, -85, 85))
        case "one huge":
            x[: min(1, numel)] = 3.4e38
        case "rising":
            x = np.sort(np.abs(x))
        case "one bin":  # 1 to 1 + 1/128: the histogram cannot tell them apart
            x = np.sort(1 + rng.random(numel) / 128)
    return x.astype(np.float32)


layers = st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))
MIDDLE = 0.7
"""A threshold that some numbers of most kinds reach."""
shares = st.sampled_from([0.0, 1e-9, 0.001, 0.01, 0.1, 0.3, 0.5, 0.99, 1.0, 1.5])
single_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def counts_of(parts: list[npt.NDArray[np.float32]], share: float) -> npt.NDArray[np.int64]:
    """A share of each part; more than all of it is allowed."""
    return np.array([int(np.ceil(share * part.size)) for part in parts], dtype=np.int64)


def offsets_of(parts: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.int64]:
    return np.cumsum([0] + [part.size for part in parts])


def bits(x: Tensor | npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Bits of floats, so that NaN equals itself and 0 differs from -0."""
    return (x.numpy() if isinstance(x, Tensor) else x).view(np.int32)


def sent_indices(x: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """The k largest magnitudes, ties by lowest index, without zeros: by a stable sort."""
    order = np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[:k]
    return np.sort(order[x[order] != 0])


def thresholds_of(rule: SelectionRule, layers: int, threshold: float) -> npt.NDArray[np.float32] | None:
    return np.full(layers, threshold, np.float32) if rule == SelectionRule.threshold else None


def compress(
    kernels: ModuleType,
    x: npt.NDArray[np.float32],
    k: int,
    values: ValueFormat,
    rule: SelectionRule = SelectionRule.topk,
    threshold: float = 0.0,
) -> tuple[Tensor, npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """One layer: (body, remainder, stats)."""
    rest = torch.from_numpy(x.copy())
    body, stats = kernels.sparse_compress_(
        rest,
        np.array([0, x.size]),
        np.array([k]),
        values,
        rule=rule,
        thresholds=thresholds_of(rule, 1, threshold),
    )
    return body, rest.numpy(), stats[0]


def assert_same_mass(
    x: npt.NDArray[np.float32], sent: npt.NDArray[np.float32], rest: npt.NDArray[np.float32]
) -> None:
    """What was sent and what is left are x, up to one float32 rounding of the difference."""
    wide, left = x.astype(np.float64), x.astype(np.float64) - sent
    assert np.all(np.abs(left - rest) <= 2.0**-24 * np.maximum(np.abs(wide), np.abs(left)))


def assert_close_to_before(x: Tensor, before: Tensor, grad: Tensor) -> None:
    """The gradient was added and taken away, but where it is not finite: that is found out before."""
    wide, was, added = x.double(), before.double(), grad.double()
    limit = 2.0**-21 * (was.abs() + added.abs()) * (wide + added).isfinite()
    assert bool((((wide - was).abs() <= limit) | torch.from_numpy(bits(x) == bits(before))).all())


def decompress(kernels: ModuleType, body: Tensor, numel: int) -> npt.NDArray[np.float32]:
    out = torch.zeros(numel)
    kernels.sparse_decompress_add_(body, [out], 1.0)
    return out.numpy()


# --- what is sent and what stays -----------------------------------------------------------------


@MODULES
@usual
@given(layers, shares)
def test_fp32_payload_and_remainder_are_x_and_exactly_the_k_largest_travel(
    kernels: ModuleType, layer: tuple[str, int, int], share: float
) -> None:
    x = numbers(*layer)
    k = int(np.ceil(share * x.size))
    body, rest, stats = compress(kernels, x, k, ValueFormat.fp32)
    sent = decompress(kernels, body, x.size)
    expected = sent_indices(x, k)
    assert np.array_equal(np.flatnonzero(sent), expected)
    assert np.array_equal(bits(sent)[expected], bits(x)[expected])
    assert not rest[expected].any()
    kept = np.ones(x.size, bool)
    kept[expected] = False
    assert np.array_equal(bits(rest)[kept], bits(x)[kept])
    assert stats[2] == expected.size
    assert stats[3] == 0


RELATIVE_ERROR = {ValueFormat.fp16: 2.0**-11, ValueFormat.bf16: 2.0**-8}


@MODULES
@usual
@given(layers, shares, st.sampled_from([how for how in ValueFormat if how is not ValueFormat.fp32]))
def test_rounded_payload_and_remainder_are_x_to_a_float32_rounding(
    kernels: ModuleType, layer: tuple[str, int, int], share: float, values: ValueFormat
) -> None:
    x = numbers(*layer)
    k = int(np.ceil(share * x.size))
    body, rest, stats = compress(kernels, x, k, values)
    sent = decompress(kernels, body, x.size)
    wide = x.astype(np.float64)
    assert_same_mass(x, sent, rest)
    chosen = sent_indices(x, k)
    assert stats[2] == chosen.size
    assert np.array_equal(bits(np.delete(rest, chosen)), bits(np.delete(x, chosen)))
    if values in RELATIVE_ERROR:
        representable = chosen[(np.abs(wide[chosen]) > 1e-4) & (np.abs(wide[chosen]) < 65504)]
        bound = RELATIVE_ERROR[values] * np.abs(wide[representable])
        assert np.all(np.abs(rest[representable]) <= bound)


@MODULES
@usual
@given(st.lists(single_floats, max_size=40), st.integers(0, 50), st.sampled_from(ValueFormat))
@example([1e-45, -1e-45, 3e-45], 2, ValueFormat.int8)
@example([3.4028235e38, -3.4028235e38, 1.0], 3, ValueFormat.int8)
@example([3.4028235e38, 65504.0, 65519.99, 65520.0, -1e30], 5, ValueFormat.fp16)
@example([3.4028235e38, -3.3895314e38, 3.3961775e38], 3, ValueFormat.bf16)
@example([6.1e-5, 6.0975552e-5, 5.9604645e-8, 2.9802322e-8, 2.98e-8, 1e-10], 6, ValueFormat.fp16)
def test_any_finite_float_survives_in_payload_and_remainder(
    kernels: ModuleType, x: list[float], k: int, values: ValueFormat
) -> None:
    x32 = np.array(x, dtype=np.float32)
    body, rest, stats = compress(kernels, x32, k, values)
    sent = decompress(kernels, body, x32.size)
    assert_same_mass(x32, sent, rest)
    assert np.isfinite(sent).all()
    assert stats[2] == min(k, np.count_nonzero(x32))


@pytest.mark.parametrize("numel", [10**6, 10**6 + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_elements_of_any_kind(kind: str, numel: int) -> None:
    x = numbers(kind, numel, 3)
    body, rest, stats = compress(cpu, x, numel // 100, ValueFormat.fp32)
    sent = decompress(cpu, body, numel)
    expected = sent_indices(x, numel // 100)
    assert np.array_equal(np.flatnonzero(sent), expected)
    assert np.array_equal(sent + rest, x)
    assert stats[2] == expected.size


def test_a_sample_that_misleads_costs_time_but_not_exactness() -> None:
    x = numbers("normal", 1 << 17, 4)
    # the groups that the sample looks at hold large numbers, the others do not
    groups = x.reshape(-1, 16)
    groups[::13, 0] *= 100
    body, _, stats = compress(cpu, x, 1500, ValueFormat.fp32)
    assert stats[2] == 1500
    assert np.array_equal(np.flatnonzero(decompress(cpu, body, x.size)), sent_indices(x, 1500))


@pytest.mark.parametrize("kind", ["equal", "rising", "one bin", "ternary"])
def test_candidates_without_end_are_trimmed_on_the_way(kind: str) -> None:
    x = numbers(kind, 300_000, 5)
    work = cpu._work.arrays(5000)
    *_, count = cpu._take(x.ctypes.data, 0, x.size, 10, int(SelectionRule.threshold), 1, work)
    assert work[1][:count].tolist() == sent_indices(x, 10).tolist()


# --- the two modules are one ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", LARGE)
def test_the_bytes_are_the_same_for_large_layers(kind: str, numel: int) -> None:
    x = numbers(kind, numel, 18)
    for rule, values in zip([*SelectionRule, SelectionRule.topk], ValueFormat, strict=True):
        for share in (0.001, 0.02, 0.4):
            k = max(1, int(share * numel))
            results = [compress(kernels, x, k, values, rule, MIDDLE) for kernels in (cpu, reference)]
            assert torch.equal(results[0][0], results[1][0])
            assert np.array_equal(bits(results[0][1]), bits(results[1][1]))
            np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-10)


@usual
@given(
    st.lists(layers, max_size=6),
    shares,
    st.sampled_from(ValueFormat),
    st.sampled_from(SelectionRule),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, np.nan, np.inf, -np.inf]),
    st.integers(0, 20),
)
def test_cpu_and_reference_give_the_same_bytes_and_remainders(
    kinds: list[tuple[str, int, int]],
    share: float,
    values: ValueFormat,
    rule: SelectionRule,
    whole: bool,
    with_grads: bool,
    bad: float | None,
    reserve: int,
) -> None:
    parts = [numbers(*kind) for kind in kinds]
    grads = [torch.from_numpy(numbers("normal", part.size, 6)) for part in parts]
    if bad is not None and parts and parts[-1].size:
        (grads[-1].numpy() if with_grads else parts[-1])[parts[-1].size // 2] = bad
    start = torch.from_numpy(np.concatenate([*parts, np.empty(0, np.float32)]))
    results = []
    for kernels in (cpu, reference):
        x = start.clone()
        counts = counts_of([start.numpy()] if whole else parts, share)
        body, stats = kernels.sparse_compress_(
            x,
            offsets_of(parts),
            counts,
            values,
            grads if with_grads else None,
            reserve,
            rule=rule,
            thresholds=thresholds_of(rule, len(counts), MIDDLE),
            whole=whole,
        )
        results.append((body[reserve:], x, stats))
    (body, x, stats), (expected_body, expected_x, expected_stats) = results
    assert body.tolist() == expected_body.tolist()
    np.testing.assert_allclose(stats, expected_stats, rtol=1e-10)
    if bad is not None and with_grads and parts and parts[-1].size:
        tail = slice(int(offsets_of(parts)[-2]), None)  # a gradient that was taken back
        assert_close_to_before(x[tail], start[tail], grads[-1])
        x[tail] = expected_x[tail]
    assert np.array_equal(bits(x), bits(expected_x))


@usual
@given(
    st.lists(layers, max_size=4),
    shares,
    st.sampled_from(ValueFormat),
    st.floats(-2, 2, width=32),
    st.booleans(),
)
def test_cpu_and_reference_add_and_clear_the_same(
    kinds: list[tuple[str, int, int]], share: float, values: ValueFormat, scale: float, whole: bool
) -> None:
    parts = [numbers(*kind) for kind in kinds]
    x = torch.from_numpy(np.concatenate([*parts, np.empty(0, np.float32)]))
    counts = counts_of([x.numpy()] if whole else parts, share)
    body, _ = cpu.sparse_compress_(x, offsets_of(parts), counts, values, whole=whole)
    results = []
    for kernels in (cpu, reference):
        outs = [torch.from_numpy(numbers("normal", part.size, 7)) for part in parts]
        kernels.sparse_decompress_add_(body, outs, scale, values, whole)
        cleared = [torch.from_numpy(numbers("normal", part.size, 7)) for part in parts]
        kernels.sparse_clear_(body, cleared, values, whole)
        outs += cleared
        results.append(np.concatenate([bits(out) for out in outs] + [np.empty(0, np.int32)]))
    assert np.array_equal(*results)


@MODULES
def test_the_kernels_for_the_cpu_offer_what_the_reference_does(kernels: ModuleType) -> None:
    assert for_device(torch.device("cpu")) is cpu
    assert for_device(torch.device("meta")) is reference
    for name in cpu.__all__:
        assert callable(getattr(kernels, name))


# --- the rules -----------------------------------------------------------------------------------


def allowed(
    rule: SelectionRule, x: npt.NDArray[np.float32], k: int, threshold: float
) -> tuple[int, int]:
    """Between how many and how many a rule may send."""
    nonzeros = int(np.count_nonzero(x))
    least = most = min(k, x.size)
    if rule == SelectionRule.threshold:
        least = most = min(k, int((np.abs(x[x != 0]) >= np.float32(threshold)).sum()))
    elif rule == SelectionRule.dgc:
        least = int(np.ceil(0.7 * k - 1e-9))
    elif rule == SelectionRule.redsync:
        most = 2 * k
    return min(least, nonzeros), min(most, nonzeros)


@RULES
@MODULES
@usual
@given(layers, shares, st.sampled_from([0.0, 1e-44, 0.25, MIDDLE, 3.0, np.inf]))
def test_every_rule_sends_the_largest_and_as_many_as_it_promises(
    kernels: ModuleType,
    rule: SelectionRule,
    layer: tuple[str, int, int],
    share: float,
    threshold: float,
) -> None:
    x = numbers(*layer)
    k = min(x.size, int(np.ceil(share * x.size)))
    body, rest, stats = compress(kernels, x, k, ValueFormat.fp32, rule, threshold)
    least, most = allowed(rule, x, k, threshold)
    assert least <= stats[2] <= most
    sent = decompress(kernels, body, x.size)
    assert np.array_equal(np.flatnonzero(sent), sent_indices(x, int(stats[2])))
    assert np.array_equal(sent + rest, x)


@RULES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [65537, 10**6])
def test_large_layers_keep_the_promises_too(kind: str, numel: int, rule: SelectionRule) -> None:
    x = numbers(kind, numel, 21)
    for k in (1, 65, numel // 1000, numel // 100, numel // 4):
        body, rest, stats = compress(cpu, x, k, ValueFormat.fp32, rule, MIDDLE)
        least, most = allowed(rule, x, k, MIDDLE)
        assert least <= stats[2] <= most
        assert body.numel() <= wire_sparse.max_sparse_bytes(numel, rule.most(k), ValueFormat.fp32)
        sent = decompress(cpu, body, numel)
        assert np.array_equal(np.flatnonzero(sent), sent_indices(x, int(stats[2])))
        assert np.array_equal(sent + rest, x)


@pytest.mark.parametrize("numel", [100_000, 3_000_000])
@pytest.mark.parametrize("kind", ["normal", "ternary", "one bin", "wide"])
def test_the_floor_of_dgc_is_that_of_the_reference(kind: str, numel: int) -> None:
    x = torch.from_numpy(numbers(kind, numel, 22))
    sample = cpu.sample_spectrum(x)
    assert np.array_equal(sample, reference.sample_spectrum(x))
    sampled = reference.counts_from_above(sample)
    for k in (1, 100, numel // 1000, numel // 100, numel // 3):
        hist = np.zeros(reference.BINS, np.int32)
        floor = cpu._floor_dgc(x.data_ptr(), 0, numel, k, hist)
        assert floor == reference.dgc_floor(sampled, numel, k)
        assert not hist.any()


def test_dgc_sends_hardly_less_than_was_asked_for_where_the_sample_is_good() -> None:
    numel = 3_000_000
    x = numbers("normal", numel, 23)
    for share in (0.005, 0.01, 0.1):
        k = int(share * numel)
        sent = int(compress(cpu, x, k, ValueFormat.bf16, SelectionRule.dgc)[2][2])
        assert 0.97 * k <= sent <= k


@pytest.mark.parametrize(("reaching", "sent"), [(7500, 7500), (6500, 10_000), (15_000, 10_000)])
def test_dgc_selects_anew_where_the_sample_misled_it_too_far(reaching: int, sent: int) -> None:
    numel, k = 1_000_000, 10_000
    sampled = np.arange(numel) % (13 * 16) < 16
    x = np.linspace(1, 2, numel, dtype=np.float32)
    large = [
        np.flatnonzero(sampled)[::90],
        np.flatnonzero(~sampled),
    ]  # 855 in the sample: 824 are asked for
    large[1] = large[1][:: len(large[1]) // (reaching - len(large[0]))]
    for indices in large:
        x[indices] += np.linspace(7, 14, len(indices), dtype=np.float32)
    assert int(compress(cpu, x, k, ValueFormat.bf16, SelectionRule.dgc)[2][2]) == pytest.approx(
        sent, rel=0.06
    )


def test_redsync_bisects_between_mean_and_maximum_as_in_the_paper() -> None:
    x = np.concatenate([np.full(90, 1.0), np.linspace(2, 10, 10)]).astype(np.float32)
    # mean 1.5: 10 reach it; halfway to the maximum, 5.75, are 5
    assert compress(cpu, x, 5, ValueFormat.fp32, SelectionRule.redsync)[2][2] == 10
    assert compress(cpu, x, 4, ValueFormat.fp32, SelectionRule.redsync)[2][2] == 5


@RULES
@MODULES
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_rule_touches_a_layer_that_is_not_finite(
    kernels: ModuleType, rule: SelectionRule, bad: float
) -> None:
    for numel in (40, 70_000):
        x = numbers("normal", numel, 24)
        x[-1] = bad
        body, rest, stats = compress(kernels, x, max(1, numel // 100), ValueFormat.bf16, rule, 1.0)
        assert np.array_equal(bits(rest), bits(x))
        assert body.tolist() == [1]
        assert stats.tolist() == [0, 0, 0, 1]


@MODULES
def test_signs_travel_with_one_mean_each(kernels: ModuleType) -> None:
    x = np.array([4.0, -1.0, 2.0, 0.5, -3.0], np.float32)
    body, rest, stats = compress(kernels, x, 4, ValueFormat.sign)
    assert decompress(kernels, body, 5).tolist() == [3, -2, 3, 0, -2]
    assert rest.tolist() == [1, 1, -1, 0.5, -1]
    assert stats.tolist() == [30.25, 26, 4, 0]


# --- all layers as one vector --------------------------------------------------------------------


@RULES
@MODULES
def test_layers_that_are_one_vector_are_selected_from_together(
    kernels: ModuleType, rule: SelectionRule
) -> None:
    parts = [numbers("normal", size, size) for size in (0, 30, 2500, 1, 0, 469)]
    grads = [torch.from_numpy(numbers("normal", part.size, 31)) for part in parts]
    x = torch.from_numpy(np.concatenate(parts))
    total = x.numpy() + np.concatenate([grad.numpy() for grad in grads])
    spectra = np.zeros((6, reference.BINS), np.int64)
    thresholds = thresholds_of(rule, 1, 1.0)
    body, stats = kernels.sparse_compress_(
        x,
        offsets_of(parts),
        np.array([50]),
        ValueFormat.bf16,
        grads,
        3,
        spectra,
        rule,
        thresholds,
        True,
    )
    expected_body, expected_rest, expected_stats = compress(
        kernels, total, 50, ValueFormat.bf16, rule, 1.0
    )
    assert torch.equal(body[3:], expected_body)
    assert np.array_equal(bits(x), bits(expected_rest))
    assert spectra.sum(1).tolist() == [0, 30, 2500, 1, 0, 469]

    outs = [torch.zeros(part.size) for part in parts]
    assert not kernels.sparse_decompress_add_(body[3:], outs, 1.0, whole=True).any()
    sent = decompress(kernels, expected_body, 3000)
    assert np.array_equal(torch.cat(outs).numpy(), sent)
    np.testing.assert_allclose(stats.sum(0), expected_stats, rtol=1e-10)
    np.testing.assert_allclose(stats[:, 1], [float(out.double().square().sum()) for out in outs])
    assert stats[:, 2].tolist() == [int(out.count_nonzero()) for out in outs]


@MODULES
def test_one_layer_that_is_not_finite_stops_the_whole_model_and_nothing_is_lost(
    kernels: ModuleType,
) -> None:
    parts = [numbers("normal", size, size) for size in (50, 7, 60)]
    grads = [torch.from_numpy(numbers("normal", part.size, 31)) for part in parts]
    grads[1][3] = np.inf
    x = torch.from_numpy(np.concatenate(parts))
    body, stats = kernels.sparse_compress_(
        x, offsets_of(parts), np.array([5]), ValueFormat.bf16, grads, whole=True
    )
    kept = [torch.from_numpy(parts[0]) + grads[0], torch.from_numpy(parts[1])]
    kept.append(torch.from_numpy(parts[2]) + grads[2])
    assert np.array_equal(bits(x), bits(torch.cat(kept)))
    assert stats[:, 3].tolist() == [0, 1, 0]
    assert not stats[:, 1].any()
    outs = [torch.zeros(part.size) for part in parts]
    assert kernels.sparse_decompress_add_(body, outs, 1.0, whole=True).tolist() == [1, 1, 1]
    assert all(out.isnan().all() for out in outs)
    less, stats = kernels.sparse_recompress_(
        body, x, offsets_of(parts), np.array([2]), ValueFormat.bf16, whole=True
    )
    assert torch.equal(less, body)
    assert stats[:, 3].all()


@MODULES
def test_more_elements_than_indices_can_count_are_refused(kernels: ModuleType) -> None:
    body = torch.ones(1, dtype=torch.uint8)
    out = torch.zeros(1).expand(2**30)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.sparse_decompress_add_(body, [out], 1.0)
    with pytest.raises(ValueError, match="2147483647 elements, got 2147483648"):
        reference.check_numel(2**31)


# --- compressing again and clearing --------------------------------------------------------------


@usual
@given(
    st.lists(layers, max_size=5),
    shares,
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    st.sampled_from(ValueFormat),
    st.sampled_from(SelectionRule),
    st.booleans(),
    st.booleans(),
    st.integers(0, 20),
)
def test_what_shrinking_drops_goes_back_and_both_modules_agree(
    kinds: list[tuple[str, int, int]],
    share: float,
    less: float,
    values: ValueFormat,
    rule: SelectionRule,
    whole: bool,
    nonfinite: bool,
    reserve: int,
) -> None:
    parts = [numbers(*kind) for kind in kinds]
    if nonfinite and parts and parts[0].size and not whole:
        parts[0][0] = np.nan
    start = torch.from_numpy(np.concatenate([*parts, np.empty(0, np.float32)]))
    offsets = offsets_of(parts)
    spans = [start.numpy()] if whole else parts
    limits = thresholds_of(rule, len(spans), MIDDLE)
    x = start.clone()
    old, _ = cpu.sparse_compress_(
        x, offsets, counts_of(spans, share), values, rule=rule, thresholds=limits, whole=whole
    )
    results = []
    for kernels in (cpu, reference):
        rest = x.clone()
        counts = counts_of(spans, share * less)
        new, stats = kernels.sparse_recompress_(
            old, rest, offsets, counts, values, reserve, rule, limits, whole
        )
        results.append((new[reserve:], rest, stats))
    (new, rest, stats), (expected_new, expected_rest, expected_stats) = results
    assert new.tolist() == expected_new.tolist()
    assert np.array_equal(bits(rest), bits(expected_rest))
    np.testing.assert_allclose(stats, expected_stats, rtol=1e-10)

    before, after = ([torch.zeros(part.size) for part in parts] for _ in range(2))
    cpu.sparse_decompress_add_(old, before, 1.0, values, whole)
    cpu.sparse_decompress_add_(new, after, 1.0, values, whole)
    for layer, (part, was, now) in enumerate(zip(parts, before, after, strict=True)):
        if not np.isfinite(part).all():
            assert stats[layer].tolist() == [0, 0, 0, 1]
            continue
        left, total = (tensor[offsets[layer] : offsets[layer + 1]].double() for tensor in (rest, x))
        scale = torch.stack([was.abs(), now.abs(), total.abs().float()]).amax(0).double()
        assert bool(((now + left) - (was + total)).abs().le(2**-23 * scale).all())
        assert stats[layer, 0] == pytest.approx(float(was.double().square().sum()), rel=1e-10)
        assert stats[layer, 1] == pytest.approx(float(now.double().square().sum()), rel=1e-10)
        assert bool((was[now != 0] != 0).all())


@MODULES
@RULES
def test_shrinking_selects_as_from_a_layer_of_the_values(
    kernels: ModuleType, rule: SelectionRule
) -> None:
    x = numbers("normal", 200_000, 26)
    body, rest, stats = compress(cpu, x, 100_000, ValueFormat.bf16)
    left = torch.from_numpy(rest)
    less, stats = kernels.sparse_recompress_(
        body,
        left,
        np.array([0, x.size]),
        np.array([2000]),
        ValueFormat.bf16,
        rule=rule,
        thresholds=thresholds_of(rule, 1, 2.0),
    )
    sent = decompress(cpu, body, x.size)
    values = sent[sent != 0]
    expected, _, expected_stats = compress(reference, values, 2000, ValueFormat.bf16, rule, 2.0)
    kept = decompress(cpu, less, x.size)
    found = decompress(cpu, expected, values.size)
    assert np.array_equal(kept[kept != 0], found[found != 0])
    np.testing.assert_allclose(stats[0], expected_stats, rtol=1e-10)


@MODULES
def test_clearing_sets_zeros_where_a_body_holds_something_and_nowhere_else(
    kernels: ModuleType,
) -> None:
    parts = [numbers("normal", size, 27) for size in (100, 0, 50, 80)]
    parts[2][7] = np.nan
    x = torch.from_numpy(np.concatenate(parts))
    for whole in (False, True):
        counts = np.array([40]) if whole else np.array([20, 5, 5, 9])
        total = x.nan_to_num() if whole else x.clone()
        body, _ = cpu.sparse_compress_(total, offsets_of(parts), counts, ValueFormat.fp32, whole=whole)
        outs = [torch.full((part.size,), 2.0) for part in parts]
        kernels.sparse_clear_(body, outs, ValueFormat.fp32, whole)
        cleared = torch.cat(outs) == 0
        sent = [torch.zeros(part.size) for part in parts]
        kernels.sparse_decompress_add_(body, sent, 1.0, whole=whole)
        expected = torch.cat(sent)
        assert torch.equal(cleared, (expected != 0) & ~expected.isnan())


# --- buckets -------------------------------------------------------------------------------------


@MODULES
@FORMATS
def test_layers_of_mixed_sizes_in_one_call_equal_one_call_each(
    kernels: ModuleType, values: ValueFormat
) -> None:
    sizes = [0, 1, 5000, 0, 70_000, 2048, 31]
    parts = [numbers("normal", size, size) for size in sizes]
    x = torch.from_numpy(np.concatenate(parts))
    body, stats = kernels.sparse_compress_(x, offsets_of(parts), counts_of(parts, 0.02), values)
    single = [
        compress(kernels, part, int(k), values)
        for part, k in zip(parts, counts_of(parts, 0.02), strict=True)
    ]
    assert body.tolist() == [byte for one in single for byte in one[0].tolist()]
    assert np.array_equal(x.numpy(), np.concatenate([one[1] for one in single]))
    assert np.array_equal(stats, np.stack([one[2] for one in single]))


@MODULES
def test_a_bucket_without_layers_is_an_empty_body(kernels: ModuleType) -> None:
    body, stats = kernels.sparse_compress_(
        torch.zeros(0), np.array([0]), np.zeros(0, np.int64), ValueFormat.fp32, []
    )
    assert body.numel() == 0
    assert stats.shape == (0, 4)
    assert kernels.sparse_decompress_add_(body, [], 1.0).shape == (0,)


@MODULES
def test_gradients_of_any_shape_are_added_first(kernels: ModuleType) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0])
    grads = [torch.full((2, 3), 10.0), torch.tensor(-8.0)]
    outs = [torch.zeros(2, 3), torch.zeros(())]
    body, _ = kernels.sparse_compress_(
        x, np.array([0, 6, 7]), np.array([2, 0]), ValueFormat.fp32, grads
    )
    kernels.sparse_decompress_add_(body, outs, 2.0)
    assert outs[0].tolist() == [[0, 0, 0], [0, 30, 32]]
    assert outs[1] == 0
    assert x.tolist() == [11, 12, 13, 14, 0, 0, 1]


@MODULES
def test_elements_outside_the_offsets_are_left_alone(kernels: ModuleType) -> None:
    x = torch.ones(10)
    kernels.sparse_compress_(x, np.array([3, 5]), np.array([2]), ValueFormat.fp32, [torch.ones(2)])
    assert x.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]


@MODULES
@FORMATS
def test_stats_are_the_energies_of_x_and_of_what_was_sent(
    kernels: ModuleType, values: ValueFormat
) -> None:
    for kind in KINDS:
        x, grad = numbers(kind, 7001, 8), numbers("normal", 7001, 9)
        rest = torch.from_numpy(x.copy())
        body, stats = kernels.sparse_compress_(
            rest, np.array([0, x.size]), np.array([70]), values, [torch.from_numpy(grad)]
        )
        total = (x + grad).astype(np.float64)
        sent = decompress(kernels, body, x.size).astype(np.float64)
        energies = [np.square(total).sum(), np.square(sent).sum()]
        np.testing.assert_allclose(stats[0, :2], energies, rtol=1e-12)


# --- summing -------------------------------------------------------------------------------------


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
        bodies.append(cpu.sparse_compress_(x, offsets_of(parts), counts, values, whole=whole)[0])
    expected, marks = [torch.zeros(size) for size in shapes], np.zeros(len(shapes), np.uint8)
    for body in bodies:
        marks |= cpu.sparse_decompress_add_(body, expected, 0.3, values, whole)
    for kernels in (cpu, reference):
        outs = [torch.full((size,), 7.0) for size in shapes]
        found = kernels.sparse_decompress_sum_(bodies, outs, 0.3, values, whole)
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
    expected, memory = torch.zeros(numel), torch.full((numel + 16,), 7.0)
    for body in bodies:
        cpu.sparse_decompress_add_(body, [expected], 0.25)
    assert 4 * numel > cpu.STREAMED
    monkeypatch.setattr(cpu, "KEPT", 20_000)
    assert 9000 * ranks > cpu.KEPT  # not all at once
    cpu.sparse_decompress_sum_(bodies, [memory[shift : shift + numel]], 0.25)
    assert np.array_equal(bits(memory[shift : shift + numel]), bits(expected))
    assert memory[:shift].tolist() + memory[shift + numel :].tolist() == [7.0] * 16


def test_room_for_many_values_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "KEPT", 10_000)
    room = cpu._Room()
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
        found: int = cpu._most_values(body.ctypes.data, body.ctypes.data + body.size, numels, expected)
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
        kernels.sparse_decompress_sum_([good, good[:-1]], [out], 1.0)
    with pytest.raises(WireError):
        kernels.sparse_decompress_sum_([good, torch.cat([good, good])], [out], 1.0)
    with pytest.raises(ValueError, match="no body to sum"):
        kernels.sparse_decompress_sum_([], [out], 1.0)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.sparse_decompress_sum_([good], [out.double()], 1.0)


# --- NaN and Inf ---------------------------------------------------------------------------------


@MODULES
@pytest.mark.parametrize("numel", [1, 40, 3000, 70_000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["gradient", "x", "overflow"])
def test_a_layer_that_is_not_finite_keeps_its_x_and_sends_a_mark(
    kernels: ModuleType, numel: int, bad: float, where: str
) -> None:
    parts = [numbers("normal", size, size) for size in (500, numel, 600)]
    grads = [numbers("normal", part.size, 11) for part in parts]
    if where == "overflow":
        parts[1][-1] = grads[1][-1] = 3e38
    else:
        (grads if where == "gradient" else parts)[1][-1] = bad
    x = torch.from_numpy(np.concatenate(parts))
    before = x.clone()
    offsets, counts = offsets_of(parts), np.array([5, max(1, numel // 100), 6])
    body, stats = kernels.sparse_compress_(
        x, offsets, counts, ValueFormat.bf16, [torch.from_numpy(grad) for grad in grads]
    )
    assert_close_to_before(x[500:-600], before[500:-600], torch.from_numpy(grads[1]))
    if kernels is reference:  # which looks before it adds
        assert np.array_equal(bits(x)[500:-600], bits(before)[500:-600])
    assert stats[1].tolist() == [0, 0, 0, 1]
    assert stats[[0, 2], 2].tolist() == [5, 6]

    outs = [torch.zeros(part.size) for part in parts]
    assert kernels.sparse_decompress_add_(body, outs, 0.5).tolist() == [0, 1, 0]
    assert outs[1].isnan().all()
    assert [int(out.count_nonzero()) for out in (outs[0], outs[2])] == [5, 6]


# --- arguments -----------------------------------------------------------------------------------


@MODULES
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(4, dtype=torch.float64)}, "x is 1-D contiguous float32"),
        ({"x": torch.zeros(8)[::2]}, "x is 1-D contiguous float32"),
        ({"offsets": np.array([0, 2])}, "L \\+ 1 offsets"),
        ({"offsets": np.array([0, 3, 5])}, "offsets must rise"),
        ({"offsets": np.array([0, 3, 2])}, "offsets must rise"),
        ({"offsets": np.array([-1, 3, 4])}, "offsets must rise"),
        ({"counts": np.array([1, -1])}, "counts must be 0 or more"),
        ({"grads": [torch.zeros(2)]}, "1 gradients for 2 layers"),
        ({"grads": [torch.zeros(2), torch.zeros(3)]}, "gradient of layer 1 must be 2"),
        ({"grads": [torch.zeros(2), torch.zeros(2).half()]}, "gradient of layer 1"),
        ({"grads": [torch.zeros(4)[::2], torch.zeros(2)]}, "gradient of layer 0"),
        ({"whole": True}, "one if they are one vector"),
        ({"rule": SelectionRule.threshold}, "thresholds belong to"),
        ({"thresholds": np.ones(2, np.float32)}, "thresholds belong to"),
        (
            {"rule": SelectionRule.threshold, "thresholds": np.ones(1, np.float32)},
            "2 thresholds of 0 or more",
        ),
        (
            {"rule": SelectionRule.threshold, "thresholds": np.array([-1, 1], np.float32)},
            "of 0 or more",
        ),
        (
            {"rule": SelectionRule.threshold, "thresholds": np.array([np.nan, 1], np.float32)},
            "of 0 or more",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    kernels: ModuleType, arguments: dict[str, object], message: str
) -> None:
    usual_arguments = {
        "x": torch.zeros(4),
        "offsets": np.array([0, 2, 4]),
        "counts": np.array([1, 1]),
        "values": ValueFormat.fp32,
    }
    with pytest.raises(ValueError, match=message):
        kernels.sparse_compress_(**(usual_arguments | arguments))


@MODULES
def test_outputs_that_cannot_be_added_to_are_refused(kernels: ModuleType) -> None:
    body = torch.zeros(1, dtype=torch.uint8)
    for out in (torch.zeros(4).half(), torch.zeros(2, 3).t()):
        with pytest.raises(ValueError, match="contiguous float32"):
            kernels.sparse_decompress_add_(body, [out], 1.0)
    with pytest.raises(ValueError, match="uint8"):
        kernels.sparse_decompress_add_(torch.zeros(1), [torch.zeros(4)], 1.0)
    with pytest.raises(ValueError, match="float32"):
        kernels.spectrum(torch.zeros(4).double())


@MODULES
def test_the_largest_number_that_is_not_sent_after_all_does_not_become_infinite(
    kernels: ModuleType,
) -> None:
    # as signs, which all get the mean, it leaves a remainder that was rounded up, and so is their sum
    unit, one_layer = 2.0**103, np.array([0, 4])
    largest = float(torch.finfo(torch.float32).max)
    x = torch.tensor([8 * unit, 4 * unit, 2 * unit, largest])
    body, _ = kernels.sparse_compress_(x, one_layer, np.array([4]), ValueFormat.sign)
    kernels.sparse_recompress_(body, x, one_layer, np.array([1]), ValueFormat.sign)
    assert x[3] == largest


# --- damage --------------------------------------------------------------------------------------


def layer_bytes(count: int, values: ValueFormat, stream: bytes, data: bytes) -> bytes:
    header = write_varint(count << 4 | values << 1)
    return header + write_varint(len(stream)) + stream + data


ONE = np.float32(1).tobytes()
FP32 = ValueFormat.fp32


def stream_of(text: str) -> bytes:
    """Bits written in the order in which they are read, as bytes."""
    text = text.replace(" ", "")
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))


DAMAGED = {
    "the bytes end before": [
        b"",
        b"\x80",
        layer_bytes(1, FP32, stream_of("000000 1"), ONE[:3]),
        layer_bytes(1, FP32, stream_of("000000"), ONE),
        layer_bytes(3, FP32, stream_of("000000 1 1"), ONE * 3),
        layer_bytes(1, FP32, b"", ONE),
        write_varint(16) + write_varint(2**62) + b"1234567890",
    ],
    "a varint is longer": [b"\x88\x00", b"\x80" * 9 + b"\x01", b"\xff" * 12, b"\x10\x81\x00"],
    "more values than": [
        layer_bytes(11, FP32, bytes(4), ONE * 11),
        write_varint(1 << 4 | 1) + b"\x01\x40" + ONE,
        write_varint(2**59) + b"\x01\x40",
    ],
    "not in the expected format": [
        layer_bytes(1, ValueFormat.fp16, stream_of("000000 1"), b"\x00\x3c"),
        write_varint(ValueFormat.int8 << 1),
        write_varint(1 << 4 | 5 << 1) + b"\x01\x40" + ONE,
        write_varint(7 << 1),
    ],
    "a code's parameter": [layer_bytes(1, FP32, stream_of("101000 1 00000"), ONE)],
    "a gap is longer": [
        layer_bytes(1, FP32, stream_of("000000") + bytes(40), ONE),
        layer_bytes(2, FP32, stream_of("000000 1") + bytes(30), ONE * 2),
        layer_bytes(1, FP32, stream_of("000001 00001 0000"), ONE),
        layer_bytes(1, FP32, stream_of("000001") + bytes(40), ONE),
    ],
    "an index is past the end": [
        layer_bytes(1, FP32, stream_of("000000 00000 00000 1"), ONE),
        layer_bytes(2, FP32, stream_of("000000 00000 00001 1"), ONE * 2),
        layer_bytes(1, FP32, stream_of("110000 01 111"), ONE),
        layer_bytes(1, FP32, stream_of("000001 0001 110"), ONE),
    ],
    "the index stream is not as long": [layer_bytes(1, FP32, stream_of("000000 1") + b"\x00", ONE)],
    "the padding": [layer_bytes(1, FP32, stream_of("000000 1 1"), ONE)],
    "a value or a scale": [
        layer_bytes(1, FP32, stream_of("000000 1"), np.float32(np.nan).tobytes()),
        layer_bytes(1, FP32, stream_of("000000 1"), np.float32(-np.inf).tobytes()),
    ],
    "bytes are left over": [b"\x00\x00", layer_bytes(1, FP32, stream_of("000000 1"), ONE + b"1")],
}


@MODULES
@pytest.mark.parametrize("message", DAMAGED)
def test_damage_is_named_and_nothing_is_written(kernels: ModuleType, message: str) -> None:
    for data in DAMAGED[message]:
        out = torch.zeros(10)
        body = tensor_of(data)
        with pytest.raises(WireError, match=f"{message}.*layer 0 of 10 elements"):
            kernels.sparse_decompress_add_(body, [out], 1.0, FP32)
        assert not out.any() or message == "bytes are left over"


@MODULES
@pytest.mark.parametrize("how", [ValueFormat.fp16, ValueFormat.bf16, ValueFormat.int8])
def test_values_that_no_encoder_sends_are_damage(kernels: ModuleType, how: ValueFormat) -> None:
    data = {"fp16": b"\x00\x7c", "bf16": b"\xc0\x7f", "int8": b"\x00\x00\xc0\x7f\x01"}[how.name]
    body = layer_bytes(1, how, stream_of("000000 1"), data)
    with pytest.raises(WireError, match="a value or a scale is NaN or Inf"):
        kernels.sparse_decompress_add_(tensor_of(body), [torch.zeros(4)], 1.0)


def written(gaps: list[int]) -> str:
    """A block of gaps as wire.py describes it, bit by bit."""
    mean, logs = sum(gaps) // len(gaps), sum((gap + 1).bit_length() - 1 for gap in gaps)
    middle, texts = max(1, mean.bit_length() - 1), []
    for r in (middle - 1, middle, middle + 1):
        texts.append(f"{r:05b}"[::-1] + "0")
        for gap in gaps:
            low = f"{gap % 2**r:0{r}b}"[::-1] if r else ""
            texts[-1] += "0" * (gap >> r) + "1" + low
    r = logs // len(gaps)
    texts.append(f"{r:05b}"[::-1] + "1")
    for gap in gaps:
        digits = f"{gap + 2**r:b}"  # begins with the one
        texts[-1] += "0" * (len(digits) - 1 - r) + "1" + digits[:0:-1]
    return min(texts, key=len)


@MODULES
@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90), st.integers(0, 4000)), min_size=1))
@example([0] * 300)
@example([1, 0, 0, 2, 0, 0, 1, 0] * 40 + [3000] * 2)
@example([60000])
def test_positions_travel_as_they_are_described(kernels: ModuleType, gaps: list[int]) -> None:
    indices = np.cumsum(np.array(gaps) + 1) - 1
    x = np.zeros(indices[-1] + 1, np.float32)
    x[indices] = 1
    text = "".join(written(gaps[start : start + 256]) for start in range(0, len(gaps), 256))
    expected = layer_bytes(len(gaps), FP32, stream_of(text), ONE * len(gaps))
    assert bytes(compress(kernels, x, len(gaps), FP32)[0].tolist()) == expected


def test_positions_that_crowd_take_fewer_bits_than_scattered_ones() -> None:
    rng = np.random.default_rng(18)
    rows = rng.random((2000, 100)) * np.where(rng.random((2000, 1)) < 0.1, 1, 0.01)
    x = torch.from_numpy(rows.astype(np.float32))
    crowded, scattered = (
        cpu.position_bits(each, np.array([2000]))[0, 1]
        for each in (x, x.view(-1)[rng.permutation(200_000)])
    )
    # Entropy: 5.2 bits, as 2,000 of 20,000 in 200 of 2,000 rows have; one Rice parameter takes 8.4.
    assert crowded / 2000 < 5.9
    assert 8.0 < scattered / 2000 < 8.2


@MODULES
def test_formats_that_there_are_not_are_damage_whatever_is_expected(kernels: ModuleType) -> None:
    for code in (5, 6, 7):
        body = write_varint(1 << 4 | code << 1) + b"\x01\x40" + ONE * 4
        with pytest.raises(WireError, match="in none that there is"):
            kernels.sparse_decompress_add_(tensor_of(body), [torch.zeros(4)], 1.0)


@MODULES
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ONE + np.float32(np.inf).tobytes() + b"\x01", "a value or a scale"),
        (np.float32(np.nan).tobytes() + ONE + b"\x01", "a value or a scale"),
        (ONE * 2 + b"\x05", "the padding of the index stream or of the signs"),
        (ONE * 2, "the bytes end before"),
    ],
)
def test_damaged_signs_are_found(kernels: ModuleType, data: bytes, message: str) -> None:
    body = layer_bytes(2, ValueFormat.sign, stream_of("000000 1 1"), data)
    with pytest.raises(WireError, match=message):
        kernels.sparse_decompress_add_(tensor_of(body), [torch.zeros(4)], 1.0)


@MODULES
def test_layers_before_the_damaged_one_are_added_and_no_others(kernels: ModuleType) -> None:
    good = layer_bytes(1, FP32, stream_of("000000 001"), ONE)
    bad = layer_bytes(1, FP32, stream_of("000000 1"), ONE[:2])
    outs = [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(WireError, match="layer 1 of 4"):
        kernels.sparse_decompress_add_(torch.tensor(list(good + bad), dtype=torch.uint8), outs, 3.0)
    assert outs[0].tolist() == [0, 0, 3, 0]
    assert not outs[1].any()


def tensor_of(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


class Trap:
    """Memory that ends at a page which nobody may read: one byte too far and the process dies."""

    def __init__(self, pages: int) -> None:
        self.size = pages * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.size + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert libc.mprotect(address + self.size, mmap.PAGESIZE, 0) == 0  # PROT_NONE
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.size)

    def hold(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """``data`` as a tensor whose last byte is the last that may be read."""
        place = self.bytes[self.size - data.size :]
        place.numpy()[:] = data
        return place


class Guarded:
    """Outputs with zones between them that no decoder may write to."""

    ZONE = 64

    def __init__(self, sizes: list[int]) -> None:
        self.all = torch.full((sum(sizes) + self.ZONE * (len(sizes) + 1),), 7.0)
        self.zones = np.ones(self.all.numel(), bool)
        self.outs = []
        start = self.ZONE
        for size in sizes:
            self.outs.append(self.all[start : start + size])
            self.zones[start : start + size] = False
            start += size + self.ZONE

    def intact(self) -> bool:
        return bool((self.all.numpy()[self.zones] == 7.0).all())


def bodies_to_damage(sizes: list[int]) -> list[npt.NDArray[np.uint8]]:
    """Good bodies of all formats and several densities for the same layers."""
    parts = [numbers("normal", size, 12) for size in sizes]
    bodies = []
    for values in ValueFormat:
        for share in (0.002, 0.05, 0.7):
            x = torch.from_numpy(np.concatenate(parts))
            body, _ = cpu.sparse_compress_(x, offsets_of(parts), counts_of(parts, share), values)
            bodies.append(body.numpy())
    return bodies


def damage(body: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Flip a bit, set bytes, cut, insert or repeat; headers are hit more often than values."""
    body = body.copy()
    where = int(body.size * rng.random() ** 2)
    match int(rng.integers(6)):
        case 0:
            body[where] ^= 1 << int(rng.integers(8))
        case 1:
            body[where : where + int(rng.integers(1, 12))] = rng.integers(256)
        case 2:
            body = body[:where]
        case 3:
            body = np.insert(body, where, rng.integers(256))
        case 4:
            body = np.delete(body, where)
        case _:
            body[where:] = np.roll(body[where:], int(rng.integers(1, 9)))
    return body


SIZES_TO_DAMAGE = [300, 0, 1, 4000]


def outcome(kernels: ModuleType, body: Tensor) -> tuple[str, list[list[int]]]:
    outs = [torch.zeros(size) for size in SIZES_TO_DAMAGE]
    x, cleared = torch.ones(sum(SIZES_TO_DAMAGE)), [torch.ones_like(out) for out in outs]
    offsets = offsets_of([out.numpy() for out in outs])
    message = ""
    for act in (
        lambda: kernels.sparse_decompress_add_(body, outs, 1.0),
        lambda: kernels.sparse_clear_(body, cleared),
        lambda: kernels.sparse_recompress_(body, x, offsets, np.array([9, 5, 1, 90]), ValueFormat.bf16),
    ):
        try:
            message += str(act())
        except WireError as error:
            message += str(error)
    return message, [bits(out).tolist() for out in [*outs, *cleared, x]]


def test_cpu_and_reference_find_the_same_damage() -> None:
    rng = np.random.default_rng(15)
    bodies = bodies_to_damage(SIZES_TO_DAMAGE)
    for i in range(1500):
        body = torch.from_numpy(damage(bodies[i % len(bodies)], rng))
        assert outcome(cpu, body) == outcome(reference, body)


@pytest.mark.parametrize("zeros", [24, 26, 30, 45])
@pytest.mark.parametrize("head", ["111000", "010000", "110001", "101101"])
def test_cpu_and_reference_say_the_same_of_a_gap_that_is_too_long(zeros: int, head: str) -> None:
    # the second gap's zeros are all in the word that the first was read from
    stream = stream_of(head + "1" + 7 * "0" + zeros * "0" + "1" + 25 * "01")
    body = tensor_of(layer_bytes(2, FP32, stream, ONE * 2))
    said = [
        finding(kernels.sparse_decompress_add_, body, [torch.zeros(3000)], 1.0)
        for kernels in (cpu, reference)
    ]
    assert said[0] == said[1] != ""


def add_each(bodies: list[Tensor], outs: list[Tensor], scale: float) -> None:
    for body in bodies:
        cpu.sparse_decompress_add_(body, outs, scale)


def finding(act: Callable[..., object], *arguments: object) -> str:
    """What was found damaged, if anything."""
    try:
        act(*arguments)
    except WireError as error:
        return str(error)
    return ""


def test_two_bodies_at_once_are_checked_as_one_by_one_and_never_read_past_their_ends() -> None:
    rng = np.random.default_rng(17)
    bodies, found = bodies_to_damage(SIZES_TO_DAMAGE), 0
    trap, other, guarded = Trap(pages=8), Trap(pages=8), Guarded(SIZES_TO_DAMAGE)
    for i in range(20_000):
        pair = [
            trap.hold(damage(bodies[i % len(bodies)], rng)),
            other.hold(bodies[i * 7 % len(bodies)]),
        ]
        pair = pair[:: 1 if i % 2 else -1]
        expected = [torch.zeros(size) for size in SIZES_TO_DAMAGE]
        message = finding(add_each, pair, expected, 1.0)
        assert finding(cpu.sparse_decompress_sum_, pair, guarded.outs, 1.0) == message
        if message:
            found += 1
            continue
        for out, wanted in zip(guarded.outs, expected, strict=True):
            assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
    assert guarded.intact()
    assert found > 10_000


# --- the spectrum --------------------------------------------------------------------------------


@MODULES
@pytest.mark.parametrize("kind", KINDS)
def test_the_spectrum_counts_exponent_and_seven_bits(kernels: ModuleType, kind: str) -> None:
    x = numbers(kind, 70_001, 16)
    expected = np.bincount((bits(x) & 0x7FFFFFFF) >> 16, minlength=1 << 15)
    assert np.array_equal(kernels.spectrum(torch.from_numpy(x)), expected)


@MODULES
def test_spectra_are_counted_in_the_same_pass_and_leave_out_what_is_not_finite(
    kernels: ModuleType,
) -> None:
    x = torch.cat([torch.randn(5000), torch.full((10,), float("nan")), torch.randn(3)])
    grads = [torch.randn(5000), torch.ones(10), torch.zeros(3)]
    offsets, counts = np.array([0, 5000, 5010, 5013]), np.array([50, 5, 3])
    before = np.ones((3, reference.BINS), np.int64)
    spectra, first = before.copy(), x[:5000] + grads[0]
    expected = [reference.spectrum(first), np.zeros(reference.BINS), reference.spectrum(x[5010:])]
    kernels.sparse_compress_(x, offsets, counts, ValueFormat.bf16, grads, spectra=spectra)
    assert np.array_equal(spectra - before, np.stack(expected))


@MODULES
def test_spectra_of_another_shape_are_refused(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"int64 array of shape \(1, 32768\)"):
        kernels.sparse_compress_(
            torch.ones(4),
            np.array([0, 4]),
            np.array([1]),
            ValueFormat.bf16,
            spectra=np.zeros((2, reference.BINS), np.int64),
        )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "denormal"])
@pytest.mark.parametrize("numel", [1, 1000, 200_000])
def test_errors_from_one_spectrum_are_within_one_percent_of_compressing(kind: str, numel: int) -> None:
    x = numbers(kind, numel, 17)
    energy = float(np.square(x.astype(np.float64)).sum())
    shares = [0, 1e-9, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 1]
    counts = np.array([int(np.ceil(share * numel)) for share in shares])
    hist = cpu.spectrum(torch.from_numpy(x))
    estimated = cpu.errors_from_spectrum(hist, energy, numel, counts)
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
    errors = cpu.errors_from_spectrum(cpu.spectrum(x), float("inf"), 2, np.array([0, 1, 2]))
    assert np.isnan(errors).all()
    for compressor in (TopK(), DGC(), RedSync(values="sign"), Threshold()):
        assert np.isnan(compressor.errors(x, [0.1, 0.2])).all()


def test_a_histogram_of_another_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="counts 5 elements"):
        cpu.errors_from_spectrum(cpu.spectrum(torch.ones(4)), 4.0, 5, np.array([1]))


# --- random subsets -------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 4097, 131_071, 131_073, 300_007])
def test_a_random_order_holds_every_number_once_and_begins_alike_for_every_count(numel: int) -> None:
    order = subset.first_indices(numel, numel, key=9)
    assert order.sort().values.tolist() == list(range(numel))
    for count in {0, min(1, numel), numel // 3, max(0, numel - 1)}:
        assert torch.equal(subset.first_indices(numel, count, key=9), order[:count])


@pytest.mark.parametrize(("numel", "count"), [(7, 3), (300_007, 1001), (300_007, 200_003)])
def test_all_elements_are_equally_likely_to_be_drawn(numel: int, count: int) -> None:
    draws, sections = 2000 if numel < 10 else 400, min(numel, 7)
    found = np.zeros(sections)
    for key in range(draws):
        indices = subset.first_indices(numel, count, mix(key)).numpy()
        found += np.bincount(indices * sections // numel, minlength=sections)
    shares = found / found.sum() * sections
    # runs of neighbours are drawn together, so that they count once
    deviation = np.sqrt(sections * subset.run_length(numel) / (draws * count))
    assert np.abs(shares - 1).max() < 5 * deviation


def test_the_ends_are_drawn_as_often_as_the_middle_though_runs_do_not_divide_the_tensor() -> None:
    numel, draws = 262_147, 4000  # runs of 4, of which the last has 3
    places = torch.tensor([0, 1, 2, 3, 131_000, numel - 4, numel - 3, numel - 2, numel - 1])
    count = numel // 2 + 1  # ends inside a run
    seen = torch.zeros(len(places))
    for key in range(draws):
        x = torch.zeros(numel)
        subset.add_(x, torch.ones(count), mix(key))
        seen += x[places]
    assert float((seen / draws - 0.5).abs().max()) < 5 * 0.5 / draws**0.5


@pytest.mark.parametrize("numel", [0, 1, 100, 300_007])
def test_values_are_taken_from_where_the_indices_say_and_added_there(numel: int) -> None:
    x, count = torch.randn(numel, generator=torch.Generator().manual_seed(1)), numel // 3
    indices = subset.first_indices(numel, count, key=5)
    rest = x.clone()
    values = subset.take_(rest, count, key=5)
    assert torch.equal(values, x[indices])
    expected = x.clone()
    expected[indices] = 0.0
    assert torch.equal(rest, expected)
    subset.add_(rest, values, key=5, scale=-2.0, skip=count // 2)
    expected[indices[count // 2 :]] -= 2.0 * values[count // 2 :]
    assert torch.equal(rest, expected)


def test_more_elements_than_there_are_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="cannot draw 4 different numbers below 3"):
        subset.take_(torch.zeros(3), 4, key=1)


@pytest.mark.parametrize(
    "module", [reference, wire_sparse, wire_frame, varint, sparse], ids=lambda module: module.__name__
)
def test_the_examples_in_docstrings_give_what_they_show(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


# --- compiling -----------------------------------------------------------------------------------


def test_warm_says_how_long_it_took() -> None:
    command = [sys.executable, "-m", "hvd_adaptive.commands.precompile"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kernels ready after" in done.stdout


def test_the_benchmark_runs() -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, str(root / "benchmarks" / "kernels.py"), "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "x memcpy" in done.stdout
