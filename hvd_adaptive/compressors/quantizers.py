"""Quantizers whose levels are the same in all steps, with random rounding or with signs alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from hvd_adaptive.compressors.base import Level
from hvd_adaptive.compressors.quantized import (
    CODINGS,
    ROTATIONS,
    Quantizer,
    check_block,
    check_choice,
)
from hvd_adaptive.wire.quantized import MAX_BITS, Norm, QuantizationRule, Rounding


@dataclass(frozen=True)
class RandomQuantizer(Quantizer):
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
        check_choice(self.name, "coding", self.coding, CODINGS)
        check_choice(self.name, "rotate", self.rotate, ROTATIONS)
        check_block(self.name, self.block)
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


@dataclass(frozen=True)
class QSGD(RandomQuantizer):
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
        >>> import torch
        >>> from hvd_adaptive.compressors import LayerContext
        >>> x = torch.tensor([3.0, -4.0])
        >>> qsgd = QSGD(bits=4)
        >>> payload, out = qsgd.compress_(x, 4, LayerContext(key=7)), torch.zeros(2)
        >>> qsgd.decompress_add_(payload, out)
        >>> payload.nbytes, (out + x).tolist()
        (7, [3.0, -4.0])
    """

    name = "qsgd"


@dataclass(frozen=True)
class QSGDInf(RandomQuantizer):
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
        >>> import torch
        >>> x, out = torch.tensor([4.0, -4.0, 0.0]), torch.zeros(3)
        >>> qsgdinf = QSGDInf(bits=2)
        >>> qsgdinf.decompress_add_(qsgdinf.compress_(x, 2), out)
        >>> out.tolist(), x.tolist()
        ([4.0, -4.0, 0.0], [0.0, 0.0, 0.0])
    """

    name = "qsgdinf"
    norm_of_block = Norm.max


@dataclass(frozen=True)
class NUQSGD(RandomQuantizer):
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
        >>> import torch
        >>> x, out = torch.tensor([0.0, -8.0]), torch.zeros(2)
        >>> nuqsgd = NUQSGD(bits=3)
        >>> nuqsgd.decompress_add_(nuqsgd.compress_(x, 3), out)
        >>> out.tolist()
        [0.0, -8.0]
    """

    name = "nuqsgd"
    rounding = Rounding.powers


@dataclass(frozen=True)
class Natural(RandomQuantizer):
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
        >>> import torch
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
        >>> import torch
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
        check_choice(self.name, "coding", self.coding, CODINGS)
        check_choice(self.name, "rotate", self.rotate, ROTATIONS)
        check_block(self.name, self.block)
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
        check_choice(self.name, "rotate", self.rotate, ROTATIONS)
        check_block(self.name, self.block)
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
        >>> import torch
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
        >>> import torch
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
