"""Tensors, bodies and damage that tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.kernels import SelectionRule
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.reference import sparse as reference
from hvd_adaptive.wire import ValueFormat, WireError

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
    body, stats = kernels.compress_(
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
    kernels.decompress_add_(body, [out], 1.0)
    return out.numpy()


def tensor_of(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


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


def finding(act: Callable[..., object], *arguments: object) -> str:
    """What was found damaged, if anything."""
    try:
        act(*arguments)
    except WireError as error:
        return str(error)
    return ""
