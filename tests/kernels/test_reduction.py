"""Sums that are compressed again in one pass: the bytes and remainders of two passes, and damage."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import GatheredCompressor, LayerBatch, Reduced
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.kernels import base
from hvd_adaptive.wire import WireError
from tests.kernels.inputs import bits, damage, numbers

SPECS = (
    "qsgd:bits=4",
    "qsgd:bits=1",
    "qsgd:bits=3,block=7,coding=huffman",
    "qsgdinf:bits=2,coding=huffman",
    "nuqsgd:bits=5,block=4096",
    "natural:bits=8",
    "terngrad",
    "terngrad:clip=2.5,coding=huffman",
    "signsgd:block=64",
    "onebit",
    "onebit:block=1",
    "alq:bits=3",
    "alq:bits=3,coding=fixed",
    "alq:bits=7,coding=fixed",
    "amq:bits=2",
    "amq:bits=1,coding=fixed",
    "topk:density=0.05",
    "globaltopk:density=0.05,values=fp32",
    "dgc:density=0.05,values=int8",
    "redsync:density=0.05,values=sign",
    "threshold:threshold=1.0",
    "qsgdinf:bits=4,rotate=hadamard",
)
FUSED = tuple(spec for spec in SPECS if isinstance(parse(spec), Quantizer) and "rotate" not in spec)
SIZES = (0, 1, 700, 2049, 5)
KEYS = np.arange(len(SIZES), dtype=np.uint64) + np.uint64(7)
OFFSETS = np.cumsum([0, *SIZES])


@contextmanager
def backend(name: str) -> Iterator[None]:
    before = base.BACKENDS["cpu"]
    base.BACKENDS["cpu"] = name
    try:
        yield
    finally:
        base.BACKENDS["cpu"] = before


def member(spec: str) -> GatheredCompressor:
    return cast(GatheredCompressor, parse(spec))


def bodies_of(compressor: GatheredCompressor, ranks: int, nan: bool = False) -> list[Tensor]:
    """Payloads of several ranks, some of them at other levels where there are some."""
    bodies = []
    for rank in range(ranks):
        x = torch.from_numpy(numbers("normal", int(OFFSETS[-1]), rank))
        if nan and rank == ranks - 1:
            x[5] = torch.nan
        level = compressor.level
        if rank == 1 and hasattr(compressor, "bits") and level + 1 in compressor.widths:
            level += 1
        batch = LayerBatch(x, OFFSETS, [level] * len(SIZES), keys=KEYS + np.uint64(rank))
        bodies.append(compressor.compress_layers_(batch)[0])
    return bodies


def batch_of(compressor: GatheredCompressor, x: Tensor) -> LayerBatch:
    return LayerBatch(x, OFFSETS, [compressor.level] * len(SIZES), keys=KEYS, reserve=3)


def residual(kind: str = "normal") -> Tensor:
    return torch.from_numpy(numbers(kind, int(OFFSETS[-1]), 99))


def in_two_passes(
    compressor: GatheredCompressor, bodies: Sequence[Tensor], x: Tensor, keeps: bool
) -> Reduced:
    return GatheredCompressor.reduce_layers_(compressor, bodies, batch_of(compressor, x), keeps)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_one_pass_gives_the_bytes_and_the_remainders_of_two(spec: str, keeps: bool, ranks: int) -> None:
    compressor = member(spec)
    for nan in (False, True):
        bodies, found = bodies_of(compressor, ranks, nan), []
        for name in ("two passes", "reference", "cpu"):
            x = residual()
            with backend("reference" if name == "reference" else "cpu"):
                if name == "two passes":
                    reduced = in_two_passes(compressor, bodies, x, keeps)
                else:
                    reduced = compressor.reduce_layers_(bodies, batch_of(compressor, x), keeps)
            found.append((reduced.body[3:].tolist(), reduced.nonfinite.tolist(), x))
        assert found[1][0] == found[2][0] == found[0][0]
        assert found[1][1] == found[2][1] == found[0][1]
        assert any(found[0][1]) == nan
        if keeps and "topk" not in spec:
            assert all(np.array_equal(bits(each[2]), bits(found[0][2])) for each in found)


@pytest.mark.parametrize("spec", SPECS)
def test_what_was_kept_of_a_layer_can_be_taken_back(spec: str) -> None:
    compressor, x = member(spec), residual()
    reduced = compressor.reduce_layers_(bodies_of(compressor, 3), batch_of(compressor, x), True)
    assert not torch.equal(x, residual())
    left = x.clone()
    reduced.undo([2, 4])
    for layer, (start, end) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        wanted = residual() if layer in (2, 4) else left
        coded = spec in FUSED and cast(Quantizer, compressor).entropy_coded
        limit = 0.0 if coded else 1e-4
        torch.testing.assert_close(x[start:end], wanted[start:end], rtol=limit, atol=limit)


@pytest.mark.parametrize("spec", [spec for spec in FUSED if "bits" in spec])
def test_a_sum_that_overflows_is_marked_and_leaves_what_was_kept(spec: str) -> None:
    compressor = member(spec)
    large = torch.zeros(int(OFFSETS[-1]))
    large[OFFSETS[3] + 1500] = 3e38  # in a later block: the blocks before have been rounded by then
    bodies = bodies_of(compressor, 2)
    bodies += [compressor.compress_layers_(batch_of(compressor, large.clone()))[0][3:]] * 3
    # Triton's kernels give back what they took: of one bit that is a block's norm, which is rounded
    limit = 2.0**-14 if os.environ.get("TRITON_INTERPRET") == "1" else 0.0
    results = []
    for name in ("reference", "cpu"):
        with backend(name):
            x = residual()
            reduced = compressor.reduce_layers_(bodies, batch_of(compressor, x), True)
        kept, before = (each[OFFSETS[3] : OFFSETS[4]] for each in (x, residual()))
        torch.testing.assert_close(kept, before, rtol=limit, atol=limit)
        kept.copy_(before)
        assert reduced.nonfinite.tolist() == [False, False, False, True, False]
        results.append((reduced.body[3:].tolist(), bits(x).tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("spec", SPECS)
def test_damage_is_what_adding_finds_and_leaves_what_was_kept(spec: str) -> None:
    compressor, rng = member(spec), np.random.default_rng(3)
    good, found = bodies_of(compressor, 3), 0
    for trial in range(60):
        bodies = list(good)
        bodies[trial % 3] = torch.from_numpy(damage(good[trial % 3].numpy(), rng))
        outs = [torch.zeros(size) for size in SIZES]
        expected = message = ""
        try:
            compressor.decompress_layers_sum_(bodies, outs, 1.0)
        except WireError as error:
            expected = str(error)
        x = residual()
        try:
            reduced = compressor.reduce_layers_(bodies, batch_of(compressor, x), True)
        except WireError as error:
            message = str(error)
            assert torch.equal(x, residual())
        else:
            compressor.decompress_layers_add_(reduced.body[3:], outs, 1.0)
        assert message == expected
        found += bool(message)
    assert found > 10


def test_what_does_not_fit_together_is_refused() -> None:
    kernels, rule = base.for_device(torch.device("cpu")).reduction, parse("qsgd").rule
    one_layer, width = np.array([0, 4]), np.array([4])
    with pytest.raises(ValueError, match="no body to sum"):
        kernels.reduce_([], one_layer, width, rule, rule.tables)
    body = base.ReceivedBody(torch.zeros(9, dtype=torch.uint8), 0, rule.tables)
    for before in (None, torch.zeros(3)):
        with pytest.raises(ValueError, match="before is float32 with as many elements as x"):
            kernels.reduce_([body], one_layer, width, rule, rule.tables, torch.zeros(4), before)
