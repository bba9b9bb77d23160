"""Compressors that send every element in a few bits: a level, times the norm of its block.

They differ in what a block is divided by, in where the levels are, and in whether rounding is random
(:class:`hvd_adaptive.wire.quantized.QuantizationRule`); everything else is the same for all of them.
Levels of compression are bits per value. What is sent is described in
:mod:`hvd_adaptive.wire.quantized`.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.compressors import rotation
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    CodecState,
    Compressor,
    GatheredCompressor,
    LayerBatch,
    LayerContext,
    LayerStats,
    Level,
    Reduced,
    Shape,
    check_input,
    whole_bounds,
)
from hvd_adaptive.compressors.distributions import Weighting
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


# --- random rounding -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Random(Quantizer):
    """Members that round at random to one of the two levels around a value.

    Options: see :class:`QSGD`, :func:`hvd_adaptive.rng.dithers` and :mod:`.rotation`.
    """

    bits: int = 4
    block: int = 512
    coding: str = "fixed"
    correlated: bool = dataclasses.field(default=False, kw_only=True)
    rotate: str = dataclasses.field(default="none", kw_only=True)

    norm_of_block: ClassVar[Norm] = Norm.l2
    rounding: ClassVar[Rounding] = Rounding.uniform

    def __post_init__(self) -> None:
        self._bits(self.bits)
        _check_choice(self.name, "coding", self.coding, CODINGS)
        _check_choice(self.name, "rotate", self.rotate, ROTATIONS)
        _check_block(self.name, self.block)
        self._range()
        super().__post_init__()

    @property
    def level(self) -> Level:
        """The bits."""
        return self.bits

    @property
    def entropy_coded(self) -> bool:
        """Whether codes are Huffman-coded."""
        return self.coding == "huffman"

    @property
    def rule(self) -> QuantizationRule:
        """The norm of the block and where the levels are."""
        return QuantizationRule(self.norm_of_block, self.rounding, self.block)


CODINGS = ("fixed", "huffman")
ROTATIONS = ("none", "hadamard")


def _check_choice(name: str, option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}: {option}={value!r} is not one of {', '.join(known)}")


def _check_block(name: str, block: int) -> None:
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"{name}: a block has 1 to {MAX_BLOCK} elements, got block={block}")


@dataclass(frozen=True)
class QSGD(_Random):
    """Evenly spaced levels between the block's L2 norm and its negative, with 0.

    Unbiased. Variance: at most ``min(block / s^2, sqrt(block) / s) * |x|^2`` with
    ``s = 2^(bits - 1) - 1``, so few bits want small blocks. Cost: about five memcpys of the tensor to
    compress, two to decode. Wire: ``bits + 32 / block`` bits per value (1.6 for 2 bits, whose three
    levels are packed five to a byte); with Huffman coding far fewer, since most codes are near 0.
    Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding" (NeurIPS 2017), section 3.1.

    Args:
        bits: 1 to 8 bits per value.
        block: 1 to 65,536 elements that share a norm.
        coding: ``fixed`` or ``huffman``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> x = torch.tensor([3.0, -4.0])
        >>> qsgd = QSGD(bits=4)
        >>> payload, out = qsgd.compress_(x, 4, LayerContext(key=7)), torch.zeros(2)
        >>> qsgd.decompress_add_(payload, out)
        >>> payload.nbytes, (out + x).tolist()
        (7, [3.0, -4.0])
    """

    name = "qsgd"


@dataclass(frozen=True)
class QSGDInf(_Random):
    """Evenly spaced levels between the block's largest magnitude and its negative, with 0.

    Unbiased. Less variance than :class:`QSGD` at equal bits, for codes that spread over all levels
    and so gain less from Huffman coding. Cost and wire as there. Source: Alistarh et al. (2017),
    section 5 ("scaling by the max").

    Args:
        bits: 1 to 8 bits per value.
        block: 1 to 65,536 elements that share a norm.
        coding: ``fixed`` or ``huffman``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> x, out = torch.tensor([4.0, -4.0, 0.0]), torch.zeros(3)
        >>> qsgdinf = QSGDInf(bits=2)
        >>> qsgdinf.decompress_add_(qsgdinf.compress_(x, 2), out)
        >>> out.tolist(), x.tolist()
        ([4.0, -4.0, 0.0], [0.0, 0.0, 0.0])
    """

    name = "qsgdinf"
    norm_of_block = Norm.max


@dataclass(frozen=True)
class NUQSGD(_Random):
    """Levels at the L2 norm times 1, 1/2, 1/4, ..., with 0 and negatives.

    Unbiased. Finer than :class:`QSGD` near 0, where nearly all of a gradient is. Cost and wire as
    there. Source: Ramezani-Kebrya et al., "NUQSGD: Provably Communication-efficient Data-parallel SGD
    via Nonuniform Quantization" (JMLR 2021), section 3.

    Args:
        bits: 1 to 8 bits per value.
        block: 1 to 65,536 elements that share a norm.
        coding: ``fixed`` or ``huffman``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> x, out = torch.tensor([0.0, -8.0]), torch.zeros(2)
        >>> nuqsgd = NUQSGD(bits=3)
        >>> nuqsgd.decompress_add_(nuqsgd.compress_(x, 3), out)
        >>> out.tolist()
        [0.0, -8.0]
    """

    name = "nuqsgd"
    rounding = Rounding.powers


@dataclass(frozen=True)
class Natural(_Random):
    """Rounding to powers of two, sign and exponent in ``bits``: the 2^(bits - 1) - 1 from the largest.

    The block's largest magnitude is rounded up to a power of two, so every decoded value is one, or 0.
    Unbiased. With 8 bits the error is at most
    1/8 of the energy. Cost and wire as :class:`QSGD`. Source: Horvath et al., "Natural Compression for
    Distributed Deep Learning" (2019), sections 2 and 3 (natural dithering for fewer bits).

    Args:
        bits: 2 to 8 bits per value.
        block: 1 to 65,536 elements that share a norm.
        coding: ``fixed`` or ``huffman``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> x, out = torch.tensor([0.25, -8.0, 0.0]), torch.zeros(3)
        >>> natural = Natural()
        >>> natural.decompress_add_(natural.compress_(x, 8), out)
        >>> out.tolist()
        [0.25, -8.0, 0.0]
    """

    bits: int = 8

    name = "natural"
    widths = range(2, MAX_BITS + 1)
    norm_of_block = Norm.power
    rounding = Rounding.powers


@dataclass(frozen=True)
class TernGrad(Quantizer):
    """The block's largest magnitude times -1, 0 or 1.

    Unbiased without clipping. Cost as :class:`QSGD`. Wire: ``1.6 + 32 / block`` bits per value. Source:
    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning"
    (NeurIPS 2017), sections 3.1 and 3.3.

    Args:
        block: 1 to 65,536 elements that share a norm.
        clip: magnitudes saturate at this many root mean squares of the block (the paper's 2.5 standard
            deviations): less variance, but biased. 0 does not clip.
        coding: ``fixed`` or ``huffman``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> x, out = torch.tensor([2.0, -2.0, 0.0]), torch.zeros(3)
        >>> terngrad = TernGrad()
        >>> payload = terngrad.compress_(x, terngrad.level)
        >>> terngrad.decompress_add_(payload, out)
        >>> payload.nbytes, out.tolist()
        (7, [2.0, -2.0, 0.0])
    """

    block: int = 512
    clip: float = 0.0
    coding: str = "fixed"
    correlated: bool = False
    rotate: str = "none"

    name = "terngrad"
    widths = range(2, 3)
    level = 2

    def __post_init__(self) -> None:
        _check_choice(self.name, "coding", self.coding, CODINGS)
        _check_choice(self.name, "rotate", self.rotate, ROTATIONS)
        _check_block(self.name, self.block)
        if not 0.0 <= self.clip < float("inf"):
            raise ValueError(f"terngrad: clip is 0 or a number of deviations, got {self.clip}")
        self._range()
        super().__post_init__()

    @property
    def entropy_coded(self) -> bool:
        """Whether codes are Huffman-coded."""
        return self.coding == "huffman"

    @property
    def rule(self) -> QuantizationRule:
        """The maximum, clipped or not."""
        return QuantizationRule(
            Norm.clipped if self.clip else Norm.max, Rounding.uniform, self.block, self.clip
        )


# --- signs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Signs(Quantizer):
    """Members that send one bit per value and what it stands for in each block."""

    block: int = 512
    rotate: str = "none"

    widths = range(1, 2)
    level = 1
    draws = False

    def __post_init__(self) -> None:
        _check_choice(self.name, "rotate", self.rotate, ROTATIONS)
        _check_block(self.name, self.block)
        self._range()
        super().__post_init__()


@dataclass(frozen=True)
class SignSGD(_Signs):
    """The sign of every value, times the mean magnitude of its block.

    Biased and not random: use it with error feedback. Cost as :class:`QSGD`. Wire: ``1 + 32 / block``
    bits per value. Source: Bernstein et al., "signSGD" (ICML 2018); scaled as in Karimireddy et al.,
    "Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML 2019), section 4.

    Args:
        block: 1 to 65,536 elements that share a mean.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: block out of its range.

    Example:
        >>> x, out = torch.tensor([3.0, -1.0, 2.0]), torch.zeros(3)
        >>> signsgd = SignSGD()
        >>> signsgd.decompress_add_(signsgd.compress_(x, 1), out)
        >>> out.tolist(), x.tolist()
        ([2.0, -2.0, 2.0], [1.0, 1.0, 0.0])
    """

    name = "signsgd"

    @property
    def rule(self) -> QuantizationRule:
        """Signs of the mean magnitude."""
        return QuantizationRule(Norm.mean, Rounding.sign, self.block)


@dataclass(frozen=True)
class OneBit(_Signs):
    """The mean of a block's negative values or that of the others, whichever a value belongs to.

    Biased and not random: use it with error feedback. Cost as :class:`QSGD`. Wire: ``1 + 64 / block``
    bits per value. Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs" (Interspeech 2014), section 3.2, with blocks in
    the place of columns.

    Args:
        block: 1 to 65,536 elements that share the two means.
        rotate: ``none`` or ``hadamard``.

    Raises:
        ValueError: block out of its range.

    Example:
        >>> x, out = torch.tensor([3.0, -1.0, 1.0]), torch.zeros(3)
        >>> onebit = OneBit()
        >>> onebit.decompress_add_(onebit.compress_(x, 1), out)
        >>> out.tolist(), x.tolist()
        ([2.0, -1.0, 2.0], [1.0, 0.0, -1.0])
    """

    name = "onebit"

    @property
    def rule(self) -> QuantizationRule:
        """A mean for each side."""
        return QuantizationRule(Norm.sides, Rounding.sign, self.block)


# --- learned levels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Learned(_Random):
    """Members whose levels follow the gradients: they are sent with every body, 4 bytes per magnitude.

    Options: see :class:`ALQ`.
    """

    bits: int = 3
    coding: str = "huffman"
    norm: str = "max"
    updates: str = "1/100/2000/10000"
    drop: float = 0.1
    weighting: str = dataclasses.field(default="expected", kw_only=True)

    rounding = Rounding.table
    kind: ClassVar[Literal["alq", "amq"]]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self.name, "norm", self.norm, ("l2", "max"))
        _check_choice(self.name, "weighting", self.weighting, ("expected", "normalized"))
        if not all(step.strip().isdecimal() for step in self.updates.split("/")):
            raise ValueError(
                f"{self.name}: updates={self.updates!r} are no steps: write updates=100/2000/10000"
            )
        self.new_state()  # names what else is wrong

    @property
    def rule(self) -> QuantizationRule:
        """Tables, which are sent with the body."""
        return QuantizationRule(Norm[self.norm], Rounding.table, self.block)

    @property
    def state_key(self) -> Compressor:
        """Levels are learned for all bits, and whatever the coding and the random numbers."""
        return dataclasses.replace(
            self, bits=type(self).bits, coding=type(self).coding, correlated=False, level_range=""
        )

    def new_state(self) -> LearnedLevels:
        """The levels to start from."""
        return LearnedLevels(
            self.kind,
            self.block,
            cast(Literal["l2", "max"], self.norm),
            tuple(int(step) for step in self.updates.split("/")),
            self.first_levels,
            getattr(self, "method", "cd"),  # amq has one number to move, and no choice
            cast(Weighting, self.weighting),
            zero=self.with_zero,
            drop=self.drop,
        )

    @property
    def with_zero(self) -> bool:
        """Whether 0 is a level."""
        return False

    @property
    def first_levels(self) -> Literal["uniform", "exponential"]:
        """Where levels are before anything was learned."""
        return "exponential"


@dataclass(frozen=True)
class ALQ(_Learned):
    """Levels that are moved one by one to where the expected error is least.

    Unbiased. Cost with 2 or 3 bits: about six memcpys of the tensor to compress and two to decode, with
    Huffman coding eight and four; more bits cost more, as there are more levels to compare with.
    Learning is at few steps (see :class:`hvd_adaptive.compressors.level_fitting.LearnedLevels`). Wire:
    at most ``bits + 32 / block`` bits per value; with Huffman coding the codes' entropy, within 2 %
    above 0.6 bits. Source: Faghri et al., "Adaptive Gradient Quantization for Data-Parallel SGD"
    (NeurIPS 2020), sections 3.1 to 3.3.

    Args:
        bits: 2 to 8 bits per value.
        block: 1 to 65,536 elements that share a norm.
        coding: ``huffman`` or ``fixed``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.
        norm: ``max``, or ``l2``, which leaves the level at 1 to hardly any value: its error is about
            twice that of ``max`` at equal bits (see benchmarks).
        updates: steps to learn at, rising, with slashes between them; the last one's multiples follow.
        drop: learn again after a step in which the learning rate fell by this share or more, in (0, 1).
        weighting: ``expected``, levels for the least variance of the gradient, in which blocks count by
            their squared norm; or ``normalized`` (the paper's ALQ-N), in which all blocks count alike.
        zero: whether 0 is a level, as in the paper: ``true``, ``false``, or ``auto``, which is
            ``true`` with Huffman coding alone. There a level at 0 makes most codes alike and payloads
            small. At a fixed width it saves nothing, and one more level for the others lowers the error
            by a fifth or more; zeros then become noise.
        start: levels before anything was learned: ``exponential`` (as NUQSGD) or ``uniform`` (QSGD).
        method: how levels are moved: ``cd``, coordinate descent (section 3.1), or ``gd``, the gradient
            descent of section 3.2, which takes more steps to the same minimum.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> alq = ALQ()
        >>> state = alq.new_state()
        >>> x = torch.tensor([4.0, 2.0, 0.0])
        >>> payload, out = alq.compress_(x, 3, LayerContext(state=state)), torch.zeros(3)
        >>> alq.decompress_add_(payload, out)  # 1/2 is one of the first levels
        >>> out.tolist()
        [4.0, 2.0, 0.0]
    """

    start: str = "exponential"
    zero: str = "auto"
    method: str = dataclasses.field(default="cd", kw_only=True)

    name = "alq"
    kind = "alq"
    widths = range(2, MAX_BITS + 1)

    def __post_init__(self) -> None:
        _check_choice(self.name, "zero", self.zero, ("auto", "true", "false"))
        _check_choice(self.name, "method", self.method, ("cd", "gd"))
        super().__post_init__()

    @property
    def state_key(self) -> Compressor:
        """As of the others; but levels with 0 are not those without."""
        zero = str(self.with_zero).lower()
        return dataclasses.replace(
            self,
            bits=type(self).bits,
            coding=type(self).coding,
            zero=zero,
            correlated=False,
            level_range="",
        )

    @property
    def with_zero(self) -> bool:
        """The option, or whether codes are Huffman-coded."""
        return self.entropy_coded if self.zero == "auto" else self.zero == "true"

    @property
    def first_levels(self) -> Literal["uniform", "exponential"]:
        """The option."""
        return cast(Literal["uniform", "exponential"], self.start)


@dataclass(frozen=True)
class AMQ(_Learned):
    """Levels 1, p, p^2, ... and their negatives, without 0, for the multiplier p of least error.

    Unbiased: below the smallest level the sign is random. The multiplier starts at 1/2. Cost, wire and
    source as :class:`ALQ` (section 3.4 there); without 0 an entropy code gains less.

    Args:
        bits: 1 to 8 bits per value.
        block: 1 to 65,536 elements that share a norm.
        coding: ``huffman`` or ``fixed``.
        correlated: whether the ranks' random numbers are spread evenly, so that errors cancel.
        rotate: ``none`` or ``hadamard``.
        norm: ``max``, or ``l2``, which leaves the level at 1 to hardly any value: its error is about
            twice that of ``max`` at equal bits (see benchmarks).
        updates: steps to learn at, rising, with slashes between them; the last one's multiples follow.
        drop: learn again after a step in which the learning rate fell by this share or more, in (0, 1).
        weighting: ``expected``, levels for the least variance of the gradient, in which blocks count by
            their squared norm; or ``normalized`` (the paper's AMQ-N), in which all blocks count alike.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> amq = AMQ(bits=2)
        >>> x = torch.tensor([4.0, -2.0])
        >>> payload, out = amq.compress_(x, 2), torch.zeros(2)
        >>> amq.decompress_add_(payload, out)
        >>> out.tolist()
        [4.0, -2.0]
    """

    name = "amq"
    kind = "amq"
