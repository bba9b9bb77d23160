"""The contract of a compressor: one layer's tensor made small at a given level.

A compressor never communicates and keeps no state of the training: what it leaves out stays in the
tensor it was given, and the feedback rule decides what becomes of that. What a compressor learns from
the gradients lives in a :class:`CodecState`, which whoever drives it keeps and hands in.

Two kinds meet the network in two ways: payloads of a :class:`.LinearCompressor` are summed by an
allreduce, in one round or several; those of a :class:`GatheredCompressor` are bytes that every rank
sends to every rank.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.compressors.checks import check_input
from hvd_adaptive.kernels.floats import CANCELLED
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.wire import WireError

Level: TypeAlias = float
"""How hard to compress: density for sparsifiers, bits for casts and quantizers, rank for low rank."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Payload:
    """What one layer sends, and what both sides know of it beforehand.

    Args:
        data: 1-D; ``uint8`` codes, or the summands themselves where the payload is linear.
        numel: number of elements of the layer.
        level: at which it was compressed.
        key: of the random numbers that went into it.
        shape: of the layer, where that matters.
    """

    data: Tensor
    numel: int
    level: Level = 0.0
    key: int = 0
    shape: Shape | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class LayerStats:
    """What one compression of a bucket's layers tells, one entry per layer.

    Args:
        energy: squared L2 norm of each layer before compression.
        sent: squared L2 norm of what each payload decodes to.
        nonfinite: True where the layer held a NaN or an Inf and was not compressed.
    """

    energy: Float64s
    sent: Float64s
    nonfinite: npt.NDArray[np.bool_]


class CodecState(ABC):
    """What a compressor has learned from one optimizer's gradients: the same on all ranks."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything, for :meth:`load_state_dict`: tensors, numbers, text."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; ValueError if it does not fit."""

    def check_layers(self, shapes: Mapping[str, Shape]) -> None:
        """ValueError unless what is known of single layers fits these, by name."""
        del shapes


class Learner(CodecState):
    """A state that follows the gradients' distribution.

    At the steps that are :meth:`due`, every rank collects statistics while it compresses; the first
    rank makes of all of them what is learned, and every rank adopts that.
    """

    collecting: bool = False
    """Set for the steps in which compression collects statistics."""
    drop: float = 0.1
    """Share by which the learning rate must fall within one step, so that the next is learned from."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether this step's gradients are to be learned from.

        The step after the learning rate fell by :attr:`drop` or more is one, too.
        """

    @abstractmethod
    def statistics(self) -> Any:
        """What this rank has collected since :attr:`collecting` was set; JSON. Forgets it."""

    @abstractmethod
    def fit(self, everyone: Sequence[Any]) -> Any:
        """What the statistics of all ranks, in rank order, teach; JSON."""

    @abstractmethod
    def adopt(self, learned: Any) -> None:
        """Use what rank 0's :meth:`fit` returned."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """Sums of several bodies, compressed again.

    Args:
        body: uint8, 1-D.
        nonfinite: True where a layer was marked in a body, or its sum was not finite: it is marked in
            ``body``, and what was kept of it is as it was.
        undo: takes the positions of other layers; what was kept of them goes back to what it was.
    """

    body: Tensor
    nonfinite: npt.NDArray[np.bool_]
    undo: Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What a compressor may want to know of one layer besides its values and the level.

    Args:
        key: of the random numbers (see :mod:`hvd_adaptive.rng`), where there are any.
        shape: the layer's shape, where that matters; None takes the tensor as it is.
        state: of :meth:`Compressor.new_state`; None compresses as at the first step.
        dither: of :func:`hvd_adaptive.rng.dithers`, where ``key`` is that of all ranks.
        rotation: key of the rotation, where there is one.
    """

    key: int = 0
    shape: Shape | None = None
    state: CodecState | None = None
    dither: int = 0
    rotation: int = 0


NO_CONTEXT = LayerContext()
"""Key 0, no shape, and nothing learned so far."""


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """The layers of one gathered compressor in one bucket, side by side in one buffer.

    Args:
        x: float32, 1-D; layer ``i`` is ``x[offsets[i]:offsets[i + 1]]``; left with the remainder.
        offsets: ``int64[L + 1]``, rising.
        levels: one per layer.
        grads: float32, contiguous, one per layer: added to ``x`` first, in the same pass. All of them
            float16 or bfloat16 where :attr:`hvd_adaptive.kernels.base.Kernels.reads_halves` says so.
        keys: ``uint64[L]``, of the layers' random numbers; None draws with key 0.
        reserve: bytes to leave free at the front of the result, for a header.
        state: of :meth:`Compressor.new_state`; None compresses as at the first step.
        dithers: ``uint64[L]``, of :func:`hvd_adaptive.rng.dithers`, where ``keys`` are those of all
            ranks; None takes the random numbers as they are.
        rotation: key of the rotation, where there is one; bodies of one key are rotated back together.
    """

    x: Tensor
    offsets: Int64s
    levels: Sequence[Level]
    grads: Sequence[Tensor] | None = None
    keys: npt.NDArray[np.uint64] | None = None
    reserve: int = 0
    state: CodecState | None = None
    dithers: npt.NDArray[np.uint64] | None = None
    rotation: int = 0
    learns: bool = True
    """Whether a :class:`Learner` that collects statistics looks at these layers, too."""

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.levels)

    def layers_of(self, edges: Int64s) -> Int64s:
        """The layer of each piece between ``edges``, of which none goes across a layer's end."""
        found: Int64s = np.searchsorted(self.offsets, edges[:-1], "right") - 1
        return found

    def cut(self, edges: Int64s) -> LayerBatch:
        """Pieces of the layers as layers of their own, with their own random numbers.

        Args:
            edges: ``int64[P + 1]``, in the places of the offsets.
        """
        owners = self.layers_of(edges)
        begins = edges[:-1] - np.asarray(self.offsets)[owners]
        rows = list(zip(owners.tolist(), begins.tolist(), np.diff(edges).tolist(), strict=True))
        grads, keys, dithers = self.grads, self.keys, self.dithers
        if grads is not None:
            grads = [grads[layer].view(-1)[start : start + size] for layer, start, size in rows]
        if keys is not None:
            # a layer that is whole draws as if nothing were cut
            keys = np.array(
                [
                    int(keys[layer]) if not start else rng.mix(int(keys[layer]) ^ start)
                    for layer, start, _ in rows
                ],
                np.uint64,
            )
        if dithers is not None:
            dithers = dithers[owners]
        levels = [self.levels[layer] for layer in owners.tolist()]
        return replace(
            self,
            offsets=edges,
            levels=levels,
            grads=grads,
            keys=keys,
            dithers=dithers,
            reserve=0,
        )


_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(f"({_NUMBER})-({_NUMBER})")


@dataclass(frozen=True)
class Compressor(ABC):
    """Makes a 1-D float32 tensor small at a level, and leaves in the tensor what was not sent.

    Members are frozen dataclasses whose fields are their options: equal options mean equal
    compressors, and :func:`hvd_adaptive.compressors.parse` builds them from text.

    Args:
        level_range: least and largest level that a planner may choose, as ``"8-128"``; in text it is
            the option ``levels``. Empty: a range around :attr:`level`.

    Raises:
        ValueError: not a range, or :attr:`level` lies outside.
    """

    level_range: str = field(default="", kw_only=True, repr=False, metadata={"option": "levels"})

    name: ClassVar[str]
    payload_kind: ClassVar[PayloadKind]
    selects: ClassVar[bool] = False
    """True if a payload holds some of the elements and leaves the others as they are."""
    projects: ClassVar[bool] = False
    """True if a payload holds some of the dimensions, and error feedback the others."""
    whole_model: ClassVar[bool] = False
    """True if all layers are compressed together, whatever a bucket's size."""

    @property
    @abstractmethod
    def biased(self) -> bool:
        """True if the payload's expectation is not the tensor: such a compressor needs feedback."""

    @property
    @abstractmethod
    def level(self) -> Level:
        """The level that the options name: what is used when nobody plans."""

    def __post_init__(self) -> None:
        """Check ``level_range``; members that check options of their own call this last."""
        bounds = self.level_bounds
        if bounds is not None and not bounds[0] <= self.level <= bounds[1]:
            raise ValueError(
                f"{self.name}: levels={self.level_range} leaves out {self.level:g}, which is the level "
                "of the other options: write a range that holds it, or another level"
            )

    @property
    def level_bounds(self) -> tuple[Level, Level] | None:
        """The least and the largest of ``level_range``; None where it is empty."""
        if not self.level_range:
            return None
        found = _RANGE.fullmatch(self.level_range)
        low, high = (float(number) for number in found.groups()) if found else (0.0, -1.0)
        if low > high:
            raise ValueError(
                f"{self.name}: levels={self.level_range!r} is not a range: write levels=LEAST-LARGEST, "
                "such as levels=8-128"
            )
        return low, high

    @abstractmethod
    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """Candidate levels for a planner, from the most faithful to the most compressed.

        Those of :attr:`level_bounds`, where there are any.
        """

    def level_of_factor(self, factor: float) -> Level | None:
        """The level whose :meth:`nominal_factor` this is in every layer; None if that is not known."""
        del factor
        return None

    def level_at(self, step: int) -> Level:
        """The level in a step, counted from the end of the dense warm-up; usually :attr:`level`."""
        del step
        return self.level

    def new_state(self) -> CodecState | None:
        """What this compressor learns during training, still empty; None if it learns nothing."""
        return None

    @property
    def state_key(self) -> Compressor:
        """Compressors with equal keys share what they learn: itself, but for options of the level."""
        return self

    @abstractmethod
    def compress_(
        self,
        x: Tensor,
        level: Level,
        context: LayerContext = NO_CONTEXT,
    ) -> Payload:
        """Compress ``x`` and leave in it what the payload does not hold.

        Afterwards ``decompress(payload) + x`` is what ``x`` was: exactly, or up to one float32
        rounding where values are rounded.

        Args:
            x: float32, 1-D, contiguous; overwritten by the remainder.
            level: one of :meth:`levels`, or any value of the same kind.
            context: what else is known of the layer.

        Raises:
            ValueError: ``x`` is not a 1-D contiguous float32 tensor, or holds a NaN or an Inf.
        """

    @abstractmethod
    def decompress_add_(self, payload: Payload, out: Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times the decoded payload to ``out`` (float32, 1-D, contiguous).

        Raises:
            WireError: the payload is damaged or belongs to a tensor of another size.
        """

    @abstractmethod
    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """Squared L2 error of compressing ``x`` at each of ``levels``, without changing ``x``.

        In expectation where rounding is random.
        """

    def sent_energies(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """Squared L2 norm of what the payload of ``x`` decodes to at each of ``levels``.

        In expectation where rounding is random. What a biased compressor sends is at right angles to
        what it leaves, so that its energy is the tensor's less the error; random rounding around the
        tensor adds its error instead. Cost: that of :meth:`errors`, and a dot product.
        """
        errors = self.errors(x, levels, context)
        energy = float(x @ x)
        return np.maximum(energy - errors, 0.0) if self.biased else energy + errors

    @abstractmethod
    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Bytes that a layer of ``numel`` elements sends at ``level`` (at most; close to it, unless
        ``size_varies``)."""

    def nominal_factor(self, level: Level, layer: Layer) -> float:
        """The compression factor as the papers count it: 8 for 4 bits.

        For sparsifiers it is 100 at a density of 1 %, which counts elements and not the bytes of their
        positions.
        """
        return layer.nbytes / max(1, self.wire_bytes(layer.numel, level, shape=layer.shape))

    @property
    def size_varies(self) -> bool:
        """True if the data decide how many bytes a level sends: then :meth:`sizes` tells them."""
        return False

    def sizes(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Int64s:
        """Bytes that ``x`` (float32, 1-D) sends at each of ``levels`` (at most; close to it).

        Args:
            x: what is compressed, with the remainder of earlier steps.
            levels: as of :meth:`errors`.
            context: what else is known of the layer.

        Returns:
            ``int64[levels]``; :meth:`wire_bytes` unless ``size_varies``.
        """
        return np.array([self.wire_bytes(x.numel(), level, shape=context.shape) for level in levels])


class MultiLevel(ABC):
    """A compressor whose payloads can be compressed further without the tensor that they came from."""

    @abstractmethod
    def recompress_(self, payload: Payload, x: Tensor, level: Level) -> Payload:
        """Compress a payload again, to ``level`` of the whole layer.

        Cost: that of the elements in ``payload``, whatever the layer's size. Source: multi-level
        compression of Tyagi and Swany, "GraVAC" (2023), section III.

        Args:
            payload: what :meth:`Compressor.compress_` made of ``x``.
            x: the remainder that it left; what is dropped now is added to it.
            level: stronger than the payload's.
        """


@runtime_checkable
class ClearsSent(Protocol):
    """A compressor that can tell where its payloads hold something (see :attr:`Compressor.selects`)."""

    def clear_layers_(self, body: Tensor, outs: Sequence[Tensor]) -> None:
        """Set ``outs`` to 0 wherever ``body`` holds an element."""


class GatheredCompressor(Compressor):
    """A payload of bytes that cannot be summed: every rank's payload goes to every rank.

    Members code all layers of a bucket in one call (:meth:`compress_layers_`), because a call per
    layer costs more than the work for small layers. A payload tells its own level, because ranks may
    choose their levels by themselves.
    """

    payload_kind = PayloadKind.ENCODED
    draws: ClassVar[bool] = True
    """Whether random numbers are needed: without them, no keys are."""
    correlated: bool = False
    """Whether all ranks draw the same numbers, of which each makes its own by its dithers."""

    @abstractmethod
    def compress_layers_(self, batch: LayerBatch) -> tuple[Tensor, LayerStats]:
        """Compress layers that stand side by side in one buffer.

        A layer that holds a NaN or an Inf (in ``x`` or in its gradient) keeps its ``x`` and sends a
        mark instead. Where the gradient was added and taken away again, ``x`` is what it was but for
        rounding: within ``2^-21 (|x| + |grad|)``.

        Returns:
            The bytes (uint8, ``reserve`` + body) and what was seen on the way.
        """

    def compress_shards_(
        self, batch: LayerBatch, shards: Sequence[Int64s]
    ) -> tuple[list[Tensor], LayerStats]:
        """As :meth:`compress_layers_`, for several receivers of which each gets a part of the elements.

        Args:
            batch: the layers; nothing is reserved in front.
            shards: of each receiver, ``int64[P + 1]``: the edges of its pieces in ``x``, rising, none
                across a layer's end; they go on where the receiver before ends. Without pieces, an
                array of one edge or none.

        Returns:
            A body for each receiver, whose layers are its pieces, and what was seen, by layer. A piece
            of a layer that is not finite may hold values; another one then holds the mark.
        """
        parts = [batch.cut(edges) for edges in shards if len(edges) > 1]
        bodies, seen = zip(*[self.compress_layers_(part) for part in parts], strict=True)
        owners = np.concatenate([batch.layers_of(part.offsets) for part in parts])
        totals = LayerStats(*(np.zeros(len(batch.levels), kind) for kind in (float, float, bool)))
        np.add.at(totals.energy, owners, np.concatenate([stats.energy for stats in seen]))
        np.add.at(totals.sent, owners, np.concatenate([stats.sent for stats in seen]))
        nonfinite = np.concatenate([stats.nonfinite for stats in seen])
        totals.nonfinite[owners[nonfinite]] = True
        if nonfinite.any():
            undo = np.split(totals.nonfinite[owners] & ~nonfinite, np.cumsum([*map(len, parts)])[:-1])
            for part, body, pieces in zip(parts, bodies, undo, strict=True):
                self._take_back(part, body, np.flatnonzero(pieces).tolist())
        found, nothing = iter(bodies), torch.zeros(0, dtype=torch.uint8, device=batch.x.device)
        return [next(found) if len(edges) > 1 else nothing for edges in shards], totals

    def _take_back(self, part: LayerBatch, body: Tensor, pieces: Sequence[int]) -> None:
        """Undo the compression of some pieces, whose layer is not finite in another piece."""
        if not pieces:
            return
        edges = part.offsets.tolist()
        own = [torch.zeros(end - start) for start, end in itertools.pairwise(edges)]
        own = [each.to(part.x.device) for each in own]
        self.decompress_layers_add_(body, own, 1.0)
        for piece in pieces:
            back = part.x[edges[piece] : edges[piece + 1]].add_(own[piece])
            if part.grads is not None:
                grad = part.grads[piece].float()
                back.sub_(grad)
                back[back.abs() <= CANCELLED * grad.abs()] = 0.0

    @abstractmethod
    def decompress_layers_add_(
        self, body: Tensor, outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Add ``scale`` times each decoded layer to its ``out``; marked layers become NaN.

        A body holds all that decoding needs: no key, no state.

        Returns:
            The marks, ``bool[L]``.

        Raises:
            WireError: the body is damaged or belongs to other layers.
        """

    def decompress_layers_sum_(
        self, bodies: Sequence[Tensor], outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Set each ``out`` to ``scale`` times the sum of what all ``bodies`` hold of its layer.

        As :meth:`decompress_layers_add_` of one after the other to zeros: bit for bit, unless layers
        were rotated, whose sum is rotated back and so rounded once. When a WireError is raised, what
        the outputs hold means nothing.
        """
        if outs:
            torch._foreach_zero_(list(outs))
        marks = np.zeros(len(outs), np.bool_)
        for body in bodies:
            marks |= self.decompress_layers_add_(body, outs, scale)
        return marks

    def reduce_layers_(self, bodies: Sequence[Tensor], batch: LayerBatch, keeps: bool) -> Reduced:
        """Sum what all ``bodies`` hold, and compress the sum: what the owner of a shard does.

        As :meth:`decompress_layers_sum_` with a scale of 1 and :meth:`compress_layers_` of the sums,
        bit for bit.

        Args:
            bodies: one per rank.
            batch: the layers; its ``x`` is added to the sums, and left with the remainder. It has no
                gradients.
            keeps: whether there is an ``x``; otherwise it is only room, and what it holds before and
                after means nothing.

        Raises:
            WireError: a body is damaged or belongs to other layers; ``x`` is as it was.
        """
        edges = list(itertools.pairwise(np.asarray(batch.offsets).tolist()))
        sums = torch.empty_like(batch.x) if keeps else batch.x
        totals = [sums[start:end] for start, end in edges]
        self.decompress_layers_sum_(bodies, totals, 1.0)
        body, stats = self.compress_layers_(replace(batch, grads=totals if keeps else None))
        return Reduced(body, stats.nonfinite, self._undoing(body, batch, lambda: totals))

    @final
    def _undoing(
        self, body: Tensor, batch: LayerBatch, totals: Callable[[], Sequence[Tensor]]
    ) -> Callable[[Sequence[int]], None]:
        """What gives layers of a batch back what they kept, before ``totals`` were added."""

        def undo(layers: Sequence[int]) -> None:
            edges, sums = np.asarray(batch.offsets).tolist(), totals()
            own = [torch.zeros_like(total) for total in sums]
            marks = self.decompress_layers_add_(body[batch.reserve :], own, 1.0)
            for layer in layers:
                if marks[layer]:
                    own[layer].zero_()  # a mark that stands for several layers: nothing was sent
                back = batch.x[edges[layer] : edges[layer + 1]].add_(own[layer]).sub_(sums[layer])
                back[back.abs() <= CANCELLED * sums[layer].abs()] = 0.0

        return undo

    @final
    def compress_(
        self,
        x: Tensor,
        level: Level,
        context: LayerContext = NO_CONTEXT,
    ) -> Payload:
        """One layer: see :meth:`compress_layers_`."""
        check_input(x)
        offsets = np.array([0, x.numel()], dtype=np.int64)
        keys, dithers = (np.array([word], np.uint64) for word in (context.key, context.dither))
        batch = LayerBatch(
            x,
            offsets,
            [level],
            keys=keys,
            state=context.state,
            dithers=dithers,
            rotation=context.rotation,
        )
        data, stats = self.compress_layers_(batch)
        if stats.nonfinite[0]:
            raise ValueError(f"{self.name}: the tensor holds a NaN or an Inf; it was left as it was")
        return Payload(data, x.numel(), level, context.key, context.shape)

    @final
    def decompress_add_(self, payload: Payload, out: Tensor, scale: float = 1.0) -> None:
        """One layer: see :meth:`decompress_layers_add_`."""
        if payload.numel != out.numel():
            raise WireError(
                f"{self.name}: a payload of {payload.numel} elements cannot be added to a tensor "
                f"of {out.numel()}"
            )
        self.decompress_layers_add_(payload.data, [out], scale)

    @classmethod
    def compress(cls, tensor: Tensor) -> Any:
        """Horovod's own contract cannot hold: its optimizer would sum the codes."""
        del tensor
        raise TypeError(
            f"{cls.name} payloads cannot be summed by an allreduce, which is what "
            "hvd.DistributedOptimizer does with them: use hvd_adaptive.DistributedOptimizer"
        )


def densities(density: float, bounds: tuple[Level, Level] | None) -> tuple[Level, ...]:
    """Candidate densities, from the largest to the smallest.

    Args:
        density: that of the options; always one of them.
        bounds: 100 in equal ratios from one to the other, both included. Without them 100 in equal
            steps from ten times ``density`` to a tenth of it (L-GreCo's search range).

    Example:
        >>> densities(0.05, None)[0], densities(0.05, None)[-1], len(densities(0.05, (0.01, 0.1)))
        (0.5, 0.005, 101)
    """
    if bounds is None:
        steps = (density * step / 10 for step in range(100, 0, -1))
        return tuple(dict.fromkeys(min(1.0, each) for each in steps))
    grid = np.geomspace(*bounds, 100).tolist()
    return tuple(sorted({*grid[1:-1], *bounds, density}, reverse=True))


def check_density_bounds(name: str, bounds: tuple[Level, Level] | None) -> None:
    """ValueError unless they are densities."""
    if bounds is not None and not 0.0 < bounds[0] <= bounds[1] <= 1.0:
        raise ValueError(
            f"{name}: levels are densities in (0, 1]: write levels=0.001-0.1, got "
            f"{bounds[0]:g}-{bounds[1]:g}"
        )


def whole_bounds(compressor: Compressor, least: int, largest: int, what: str) -> tuple[int, int] | None:
    """The bounds of levels that are whole numbers; None where there are none.

    Raises:
        ValueError: they are no whole numbers from ``least`` to ``largest``.
    """
    bounds = compressor.level_bounds
    if bounds is None:
        return None
    low, high = bounds
    if not (low.is_integer() and high.is_integer() and least <= low <= high <= largest):
        raise ValueError(
            f"{compressor.name}: levels={compressor.level_range} are {what}: write whole numbers from "
            f"{least} to {largest}"
        )
    return int(low), int(high)
