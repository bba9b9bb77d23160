"""The contract, run over every compressor: a new member adds a row to MEMBERS."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.compressors import REGISTRY, Compression, Compressor, Payload, format_spec, parse
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import WireError

# specification -> largest relative rounding error of a value that is sent
MEMBERS = {
    "none": 0.0,
    "fp16": 2**-11,
    "bf16": 2**-8,
    "topk:density=0.01,values=fp32": 0.0,
    "topk:density=0.05,values=fp16": 2**-11,
    "topk:density=0.3,values=bf16": 2**-8,
    "topk:density=0.02,values=int8": 1 / 254,
    "topk:density=1.0,values=fp32": 0.0,
}
SIZES = (0, 1, 2, 1000, 2**16 - 1, 2**16, 2**16 + 1, 10**6)

member = pytest.mark.parametrize("spec", MEMBERS)


def decoded(compressor: Compressor, payload: Payload) -> Tensor:
    out = torch.zeros(payload.numel)
    compressor.decompress_add_(payload, out)
    return out


def sample(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # heavier tails than normal, as gradients have them
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(3)


def test_every_registered_compressor_has_a_row() -> None:
    assert {spec.partition(":")[0] for spec in MEMBERS} == set(REGISTRY)
    assert all(getattr(Compression, name) is REGISTRY[name] for name in REGISTRY)


@member
@pytest.mark.parametrize("numel", SIZES)
def test_payload_and_remainder_add_up_to_the_tensor(spec: str, numel: int) -> None:
    compressor, x = parse(spec), sample(numel)
    rest = x.clone()
    sent = decoded(compressor, compressor.compress_(rest, compressor.level))
    # the remainder is x - sent, rounded once: exact wherever both are near each other
    torch.testing.assert_close(sent + rest, x, rtol=2**-23, atol=1e-12)
    if MEMBERS[spec] == 0.0:
        assert torch.equal(sent + rest, x)


@member
def test_values_that_are_sent_are_within_the_rounding_of_their_format(spec: str) -> None:
    compressor, x = parse(spec), sample(10_000)
    sent = decoded(compressor, compressor.compress_(x.clone(), compressor.level))
    picked = sent != 0
    # int8 rounds by its block's largest value, fp16 absolutely below 6e-5
    limit = MEMBERS[spec] * (x.abs().max() if "int8" in spec else x[picked].abs()) + 3e-8
    assert bool(((sent - x)[picked].abs() <= limit).all())


@member
def test_errors_are_those_of_compressing(spec: str) -> None:
    compressor, x = parse(spec), sample(50_000)
    levels = compressor.levels(Layer(0, "w", (50_000,)))
    kept = x.clone()
    errors = compressor.errors(x, levels)
    assert torch.equal(x, kept)
    for level, error in list(zip(levels, errors, strict=True))[:: max(1, len(levels) // 7)]:
        rest = x.clone()
        compressor.compress_(rest, level)
        truth = float(rest.double().square().sum())
        total = float(x.double().square().sum())
        assert error == pytest.approx(truth, rel=0.01, abs=2e-5 * total)


@member
def test_levels_fall_from_faithful_to_compressed(spec: str) -> None:
    compressor = parse(spec)
    levels = compressor.levels(Layer(0, "w", (1000, 100)))
    sizes = [compressor.wire_bytes(100_000, level) for level in levels]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(levels)) == len(levels)
    assert any(np.isclose(level, compressor.level) for level in levels)


@member
@pytest.mark.parametrize("numel", SIZES)
def test_wire_bytes_bound_what_is_sent(spec: str, numel: int) -> None:
    compressor = parse(spec)
    payload = compressor.compress_(sample(numel), compressor.level)
    bound = compressor.wire_bytes(numel, compressor.level)
    assert payload.nbytes <= bound
    if numel >= 2**16 - 1:
        assert bound <= 1.03 * payload.nbytes


@member
def test_compressing_is_deterministic(spec: str) -> None:
    compressor = parse(spec)
    first = compressor.compress_(sample(5000), compressor.level)
    second = compressor.compress_(sample(5000), compressor.level)
    assert torch.equal(first.data, second.data)


@member
@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(
        st.floats(
            width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126
        ),
        max_size=40,
    )
)
def test_no_mass_is_lost_on_any_finite_tensor(spec: str, values: list[float]) -> None:
    compressor, x = parse(spec), torch.tensor(values, dtype=torch.float32)
    rest = x.clone()
    sent = decoded(compressor, compressor.compress_(rest, compressor.level))
    assert bool(sent.isfinite().all())
    torch.testing.assert_close(sent.double() + rest.double(), x.double(), rtol=2**-22, atol=1e-44)


@member
@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]]
)
def test_a_tensor_of_another_kind_is_refused(spec: str, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="1-D contiguous float32"):
        parse(spec).compress_(wrong, parse(spec).level)


@member
def test_a_payload_of_another_tensor_is_refused(spec: str) -> None:
    compressor = parse(spec)
    payload = compressor.compress_(sample(100), compressor.level)
    with pytest.raises(WireError):
        compressor.decompress_add_(payload, torch.zeros(99))


@member
def test_the_specification_reads_back(spec: str) -> None:
    assert parse(format_spec(parse(spec))) == parse(spec)
    assert hash(parse(spec)) == hash(parse(format_spec(parse(spec))))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_topk_refuses_and_keeps_a_tensor_that_is_not_finite(bad: float) -> None:
    x = torch.tensor([1.0, bad, 2.0])
    kept = x.clone()
    with pytest.raises(ValueError, match="NaN or an Inf"):
        parse("topk").compress_(x, 0.5)
    assert torch.equal(x, kept) or bool(x.isnan().any())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topkk", r"did you mean 'topk'.*none, fp16, bf16, topk"),
        ("topk:densty=0.1", "did you mean 'density'.*density, values"),
        ("topk:density", "write density=VALUE"),
        ("topk:density=x", "not of type float"),
        ("topk:density=0", r"\(0, 1\]"),
        ("topk:density=2", r"\(0, 1\]"),
        ("topk:density=nan", r"\(0, 1\]"),
        ("topk:density=0.1,density=0.2", "given twice"),
        ("topk:values=int4", "fp32, fp16, bf16, int8"),
        ("fp16:bits=8", "has no option 'bits'"),
    ],
)
def test_a_mistake_in_a_specification_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_something_else_than_a_specification_is_named() -> None:
    with pytest.raises(TypeError, match=r"topk:density=0\.01"):
        parse(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_linear_compressors_follow_horovods_contract(name: str) -> None:
    x = sample(100).view(10, 10)
    member_class = getattr(Compression, name)
    for compressor in (member_class, member_class()):
        small, context = compressor.compress(x)
        back = compressor.decompress(small, context)
        assert back.dtype == x.dtype
        torch.testing.assert_close(back, x, rtol=2**-8, atol=1e-6)
        assert small.dtype in (torch.float32, torch.float16)  # what Horovod can add


def test_horovod_is_told_that_it_cannot_sum_sparse_payloads() -> None:
    with pytest.raises(TypeError, match=r"use hvd_adaptive\.DistributedOptimizer"):
        Compression.topk(density=0.5).compress(torch.zeros(3))


def test_compressors_and_planning_import_without_horovod_and_mpi() -> None:
    code = (
        "import sys\n"
        "for name in ('horovod', 'horovod.torch', 'mpi4py', 'mpi4py.MPI'): sys.modules[name] = None\n"
        "import hvd_adaptive.compressors, hvd_adaptive.planning, hvd_adaptive.kernels.cpu\n"
        "import hvd_adaptive; assert hvd_adaptive.Compression.topk(density=0.5).density == 0.5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
