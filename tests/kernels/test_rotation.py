"""What every backend of the rotation family keeps to; one row per backend: ``MODULES``."""

from __future__ import annotations

import doctest
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.kernels import rotation
from hvd_adaptive.kernels.cpu import rotation as cpu
from hvd_adaptive.kernels.reference import rotation as reference
from hvd_adaptive.kernels.rotation import CHUNK, LARGEST_BACK, LARGEST_ROTATED
from tests.kernels.inputs import KINDS, bits, numbers, usual

MODULES = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
KEYS = st.integers(0, 2**64 - 1)
SIZES = (0, 1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 255, 256, 1000, 1023, 1024, 1025, 3400, 70_001)


def layer(kind: str, numel: int, seed: int) -> Tensor:
    x = torch.from_numpy(numbers(kind, numel, seed))
    return x.clamp(-LARGEST_ROTATED, LARGEST_ROTATED)


@usual
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES)), max_size=4),
    KEYS,
    st.booleans(),
)
@example([("wide", 3400), ("denormal", 1024), ("normal", 4)], 2**64 - 1, True)
def test_cpu_and_reference_rotate_to_the_same_bits_and_back(
    kinds: list[tuple[str, int]], key: int, with_grads: bool
) -> None:
    results = []
    for kernels in (cpu, reference):
        layers = [layer(kind, numel, seed) for seed, (kind, numel) in enumerate(kinds)]
        grads = [layer("normal", numel, 9) for _, numel in kinds] if with_grads else None
        found = kernels.rotate_(layers, key, grads).tolist()
        forth = [bits(each).tolist() for each in layers]
        outs = [torch.ones(each.numel()) for each in layers]
        kernels.rotate_back_(layers, key, outs)
        kernels.rotate_back_(layers, key)
        results.append((found, forth, *([bits(x).tolist() for x in xs] for xs in (layers, outs))))
    same = results[0] == results[1]
    assert same


@MODULES
@pytest.mark.parametrize("kind", ["normal", "wide", "mostly zero", "equal"])
@pytest.mark.parametrize("numel", SIZES)
def test_the_inverse_gives_back_and_lengths_stay(kernels: ModuleType, kind: str, numel: int) -> None:
    x, grad = layer(kind, numel, 3), layer("normal", numel, 4)
    total = x + grad
    assert kernels.rotate_([x], 5, [grad]).tolist() == [0]
    length = float(total.double().norm())
    assert float(x.double().norm()) == pytest.approx(length, rel=1e-6)
    out = torch.full((numel,), 2.0)
    kernels.rotate_back_([x], 5, [out])
    kernels.rotate_back_([x], 5)
    for start, size, count in rotation.chunks(numel):
        part = slice(start, start + size * count)
        # each of log2(chunk) sums forth and back rounds by 2^-24 of what it adds
        limit = 20 * 2.0**-24 * float(total[part].double().norm()) + 1e-40
        assert float((x[part] - total[part]).double().norm()) <= limit
        off = (out[part] - 2.0 - total[part]).abs().max()
        assert float(off) <= limit + 2.0**-23 * (2 + float(total[part].abs().max()))


@MODULES
@pytest.mark.parametrize("size", [1, 4, 16, 64, 256, 1024])
def test_a_chunk_is_multiplied_by_signs_and_the_hadamard_matrix(kernels: ModuleType, size: int) -> None:
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    x = layer("normal", size, 1)
    expected = hadamard @ (x * reference.signs(7)[:size]).double().numpy() / math.sqrt(size)
    kernels.rotate_([x], 7)
    np.testing.assert_allclose(x.numpy(), expected, atol=1e-5)


@usual
@given(st.integers(0, 10 * CHUNK))
def test_chunks_are_powers_of_four_that_cover_a_layer_without_padding(numel: int) -> None:
    position, last = 0, 4 * CHUNK
    for start, size, count in rotation.chunks(numel):
        assert start == position
        assert size < last
        assert CHUNK % size == 0
        assert round(math.sqrt(size)) ** 2 == size
        assert count < 4 or size == CHUNK
        position, last = start + size * count, size
    assert position == numel


def test_signs_are_even_unlike_for_other_keys_and_not_those_of_rounding() -> None:
    keys = range(400)
    rows = np.array([reference.signs(key).numpy() for key in keys])
    # 400 x 1024 draws: five standard deviations of their mean, of each place's and of each pair's
    assert abs(rows.mean()) < 5 / math.sqrt(rows.size)
    assert np.abs(rows.mean(0)).max() < 5 / math.sqrt(len(rows))
    products = rows @ rows.T / CHUNK
    np.fill_diagonal(products, 0)
    assert np.abs(products).max() < 6 / math.sqrt(CHUNK)
    upper = 1.0 - 2.0 * (reference.words(CHUNK, 3, None) >> 31).float()
    assert abs(float((upper * reference.signs(3)).mean())) < 5 / math.sqrt(CHUNK)


@MODULES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38, -2 * LARGEST_ROTATED])
@pytest.mark.parametrize("where", ["layer", "gradient"])
def test_a_layer_that_cannot_be_rotated_is_named_and_kept(
    kernels: ModuleType, bad: float, where: str
) -> None:
    layers = [layer("normal", numel, numel) for numel in (10, 2000, 0, 300)]
    grads = [layer("normal", each.numel(), 8) for each in layers]
    (layers if where == "layer" else grads)[1][-1] = bad
    kept = [each.clone() for each in layers]
    found = kernels.rotate_(layers, 1, grads).tolist()
    assert found == [0, 2 if math.isfinite(bad) else 1, 0, 0]
    assert np.array_equal(bits(layers[1]), bits(kept[1]))
    assert not torch.equal(layers[0], kept[0])
    assert not torch.equal(layers[3], kept[3])


@MODULES
def test_the_largest_magnitudes_that_are_rotated_stay_finite(kernels: ModuleType) -> None:
    assert 32 * LARGEST_ROTATED < LARGEST_BACK
    x = torch.full((CHUNK,), LARGEST_ROTATED) * reference.signs(2)
    kept = x.clone()
    assert kernels.rotate_([x], 2).tolist() == [0]
    assert float(x[0]) == LARGEST_ROTATED * 32
    assert not x[1:].any()
    kernels.rotate_back_([x], 2)
    assert torch.equal(x, kept)


@MODULES
def test_whatever_is_rotated_back_becomes_finite_but_for_nan(kernels: ModuleType) -> None:
    x = torch.full((2 * CHUNK,), 3e38)
    x[CHUNK - 1], x[CHUNK] = math.inf, math.nan
    out = torch.zeros(2 * CHUNK)
    kernels.rotate_back_([x], 2, [out])
    assert bool(out[:CHUNK].isfinite().all())
    assert float(out[0].abs()) == 32 * LARGEST_BACK
    assert bool(out[CHUNK:].isnan().all())


@MODULES
def test_tensors_of_another_kind_are_refused(kernels: ModuleType) -> None:
    for wrong in (torch.zeros(8).double(), torch.zeros(16)[::2]):
        with pytest.raises(ValueError, match="contiguous float32"):
            kernels.rotate_([wrong], 1)
        with pytest.raises(ValueError, match="contiguous float32"):
            kernels.rotate_back_([torch.zeros(8)], 1, [wrong])
    with pytest.raises(ValueError, match="do not fit"):
        kernels.rotate_([torch.zeros(8)], 1, [torch.zeros(7)])


@pytest.mark.parametrize("module", [rotation, reference], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_give_what_they_show(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
