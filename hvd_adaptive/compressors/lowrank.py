"""Low rank: a layer's matrix as the product of two thin ones, found by one power iteration a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    CodecState,
    Compressor,
    LayerContext,
    Level,
    LinearBatch,
    LinearCompressor,
    Payload,
    Rounds,
    Shape,
    all_finite,
    check_input,
    check_output,
    check_values,
    whole_bounds,
)
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.rng import mix
from hvd_adaptive.wire import WireError

MAX_RANK = 64
"""Of the range that a planner has by itself."""
LARGEST_RANK = 1 << 12
LARGEST = float(torch.finfo(torch.float32).max)
FAR_FROM_LARGEST = 2.0**96
"""While a factor is below it, no float32 minus the product becomes infinite: rows of the other one,
whose columns are orthonormal, have a norm of 1 at most, and elements of the product are below 2^102 up
to rank 2^12."""


@dataclass(frozen=True)
class PowerSGD(LinearCompressor):
    """The best approximation of rank ``rank`` that one warm-started power iteration finds.

    With M the layer as a matrix (a convolution as outputs x inputs * kernel): ``P = M Q``, summed over
    the ranks and made orthonormal; ``Q = M^T P``, summed; the layer is ``P Q^T``, and Q starts the next
    step. Two allreduces per bucket: one for all P and the layers that are sent dense, one for all Q.
    Biased: use it with error feedback. Magnitudes near float32's largest saturate. Memory: Q, and the
    residual. Cost: two products with a matrix of ``rank`` columns and a QR decomposition of P. Layers
    with one dimension, and those whose factors would not be smaller than they are, are sent dense.
    Source: Vogels, Karimireddy and Jaggi, "PowerSGD" (NeurIPS 2019), algorithms 1 and 2.

    Args:
        rank: columns of P and Q, at least 1.

    Raises:
        ValueError: a rank below 1.

    Example:
        >>> x = torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 5)).view(-1)
        >>> payload = PowerSGD(rank=1).compress_(x, 1, LayerContext(shape=(8, 4)))
        >>> payload.nbytes, bool(x.abs().max() < 1e-4)
        (48, True)
    """

    rank: int = 4

    name = "powersgd"
    payload_kind = PayloadKind.SUMMABLE
    biased = True
    wire_dtype = torch.float32

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank is at least 1, got {self.rank}: write powersgd:rank=4")
        whole_bounds(self, 1, LARGEST_RANK, "ranks")
        super().__post_init__()

    @property
    def level(self) -> Level:
        """The rank."""
        return self.rank

    @property
    def state_key(self) -> Compressor:
        """Ranks share their warm start."""
        return replace(self, rank=1, level_range="")

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """Ranks from twice the default to half of it (L-GreCo's search range), as far as they help.

        By itself the range ends at the default or at 64, whichever is more.
        """
        around = max(1, self.rank // 2), max(self.rank, min(2 * self.rank, MAX_RANK))
        least, most = whole_bounds(self, 1, LARGEST_RANK, "ranks") or around
        highest = min(most, max_rank(layer.shape))
        lowest = min(least, max(1, highest))
        return tuple(range(max(1, highest), lowest - 1, -1))

    def new_state(self) -> WarmStarts:
        """The right factors of the last step."""
        return WarmStarts()

    def rounds(self, batch: LinearBatch) -> Rounds:
        """Two rounds: all P and dense layers, then all Q."""
        state = batch.state if isinstance(batch.state, WarmStarts) else self.new_state()
        matrices = [
            _Factors(x, layer, int(level), int(key), state)
            for x, layer, level, key in zip(
                batch.x, batch.layers, batch.levels, batch.keys, strict=True
            )
        ]
        reduced = yield [each.first() for each in matrices]
        thin = [each for each, first in zip(matrices, reduced, strict=True) if each.second(first)]
        if thin:
            reduced = yield [each.q for each in thin]
            for each, q in zip(thin, reduced, strict=True):
                each.third(q, state)
        for each, out in zip(matrices, batch.outs, strict=True):
            each.write(out)

    def compress_(
        self,
        x: Tensor,
        level: Level,
        context: LayerContext = NO_CONTEXT,
    ) -> Payload:
        """As on one rank alone; the payload is P and Q one after the other, or ``x`` itself.

        Without a shape the tensor is folded into the matrix nearest to a square.
        """
        check_input(x)
        if not all_finite(x):
            raise ValueError("powersgd: the tensor holds a NaN or an Inf; it was left as it was")
        key, shape = context.key, context.shape or folded(x.numel())
        starts = context.state if isinstance(context.state, WarmStarts) else self.new_state()
        factors = _Factors(x, Layer(0, "", shape), int(level), key, starts)
        first = factors.first()
        if not factors.second(first.clone()):
            return Payload(first.clone(), x.numel(), level, key, shape)
        p, q = factors.p, factors.q.clone()
        factors.third(q, starts)
        return Payload(torch.cat([p.reshape(-1), q.reshape(-1)]), x.numel(), level, key, shape)

    def decompress_add_(self, payload: Payload, out: Tensor, scale: float = 1.0) -> None:
        """Add ``P Q^T``."""
        check_output(out)
        shape = payload.shape or folded(payload.numel)
        if math.prod(shape) != out.numel():
            raise WireError(
                f"powersgd: a payload of shape {shape} cannot be added to {out.numel()} elements"
            )
        size = self.wire_bytes(out.numel(), payload.level, shape=shape) // 4
        check_values(self.name, payload.data, size, torch.float32)
        rank = rank_of(shape, int(payload.level))
        if rank == 0:
            out.add_(payload.data, alpha=scale)
            return
        rows, columns = as_matrix(shape)
        p, q = payload.data.split([rows * rank, columns * rank])
        out.view(rows, columns).addmm_(p.view(rows, rank), q.view(columns, rank).T, alpha=scale)

    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """The energy beyond each rank, from one decomposition: what warm-started iterations come to."""
        check_input(x)
        shape = context.shape or folded(x.numel())
        if x.numel() == 0:
            return np.zeros(len(levels))
        rows, columns = as_matrix(shape)
        matrix = x.double().view(rows, columns)
        gram = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
        energies = torch.linalg.eigvalsh(gram).clamp(min=0.0).cpu().numpy()  # rising
        tails = np.concatenate([[0.0], np.cumsum(energies)])  # tails[i]: the i smallest
        ranks = [rank_of(shape, int(level)) for level in levels]
        return np.array([tails[max(0, len(energies) - rank)] if rank else 0.0 for rank in ranks])

    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Exact: both factors, or the layer itself."""
        shape = shape or folded(numel)
        rank = rank_of(shape, int(level))
        return 4 * (rank * sum(as_matrix(shape)) if rank else numel)


class WarmStarts(CodecState):
    """The right factor of each layer's last step: float32, columns of the matrix x rank."""

    def __init__(self) -> None:
        self.q: dict[str, Tensor] = {}

    def start(self, layer: Layer, columns: int, rank: int, key: int) -> Tensor:
        """The right factor to begin with: the last one, with columns dropped, or random ones added.

        Times powers of two, so that its product with a finite matrix is finite, and hardly ever 0: the
        last factor is as large as the matrix was, and the square of that may be anywhere.
        """
        q = self.q.get(layer.name)
        have = 0 if q is None else min(rank, q.shape[1])
        start = torch.empty(columns, rank)
        if q is not None:
            start[:, :have] = q[:, :have]
        if have < rank:
            generator = torch.Generator().manual_seed(mix(key) & (2**63 - 1))
            start[:, have:] = torch.randn(columns, rank - have, generator=generator)
        return scaled_down(start).to(layer.device)

    def state_dict(self) -> dict[str, Any]:
        """The factors by layer."""
        return {name: q.clone() for name, q in self.q.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError where something is not a matrix of factors."""
        for name, q in state.items():
            matrix = isinstance(q, Tensor) and q.dim() == 2 and q.dtype == torch.float32
            if not matrix or not all_finite(q):
                raise ValueError(
                    f"powersgd: the warm start of {name!r} is not a matrix of finite float32: {q!r}"
                )
        self.q = {name: q.clone() for name, q in state.items()}

    def check_layers(self, shapes: Mapping[str, Shape]) -> None:
        """A row of each factor for each column of the layer, and no more factors than these."""
        for name, q in self.q.items():
            if name not in shapes:
                raise ValueError(f"powersgd: there is no layer {name!r}")
            rows, columns = as_matrix(shapes[name])
            if q.shape[0] != columns or not 1 <= q.shape[1] <= min(rows, columns):
                raise ValueError(
                    f"powersgd: the warm start of {name!r} has the shape {tuple(q.shape)}, the layer "
                    f"{rows} x {columns} elements"
                )


class _Factors:
    """One layer on its way through the rounds."""

    def __init__(self, x: Tensor, layer: Layer, level: int, key: int, state: WarmStarts) -> None:
        self._x = x
        self._layer = layer
        self._rank = rank_of(layer.shape, level)
        if self._rank:
            rows, columns = as_matrix(layer.shape)
            self._matrix = x.view(rows, columns)
            self._start = state.start(layer, columns, self._rank, key)

    def first(self) -> Tensor:
        """``P = M Q``, or the layer itself."""
        if not self._rank:
            return self._x.clone()
        if not all_finite(self._x):
            return torch.full_like(self._x[: self._matrix.shape[0] * self._rank], torch.nan)
        return _times(self._start, self._matrix.T).view(-1)

    def second(self, reduced: Tensor) -> bool:
        """Whether a second round follows; ``p`` and ``q`` are then its factors, else all is done."""
        if not self._rank:
            self._dense = reduced
            self._x.zero_()
            return False
        p = reduced.view(-1, self._rank)
        self.p = orthonormal(p) if all_finite(p) else torch.full_like(p, torch.nan)
        self.q = _times(self.p, self._matrix)
        rest = self._x.view_as(self._matrix)
        if float(self.q.abs().max()) < FAR_FROM_LARGEST:  # not for NaN
            rest.addmm_(self.p, self.q.T, alpha=-1.0)
            return True
        # a column's norm, and with it an element of the product, is up to sqrt(rows) times its elements
        limit = LARGEST / (4 * math.sqrt(len(self._matrix)))
        self.q = _times(self.p, self._matrix.clamp(-limit, limit))
        rest.addmm_(self.p, self.q.T, alpha=-1.0).clamp_(-LARGEST, LARGEST)
        return True

    def third(self, reduced: Tensor, state: WarmStarts) -> None:
        """The reduced right factor, which starts the next step unless something was not finite."""
        self.q = reduced.view(-1, self._rank)
        if all_finite(self.q):
            state.q[self._layer.name] = _longer(self.q, state.q.get(self._layer.name))

    def write(self, out: Tensor) -> None:
        """The reduced layer."""
        if self._rank:
            torch.mm(self.p, self.q.T, out=out.view_as(self._matrix))
        else:
            out.copy_(self._dense)


def scaled_down(q: Tensor) -> Tensor:
    """Each column of ``q`` times the power of two that brings its magnitudes to a sum below 1/2.

    Exact: making the product of a matrix and ``q`` orthonormal gives the same with it as without.

    Args:
        q: float32, two-dimensional; columns of zeros stay as they are.

    Example:
        >>> scaled_down(torch.tensor([[3.0, 2e38], [-1.0, 0.0]])).tolist()[1]
        [-0.0625, 0.0]
    """
    wide = q.double()
    return torch.ldexp(wide, -1 - torch.frexp(wide.abs().sum(0)).exponent).float()


def _times(thin: Tensor, matrix: Tensor) -> Tensor:
    """``matrix^T thin``. BLAS takes several times as long for a thin right factor as for a left one."""
    return (thin.T.contiguous() @ matrix).T.contiguous()


def _longer(q: Tensor, before: Tensor | None) -> Tensor:
    """The new factor, with the columns beyond it that were known: a rank may rise again."""
    q = q.detach().to("cpu", copy=True)
    if before is None or before.shape[1] <= q.shape[1]:
        return q
    return torch.cat([q, before[:, q.shape[1] :]], dim=1)


def orthonormal(p: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``p`` (and more, where these are dependent or zero).

    Householder reflections in float64: stable whatever the columns are.

    Args:
        p: float32, rows x rank, rows >= rank.

    Example:
        >>> orthonormal(torch.zeros(3, 2)).abs().tolist()
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    q: Tensor = torch.linalg.qr(p.double()).Q
    return q.to(p.dtype)


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a layer: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def max_rank(shape: Shape) -> int:
    """The largest rank whose factors are smaller than the layer; 0 where there is none."""
    rows, columns = as_matrix(shape)
    return max(0, min(rows, columns, (rows * columns - 1) // max(1, rows + columns)))


def rank_of(shape: Shape, level: int) -> int:
    """The rank at which a layer is sent: 0 if it is sent dense."""
    rows, columns = as_matrix(shape)
    if len(shape) < 2:
        return 0
    rank = min(level, rows, columns)
    return rank if 0 < rank <= max_rank(shape) else 0


def folded(numel: int) -> Shape:
    """The shape nearest to a square matrix of ``numel`` elements."""
    rows = next((rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0), 1)
    return rows, numel // rows if numel else 0
