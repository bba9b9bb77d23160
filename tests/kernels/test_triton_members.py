"""Every gathered compressor with Triton's kernels and with the reference: the same bytes, bit for bit.

Run by ``tests/kernels/test_triton.py`` in a process that interprets Triton.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hvd_adaptive.compressors import GatheredCompressor, parse
from hvd_adaptive.compressors.base import LayerBatch
from hvd_adaptive.kernels.base import BACKENDS, for_device
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.quantized import Norm, QuantizationRule, Rounding
from tests.compressors.test_contract import GATHERED
from tests.kernels.inputs import bits, damage, numbers

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1: see test_triton.py"
)

SIZES = (0, 1, 777, 2500)
KINDS = ("normal", "normal", "wide", "mostly zero")
AT_EDGES = [
    ("topk:density=0.02,values=int8", 2**16 - 1),
    ("dgc:density=0.05", 2**16),
    ("topk:density=0.02,values=int8", 2**16 + 1),
    ("qsgd:bits=4", 2**16 - 1),
    ("terngrad", 2**16),
    ("qsgd:bits=4", 2**16 + 1),
]
"""Each size with a code of positions, and with one of all values."""
RESERVE = 6


@dataclass
class Outcome:
    """What one backend makes of a bucket."""

    body: list[int]
    remainder: list[int]
    stats: list[float]
    summed: list[int]
    damaged: list[str]


def outcome(spec: str, sizes: tuple[int, ...], kinds: tuple[str, ...], nonfinite: bool) -> Outcome:
    """Compress, decode the sum of two, and decode what is damaged, with the backend in use."""
    compressor = parse(spec)
    assert isinstance(compressor, GatheredCompressor)
    layers = [numbers(kind, size, 5) for kind, size in zip(kinds, sizes, strict=True)]
    x = torch.from_numpy(np.concatenate(layers)).clamp(-1e30, 1e30)
    grads = [torch.from_numpy(numbers("normal", size, size)) for size in sizes]
    if nonfinite:
        grads[-1][3] = torch.inf
    keys = np.arange(len(sizes), dtype=np.uint64) + np.uint64(2**63)
    offsets, levels = np.cumsum([0, *sizes]), [compressor.level] * len(sizes)
    batch = LayerBatch(
        x, offsets, levels, grads, keys, RESERVE, compressor.new_state(), dithers=keys, rotation=9
    )
    data, stats = compressor.compress_layers_(batch)
    body = data[RESERVE:].clone()
    outs = [torch.ones(size) for size in sizes]
    compressor.decompress_layers_sum_([body, body], outs, 0.5)
    rng = np.random.default_rng(7)
    found = [finding(compressor, [damage(body.numpy(), rng)], sizes) for _ in range(2)]
    found.append(finding(compressor, [body.numpy(), damage(body.numpy(), rng)], sizes))
    return Outcome(
        body.tolist(),
        bits(x).tolist(),
        [*stats.energy.tolist(), *stats.sent.tolist(), *stats.nonfinite.tolist()],
        bits(torch.cat(outs)).tolist(),
        found,
    )


def finding(
    compressor: GatheredCompressor,
    bodies: list[np.ndarray[tuple[int], np.dtype[np.uint8]]],
    sizes: tuple[int, ...],
) -> str:
    """What is found wrong, or the sum of what is decoded."""
    outs: list[Tensor] = [torch.zeros(size) for size in sizes]
    try:
        received = [torch.from_numpy(data.copy()) for data in bodies]
        if len(received) > 1:
            compressor.decompress_layers_sum_(received, outs, 1.0)
        else:
            compressor.decompress_layers_add_(received[0], outs, 1.0)
    except WireError as error:
        return str(error)
    return str(torch.cat(outs).double().sum().item())


def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but Huffman coding, which is in host memory for both, and slow there."""
    entropy = for_device(torch.device("cpu")).entropy
    monkeypatch.setitem(BACKENDS, "cpu", "reference")
    monkeypatch.setattr(for_device(torch.device("cpu")), "entropy", entropy)


def assert_same(
    spec: str,
    sizes: tuple[int, ...],
    kinds: tuple[str, ...],
    nonfinite: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = outcome(spec, sizes, kinds, nonfinite)
    use_reference(monkeypatch)
    expected = outcome(spec, sizes, kinds, nonfinite)
    assert found.body == expected.body
    if nonfinite:  # from the last layer gradients are taken back, up to a rounding of the sum
        kept = [torch.tensor(each.remainder[-sizes[-1] :]) for each in (found, expected)]
        last = [each.to(torch.int32).view(torch.float32) for each in kept]
        torch.testing.assert_close(last[0], last[1], rtol=2**-20, atol=2**-20)
        found.remainder[-sizes[-1] :] = expected.remainder[-sizes[-1] :]
    assert found.remainder == expected.remainder
    np.testing.assert_allclose(found.stats, expected.stats, rtol=1e-10)
    assert found.summed == expected.summed
    assert found.damaged == expected.damaged


@pytest.mark.parametrize("spec", GATHERED)
def test_a_bucket_has_the_same_bytes(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(spec, SIZES, KINDS, False, monkeypatch)


@pytest.mark.parametrize("spec", GATHERED[::4])
def test_so_has_one_with_a_layer_that_is_not_finite(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hadamard" in spec or "globaltopk" in spec:
        pytest.skip("the others of one vector, and what is not rotated, are in the contracts")
    assert_same(spec, SIZES, KINDS, True, monkeypatch)


OWNED = ("qsgd:bits=3,block=100,coding=huffman", "onebit", "natural:bits=8", "topk:density=0.1")


@pytest.mark.parametrize("spec", OWNED)
def test_an_owners_sums_are_those_of_the_reference(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = owners(spec)
    use_reference(monkeypatch)
    assert found == owners(spec)


def owners(spec: str) -> list[tuple[list[int] | str, list[int]]]:
    """(the sum of three bodies compressed again, or what is wrong; what is kept) of four trials."""
    compressor, rng, rows = parse(spec), np.random.default_rng(2), []
    assert isinstance(compressor, GatheredCompressor)
    offsets, levels = np.cumsum([0, *SIZES]), [compressor.level] * len(SIZES)
    keys = np.arange(len(SIZES), dtype=np.uint64)
    numel = int(offsets[-1])
    sent = [LayerBatch(layer_of(numel, seed), offsets, levels, keys=keys) for seed in range(3)]
    bodies = [compressor.compress_layers_(batch)[0] for batch in sent]
    for trial in range(4):
        x, received = layer_of(numel, 9), list(bodies)
        if trial:
            received[trial - 1] = torch.from_numpy(damage(bodies[trial - 1].numpy(), rng).copy())
        try:
            reduced = compressor.reduce_layers_(
                received, LayerBatch(x, offsets, levels, keys=keys), keeps=True
            )
            rows.append((reduced.body.tolist(), bits(x).tolist()))
        except WireError as error:
            rows.append((str(error), bits(x).tolist()))
    return rows


def layer_of(numel: int, seed: int) -> Tensor:
    return torch.from_numpy(numbers("normal", numel, seed))


HALVES = ("globaltopk:density=0.1", "dgc:density=0.1", "qsgd:bits=4", "onebit:rotate=hadamard")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("spec", HALVES)
def test_half_gradients_are_added_as_widened_ones_are(
    spec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_two_parts(spec, [grad.to(dtype) for grad in halves_of(dtype)])
    use_reference(monkeypatch)
    assert found == in_two_parts(spec, [grad.float() for grad in halves_of(dtype)])


def halves_of(dtype: torch.dtype) -> list[Tensor]:
    """Gradients with denormals of the type, signed zeros, and its largest values."""
    small, large = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max / 2
    edges = torch.tensor([small, -small, 0.0, -0.0, large, -large])
    grads = [layer_of(size, size) for size in (777, 900)]
    return [torch.cat([edges.clamp(-1e30, 1e30), grad]).to(dtype) for grad in grads]


def in_two_parts(spec: str, grads: list[Tensor]) -> list[list[int]]:
    """The bytes for two receivers, whose parts begin within a layer, and what is left."""
    compressor = parse(spec)
    assert isinstance(compressor, GatheredCompressor)
    offsets = np.cumsum([0, *(grad.numel() for grad in grads)])
    x, keys = layer_of(int(offsets[-1]), 4), np.arange(len(grads), dtype=np.uint64)
    batch = LayerBatch(x, offsets, [compressor.level] * len(grads), grads, keys, rotation=3)
    cut = int(offsets[1]) - 301
    edges = [np.array([0, cut]), np.array([cut, *offsets[1:]])]
    bodies, _ = compressor.compress_shards_(batch, edges)
    return [*(body.tolist() for body in bodies), bits(x).tolist()]


@pytest.mark.parametrize(("spec", "numel"), AT_EDGES)
def test_and_layers_at_the_edge_of_16_bits(
    spec: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(spec, (numel,), ("normal",), False, monkeypatch)


def selected(x: torch.Tensor, counts: npt.NDArray[np.int64]) -> Any:
    """The selection of so many elements of one layer."""
    from hvd_adaptive.kernels.triton import selecting

    offsets = np.array([0, x.numel()])
    segments = selecting.segments_of(offsets, offsets, counts, False, x.device)
    return selecting.Selection(segments, torch.from_numpy(segments.given(x, None)), 0)


def in_sample(numel: int) -> npt.NDArray[np.bool_]:
    """Which elements of one layer the sample looks at."""
    from hvd_adaptive.kernels.triton import selecting

    tile, seen = selecting._TILE, selecting._TILE // selecting._SAMPLED
    found = np.zeros(numel, bool)
    for number in range(-(-numel // tile)):
        size = min(tile, numel - number * tile)
        start = number * tile + (size - min(size, seen)) * (number % 7) // 7
        found[start : start + seen] = True
    return found


def test_a_sample_that_misleads_costs_another_pass_but_not_exactness() -> None:
    numel, count = 12_388, 1000
    x = numbers("normal", numel, 4)
    x[in_sample(numel)] *= 1e6
    selection = selected(torch.from_numpy(x.copy()), np.array([count]))
    assert int(selection._lists.found.sum()) == np.count_nonzero(x)
    assert selection.indices.tolist() == np.sort(np.argsort(-np.abs(x), kind="stable")[:count]).tolist()


def test_a_good_sample_lists_few_more_candidates_than_are_sent() -> None:
    selection = selected(torch.from_numpy(numbers("normal", 100_000, 4)), np.array([1000]))
    assert 1000 <= int(selection._lists.found.sum()) < 6000


@pytest.mark.parametrize(
    ("scale", "count"), [(1, 4200), (1e9, 500), (1, 8990)], ids=["near", "far", "no floor"]
)
@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_the_threshold_is_exact_near_the_samples_and_far_from_it(
    kind: str, scale: float, count: int
) -> None:
    x = numbers(kind, 9000, 4)
    x[~in_sample(9000) & (np.arange(9000) % 5 == 0)] *= scale
    selection = selected(torch.from_numpy(x.copy()), np.array([count]))
    assert selection.indices.tolist() == np.sort(np.argsort(-np.abs(x), kind="stable")[:count]).tolist()


def test_a_threshold_has_no_unknown_bits_after_the_last_launch() -> None:
    from hvd_adaptive.kernels.triton.jit import selection as jit

    assert jit.BINS.value == 1 << jit.LOG_BINS.value
    largest = np.finfo(np.float32).max.view(np.int32)
    octaves = (int(largest) - 1 - (jit.NEAR_BINS.value << jit.NEAR_BITS.value)) >> jit.FAR_BITS.value
    assert jit.NEAR_BINS.value + octaves < jit.BINS.value
    assert int(largest) >> jit.WIDE_BITS.value < jit.BINS.value
    found = (jit.STEPS.value - 1) * jit.LOG_BINS.value
    assert max(jit.NEAR_BITS.value, jit.FAR_BITS.value, jit.WIDE_BITS.value) <= found


@pytest.mark.parametrize("block", [100, 512])
def test_a_body_adds_minus_zeros_as_they_are(block: int) -> None:
    from hvd_adaptive.kernels.reference import quantized as reference
    from hvd_adaptive.kernels.triton import quantized

    rule, one = QuantizationRule(Norm.max, Rounding.uniform, block=block), np.array([0, 1000])
    x = torch.from_numpy(numbers("mostly zero", 1000, 3))
    body, _ = quantized.compress_(x, one, np.array([5]), rule, rule.tables)
    for scale in (-0.5, 0.5):
        found, expected = torch.full((1000,), -0.0), torch.full((1000,), -0.0)
        quantized.decompress_add_(body, 0, [found], scale, rule, rule.tables)
        reference.decompress_add_(body, 0, [expected], scale, rule, rule.tables)
        assert np.array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("numel", [2048, 2049])
def test_a_sum_finds_digits_after_the_last_of_a_whole_tile(numel: int) -> None:
    from hvd_adaptive.kernels.triton import quantized

    rule, one = QuantizationRule(Norm.max, Rounding.uniform), np.array([0, numel])
    x, out = torch.from_numpy(numbers("normal", numel, 3)), torch.zeros(numel)
    body, _ = quantized.compress_(x, one, np.array([2]), rule, rule.tables)
    body[-1] = 242  # five digits of 2, where three or four are left
    with pytest.raises(WireError, match="after the last code"):
        quantized.decompress_sum_([ReceivedBody(body, 0, rule.tables)], [out], 1.0, rule)


@pytest.mark.parametrize("rounding", [Rounding.uniform, Rounding.powers])
@pytest.mark.parametrize("block", [8, 100, 512, 2048])
def test_a_sum_is_the_references_for_codes_of_all_sizes(rounding: Rounding, block: int) -> None:
    """Also where bodies have other sizes of the same layer, and where one is marked."""
    from hvd_adaptive.kernels.reference import quantized as reference
    from hvd_adaptive.kernels.triton import quantized

    rule = QuantizationRule(Norm.max, rounding, block=block)
    sizes = [1500, 3, 0, 2048, 700]
    offsets, bodies = np.cumsum([0, *sizes]), []
    for rank, widths in enumerate([(4, 3, 2, 5, 8), (4, 3, 2, 5, 1), (4, 2, 2, 5, 8)]):
        x = torch.from_numpy(numbers("normal", sum(sizes), rank))
        if rank == 1:
            x[3600] = torch.nan  # of the last layer
        body, _ = reference.compress_(x, offsets, np.array(widths), rule, rule.tables)
        bodies.append(ReceivedBody(body, 0, rule.tables))
    for count in (1, 2, 3):
        outs = [[torch.full((size,), 9.0) for size in sizes] for _ in range(2)]
        marks = [
            module.decompress_sum_(bodies[:count], out, 0.3, rule)
            for module, out in zip((quantized, reference), outs, strict=True)
        ]
        assert marks[0].tolist() == marks[1].tolist() == [0, 0, 0, 0, int(count > 1)]
        found, expected = (torch.cat(out) for out in outs)
        assert np.array_equal(bits(found), bits(expected))
