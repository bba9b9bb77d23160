"""What every backend of the sparse family keeps to; one row per backend: ``MODULES``."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hvd_adaptive.kernels import SelectionRule, for_device
from hvd_adaptive.kernels.base import (
    BACKENDS,
    REGISTRY,
    EntropyKernels,
    Kernels,
    MeasuringKernels,
    QuantizedKernels,
    RotationKernels,
    SparseKernels,
    SubsetKernels,
)
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.wire import ValueFormat
from tests.kernels.inputs import (
    FORMATS,
    KINDS,
    LARGE,
    MIDDLE,
    MODULES,
    assert_close_to_before,
    assert_same_mass,
    bits,
    compress,
    counts_of,
    decompress,
    layers,
    numbers,
    offsets_of,
    sent_indices,
    shares,
    single_floats,
    thresholds_of,
    usual,
)

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
        body, stats = kernels.compress_(
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
    body, _ = cpu.compress_(x, offsets_of(parts), counts, values, whole=whole)
    results = []
    for kernels in (cpu, reference):
        outs = [torch.from_numpy(numbers("normal", part.size, 7)) for part in parts]
        kernels.decompress_add_(body, outs, scale, values, whole)
        cleared = [torch.from_numpy(numbers("normal", part.size, 7)) for part in parts]
        kernels.clear_(body, cleared, values, whole)
        outs += cleared
        results.append(np.concatenate([bits(out) for out in outs] + [np.empty(0, np.int32)]))
    assert np.array_equal(*results)


@pytest.mark.parametrize(
    "protocol",
    [
        SparseKernels,
        QuantizedKernels,
        RotationKernels,
        EntropyKernels,
        SubsetKernels,
        MeasuringKernels,
    ],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_family_of_every_backend_has_what_its_protocol_says(backend: str, protocol: type) -> None:
    family = protocol.__name__.removesuffix("Kernels").lower()
    module = importlib.import_module(REGISTRY[family][backend])
    assert getattr(Kernels(backend), family) is module
    for name in {name for name in vars(protocol) if not name.startswith("_")}:
        expected = inspect.signature(getattr(protocol, name))
        found = inspect.signature(getattr(module, name))
        wanted = [each.name for each in expected.parameters.values()][1:]  # without self
        assert list(found.parameters)[: len(wanted)] == wanted


def test_what_a_backend_lacks_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "meta", "new")
    monkeypatch.setitem(REGISTRY["sparse"], "new", REGISTRY["sparse"]["cpu"])
    kernels = for_device(torch.device("meta"))
    assert kernels.backend == "new"
    assert kernels.sparse is cpu
    monkeypatch.delitem(BACKENDS, "cuda")
    assert kernels.quantized is for_device(torch.device("cuda")).quantized


@MODULES
def test_the_kernels_for_the_cpu_offer_what_the_reference_does(kernels: ModuleType) -> None:
    assert for_device(torch.device("cpu")).sparse is cpu
    assert for_device(torch.device("meta")).sparse is reference
    for name in cpu.__all__:
        assert callable(getattr(kernels, name))


# --- buckets -------------------------------------------------------------------------------------


@MODULES
@FORMATS
def test_layers_of_mixed_sizes_in_one_call_equal_one_call_each(
    kernels: ModuleType, values: ValueFormat
) -> None:
    sizes = [0, 1, 5000, 0, 70_000, 2048, 31]
    parts = [numbers("normal", size, size) for size in sizes]
    x = torch.from_numpy(np.concatenate(parts))
    body, stats = kernels.compress_(x, offsets_of(parts), counts_of(parts, 0.02), values)
    single = [
        compress(kernels, part, int(k), values)
        for part, k in zip(parts, counts_of(parts, 0.02), strict=True)
    ]
    assert body.tolist() == [byte for one in single for byte in one[0].tolist()]
    assert np.array_equal(x.numpy(), np.concatenate([one[1] for one in single]))
    assert np.array_equal(stats, np.stack([one[2] for one in single]))


@MODULES
@pytest.mark.parametrize("whole", [False, True])
def test_a_bucket_without_layers_is_empty(kernels: ModuleType, whole: bool) -> None:
    body, stats = kernels.compress_(
        *(torch.zeros(0), np.array([0]), np.zeros(int(whole), np.int64), ValueFormat.fp32, []),
        whole=whole,
    )
    assert body.tolist() == [0] * whole  # the count of the one vector that all layers are
    assert stats.shape == (0, 4)
    assert kernels.decompress_add_(body, [], 1.0, ValueFormat.fp32, whole).shape == (0,)


@MODULES
def test_gradients_of_any_shape_are_added_first(kernels: ModuleType) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0])
    grads = [torch.full((2, 3), 10.0), torch.tensor(-8.0)]
    outs = [torch.zeros(2, 3), torch.zeros(())]
    body, _ = kernels.compress_(x, np.array([0, 6, 7]), np.array([2, 0]), ValueFormat.fp32, grads)
    kernels.decompress_add_(body, outs, 2.0)
    assert outs[0].tolist() == [[0, 0, 0], [0, 30, 32]]
    assert outs[1] == 0
    assert x.tolist() == [11, 12, 13, 14, 0, 0, 1]


@MODULES
def test_elements_outside_the_offsets_are_left_alone(kernels: ModuleType) -> None:
    x = torch.ones(10)
    kernels.compress_(x, np.array([3, 5]), np.array([2]), ValueFormat.fp32, [torch.ones(2)])
    assert x.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]


@MODULES
@FORMATS
def test_stats_are_the_energies_of_x_and_of_what_was_sent(
    kernels: ModuleType, values: ValueFormat
) -> None:
    for kind in KINDS:
        x, grad = numbers(kind, 7001, 8), numbers("normal", 7001, 9)
        rest = torch.from_numpy(x.copy())
        body, stats = kernels.compress_(
            rest, np.array([0, x.size]), np.array([70]), values, [torch.from_numpy(grad)]
        )
        total = (x + grad).astype(np.float64)
        sent = decompress(kernels, body, x.size).astype(np.float64)
        energies = [np.square(total).sum(), np.square(sent).sum()]
        np.testing.assert_allclose(stats[0, :2], energies, rtol=1e-12)


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
    body, stats = kernels.compress_(
        x, offsets, counts, ValueFormat.bf16, [torch.from_numpy(grad) for grad in grads]
    )
    assert_close_to_before(x[500:-600], before[500:-600], torch.from_numpy(grads[1]))
    if kernels is reference:  # which looks before it adds
        assert np.array_equal(bits(x)[500:-600], bits(before)[500:-600])
    assert stats[1].tolist() == [0, 0, 0, 1]
    assert stats[[0, 2], 2].tolist() == [5, 6]

    outs = [torch.zeros(part.size) for part in parts]
    assert kernels.decompress_add_(body, outs, 0.5).tolist() == [0, 1, 0]
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
        kernels.compress_(**(usual_arguments | arguments))


@MODULES
def test_outputs_that_cannot_be_added_to_are_refused(kernels: ModuleType) -> None:
    body = torch.zeros(1, dtype=torch.uint8)
    for out in (torch.zeros(4).half(), torch.zeros(2, 3).t()):
        with pytest.raises(ValueError, match="contiguous float32"):
            kernels.decompress_add_(body, [out], 1.0)
    with pytest.raises(ValueError, match="uint8"):
        kernels.decompress_add_(torch.zeros(1), [torch.zeros(4)], 1.0)
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
    body, _ = kernels.compress_(x, one_layer, np.array([4]), ValueFormat.sign)
    kernels.recompress_(body, x, one_layer, np.array([1]), ValueFormat.sign)
    assert x[3] == largest
