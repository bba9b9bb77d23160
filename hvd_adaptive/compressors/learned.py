"""Quantizers whose levels follow the distribution of the gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from hvd_adaptive.compressors.base import Compressor
from hvd_adaptive.compressors.distributions import Weighting
from hvd_adaptive.compressors.level_fitting import LearnedLevels
from hvd_adaptive.compressors.quantized import check_choice
from hvd_adaptive.compressors.quantizers import RandomQuantizer
from hvd_adaptive.wire.quantized import MAX_BITS, Norm, QuantizationRule, Rounding


@dataclass(frozen=True)
class _Learned(RandomQuantizer):
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
        check_choice(self.name, "norm", self.norm, ("l2", "max"))
        check_choice(self.name, "weighting", self.weighting, ("expected", "normalized"))
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
        >>> import torch
        >>> from hvd_adaptive.compressors import LayerContext
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
        check_choice(self.name, "zero", self.zero, ("auto", "true", "false"))
        check_choice(self.name, "method", self.method, ("cd", "gd"))
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
        >>> import torch
        >>> amq = AMQ(bits=2)
        >>> x = torch.tensor([4.0, -2.0])
        >>> payload, out = amq.compress_(x, 2), torch.zeros(2)
        >>> amq.decompress_add_(payload, out)
        >>> out.tolist()
        [4.0, -2.0]
    """

    name = "amq"
    kind = "amq"
