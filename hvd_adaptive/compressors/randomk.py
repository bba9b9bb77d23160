"""Random-k: all ranks send the same random elements, so that only values travel, and can be summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import wire
from hvd_adaptive.compressors.base import (
    Batch,
    CodecState,
    Float64s,
    Level,
    LinearCompressor,
    MultiLevel,
    Payload,
    Rounds,
    Shape,
    all_finite,
    check_input,
    check_values,
)
from hvd_adaptive.keys import mix
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.wire import WireError

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_ROUNDS = 4


@dataclass(frozen=True)
class RandomK(LinearCompressor, MultiLevel):
    """``density * numel`` elements at random, the same on all ranks; nothing but values travels.

    Each step draws a new set, of which all ranks know the key (seed, step, layer). Biased, and used
    with error feedback; ``unbiased=true`` scales the values by ``1 / density`` instead, and needs no
    feedback. Contraction: ``E |x - C(x)|^2 = (1 - density) |x|^2``. Cost: proportional to the
    elements sent. Wire: one value an element, summed by allreduce, so that traffic does not grow with
    the number of ranks. Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (NeurIPS
    2018), definition 2.1; unbiased: Wangni et al. (NeurIPS 2018).

    Args:
        density: share of the elements to send, in (0, 1].
        values: ``fp32`` or ``fp16`` (what Horovod can sum); the rounding error of the values stays in
            the remainder.
        unbiased: scale by ``1 / density``.

    Raises:
        ValueError: density outside (0, 1], or another value format.

    Example:
        >>> x = torch.ones(100)
        >>> payload = RandomK(density=0.1).compress_(x, 0.1, key=7)
        >>> payload.nbytes, int(x.sum())
        (40, 90)
    """

    density: float = 0.01
    values: str = "fp32"
    unbiased: bool = False

    name = "randomk"
    collective = Collective.REDUCE

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(
                f"randomk: density is the share of elements to send and must lie in (0, 1], got "
                f"{self.density}: write randomk:density=0.01 for 1 %"
            )
        if self.values not in _DTYPES:
            raise ValueError(
                f"randomk: values={self.values!r} is not one of {', '.join(_DTYPES)}: Horovod sums them"
            )

    @property
    def biased(self) -> bool:
        """Unless scaled."""
        return not self.unbiased

    @property
    def level(self) -> Level:
        """The density."""
        return self.density

    @property
    def wire_dtype(self) -> torch.dtype:
        """That of the values."""
        return _DTYPES[self.values]

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """100 densities from ten times the default to a tenth of it (L-GreCo's search range)."""
        del layer
        steps = (self.density * step / 10 for step in range(100, 0, -1))
        return tuple(dict.fromkeys(min(1.0, density) for density in steps))

    def rounds(self, batch: Batch) -> Rounds:
        """One round with the values of all layers."""
        sent = [
            self._take_(x, level, int(key))
            for x, level, key in zip(batch.x, batch.levels, batch.keys, strict=True)
        ]
        reduced = yield [values for _, values in sent]
        for (indices, _), values, out in zip(sent, reduced, batch.outs, strict=True):
            out.zero_()[indices] = values.to(out.dtype)
            if not all_finite(values):
                out.fill_(torch.nan)

    def compress_(
        self,
        x: Tensor,
        level: Level,
        *,
        key: int = 0,
        shape: Shape | None = None,
        state: CodecState | None = None,
    ) -> Payload:
        """Take the values at the indices of ``key`` out of ``x``."""
        del state
        check_input(x)
        if not all_finite(x):
            raise ValueError("randomk: the tensor holds a NaN or an Inf; it was left as it was")
        _, values = self._take_(x, level, key)
        return Payload(values, x.numel(), level, key, shape)

    def decompress_add_(self, payload: Payload, out: Tensor, scale: float = 1.0) -> None:
        """Scatter-add."""
        if payload.numel != out.numel():
            raise WireError(
                f"randomk: a payload of {payload.numel} elements cannot be added to a tensor of "
                f"{out.numel()}"
            )
        indices = random_indices(out.numel(), wire.count_of(out.numel(), payload.level), payload.key)
        check_values(self.name, payload.data, indices.numel(), self.wire_dtype)
        out[indices.to(out.device)] += scale * payload.data.to(out.dtype)

    def shrink_(self, payload: Payload, x: Tensor, level: Level) -> Payload:
        """Keep the first of the values: a smaller set of the same key is the beginning of a larger."""
        count = wire.count_of(payload.numel, payload.level)
        fewer = wire.count_of(payload.numel, level)
        indices = random_indices(payload.numel, count, payload.key).to(x.device)
        values = payload.data.to(x.dtype)
        kept = payload.data[:fewer]
        if self.unbiased:
            kept = (values[:fewer] * (count / max(1, fewer))).to(payload.data.dtype)
        x[indices] += values
        x[indices[:fewer]] -= kept.to(x.dtype)
        return Payload(kept, payload.numel, level, payload.key, payload.shape)

    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        *,
        shape: Shape | None = None,
        state: CodecState | None = None,
    ) -> Float64s:
        """In expectation over the sets: ``1 - density`` of the energy, or ``1 / density - 1``."""
        del shape, state
        energy = float(x.double().square().sum())
        shares = np.array([wire.count_of(x.numel(), level) for level in levels]) / max(1, x.numel())
        if x.numel() == 0:
            return np.zeros(len(levels))
        return energy * ((1 / shares - 1) if self.unbiased else (1 - shares))

    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Exact."""
        del shape
        return wire.count_of(numel, level) * self.wire_dtype.itemsize

    def _take_(self, x: Tensor, level: Level, key: int) -> tuple[Tensor, Tensor]:
        """(indices, values as they travel), which are taken out of ``x``.

        A tensor that is not finite sends NaN at all of them: whichever were drawn, all ranks see it.
        """
        count = wire.count_of(x.numel(), level)
        indices = random_indices(x.numel(), count, key).to(x.device)
        values = x[indices]
        if self.unbiased:
            values = values * (x.numel() / max(1, count))
        limit = torch.finfo(self.wire_dtype).max
        sent = values.clamp(-limit, limit).to(self.wire_dtype)
        if not all_finite(x):
            sent.fill_(torch.nan)
        x[indices] -= sent.to(x.dtype)
        return indices, sent


def random_indices(numel: int, count: int, key: int) -> Tensor:
    """``count`` different numbers below ``numel``: the beginning of a random permutation.

    A Feistel network permutes the numbers below the next power of four; those beyond ``numel`` are
    permuted again until they fall below it. Cost: a few operations an index, whatever ``numel`` is.
    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), sections 3, 4.

    Args:
        numel: below 2^31.
        count: at most ``numel``.
        key: the same key gives the same numbers, and a smaller count a beginning of them.

    Returns:
        int64, 1-D, not sorted.

    Example:
        >>> sorted(random_indices(5, 5, key=1).tolist()), len(random_indices(10**6, 10, key=1))
        ([0, 1, 2, 3, 4], 10)
    """
    half = max(1, (max(1, numel - 1).bit_length() + 1) // 2)
    keys = [mix(key ^ (round_ << 56)) & 0xFFFFFFFF for round_ in range(_ROUNDS)]
    values = _feistel(np.arange(count, dtype=np.uint64), half, keys)
    while True:
        beyond = np.flatnonzero(values >= numel)
        if beyond.size == 0:
            return torch.from_numpy(values.astype(np.int64))
        values[beyond] = _feistel(values[beyond], half, keys)


def _feistel(
    values: np.typing.NDArray[np.uint64], half: int, keys: Sequence[int]
) -> np.typing.NDArray[np.uint64]:
    """A permutation of the numbers of ``2 * half`` bits."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        word = (right + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        word ^= word >> np.uint64(29)
        word *= np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((word >> np.uint64(64 - 24)) & mask)
    return (left << shift) | right
