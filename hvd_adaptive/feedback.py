"""Feedback: what happens to what compression left out.

A rule owns the flat buffers in which a bucket's layers are compressed. Because a compressor leaves in
its input exactly what it did not send, error feedback needs no arithmetic of its own: the buffer is
the residual, and the next gradient is added to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.layers import Layer


class Feedback(ABC):
    """Prepares the tensor that is compressed, and keeps what is left of it.

    One instance serves one optimizer on one rank. Buckets may be rebuilt during training
    (:meth:`attach`); what is kept of a layer follows the layer.
    """

    name: ClassVar[str]
    keeps: ClassVar[bool]
    """Whether anything is kept from one step to the next."""

    def __init__(self) -> None:
        self._flats: dict[int, Tensor] = {}

    @abstractmethod
    def attach(self, buckets: Sequence[Bucket], kept: dict[str, Tensor]) -> None:
        """Make buffers for ``buckets``; take from ``kept`` (by layer name) what belongs in them."""

    @abstractmethod
    def begin(self, bucket: Bucket) -> Tensor:
        """The flat float32 buffer to which the compressor adds the bucket's gradients."""

    @abstractmethod
    def residuals(self) -> dict[str, Tensor]:
        """What is kept of each layer (1-D float32, by name): views, not copies."""


class NoFeedback(Feedback):
    """What was left out is dropped. Memory: one float32 buffer for each bucket that is coded."""

    name = "none"
    keeps = False

    def attach(self, buckets: Sequence[Bucket], kept: dict[str, Tensor]) -> None:
        """Nothing is taken: what is kept of these layers goes out with their next gradient."""
        del buckets, kept
        self._flats = {}

    def begin(self, bucket: Bucket) -> Tensor:
        """The buffer, cleared; made on demand, because buckets that are only summed need none."""
        if bucket.index not in self._flats:
            self._flats[bucket.index] = _zeros(bucket)
        return self._flats[bucket.index].zero_()

    def residuals(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}


class ErrorFeedback(Feedback):
    """What was left out is added to the next gradient.

    Memory: one float32 a gradient element. Source: Seide et al., "1-Bit Stochastic Gradient Descent"
    (Interspeech 2014); Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019).
    """

    name = "ef"
    keeps = True

    def __init__(self) -> None:
        super().__init__()
        self._residuals: dict[str, Tensor] = {}

    def attach(self, buckets: Sequence[Bucket], kept: dict[str, Tensor]) -> None:
        """Lay the residuals of each bucket side by side."""
        self._flats = {bucket.index: _zeros(bucket) for bucket in buckets}
        self._residuals = {}
        for bucket in buckets:
            views = split(self._flats[bucket.index], bucket.layers)
            for layer, view in zip(bucket.layers, views, strict=True):
                if layer.name in kept:
                    view.copy_(kept.pop(layer.name))
                self._residuals[layer.name] = view

    def begin(self, bucket: Bucket) -> Tensor:
        """The residual itself."""
        return self._flats[bucket.index]

    def residuals(self) -> dict[str, Tensor]:
        """The residual of each layer."""
        return dict(self._residuals)


REGISTRY: Mapping[str, type[Feedback]] = {rule.name: rule for rule in (NoFeedback, ErrorFeedback)}


def check_name(name: str | None) -> str | None:
    """Return ``name``; ValueError, listing the rules, if there is none of that name."""
    if name is not None and name not in REGISTRY:
        raise ValueError(
            f"unknown feedback {name!r}: the rules are {', '.join(REGISTRY)}; None lets each "
            "compressor choose (ef for biased ones)"
        )
    return name


def split(flat: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Views of the layers that stand side by side in ``flat``."""
    return list(torch.split(flat, [layer.numel for layer in layers]))


def _zeros(bucket: Bucket) -> Tensor:
    return torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
