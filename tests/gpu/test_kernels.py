"""What only a GPU can show: that the compiled kernels give the reference's bytes, and do not wait.

On a machine with one: ``python -m pytest tests/gpu``.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_adaptive.compressors import GatheredCompressor, parse
from hvd_adaptive.compressors.base import LayerBatch
from hvd_adaptive.kernels import for_device
from hvd_adaptive.wire import WireError
from tests.compressors.test_contract import GATHERED
from tests.kernels.inputs import KINDS, bits, damage, numbers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

SIZES = (0, 1, 2**16 - 1, 2**16, 2**16 + 1, 10**6)
RESERVE = 6


def compressed(spec: str, kind: str, device: str) -> tuple[Tensor, Tensor, list[float]]:
    """A bucket's body, its remainder and its statistics, in host memory."""
    compressor = parse(spec)
    assert isinstance(compressor, GatheredCompressor)
    x = torch.from_numpy(np.concatenate([numbers(kind, size, 5) for size in SIZES]))
    x = x.clamp(-1e30, 1e30).to(device)
    grads = [torch.from_numpy(numbers("normal", size, size)).to(device) for size in SIZES]
    keys = np.arange(len(SIZES), dtype=np.uint64) + np.uint64(2**63)
    levels, state = [compressor.level] * len(SIZES), compressor.new_state()
    batch = LayerBatch(
        x, np.cumsum([0, *SIZES]), levels, grads, keys, RESERVE, state, dithers=keys, rotation=9
    )
    body, stats = compressor.compress_layers_(batch)
    rows = [*stats.energy.tolist(), *stats.sent.tolist(), *stats.nonfinite.tolist()]
    return body[RESERVE:].cpu(), x.cpu(), rows


def summed(spec: str, body: Tensor, device: str) -> str | list[int]:
    """The sum of two bodies, as bits; what is wrong with a body that is damaged."""
    compressor = parse(spec)
    assert isinstance(compressor, GatheredCompressor)
    outs = [torch.ones(size, device=device) for size in SIZES]
    try:
        compressor.decompress_layers_sum_([body.to(device)] * 2, outs, 0.5)
    except WireError as error:
        return str(error)
    found: list[int] = bits(torch.cat(outs).cpu()).tolist()
    return found


def assert_as_on_a_cpu(spec: str, kind: str) -> None:
    """Bytes, remainder, statistics and sum of a bucket."""
    body, rest, stats = compressed(spec, kind, "cuda")
    expected, expected_rest, expected_stats = compressed(spec, kind, "cpu")
    assert torch.equal(body, expected)
    assert np.array_equal(bits(rest), bits(expected_rest))
    np.testing.assert_allclose(stats, expected_stats, rtol=1e-10)
    assert summed(spec, body, "cuda") == summed(spec, body, "cpu")


@pytest.mark.parametrize("kind", ["normal", "wide", "mostly zero"])
@pytest.mark.parametrize("spec", GATHERED)
def test_a_gpu_and_a_cpu_give_the_same_bytes(spec: str, kind: str) -> None:
    assert for_device(torch.device("cuda")).backend == "triton"
    assert_as_on_a_cpu(spec, kind)


@pytest.mark.parametrize("spec", GATHERED)
def test_damage_is_what_a_cpu_finds(spec: str) -> None:
    body, _, _ = compressed(spec, "normal", "cpu")
    rng = np.random.default_rng(3)
    for _ in range(20):
        hostile = torch.from_numpy(damage(body.numpy(), rng).copy())
        assert summed(spec, hostile, "cuda") == summed(spec, hostile, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_are_those_of_a_cpu(kind: str) -> None:
    x = torch.from_numpy(numbers(kind, 150_000, 4))
    gpu, cpu = (for_device(torch.device(name)).sparse for name in ("cuda", "cpu"))
    assert np.array_equal(gpu.spectrum(x.cuda()), cpu.spectrum(x))
    assert np.array_equal(gpu.sample_spectrum(x.cuda()), cpu.sample_spectrum(x))
    np.testing.assert_allclose(gpu.moments(x.cuda()), cpu.moments(x), rtol=1e-10)
    np.testing.assert_allclose(gpu.summary(x.cuda())[1:], cpu.summary(x)[1:], rtol=1e-10)


def test_adding_waits_once_and_only_for_what_it_returns() -> None:
    """torch reports other waits, such as for a copy from memory that is not pinned."""
    sparse = for_device(torch.device("cuda")).sparse
    x, out = torch.randn(10**6, device="cuda"), torch.zeros(10**6, device="cuda")
    from hvd_adaptive.wire import ValueFormat

    one, count = np.array([0, x.numel()]), np.array([10_000])
    body, _ = sparse.compress_(x.clone(), one, count, ValueFormat.fp16)  # compiles
    sparse.decompress_add_(body, [out], 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        body, _ = sparse.compress_(x.clone(), one, count, ValueFormat.fp16)
        sparse.decompress_add_(body, [out], 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("spec", GATHERED)
def test_replayed_calls_give_what_first_ones_do(spec: str) -> None:
    """The second call with the same layers is recorded, and later ones replay it with other numbers."""
    for _ in range(2):
        for kind in ("normal", "wide", "mostly zero"):
            assert_as_on_a_cpu(spec, kind)


def test_bodies_stay_what_they_are_when_a_recording_is_replayed() -> None:
    from hvd_adaptive.kernels.triton import recording
    from hvd_adaptive.wire import ValueFormat

    sparse, one = for_device(torch.device("cuda")).sparse, np.array([0, 50_000])
    cases = [(numbers("normal", 50_000, seed), 500 + 100 * (seed % 2)) for seed in range(8)]
    for _ in range(2):
        bodies = []
        for x, count in cases:  # two buckets in turn
            body, _ = sparse.compress_(
                torch.from_numpy(x.copy()).cuda(), one, np.array([count]), ValueFormat.fp16
            )
            bodies.append(body)
        cpu = for_device(torch.device("cpu")).sparse
        for (x, count), body in zip(cases, bodies, strict=True):
            expected, _ = cpu.compress_(
                torch.from_numpy(x.copy()), one, np.array([count]), ValueFormat.fp16
            )
            assert torch.equal(body.cpu(), expected)
        recording.forget()  # and all are made again
