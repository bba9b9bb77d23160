"""What compressors share that send every element in a few bits: a level, times the norm of its block.

They are in :mod:`.quantizers` and :mod:`.learned`, and differ in what a block is divided by, in where
the levels are, and in whether rounding is random
(:class:`hvd_adaptive.wire.quantized.QuantizationRule`); everything else is the same for all of them.
Levels of compression are bits per value. What is sent is described in
:mod:`hvd_adaptive.wire.quantized`.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.compressors import rotation
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    CodecState,
    GatheredCompressor,
    LayerBatch,
    LayerContext,
    LayerStats,
    Level,
    Reduced,
    Shape,
    whole_bounds,
)
from hvd_adaptive.compressors.checks import check_input
from hvd_adaptive.compressors.level_fitting import LearnedLevels
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.checks import check_bytes
from hvd_adaptive.kernels.huffman import Code
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import quantized
from hvd_adaptive.wire.quantized import (
    MAX_BITS,
    MAX_BLOCK,
    Codebook,
    Norm,
    QuantizationRule,
    Rounding,
    Tables,
)


@dataclass(frozen=True, slots=True)
class _Encoding:
    """How a batch is sent: bits and levels, codebooks, their bytes, and the room for them in front."""

    bits: Int64s
    tables: Tables
    codebooks: list[Codebook]
    front: bytes
    room: int


class Quantizer(GatheredCompressor):
    """All layers in one kernel call: add the gradient, measure, round, pack, leave the remainder.

    Cost: two passes over the tensor, and some over the codes where they are Huffman-coded. Memory:
    the payload. Source: Alistarh et al., "QSGD" (NeurIPS 2017).
    """

    widths: ClassVar[range] = range(1, MAX_BITS + 1)
    """Bits per value that there can be."""
    rotate: str = "none"
    """Whether layers are rotated before they are quantized: ``none`` or ``hadamard``."""

    @property
    @abstractmethod
    def rule(self) -> QuantizationRule:
        """How this member measures and rounds a block."""

    @property
    def biased(self) -> bool:
        """Not where rounding is random and nothing saturates."""
        return self.rule.rounding is Rounding.sign or self.rule.norm is Norm.clipped

    @property
    def entropy_coded(self) -> bool:
        """Whether codes are Huffman-coded."""
        return False

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """Bits from twice the default to half of it, by one (L-GreCo's search range)."""
        del layer
        bits = int(self.level)
        low, high = self._range() or (bits // 2, 2 * bits)
        return tuple(width for width in range(high, low - 1, -1) if width in self.widths)

    def _range(self) -> tuple[int, int] | None:
        """The explicit range of bits."""
        return whole_bounds(self, self.widths[0], self.widths[-1], "bits")

    def tables(self, bits: Sequence[int], state: CodecState | None) -> Tables:
        """The levels for these numbers of bits: fixed ones, or those of ``state``."""
        if not self.rule.carried:
            return self.rule.tables
        learned = state if state is not None else _fresh_state(self)
        if not isinstance(learned, LearnedLevels):
            raise TypeError(f"{self.name}: its state is a LearnedLevels, got {type(learned).__name__}")
        return Tables({width: learned.table(width) for width in sorted(set(bits))})

    def compress_layers_(self, batch: LayerBatch) -> tuple[Tensor, LayerStats]:
        """Quantize all layers; see :meth:`GatheredCompressor.compress_layers_`.

        Raises:
            ValueError: a level is not a number of bits that this compressor has, or the tensors do
                not fit together.
        """
        if self.rotate == "hadamard":
            return rotation.compress_layers_(batch, self._compress_layers_)
        return self._compress_layers_(batch)

    def _compress_layers_(self, batch: LayerBatch) -> tuple[Tensor, LayerStats]:
        """Quantize all layers as they are."""
        state = batch.state
        if isinstance(state, LearnedLevels) and state.collecting and batch.learns:
            _observe(state, batch)
        encoding = self._encoding(batch)
        body, stats = for_device(batch.x.device).quantized.compress_(
            *(batch.x, batch.offsets, encoding.bits, self.rule, encoding.tables, batch.grads),
            *(batch.keys, encoding.room),
            dithers=batch.dithers,
        )
        return self._finished(body, batch, encoding), LayerStats(
            stats[:, 0], stats[:, 1], stats[:, 2] != 0
        )

    def reduce_layers_(self, bodies: Sequence[Tensor], batch: LayerBatch, keeps: bool) -> Reduced:
        """Sum and quantize block by block, in one pass; rotated layers in two.

        Packed codes with something kept take two passes as well, which were measured to be faster: one
        pass writes down what was kept before, and where codes are packed that costs what it saves.
        """
        packed = keeps and not self.entropy_coded
        if packed or self.rotate != "none" or batch.dithers is not None:
            return super().reduce_layers_(bodies, batch, keeps)
        x, encoding = batch.x, self._encoding(batch)
        received = [ReceivedBody(body, *self._placed(body)) for body in bodies]
        before = torch.empty_like(x) if keeps else None
        body, marks = for_device(x.device).reduction.reduce_(
            *(received, batch.offsets, encoding.bits, self.rule, encoding.tables),
            *(x if keeps else None, before, batch.keys, encoding.room),
        )
        edges = np.asarray(batch.offsets).tolist()

        def undo(layers: Sequence[int]) -> None:
            for layer in layers:
                assert before is not None
                x[edges[layer] : edges[layer + 1]] = before[edges[layer] : edges[layer + 1]]

        return Reduced(self._finished(body, batch, encoding), marks != 0, undo)

    def _encoding(self, batch: LayerBatch) -> _Encoding:
        """The levels of a batch, and what is written in front of it."""
        bits = np.array([self._bits(level) for level in batch.levels], np.int64)
        tables = self.tables(bits.tolist(), batch.state)
        codebooks = [Codebook(width, tables.magnitudes[width]) for width in sorted({*bits.tolist()})]
        front = quantized.write_codebooks(codebooks if self.rule.carried else [])
        room = batch.reserve + (0 if self.entropy_coded else len(front))
        return _Encoding(bits, tables, codebooks, front, room)

    def _finished(self, body: Tensor, batch: LayerBatch, encoding: _Encoding) -> Tensor:
        """A body of packed codes with its codebooks in front, and Huffman-coded where that is asked."""
        reserve, room = batch.reserve, encoding.room
        if self.entropy_coded:
            numels = np.diff(batch.offsets)
            return self._coded(body[room:], numels, encoding.tables, encoding.codebooks, reserve)
        body[reserve:room] = torch.frombuffer(bytearray(encoding.front), dtype=torch.uint8)
        return body

    def _coded(
        self,
        layers: Tensor,
        numels: npt.NDArray[np.int64],
        tables: Tables,
        codebooks: list[Codebook],
        reserve: int,
    ) -> Tensor:
        """Huffman-code the layers and put their codebooks in front."""
        host = layers.cpu()

        def front(codes: Mapping[int, bytes]) -> bytes:
            for codebook in codebooks:
                codebook.magnitudes = codebook.magnitudes if self.rule.carried else None
                codebook.huffman = codes.get(codebook.bits)
            used = [book for book in codebooks if self.rule.carried or book.huffman is not None]
            return bytes(reserve) + quantized.write_codebooks(used)

        entropy = for_device(host.device).entropy
        streams, _ = entropy.encode(host, numels, self.rule, tables, front)
        return streams.to(layers.device)

    def decompress_layers_add_(
        self, body: Tensor, outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Decode and add; every length, norm, table and code is checked.

        When a WireError is raised, layers and blocks before the damage may have been added.
        """
        if self.rotate == "hadamard":
            return rotation.decompress_layers_sum_([body], outs, scale, self._sum_layers_)
        start, tables, codes = self._placed(body)
        kernels = for_device(body.device).quantized
        marks = kernels.decompress_add_(body, start, outs, scale, self.rule, tables, codes)
        return marks.astype(np.bool_)

    def decompress_layers_sum_(
        self, bodies: Sequence[Tensor], outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Decode and sum; rotated bodies of one key are rotated back once, after summing them."""
        if self.rotate == "none":
            return self._sum_layers_(bodies, outs, scale)
        if outs:
            torch._foreach_zero_(list(outs))
        return rotation.decompress_layers_sum_(bodies, outs, scale, self._sum_layers_)

    def _sum_layers_(
        self, bodies: Sequence[Tensor], outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Set the outputs to the sum of bodies without a rotation."""
        received = [ReceivedBody(body, *self._placed(body)) for body in bodies]
        kernels = for_device(bodies[0].device).quantized
        return kernels.decompress_sum_(received, outs, scale, self.rule).astype(np.bool_)

    def _placed(self, body: Tensor) -> tuple[int, Tables, Mapping[int, Code]]:
        """Where the layers of a body begin, and its tables and Huffman codes."""
        check_bytes(body)
        if body.numel() and not self.rule.carried and not body[0]:
            return 1, self.rule.tables, {}
        data = body.cpu()
        tables, codes, start = for_device(data.device).entropy.read_codebooks(data.numpy(), self.rule)
        return start, tables, codes

    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """From one weighted histogram for all levels: within 1 % of the expectation.

        Where rounding is not random it is exact, up to the rounding of the means (10^-7 of the
        energy). NaN where ``x`` is not finite.
        """
        check_input(x)
        bits = [self._bits(level) for level in levels]
        if self.rule.rounding is Rounding.sign:
            one_layer, one_level = np.array([0, x.numel()]), [self.level]
            batch = LayerBatch(x.clone(), one_layer, one_level, rotation=context.rotation)
            _, stats = self.compress_layers_(batch)
            # the means are what is nearest to their sides, so the remainder is orthogonal to them
            error = max(0.0, float(stats.energy[0] - stats.sent[0]))
            return np.full(len(bits), torch.nan if stats.nonfinite[0] else error)
        tables = self.tables(bits, context.state)
        kernels = for_device(x.device).quantized
        weights, beyond = self._norm_histogram(x, context, squared=True)
        errors, _ = kernels.expected_error_at(weights, tables, bits)
        return errors + beyond

    def sent_energies(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """By compressing where values saturate, whose rounding is around something else than ``x``.

        Else from the errors; see :meth:`Compressor.sent_energies`.
        """
        if self.rule.norm is not Norm.clipped:
            return super().sent_energies(x, levels, context)
        found = np.empty(len(levels))
        for index, level in enumerate(levels):
            one_layer, keys = np.array([0, x.numel()]), np.array([context.key], np.uint64)
            batch = LayerBatch(
                x.clone(), one_layer, [level], keys=keys, state=context.state, rotation=context.rotation
            )
            _, stats = self.compress_layers_(batch)
            found[index] = np.nan if stats.nonfinite[0] else stats.sent[0]
        return found

    def _norm_histogram(
        self, x: Tensor, context: LayerContext, *, squared: bool
    ) -> tuple[Float64s, float]:
        """The histogram of what is rounded, and the squared error of what saturates."""
        kernels, too_large = for_device(x.device).quantized, 0.0
        if self.rotate == "hadamard":
            x, too_large = rotation.rotated(x, context.rotation)
        weights, beyond = kernels.norm_histogram(x, self.rule, squared=squared)
        return weights, beyond + too_large

    @property
    def size_varies(self) -> bool:
        """Where codes are Huffman-coded."""
        return self.entropy_coded

    def sizes(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Int64s:
        """What Huffman coding is expected to leave of the codes, from one histogram for all levels.

        Hardly ever less than what is sent, and within 2 % above it in large layers of scattered
        values; more where neighbors are alike or one sign prevails, from which a code gains what is
        not counted here. Not finite input gives the packed size. Layers of a bucket share a Huffman
        code for each number of bits, but here ``x`` is coded alone, by its own probabilities. Cost:
        as of :meth:`errors`, and making the codes: two to four times as much in all.
        """
        if not self.size_varies:
            return super().sizes(x, levels, context)
        check_input(x)
        kernels, numel = for_device(x.device).quantized, x.numel()
        bits = [self._bits(level) for level in levels]
        tables = self.tables(bits, context.state)
        most = [self._packed_body(numel, width, int(tables.alphabets[width])) for width in bits]
        weights, beyond = self._norm_histogram(x, context, squared=False)
        if not numel or np.isnan(beyond):
            return np.array(most)
        _, counts = kernels.expected_error_at(weights, tables, bits)
        rows = zip(bits, counts, strict=True)
        saved = [self._saved(row[: tables.alphabets[width]], width, numel) for width, row in rows]
        return np.subtract(most, saved)

    def _saved(self, counts: Float64s, bits: int, numel: int) -> int:
        """Bytes that Huffman coding takes off packed codes whose magnitudes occur so often."""
        entropy = for_device(torch.device("cpu")).entropy
        even = (counts + counts[::-1]) / 2  # the signs
        # the length of the stream; and where no table is sent, the first byte of a codebook
        front = 4 + (0 if self.rule.carried else 1)
        coded = front + entropy.expected_bytes(even, numel)
        return max(0, quantized.packed_bytes(numel, bits, counts.size) - coded)

    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Exact for packed codes; with Huffman coding an upper bound, which is their size."""
        del shape
        bits = self._bits(level)
        return self._packed_body(numel, bits, int(self.tables([bits], None).alphabets[bits]))

    def _packed_body(self, numel: int, bits: int, alphabet: int) -> int:
        """Bytes of a layer alone, whose codes are packed."""
        codebooks = quantized.codebook_bytes(bits) if self.rule.carried else 0
        codebooks += quantized.ROTATION_BYTES if self.rotate == "hadamard" else 0
        return 1 + codebooks + quantized.layer_bytes(numel, bits, alphabet, self.rule)

    def _bits(self, level: Level) -> int:
        """A level as a number of bits; ValueError where it is none."""
        if level not in self.widths:
            raise ValueError(
                f"{self.name}: a level is {self.widths[0]} to {self.widths[-1]} whole bits, got {level}"
            )
        return int(level)


@lru_cache
def _fresh_state(compressor: Quantizer) -> CodecState | None:
    """What compresses where there is no state: as at the first step."""
    return compressor.new_state()


def _observe(state: LearnedLevels, batch: LayerBatch) -> None:
    """Show the state what is about to be compressed, but for layers that are not finite."""
    layers = [
        batch.x[start:end] for start, end in itertools.pairwise(np.asarray(batch.offsets).tolist())
    ]
    if batch.grads is not None:
        layers = [layer + grad.view(-1) for layer, grad in zip(layers, batch.grads, strict=True)]
    finite = [layer for layer in layers if bool(layer.isfinite().all())]
    if finite:
        state.observe(torch.cat(finite), np.cumsum([0] + [layer.numel() for layer in finite]))


CODINGS = ("fixed", "huffman")
ROTATIONS = ("none", "hadamard")


def check_choice(name: str, option: str, value: str, known: Sequence[str]) -> None:
    """ValueError where an option's value is none of those known."""
    if value not in known:
        raise ValueError(f"{name}: {option}={value!r} is not one of {', '.join(known)}")


def check_block(name: str, block: int) -> None:
    """ValueError where so many elements cannot share a norm."""
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"{name}: a block has 1 to {MAX_BLOCK} elements, got block={block}")
