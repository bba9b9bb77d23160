"""Random-k under Horovod's own optimizer, which knows nothing of layers, steps and keys.

``hvd.DistributedOptimizer`` calls ``compress`` for each gradient, sums what that returns, and hands the
sum to ``decompress``. So the ranks must draw the same elements without any message: the key is made of
the gradient's number of elements and of the *round*. A round ends with its first ``decompress``, as
Horovod's ``synchronize`` compresses what is missing before it decompresses anything. Neither depends on
the order in which gradients arrive, which may differ between ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.compressors.base import LayerContext, Payload
from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.compressors.linear import LinearCompressor
from hvd_adaptive.layers import SMALL_NUMEL
from hvd_adaptive.wire import sparse as wire_sparse


class ClassOrInstanceMethod:
    """A method that works on an instance, and on its class as on an instance with the defaults.

    Horovod takes both: ``compression=Compression.randomk`` and ``compression=Compression.randomk()``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return partial(self._function, owner() if instance is None else instance)


@dataclass(slots=True)
class _Rounds:
    """The number of the running round, and whether it has begun to end."""

    number: int = 0
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """What ``decompress`` needs to know of a gradient.

    Args:
        shape: of the gradient.
        dtype: of the gradient.
        key: of the elements that were drawn.
        token: what all ranks send as the last value, if they drew by the same key.
    """

    shape: torch.Size
    dtype: torch.dtype
    key: int
    token: float


_rounds: dict[LinearCompressor, _Rounds] = {}
"""Of each compressor: equal ones are one and the same to Horovod's optimizers."""
_TOKENS = 7
_NEAR = 0.05
"""Relative error of a mean of equal small whole numbers, in half precision, at most."""


def compress(compressor: LinearCompressor, tensor: Tensor) -> tuple[Tensor, Sent | None]:
    """Some random values of a gradient, the same elements on all ranks, and a token.

    Biases, norms and tensors under 1,024 elements are sent as they are. Cost: a copy of the gradient.

    Warns:
        RuntimeWarning: once, where the values are not scaled: nothing is kept of what is left out.
    """
    if tensor.dim() <= 1 or tensor.numel() < SMALL_NUMEL or not tensor.dtype.is_floating_point:
        return tensor, None
    if compressor not in _rounds and compressor.biased:
        warnings.warn(
            "randomk under hvd.DistributedOptimizer keeps nothing of what it leaves out: the expected "
            f"gradient is {compressor.level:g} times the whole. Write unbiased=True, or use "
            "hvd_adaptive.DistributedOptimizer, which has error feedback",
            RuntimeWarning,
            stacklevel=3,
        )
    rounds = _rounds.setdefault(compressor, _Rounds())
    if rounds.ends:
        rounds.number, rounds.ends = rounds.number + 1, False
    key = int(rng.layer_keys(0, rng.SHARED, rounds.number, [tensor.numel()])[0])
    token = float(1 + rng.mix(key) % _TOKENS)
    x = tensor.detach().reshape(-1).to(torch.float32, copy=True)
    if all_finite(x):
        values = compressor.compress_(x, compressor.level, LayerContext(key)).data
    else:
        count = wire_sparse.count_of(x.numel(), compressor.level)
        values = x.new_full((count,), torch.nan, dtype=compressor.wire_dtype)
    return torch.cat([values, values.new_full((1,), token)]), Sent(
        tensor.shape, tensor.dtype, key, token
    )


def decompress(compressor: LinearCompressor, tensor: Tensor, ctx: Sent | None) -> Tensor:
    """The gradient that the reduced values are of, 0 elsewhere; NaN where some rank was not finite.

    Raises:
        RuntimeError: ranks drew different elements, as those that join an elastic run do.
    """
    if ctx is None:
        return tensor
    _rounds[compressor].ends = True
    # the mean of equal tokens is the token, their sum a multiple of it
    times = float(tensor[-1]) / ctx.token
    if not abs(times - max(1, round(times))) <= _NEAR * times:
        raise RuntimeError(
            "randomk: ranks have drawn different elements, because they have compressed different "
            "numbers of steps: hvd.DistributedOptimizer cannot tell a rank that joins how many there "
            "were. Use hvd_adaptive.DistributedOptimizer in elastic runs"
        )
    values = tensor[:-1].contiguous()
    out = torch.zeros(ctx.shape.numel(), device=tensor.device)
    if not all_finite(values):
        out.fill_(torch.nan)
    else:
        payload = Payload(values, out.numel(), compressor.level, ctx.key)
        compressor.decompress_add_(payload, out)
    return out.view(ctx.shape).to(ctx.dtype)
