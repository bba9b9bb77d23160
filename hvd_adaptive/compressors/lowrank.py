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
    Payload,
    Shape,
    whole_bounds,
)
from hvd_adaptive.compressors.checks import all_finite, check_input, check_output, check_values
from hvd_adaptive.compressors.linear import LinearBatch, LinearCompressor, Rounds
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.rng import mix
from hvd_adaptive.wire import WireError

MAX_RANK = 64
"""Of the range that a planner has by itself."""
LARGEST_RANK = 1 << 12
LARGEST = float(torch.finfo(torch.float32).max)
SPARE = 8
"""Columns by which a subspace is larger than the largest rank that it is for."""
POWERS = 3
"""Power iterations by which it is found."""
SMALL = 16
"""As many times as a subspace's columns are few for a matrix: its whole spectrum takes little then."""
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
    projects = True
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
        groups = _groups_of(batch, state)
        thin = sorted(position for group in groups for position in group.positions)
        dense = [position for position in range(len(batch.x)) if position not in {*thin}]
        sends = {position: batch.x[position].clone() for position in dense}
        for group in groups:
            sends.update(zip(group.positions, group.first(), strict=True))
        reduced = yield [sends[position] for position in range(len(batch.x))]
        for position in dense:
            batch.x[position].zero_()
        sends = {}
        for group in groups:
            factors = group.second([reduced[position] for position in group.positions])
            sends.update(zip(group.positions, factors, strict=True))
        if thin:
            found = yield [sends[position] for position in thin]
            by_position = dict(zip(thin, found, strict=True))
            for group in groups:
                group.third([by_position[position] for position in group.positions], state)
                group.write([batch.outs[position] for position in group.positions])
        for position in dense:
            batch.outs[position].copy_(reduced[position])

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
        layer, rank = Layer(0, "", shape), rank_of(shape, int(level))
        if not rank:
            dense = x.clone()
            x.zero_()
            return Payload(dense, x.numel(), level, key, shape)
        group = _Group([x], [layer], [key], rank, starts, [0])
        (q,) = (each.clone() for each in group.second(group.first()))
        group.third([q], starts)
        (p,) = group.p
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
        """The energy beyond each rank: what warm-started iterations come to.

        Of small matrices from one decomposition, exact but for rounding; of others, whose decomposition
        would take many times as long as compressing them, from a subspace that holds nearly all of the
        largest ranks' energy: up to 1 % too much where singular values hardly fall, as those of noise.
        """
        check_input(x)
        shape = context.shape or folded(x.numel())
        if x.numel() == 0:
            return np.zeros(len(levels))
        ranks = [rank_of(shape, int(level)) for level in levels]
        tails = _tails(x.view(as_matrix(shape)), max(ranks, default=0))
        return np.array([tails[rank] if rank else 0.0 for rank in ranks])

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
        return scaled_down(start)

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


def _groups_of(batch: LinearBatch, state: WarmStarts) -> list[_Group]:
    """The layers that are not sent dense, those of equal shape and rank together."""
    alike: dict[tuple[int, int, int, torch.device], list[int]] = {}
    for position, (x, layer, level) in enumerate(zip(batch.x, batch.layers, batch.levels, strict=True)):
        rank = rank_of(layer.shape, int(level))
        if rank:
            alike.setdefault((*as_matrix(layer.shape), rank, x.device), []).append(position)
    return [
        _Group(
            [batch.x[position] for position in positions],
            [batch.layers[position] for position in positions],
            [int(batch.keys[position]) for position in positions],
            rank,
            state,
            positions,
        )
        for (_, _, rank, _), positions in alike.items()
    ]


_LARGEST_JOINED = 1 << 18
"""Elements of a matrix beyond which a launch of its own costs less than copying it next to others."""


def _joins(matrices: Sequence[Tensor]) -> bool:
    """Whether products with these are made in one launch, of copies side by side."""
    small = matrices[0].numel() <= _LARGEST_JOINED
    return len(matrices) > 1 and small and not matrices[0].is_cpu


class _Group:
    """Layers of one shape and rank on their way through the rounds.

    QR decompositions are batched. On GPUs so are the products of small matrices, while others read the
    layers where they are, and the host waits once for what it has to know of all layers.

    Args:
        xs: the layers, 1-D; the remainders are left in them.
        layers: what is known of them.
        keys: of their random numbers.
        rank: of all of them.
        state: where they start.
        positions: of the layers in the batch.
    """

    def __init__(
        self,
        xs: Sequence[Tensor],
        layers: Sequence[Layer],
        keys: Sequence[int],
        rank: int,
        state: WarmStarts,
        positions: Sequence[int],
    ) -> None:
        self.positions = positions
        self._layers, self._rank = layers, rank
        rows, columns = as_matrix(layers[0].shape)
        self._matrices = [x.view(rows, columns) for x in xs]
        starts = [
            state.start(layer, columns, rank, key) for layer, key in zip(layers, keys, strict=True)
        ]
        self._starts = torch.stack(starts).to(xs[0].device)
        self._joined = torch.stack(self._matrices) if _joins(self._matrices) else None
        each = range(len(layers))
        self._turns = [[i] for i in each] if xs[0].is_cpu else [[*each]]
        """What is done with together: on CPUs with one layer alone, which so stays in the cache."""

    def first(self) -> list[Tensor]:
        """``P = M Q`` of each layer."""
        if self._joined is not None:
            products = [*torch.bmm(self._joined, self._starts)]
        else:
            products = []
        for turn in self._turns:
            finite = _all_finite_of([self._matrices[i] for i in turn])
            if self._joined is None:
                products += [_times(self._starts[i], self._matrices[i].T) for i in turn]
            for i, fine in zip(turn, finite, strict=True):
                if not fine:
                    products[i].fill_(torch.nan)
        return [p.reshape(-1) for p in products]

    def second(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Right factors ``Q`` for the left ones that were reduced; leaves the remainders."""
        found = torch.stack([each.view(-1, self._rank) for each in reduced])
        wrong = [not finite for finite in _all_finite_of(found)]
        if any(wrong):
            found[wrong] = 0.0
        self.p = orthonormal(found)
        if any(wrong):
            self.p[wrong] = torch.nan
        if self._joined is not None:
            return self._subtract_joined(self._joined)
        return [q for turn in self._turns for q in self._subtract(turn)]

    def _subtract(self, turn: Sequence[int]) -> list[Tensor]:
        """The right factors of some layers, whose products with the left ones are subtracted."""
        factors = [_times(self.p[i], self._matrices[i]) for i in turn]
        return [
            _subtract_product_(self._matrices[i], self.p[i], q, top)
            for i, q, top in zip(turn, factors, _largest_of(factors), strict=True)
        ]

    def _subtract_joined(self, joined: Tensor) -> list[Tensor]:
        """As :meth:`_subtract` of all layers, in copies of them."""
        factors = torch.bmm(joined.mT, self.p)
        tops = _largest_of(factors)
        if all(top < FAR_FROM_LARGEST for top in tops):  # not for NaN
            torch._foreach_copy_(self._matrices, [*joined.baddbmm_(self.p, factors.mT, alpha=-1.0)])
            return [*factors]
        return [
            _subtract_product_(*each)
            for each in zip(self._matrices, self.p, factors, tops, strict=True)
        ]

    def third(self, reduced: Sequence[Tensor], state: WarmStarts) -> None:
        """The reduced right factors, which start the next step unless something was not finite."""
        self._q = [each.view(-1, self._rank) for each in reduced]
        host = torch.stack([q.detach() for q in self._q]).cpu()  # a copy, on any device
        for layer, q, finite in zip(self._layers, host, _all_finite_of(host), strict=True):
            if finite:
                state.q[layer.name] = _longer(q.clone(), state.q.get(layer.name))

    def write(self, outs: Sequence[Tensor]) -> None:
        """The reduced layers."""
        views = [out.view_as(matrix) for out, matrix in zip(outs, self._matrices, strict=True)]
        if self._joined is not None:
            torch._foreach_copy_(views, [*torch.bmm(self.p, torch.stack(self._q).mT)])
            return
        for view, p, q in zip(views, self.p, self._q, strict=True):
            torch.mm(p, q.T, out=view)


def _subtract_product_(matrix: Tensor, p: Tensor, q: Tensor, top: float) -> Tensor:
    """Subtract ``p q^T`` from a matrix; returns ``q``, another one where its largest is too large."""
    if top < FAR_FROM_LARGEST:  # not for NaN
        matrix.addmm_(p, q.T, alpha=-1.0)
        return q
    # a column's norm, and with it an element of the product, is up to sqrt(rows) times its elements
    limit = LARGEST / (4 * math.sqrt(len(matrix)))
    q = _times(p, matrix.clamp(-limit, limit))
    matrix.addmm_(p, q.T, alpha=-1.0).clamp_(-LARGEST, LARGEST)
    return q


def _largest_of(tensors: Sequence[Tensor] | Tensor) -> list[float]:
    """The largest magnitude of each; the host waits once."""
    found: list[float] = torch.stack([each.abs().max() for each in tensors]).tolist()
    return found


def _all_finite_of(tensors: Sequence[Tensor] | Tensor) -> list[bool]:
    """:func:`all_finite` of each; the host waits once where all are."""
    sums = torch.stack([each.sum() for each in tensors]).tolist()
    return [
        math.isfinite(total) or bool(each.isfinite().all())
        for total, each in zip(sums, tensors, strict=True)
    ]


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
    if before is None or before.shape[1] <= q.shape[1]:
        return q
    return torch.cat([q, before[:, q.shape[1] :]], dim=1)


def orthonormal(p: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``p`` (and more, where these are dependent or zero).

    Householder reflections in float64: stable whatever the columns are.

    Args:
        p: float32, rows x rank, rows >= rank; or a batch of such matrices.

    Example:
        >>> orthonormal(torch.zeros(3, 2)).abs().tolist()
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    q: Tensor = torch.linalg.qr(p.double()).Q
    return q.to(p.dtype)


def _tails(matrix: Tensor, most: int) -> Float64s:
    """``float64[most + 1]``: the energy that each number of largest singular values leaves."""
    columns = most + SPARE
    largest = float(matrix.abs().max())
    if SMALL * columns >= min(matrix.shape) or not 0 < largest < math.inf:
        exact = matrix.double()
        return _rest(exact if exact.shape[0] >= exact.shape[1] else exact.T)[: most + 1]
    # a power of two, so that scaling rounds nothing, and not above the largest float32
    scale = 2.0 ** (math.frexp(largest)[1] - 1)
    scaled = matrix / scale
    start = torch.randn(matrix.shape[1], columns, generator=torch.Generator().manual_seed(0))
    basis = start.to(matrix.device)
    for _ in range(POWERS):
        left, _ = torch.linalg.qr(scaled @ basis)
        basis, _ = torch.linalg.qr(scaled.T @ left)
    seen = scaled @ basis
    outside = torch.linalg.vector_norm(torch.addmm(scaled, seen, basis.T, alpha=-1.0))
    return (float(outside) ** 2 + _rest(seen.double())[: most + 1]) * scale**2


def _rest(tall: Tensor) -> Float64s:
    """``float64[columns + 1]``: the same of all numbers, from a whole decomposition."""
    rising = torch.linalg.eigvalsh(tall.T @ tall).clamp(min=0.0).cpu().numpy()
    found: Float64s = np.concatenate([[0.0], np.cumsum(rising)])[::-1]
    return found


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
