"""Which elements each rule sends, of one layer, of all as one vector, or of a body."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.kernels import SelectionRule
from hvd_adaptive.kernels.checks import check_numel
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.cpu.candidates import count_sample, floor_dgc, take_candidates
from hvd_adaptive.kernels.cpu.memory import thread_buffers
from hvd_adaptive.kernels.floats import BINS
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.kernels.selection import counts_from_above, dgc_floor
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire import sparse as wire_sparse
from tests.kernels.inputs import (
    KINDS,
    MIDDLE,
    MODULES,
    RULES,
    bits,
    compress,
    counts_of,
    decompress,
    layers,
    numbers,
    offsets_of,
    sent_indices,
    shares,
    thresholds_of,
    usual,
)


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
    work = thread_buffers.arrays(5000)
    *_, count = take_candidates(x.ctypes.data, 0, x.size, 10, int(SelectionRule.threshold), 1, work)
    assert work[1][:count].tolist() == sent_indices(x, 10).tolist()


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
    sampled = counts_from_above(sample)
    for k in (1, 100, numel // 1000, numel // 100, numel // 3):
        hist = np.zeros(BINS, np.int32)
        floor = floor_dgc(count_sample(x.data_ptr(), 0, numel, hist), numel, k, hist)
        assert floor == dgc_floor(sampled, numel, k)
        assert not hist.any()


def test_dgc_sends_hardly_less_than_was_asked_for_where_the_sample_is_good() -> None:
    numel = 3_000_000
    x = numbers("normal", numel, 23)
    for share in (0.005, 0.01, 0.1):
        k = int(share * numel)
        sent = int(compress(cpu, x, k, ValueFormat.bf16, SelectionRule.dgc)[2][2])
        assert 0.97 * k <= sent <= k


@pytest.mark.parametrize(("reaching", "sent"), [(7500, 7500), (6500, 10_000), (15_000, 10_000)])
def test_dgc_selects_again_where_the_sample_misled_it_too_far(reaching: int, sent: int) -> None:
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
def test_signs_are_sent_with_one_mean_each(kernels: ModuleType) -> None:
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
    thresholds = thresholds_of(rule, 1, 1.0)
    body, stats = kernels.compress_(
        x,
        offsets_of(parts),
        np.array([50]),
        ValueFormat.bf16,
        grads,
        3,
        rule,
        thresholds,
        True,
    )
    expected_body, expected_rest, expected_stats = compress(
        kernels, total, 50, ValueFormat.bf16, rule, 1.0
    )
    assert torch.equal(body[3:], expected_body)
    assert np.array_equal(bits(x), bits(expected_rest))

    outs = [torch.zeros(part.size) for part in parts]
    assert not kernels.decompress_add_(body[3:], outs, 1.0, whole=True).any()
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
    body, stats = kernels.compress_(
        x, offsets_of(parts), np.array([5]), ValueFormat.bf16, grads, whole=True
    )
    kept = [torch.from_numpy(parts[0]) + grads[0], torch.from_numpy(parts[1])]
    kept.append(torch.from_numpy(parts[2]) + grads[2])
    assert np.array_equal(bits(x), bits(torch.cat(kept)))
    assert stats[:, 3].tolist() == [0, 1, 0]
    assert not stats[:, 1].any()
    outs = [torch.zeros(part.size) for part in parts]
    assert kernels.decompress_add_(body, outs, 1.0, whole=True).tolist() == [1, 1, 1]
    assert all(out.isnan().all() for out in outs)
    less, stats = kernels.recompress_(
        body, x, offsets_of(parts), np.array([2]), ValueFormat.bf16, whole=True
    )
    assert torch.equal(less, body)
    assert stats[:, 3].all()


@MODULES
def test_more_elements_than_indices_can_count_are_refused(kernels: ModuleType) -> None:
    body = torch.ones(1, dtype=torch.uint8)
    out = torch.zeros(1).expand(2**30)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.decompress_add_(body, [out], 1.0)
    with pytest.raises(ValueError, match="2147483647 elements, got 2147483648"):
        check_numel(2**31)


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
def test_what_recompressing_drops_goes_back_and_both_modules_agree(
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
    old, _ = cpu.compress_(
        x, offsets, counts_of(spans, share), values, rule=rule, thresholds=limits, whole=whole
    )
    results = []
    for kernels in (cpu, reference):
        rest = x.clone()
        counts = counts_of(spans, share * less)
        new, stats = kernels.recompress_(
            old, rest, offsets, counts, values, reserve, rule, limits, whole
        )
        results.append((new[reserve:], rest, stats))
    (new, rest, stats), (expected_new, expected_rest, expected_stats) = results
    assert new.tolist() == expected_new.tolist()
    assert np.array_equal(bits(rest), bits(expected_rest))
    np.testing.assert_allclose(stats, expected_stats, rtol=1e-10)

    before, after = ([torch.zeros(part.size) for part in parts] for _ in range(2))
    cpu.decompress_add_(old, before, 1.0, values, whole)
    cpu.decompress_add_(new, after, 1.0, values, whole)
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
def test_recompressing_selects_as_from_a_layer_of_the_values(
    kernels: ModuleType, rule: SelectionRule
) -> None:
    x = numbers("normal", 200_000, 26)
    body, rest, stats = compress(cpu, x, 100_000, ValueFormat.bf16)
    left = torch.from_numpy(rest)
    less, stats = kernels.recompress_(
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
        body, _ = cpu.compress_(total, offsets_of(parts), counts, ValueFormat.fp32, whole=whole)
        outs = [torch.full((part.size,), 2.0) for part in parts]
        kernels.clear_(body, outs, ValueFormat.fp32, whole)
        cleared = torch.cat(outs) == 0
        sent = [torch.zeros(part.size) for part in parts]
        kernels.decompress_add_(body, sent, 1.0, whole=whole)
        expected = torch.cat(sent)
        assert torch.equal(cleared, (expected != 0) & ~expected.isnan())
