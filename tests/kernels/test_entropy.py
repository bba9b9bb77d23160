"""What every backend of the entropy family keeps to."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.kernels.cpu import entropy as cpu
from hvd_adaptive.kernels.cpu import quantized
from hvd_adaptive.kernels.reference import entropy as reference
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.quantized import Damage, QuantizationRule, Tables
from tests.compressors.quantizers import KEY, RULES, tables_of, widths_of
from tests.kernels.inputs import damage, numbers, offsets_of, usual

MODULES = pytest.mark.parametrize("entropy", [reference, cpu], ids=["reference", "cpu"])


def optimal_bits(counts: npt.NDArray[np.int64]) -> int:
    """The bits of a Huffman code without a limit, by merging the two least again and again."""
    rest, total = sorted(int(count) for count in counts if count), 0
    while len(rest) > 1:
        merged = rest[0] + rest[1]
        total += merged
        rest = sorted([merged, *rest[2:]])
    return total


@MODULES
@usual
@given(counts=st.lists(st.integers(0, 1000), min_size=2, max_size=60))
def test_the_code_is_optimal_complete_and_reads_back(entropy: ModuleType, counts: list[int]) -> None:
    counts[0] += 1
    symbols = np.array(counts, np.int64)
    code = entropy.code_of(symbols, 1, symbols.size)
    used = code.lengths[symbols > 0].astype(np.int64)
    assert not code.lengths[symbols == 0].any()
    if used.size > 1:
        assert (code.lengths * symbols).sum() == optimal_bits(symbols)
        assert np.sum(2.0**-used) == 1
    data = np.frombuffer(entropy.code_to_bytes(code) + b"123", np.uint8)
    read = entropy.read_code(data, symbols.size)
    assert not isinstance(read, Damage)
    assert np.array_equal(read[0].lengths, code.lengths)
    assert read[1] == data.size - 3


@MODULES
def test_codewords_are_limited_to_fifteen_bits(entropy: ModuleType) -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    for counts in (fibonacci, [1] * 2**15, [1] * 3000 + [2**40], list(range(1, 3000))):
        code = entropy.code_of(np.array(counts, np.int64), 1, len(counts))
        assert code.lengths.max() <= 15
        assert np.sum(2.0 ** -code.lengths.astype(np.float64)) == 1


def packed(rule: QuantizationRule, tables: Tables) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """A body of layers that gain from coding, that do not, and that are marked, and their sizes."""
    parts = [numbers(kind, size, size) for kind, size in LAYERS]
    parts[2][7] = np.nan
    widths = widths_of(rule)
    bits = np.array([widths[layer % len(widths)] for layer in range(len(parts))])
    x, keys = torch.from_numpy(np.concatenate(parts)), KEY + np.arange(len(parts), dtype=np.uint64)
    body, _ = quantized.compress_(x, offsets_of(parts), bits, rule, tables, keys=keys)
    return body, np.array([part.size for part in parts])


LAYERS = [
    ("normal", 9000),
    ("mostly zero", 4000),
    ("normal", 50),
    ("normal", 0),
    ("zero", 3361),
    ("wide", 1),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_cpu_and_reference_code_the_same_and_read_each_other(rule: QuantizationRule) -> None:
    tables = tables_of(rule)
    body, numels = packed(rule, tables)
    streams, codes = cpu.encode(body, numels, rule, tables)
    expected, others = reference.encode(body, numels, rule, tables)
    assert torch.equal(streams, expected)
    assert codes == others
    assert streams.numel() <= body.numel()
    for entropy in (cpu, reference):
        read = {
            bits: entropy.read_code(np.frombuffer(data, np.uint8), int(tables.alphabets[bits]))
            for bits, data in codes.items()
        }
        tools = {bits: found[0] for bits, found in read.items()}
        assert torch.equal(entropy.decode(streams, 0, numels.tolist(), rule, tables, tools), body)


def test_cpu_and_reference_find_the_same_damage_in_streams() -> None:
    rule, rng, refused = RULES[0], np.random.default_rng(3), 0
    tables = tables_of(rule)
    body, numels = packed(rule, tables)
    streams, codes = cpu.encode(body, numels, rule, tables)
    tools = {
        bits: cpu.read_code(np.frombuffer(data, np.uint8), int(tables.alphabets[bits]))[0]
        for bits, data in codes.items()
    }
    for _ in range(150):
        broken = torch.from_numpy(damage(streams.numpy(), rng))
        found = []
        for entropy in (cpu, reference):
            try:
                decoded = entropy.decode(broken, 0, numels.tolist(), rule, tables, tools)
                found.append(decoded.numpy().tobytes())
            except WireError as error:
                found.append(str(error).encode())
        assert found[0] == found[1]
        refused += found[0].startswith(b"damaged")
    assert refused > 50


@pytest.mark.parametrize("counts", [[500.0, 9000.0, 500.0], [10.0, 0.0, 5.0, 1.0], [1.0, 1.0]])
def test_cpu_and_reference_expect_the_same_bytes(counts: list[float]) -> None:
    row = np.array(counts)
    numel = int(row.sum())
    assert cpu.expected_bytes(row, numel) == reference.expected_bytes(row, numel)
