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
from hvd_adaptive.kernels.huffman import Code
from hvd_adaptive.kernels.reference import entropy as reference
from hvd_adaptive.kernels.reference import quantized as reference_quantized
from hvd_adaptive.kernels.reference.packing import pack
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.quantized import Damage, Norm, QuantizationRule, Rounding, Tables
from tests.compressors.quantizers import KEY, RULES, tables_of, widths_of
from tests.kernels.inputs import bits as bits_of
from tests.kernels.inputs import damage, layers, numbers, offsets_of, usual

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
        tools = codes_of(entropy, codes, tables)
        assert torch.equal(entropy.decode(streams, 0, numels.tolist(), rule, tables, tools), body)


def codes_of(entropy: ModuleType, codes: dict[int, bytes], tables: Tables) -> dict[int, Code]:
    read = {
        bits: entropy.read_code(np.frombuffer(data, np.uint8), int(tables.alphabets[bits]))
        for bits, data in codes.items()
    }
    return {bits: found[0] for bits, found in read.items()}


def added(
    kernels: ModuleType,
    body: torch.Tensor,
    numels: npt.NDArray[np.int64],
    rule: QuantizationRule,
    tables: Tables,
    codes: dict[int, Code] | None,
) -> list[list[int]]:
    """What a body adds to ones, as bits, and which layers it marks; nothing where it is refused."""
    outs = [torch.ones(int(numel)) for numel in numels]
    try:
        marks = kernels.decompress_add_(body, 0, outs, 0.7, rule, tables, codes)
    except WireError:
        return []
    return [*(bits_of(out).tolist() for out in outs), marks.tolist()]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_coded_body_adds_what_its_packed_layers_add(rule: QuantizationRule) -> None:
    tables = tables_of(rule)
    body, numels = packed(rule, tables)
    streams, sent = cpu.encode(body, numels, rule, tables)
    expected = added(quantized, body, numels, rule, tables, None)
    for kernels, entropy in ((quantized, cpu), (reference_quantized, reference)):
        codes = codes_of(entropy, sent, tables)
        assert added(kernels, streams, numels, rule, tables, codes) == expected


@usual
@given(
    st.lists(layers, min_size=1, max_size=3),
    st.sampled_from(RULES[::2]),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 0.99]),
)
def test_layers_of_any_size_and_sparsity_are_coded_alike(
    parts: list[tuple[str, int, int]], rule: QuantizationRule, width: int, zeros: float
) -> None:
    tables, width = tables_of(rule), min(width, widths_of(rule)[-1])
    arrays = [numbers(*part) for part in parts]
    for array in arrays:
        array[np.random.default_rng(1).random(array.size) < zeros] = 0
    numels, x = np.array([a.size for a in arrays]), torch.from_numpy(np.concatenate(arrays))
    widths = np.full(len(arrays), width)
    body, _ = quantized.compress_(x, offsets_of(arrays), widths, rule, tables)
    streams, sent = cpu.encode(body, numels, rule, tables)
    expected, others = reference.encode(body, numels, rule, tables)
    assert torch.equal(streams, expected)
    assert sent == others
    codes = codes_of(cpu, sent, tables)
    assert torch.equal(cpu.decode(streams, 0, numels.tolist(), rule, tables, codes), body)
    found = added(quantized, streams, numels, rule, tables, codes)
    assert found == added(quantized, body, numels, rule, tables, None)


@pytest.mark.parametrize(
    ("width", "alphabet", "least"), [(8, 256, 15), (8, 255, 15), (4, 15, 15), (3, 7, 12), (2, 3, 6)]
)
def test_codewords_longer_than_a_look_up_come_back(width: int, alphabet: int, least: int) -> None:
    rule = QuantizationRule(Norm.max, Rounding.table, block=100)
    magnitudes = np.linspace(0 if alphabet % 2 else 0.001, 1, 1 << (width - 1))
    tables = Tables({width: magnitudes})
    rng, numel = np.random.default_rng(width), 300_007
    chosen = np.minimum(rng.geometric(0.5, numel) - 1, alphabet - 1)
    norms = rng.random(-(-numel // rule.block)).astype(np.float32).tobytes()
    packed_codes = pack(torch.from_numpy(chosen), width, alphabet).numpy().tobytes()
    body = torch.frombuffer(bytearray(bytes([width]) + norms + packed_codes), dtype=torch.uint8)
    numels = np.array([numel])
    streams, sent = cpu.encode(body, numels, rule, tables)
    codes = codes_of(cpu, sent, tables)
    assert codes[width].lengths.max() >= least
    assert torch.equal(cpu.decode(streams, 0, [numel], rule, tables, codes), body)
    expected = added(quantized, body, numels, rule, tables, None)
    assert added(quantized, streams, numels, rule, tables, codes) == expected


@pytest.mark.parametrize("rule", RULES[:3], ids=repr)
def test_cpu_and_reference_refuse_the_same_coded_bodies(rule: QuantizationRule) -> None:
    rng, tables, refused = np.random.default_rng(4), tables_of(rule), 0
    body, numels = packed(rule, tables)
    streams, sent = cpu.encode(body, numels, rule, tables)
    codes = codes_of(cpu, sent, tables)
    for _ in range(150):
        broken = torch.from_numpy(damage(streams.numpy(), rng))
        found = added(quantized, broken, numels, rule, tables, codes)
        assert found == added(reference_quantized, broken, numels, rule, tables, codes)
        refused += not found
    assert refused > 50


def test_cpu_and_reference_find_the_same_damage_in_streams() -> None:
    rule, rng, refused = RULES[0], np.random.default_rng(3), 0
    tables = tables_of(rule)
    body, numels = packed(rule, tables)
    streams, codes = cpu.encode(body, numels, rule, tables)
    tools = codes_of(cpu, codes, tables)
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
