"""What a kernel backend offers, and which backend works on the tensors of a device.

A *family* is a set of functions with one Protocol; a *backend* is a package with a module per family.
``cpu`` (Numba) is for tensors in host memory, ``triton`` for those of NVIDIA's GPUs, where Triton is
installed; ``reference`` (plain torch, any device) for everything else and as the oracle in tests: all
backends give the same bytes. A new backend is a package, a value in :data:`BACKENDS`, and an entry in
the row of each family that it has in :data:`REGISTRY`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.huffman import Code, Front
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.kernels.selection import SelectionRule
from hvd_adaptive.kernels.signs import SignedSums, Signs
from hvd_adaptive.wire.quantized import QuantizationRule, Tables
from hvd_adaptive.wire.sparse import ValueFormat

REGISTRY: dict[str, dict[str, str]] = {
    family: {backend: f"hvd_adaptive.kernels.{backend}.{family}" for backend in backends}
    for family, backends in {
        "sparse": ("reference", "cpu", "triton"),
        "quantized": ("reference", "cpu", "triton"),
        "reduction": ("reference", "cpu", "triton"),
        "entropy": ("reference", "cpu"),
        "rotation": ("reference", "cpu", "triton"),
        "subset": ("reference", "cpu", "triton"),
        "measuring": ("reference", "cpu"),
    }.items()
}
"""The module of each family in each backend that has it; the reference stands in for the others."""

BACKENDS: dict[str, str] = {"cpu": "cpu", "cuda": "triton"}
"""The backend of each type of device; all other devices have the reference."""

NEEDS: dict[str, str] = {"triton": "triton"}
"""What must be installed for a backend; where it is not, its devices have the reference as well."""


READS_HALVES = frozenset({"reference", "triton"})
"""Backends that add float16 and bfloat16 gradients as they are, instead of widened copies of them."""


class SparseKernels(Protocol):
    """Kernels of sparse layers: select, encode, decode, and what selection is foreseen from."""

    def compress_(
        self,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        values: ValueFormat,
        grads: Sequence[Tensor] | None = None,
        reserve: int = 0,
        rule: SelectionRule = SelectionRule.topk,
        thresholds: npt.NDArray[np.float32] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Add the gradients, take the largest elements of each layer out of ``x``, and encode them.

        How many are sent is up to the :class:`SelectionRule`, but never a zero. What is not sent stays
        in ``x``: 0 where a value was sent exactly, its rounding error otherwise, so that payload +
        remainder is what ``x`` was. Biased.

        A layer whose sum ``x + grad`` has a NaN or an Inf keeps its ``x`` and sends a mark; of a model
        that is one vector, the other layers then keep their sums and nothing is sent but the mark. A
        module may find out after it has added: ``x`` is then within ``2^-21 (|x| + |grad|)`` of what it
        was. Reading all of it first would cost every step a third of the time for the sake of those
        that are skipped.

        Source: exact selection by a histogram of float bits, in the place of the sort of Aji and
        Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), section 3; those
        of the other rules stand with :class:`SelectionRule`.

        Args:
            x: float32, 1-D, contiguous; layer ``l`` is ``x[offsets[l]:offsets[l + 1]]``.
            offsets: ``int64[L + 1]``, rising; a layer may be empty and holds at most 2^31 - 1 elements.
            counts: ``int64[L]``: how many elements to send of each layer, 0 or more: the rule's ``k``.
            values: how values are sent.
            grads: one contiguous float32 tensor per layer, of any shape with as many elements, on the
                device of ``x``; None adds nothing. All float16 or all bfloat16 where
                :attr:`Kernels.reads_halves` says so: they are added as if they were widened.
            reserve: bytes to leave free, with whatever they hold, in front of the body (for
                :func:`hvd_adaptive.wire.frame.write_header`).
            rule: how many to send, given ``counts``.
            thresholds: ``float32[L]``, 0 or more: for ``SelectionRule.threshold``, None for all others.
            whole: the layers are one vector, and the body is one layer over all of them; ``counts`` and
                ``thresholds`` then have one entry.

        Returns:
            ``(data, stats)``: uint8, 1-D, on the device of ``x``: ``reserve`` bytes and the body as
            :mod:`hvd_adaptive.wire` describes it; and ``float64[L, 4]``: energy (squared L2 norm) of
            ``x + grad``, energy of the values as they will be decoded, number of values sent, and 1
            where the layer was not finite (the others are then 0).

        Raises:
            ValueError: the arguments do not fit together.
        """

    def compress_cut_(
        self,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        values: ValueFormat,
        cuts: npt.NDArray[np.int64],
        grads: Sequence[Tensor] | None = None,
        rule: SelectionRule = SelectionRule.topk,
        thresholds: npt.NDArray[np.float32] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """As :func:`compress_`, but what is selected of a layer is encoded for several receivers.

        Each piece is encoded as if it were a layer of its own. int8's scales and sign's means are those
        of the piece; with other formats the remainder is that of :func:`compress_`.

        Args:
            x: as for :func:`compress_`, like all that is not named here, and the errors.
            offsets: of the layers.
            counts: of the layers.
            values: how values are sent.
            cuts: ``int64[P + 1]``, rising from the first offset to the last: piece ``p`` is
                ``x[cuts[p]:cuts[p + 1]]``. All offsets are among them, but where ``whole``.
            grads: of the layers.
            rule: how many to send.
            thresholds: of the layers.
            whole: the layers are one vector to select from.

        Returns:
            ``(data, stats, ends)``: the pieces one after the other; stats as from :func:`compress_`,
            by layer; and ``int64[P]``, where each piece ends in ``data``.
        """

    def decompress_add_(
        self,
        body: Tensor,
        outs: Sequence[Tensor],
        scale: float,
        values: ValueFormat | None = None,
        whole: bool = False,
    ) -> npt.NDArray[np.uint8]:
        """Add ``scale`` times every value of a body at its index; a layer marked nonfinite becomes NaN.

        A layer is added as a whole or not at all: when a WireError is raised, the layers before the
        damaged one have been added, and the outputs of the others are as they were.

        Args:
            body: uint8, 1-D, contiguous: the layers of one bucket, no header.
            outs: one contiguous float32 tensor per layer, of any shape, on the device of ``body``.
            scale: what to multiply with, as float32.
            values: the format that all layers must have; None takes each layer's own.
            whole: the body is one layer over all outputs.

        Returns:
            ``uint8[L]``: 1 where a layer was marked nonfinite.

        Raises:
            WireError: the body is damaged or does not belong to these layers; says what was found
                where.
            ValueError: the tensors are not as described.
        """

    def decompress_sum_(
        self,
        bodies: Sequence[Tensor],
        outs: Sequence[Tensor],
        scale: float,
        values: ValueFormat | None = None,
        whole: bool = False,
    ) -> npt.NDArray[np.uint8]:
        """Set the outputs to ``scale`` times the sum of all bodies.

        It is what :func:`decompress_add_` of one after the other makes of zeros, bit for bit. When a
        WireError is raised, what the outputs hold means nothing.

        Args:
            bodies: one per rank, of at least one.
            outs: as for :func:`decompress_add_`, like all that follows, the marks and the errors.
            scale: what to multiply with.
            values: the format of the values.
            whole: each body is one layer over all outputs.
        """

    def clear_(
        self,
        body: Tensor,
        outs: Sequence[Tensor],
        values: ValueFormat | None = None,
        whole: bool = False,
    ) -> None:
        """Set the outputs to 0 at every index that a body holds; layers marked nonfinite hold none.

        What DGC's momentum factor masking needs (Lin et al. 2018, section 3.2). Bodies are checked as
        by :func:`decompress_add_`, with the same arguments and errors.
        """

    def recompress_(
        self,
        body: Tensor,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        values: ValueFormat,
        reserve: int = 0,
        rule: SelectionRule = SelectionRule.topk,
        thresholds: npt.NDArray[np.float32] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Compress a body further: send some of its values, add the others back to the remainder.

        The rule is applied to the values that a layer's body decodes to, as if they were the layer.
        What it drops, and what encoding again rounds off, is added to ``x``: the new body + the new
        ``x`` are what the old body + the old ``x`` were, up to one float32 rounding. Biased. A mark is
        passed on.

        Cost: that of the values in ``body``, whatever the size of the layers. Source: multi-level
        compression of Tyagi and Swany, "GraVAC" (IEEE CLOUD 2023), section III.

        Args:
            body: uint8, 1-D, contiguous, no header: what :func:`compress_` returned for ``x``.
            x: float32, 1-D, contiguous: the remainder that it left; overwritten by the new one.
            offsets: ``int64[L + 1]``: those of the compression.
            counts: ``int64[L]``: the rule's ``k``, of the whole layer.
            values: how values are sent, in the old body and the new.
            reserve: bytes to leave free in front of the new body.
            rule: how many to send, given ``counts``.
            thresholds: ``float32[L]``, 0 or more: for ``SelectionRule.threshold``, None for all others.
            whole: the body is one layer over all of ``x``'s; ``counts`` has one entry.

        Returns:
            ``(data, stats)`` as from :func:`compress_`, but the energy in the first column is that
            of the values in the old body.

        Raises:
            WireError: the body is damaged or does not belong to these layers; those before the damaged
                one have been recompressed already.
            ValueError: the arguments do not fit together.
        """

    def reduce_(
        self,
        bodies: Sequence[Tensor],
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        values: ValueFormat,
        keeps: bool = True,
        reserve: int = 0,
        rule: SelectionRule = SelectionRule.topk,
        thresholds: npt.NDArray[np.float32] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, npt.NDArray[np.uint8]]:
        """Sum what several bodies hold of each layer, add ``x``, and compress the sum.

        It is :meth:`decompress_sum_` with a scale of 1 and :meth:`compress_` of ``x`` with the sums as
        its gradients, bit for bit. Biased.

        Args:
            bodies: one per rank, of at least one, on the device of ``x``.
            x: as for :meth:`compress_`, like all that is not named here.
            offsets: of the layers.
            counts: of the layers.
            values: of the bodies' values, and of the result's.
            keeps: whether there is an ``x``: it is added to the sums, and left with the remainder.
                Otherwise it is only room, and what it holds before and after means nothing.
            reserve: bytes to leave free in front.
            rule: how many to send.
            thresholds: of the layers.
            whole: each body, and the result, is one layer over all layers.

        Returns:
            ``(data, marks)``: as from :meth:`compress_`; and ``uint8[L]``: 1 where a layer was not
            finite.

        Raises:
            WireError: a body is damaged or does not belong to these layers; ``x`` is as it was if
                ``keeps``.
            ValueError: the arguments do not fit together.
        """

    def position_bits(self, x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bits that the positions of the largest elements take on the wire, exactly, for many counts.

        Args:
            x: float32, contiguous, of any shape, fewer than 2^31 elements.
            counts: ``int64[C]``: how many of the largest are sent, each 0 or more; of equals those of
                lowest index, and never a zero.

        Returns:
            ``int64[C, 2]``: how many there are to send, and the bits of their index stream; 0 where
            ``x`` holds a NaN or an Inf.

        Raises:
            ValueError: the arguments are not as described.
        """

    def spectrum(self, x: Tensor) -> npt.NDArray[np.int64]:
        """Histogram of magnitudes: how many elements share exponent and upper 7 bits of the mantissa.

        Args:
            x: float32, contiguous, of any shape.

        Returns:
            ``int64[32768]``, from the smallest magnitude (bin 0: zeros and the least denormals) to the
            largest; bins from 32,640 on count Inf and NaN.

        Raises:
            ValueError: the tensor is not as described.
        """

    def sample_spectrum(self, x: Tensor) -> npt.NDArray[np.int64]:
        """The :func:`spectrum` of DGC's sample: one group of 16 in 13, from 2^21 elements on one in 61.

        Args:
            x: float32, contiguous, of any shape.

        Returns:
            ``int64[32768]``; empty where ``x`` has no more than one group.
        """

    def refined_spectrum(self, x: Tensor, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """How the elements inside some bins of the :func:`spectrum` are spread: exact magnitudes.

        Args:
            x: float32, contiguous, of any shape, fewer than 2^31 elements.
            bins: ``int64[B]``, all different.

        Returns:
            ``int32[B, 65536]``: counts by the lower 16 bits of the magnitude.

        Raises:
            ValueError: the arguments are not as described.
        """

    def summary(self, x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
        """What the errors of all levels are estimated from, in one read of ``x``.

        Args:
            x: float32, contiguous, of any shape.

        Returns:
            The :func:`spectrum`, the sum of the magnitudes, the energy (squared L2 norm), and the
            largest magnitude; sums in float64.
        """

    def moments(self, x: Tensor) -> npt.NDArray[np.float64]:
        """The :func:`spectrum` of either sign with sums: what the error of signs and means is made of.

        Args:
            x: float32, contiguous, of any shape.

        Returns:
            ``float64[2, 32768, 3]``: of the elements with a plus and of those with a minus, for each
            bin their number, the sum of their magnitudes, and that of their squares.
        """


class QuantizedKernels(Protocol):
    """Kernels of quantized layers: measure, round, pack, unpack, and the expected error of rounding."""

    def compress_(
        self,
        x: Tensor,
        offsets: npt.NDArray[np.int64],
        bits: npt.NDArray[np.int64],
        rule: QuantizationRule,
        tables: Tables,
        grads: Sequence[Tensor] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
        reserve: int = 0,
        dithers: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Add the gradients, round each layer to the levels of its bits, and encode that.

        Each block is divided by its norm, and what results is rounded to one of the two signed levels
        around it, at random so that the expectation is the value itself. It is so but for the
        resolution of the random numbers (2^-24 of the distance of two levels), for values above the
        norm, which saturate (:attr:`Norm.clipped`, and magnitudes above 2^127), and for
        :attr:`Rounding.sign`, which is not random. The remainder stays in ``x``: payload + remainder is
        what ``x`` was, up to one rounding.

        A layer whose sum ``x + grad`` has a NaN or an Inf keeps its ``x`` and sends a mark. A module
        may find out after it has taken what it sends: ``x`` is then within ``2^-21`` times the sum of
        ``|x|``, ``|grad|`` and the norm of the block of what it was.

        Source: Alistarh et al., "QSGD" (NeurIPS 2017), section 3.1, for any levels as in Faghri et al.,
        "Adaptive Gradient Quantization for Data-Parallel SGD" (NeurIPS 2020), section 2.

        Args:
            x: float32, 1-D, contiguous; layer ``l`` is ``x[offsets[l]:offsets[l + 1]]``.
            offsets: ``int64[L + 1]``, rising; a layer may be empty and holds at most 2^31 - 1 elements.
            bits: ``int64[L]``, each 1 to 8 and one that ``tables`` has levels for.
            rule: what a block is divided by, and where the levels are.
            tables: the levels; those of ``rule`` unless they are sent with the body.
            grads: one contiguous float32 tensor per layer, of any shape with as many elements, on the
                device of ``x``; None adds nothing. All float16 or all bfloat16 where
                :attr:`Kernels.reads_halves` says so: they are added as if they were widened.
            keys: ``uint64[L]``, of the layers' random numbers; None draws with key 0.
            reserve: bytes to leave free, with whatever they hold, in front.
            dithers: ``uint64[L]``, of :func:`hvd_adaptive.rng.dithers`, where the keys are those of all
                ranks; None takes the random numbers as they are.

        Returns:
            ``(data, stats)``: uint8, 1-D, on the device of ``x``: ``reserve`` bytes and the layers as
            :mod:`hvd_adaptive.wire.quantized` describes them, without codebooks; and ``float64[L, 3]``:
            energy (squared L2 norm) of ``x + grad``, energy of what was sent, and 1 where the layer was
            not finite (the others are then 0).

        Raises:
            ValueError: the arguments do not fit together.
        """

    def decompress_add_(
        self,
        body: Tensor,
        start: int,
        outs: Sequence[Tensor],
        scale: float,
        rule: QuantizationRule,
        tables: Tables,
        codes: Mapping[int, Code] | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Add ``scale`` times every decoded value; a layer marked nonfinite becomes NaN.

        When a WireError is raised, the layers before the damaged one have been added, the blocks of the
        damaged one that stand before the damage may have been, and nothing else has.

        Args:
            body: uint8, 1-D, contiguous.
            start: byte of it at which the layers begin.
            outs: one contiguous float32 tensor per layer, of any shape, on the device of ``body``.
            scale: what to multiply with, as float32.
            rule: that of compression.
            tables: levels for all numbers of bits that a layer may have.
            codes: the Huffman codes of coded layers, by bits.

        Returns:
            ``uint8[L]``: 1 where a layer was marked nonfinite.

        Raises:
            WireError: the body is damaged or does not belong to these layers; says what was found
                where.
            ValueError: the tensors are not as described.
        """

    def decompress_sum_(
        self,
        bodies: Sequence[ReceivedBody],
        outs: Sequence[Tensor],
        scale: float,
        rule: QuantizationRule,
    ) -> npt.NDArray[np.uint8]:
        """Set the outputs to ``scale`` times the sum of what several bodies hold.

        As :meth:`decompress_add_` of one after the other to zeros, bit for bit. Cost: that, or where a
        backend sums in one pass, reading all codes and writing each output once.

        Args:
            bodies: at least one, of the same layers.
            outs: as of :meth:`decompress_add_`.
            scale: as there.
            rule: as there.

        Returns:
            ``uint8[L]``: 1 where a layer was marked nonfinite in some body.

        Raises:
            WireError: as there, for the first body that is damaged; the outputs then mean nothing.
            ValueError: as there.
        """

    def round_at_random_(self, out: Tensor, x: Tensor, key: int) -> None:
        """Round float32 ``x`` to bfloat16 ``out`` so that the expectation is ``x``.

        The upper half of a float32 is the bfloat16 towards zero; 16 random bits, added to the lower
        half, carry into it as often as that half says. Unbiased, but beyond bfloat16's range, where it
        saturates.

        Args:
            out: bfloat16[n].
            x: float32[n]; a NaN stays one.
            key: of the random numbers.
        """

    def norm_histogram(
        self, x: Tensor, rule: QuantizationRule, *, squared: bool
    ) -> tuple[npt.NDArray[np.float64], float]:
        """A histogram of ``|x| / norm``, from which :func:`expected_error_at` takes errors.

        Args:
            x: float32, contiguous.
            rule: what a block is divided by: one norm per block.
            squared: whether an element counts by its block's squared norm, as its share of the error
                does; or as 1, as its code does.

        Returns:
            ``float64[WEIGHT_BINS]``, by exponent and 10 bits of the mantissa, and the squared error of
            what is above its norm; that is NaN where ``x`` is not finite.
        """

    def expected_error_at(
        self, weights: npt.NDArray[np.float64], tables: Tables, bits: Sequence[int]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """:func:`expected_from_weights` for several numbers of bits.

        Returns:
            The errors, ``float64[W]``, and each code's weight, ``float64[W, LEVELS]``, 0 where there is
            no level.
        """


class ReductionKernels(Protocol):
    """What the owner of a shard does with quantized layers."""

    def reduce_(
        self,
        bodies: Sequence[ReceivedBody],
        offsets: npt.NDArray[np.int64],
        bits: npt.NDArray[np.int64],
        rule: QuantizationRule,
        tables: Tables,
        x: Tensor | None = None,
        before: Tensor | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
        reserve: int = 0,
    ) -> tuple[Tensor, npt.NDArray[np.uint8]]:
        """Sum what several bodies hold of each layer, and encode the sum.

        It is :meth:`QuantizedKernels.decompress_add_` of one body after the other to zeros and
        :meth:`QuantizedKernels.compress_` of the sums, bit for bit. A layer that is marked in a body,
        or whose sum is not finite, keeps its ``x`` bit for bit and sends a mark.

        Args:
            bodies: one per rank, of at least one, on one device.
            offsets: ``int64[L + 1]``, of the layers.
            bits: as for :meth:`QuantizedKernels.compress_`, like all that is not named here.
            rule: of all bodies and of the result.
            tables: the levels of the result.
            x: float32, 1-D, contiguous: added to the sums, and left with the remainder; None adds and
                leaves nothing.
            before: float32 of as many elements: receives what ``x`` held in the layers; None only where
                there is no ``x``.
            keys: of the random numbers of the result.
            reserve: bytes to leave free in front.

        Returns:
            ``(data, marks)``: the body without codebooks; and ``uint8[L]``: 1 where a layer was not
            finite.

        Raises:
            WireError: a body is damaged or does not belong to these layers; ``x`` is as it was.
            ValueError: the arguments do not fit together.
        """


class RotationKernels(Protocol):
    """Randomized Hadamard rotation of layers, which spreads each value over a chunk.

    How it is made is described in :mod:`hvd_adaptive.kernels.rotation`. Source: Suresh, Yu, Kumar and
    McMahan, "Distributed Mean Estimation with Limited Communication" (ICML 2017), section 3.
    """

    def rotate_(
        self, layers: Sequence[Tensor], key: int, grads: Sequence[Tensor] | None = None
    ) -> npt.NDArray[np.uint8]:
        """Add the gradients and rotate the sums in place.

        Orthonormal: lengths and angles stay what they are, but for float32 rounding.

        Args:
            layers: contiguous float32, of any shape.
            key: of the random signs.
            grads: one per layer, of as many elements; None adds nothing.

        Returns:
            ``uint8[L]``: 0 where the layer was rotated; 1 where the sum has a NaN or an Inf, 2 where it
            has a magnitude above :data:`LARGEST_ROTATED`. These layers keep what they held.

        Raises:
            ValueError: the tensors are not as described.
        """

    def rotate_back_(
        self, layers: Sequence[Tensor], key: int, outs: Sequence[Tensor] | None = None
    ) -> None:
        """Undo :meth:`rotate_`, in place or into ``outs``; :data:`LARGEST_BACK` saturates.

        Args:
            layers: contiguous float32, of any shape.
            key: that of the rotation.
            outs: one per layer, of as many elements: added to, instead of changing ``layers``.

        Raises:
            ValueError: the tensors are not as described.
        """


class EntropyKernels(Protocol):
    """Huffman coding of quantized layers' codes, in host memory."""

    def encode(
        self,
        body: Tensor,
        numels: npt.NDArray[np.int64],
        rule: QuantizationRule,
        tables: Tables,
        front: Front = ...,
    ) -> tuple[Tensor, dict[int, bytes]]:
        """Huffman-code the layers for which that takes fewer bytes.

        Never larger than ``body``, the codebooks included. Cost: some two memcpys of the tensor.
        Lossless.

        Args:
            body: uint8, 1-D, on the CPU: quantized layers, without their reserve.
            numels: ``int64[L]``.
            rule: of that call.
            tables: of that call.
            front: makes what is put before the layers; nothing by default.

        Returns:
            The layers, and for each number of bits that was coded its Huffman code as it is sent.
        """

    def decode(
        self,
        body: Tensor,
        start: int,
        numels: Sequence[int],
        rule: QuantizationRule,
        tables: Tables,
        codes: Mapping[int, Code],
    ) -> Tensor:
        """Undo :meth:`encode`: every layer's codes packed.

        Args:
            body: uint8, 1-D, contiguous, on the CPU.
            start: byte of it at which the layers begin.
            numels: elements of each layer.
            rule: that of compression.
            tables: levels for all numbers of bits that a layer may have.
            codes: the Huffman codes, by bits.

        Raises:
            WireError: a layer is cut short, has no code, or its stream is damaged.
        """

    def read_codebooks(
        self, data: npt.NDArray[np.uint8], rule: QuantizationRule
    ) -> tuple[Tables, dict[int, Code], int]:
        """The codebooks at the front of a body.

        Args:
            data: the body.
            rule: that of compression.

        Returns:
            The levels, those of ``rule`` or in the body; the Huffman codes, by bits; and the byte
            at which the layers begin.

        Raises:
            WireError: the codebooks are damaged, or of another rule.
        """

    def expected_bytes(self, counts: npt.NDArray[np.float64], numel: int) -> int:
        """Bytes of a layer's stream and its code, where each code occurs ``counts`` times on average.

        Codes are taken to be independent, which is an upper bound. A stream then takes their entropy
        and what a code that is made for counts, which are drawn here, is off it. A standard deviation
        of what the draws of rounding may add is on top. Cost: that of making a code.

        Args:
            counts: ``float64[alphabet]``, not negative; they sum to ``numel``.
            numel: elements of the layer, at least 1.
        """


class SubsetKernels(Protocol):
    """Random subsets that all ranks draw alike."""

    def first_indices(self, numel: int, count: int, key: int) -> Tensor:
        """``count`` different numbers below ``numel``: the beginning of a random order.

        Each number is as likely as any other. Cost: about 3 ns an index at most; releases the GIL.

        Args:
            numel: below 2^31.
            count: at most ``numel``.
            key: the same key gives the same numbers, and a smaller count a beginning of them.

        Returns:
            int64, 1-D, not sorted, in host memory: runs of :func:`run_length` neighbors.

        Raises:
            ValueError: a count beyond ``numel``, or a ``numel`` beyond 2^31.
        """

    def take_(self, x: Tensor, count: int, key: int) -> Tensor:
        """``x[first_indices(x.numel(), count, key)]``, which are 0 in ``x`` afterwards.

        Args:
            x: float32, 1-D, contiguous, on any device; in host memory no indices are written down.
            count: how many.
            key: which subset.

        Raises:
            ValueError: ``x`` is of another kind, or has too few elements.
        """

    def add_(self, x: Tensor, values: Tensor, key: int, scale: float = 1.0, skip: int = 0) -> None:
        """``x[first_indices(x.numel(), values.numel(), key)] += scale * values``, as :func:`take_`.

        Args:
            x: float32, 1-D, contiguous.
            values: float32, 1-D, contiguous, of the same device.
            key: which subset.
            scale: factor of the values.
            skip: so many values at the beginning are not added.

        Raises:
            ValueError: ``x`` or ``values`` are of another kind, or there are more values than elements.
        """


class MeasuringKernels(Protocol):
    """What planners ask of every gradient: sums of it, each in one pass."""

    def signed_sums(self, x: Tensor, signs: Signs, minus: Tensor | None = None) -> SignedSums:
        """Sums under random signs, the energy, and how many elements are not 0; of ``x - minus``.

        Numbers and energy are float32 within 512 elements, and not finite where an element is not.
        Cost: a pass over ``x``, and one over ``minus``.

        Args:
            x: float32, 1-D, contiguous.
            signs: of as many elements.
            minus: of the same kind and size; None takes nothing away.

        Raises:
            ValueError: ``x`` or ``minus`` is of another kind, or the sizes do not fit.
        """

    def cast_error(self, x: Tensor, dtype: torch.dtype) -> float:
        """Squared error of a cast whose values saturate; not finite where an element is not.

        Args:
            x: float32, 1-D, contiguous.
            dtype: ``torch.float16`` or ``torch.bfloat16``.

        Raises:
            ValueError: ``x`` is of another kind.
        """


class Kernels:
    """The families of one backend; a module is imported when it is first used.

    Args:
        backend: one of those in :data:`REGISTRY`; what it lacks is that of the reference.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend

    @property
    def reads_halves(self) -> bool:
        """Whether gradients of one call may all be float16, or all bfloat16."""
        return self.backend in READS_HALVES

    @functools.cached_property
    def sparse(self) -> SparseKernels:
        """Positions and values of some elements."""
        return cast(SparseKernels, self._family("sparse"))

    @functools.cached_property
    def quantized(self) -> QuantizedKernels:
        """All elements in a few bits."""
        return cast(QuantizedKernels, self._family("quantized"))

    @functools.cached_property
    def reduction(self) -> ReductionKernels:
        """Sums of quantized layers, quantized again."""
        return cast(ReductionKernels, self._family("reduction"))

    @functools.cached_property
    def entropy(self) -> EntropyKernels:
        """Huffman coding; of tensors in host memory, whatever the backend."""
        return cast(EntropyKernels, self._family("entropy"))

    @functools.cached_property
    def rotation(self) -> RotationKernels:
        """Randomized Hadamard rotation."""
        return cast(RotationKernels, self._family("rotation"))

    @functools.cached_property
    def subset(self) -> SubsetKernels:
        """Random elements."""
        return cast(SubsetKernels, self._family("subset"))

    @functools.cached_property
    def measuring(self) -> MeasuringKernels:
        """Sums of gradients that planners ask for."""
        return cast(MeasuringKernels, self._family("measuring"))

    def _family(self, family: str) -> Any:
        modules = REGISTRY[family]
        return importlib.import_module(modules.get(self.backend, modules["reference"]))


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on ``device``.

    Example:
        >>> for_device(torch.device("cpu")).backend, for_device(torch.device("meta")).backend
        ('cpu', 'reference')
    """
    return _of_backend(_usable(BACKENDS.get(device.type, "reference")))


@functools.cache
def _usable(backend: str) -> str:
    """The backend, if what it needs is installed; nothing is imported to find out."""
    missing = backend in NEEDS and importlib.util.find_spec(NEEDS[backend]) is None
    return "reference" if missing else backend


@functools.cache
def _of_backend(backend: str) -> Kernels:
    return Kernels(backend)
