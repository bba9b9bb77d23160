"""Feedback: what happens to what compression left out.

A rule is a frozen dataclass of options; its *memory* owns the flat buffers in which a bucket's layers
are compressed. Because a compressor leaves in its input exactly what it did not send, error feedback
needs no arithmetic of its own: the buffer is the residual, and the next gradient is added to it.

One step of a bucket calls, in this order:

* :meth:`FeedbackState.begin` gives the buffer and what the compressor is to add to it;
* :meth:`FeedbackState.commit` takes the remainder that the compressor left in the buffer;
* :meth:`FeedbackState.finish` sees the reduced result, and changes it where the rule says so;
* :meth:`FeedbackState.restore` takes back what was done for layers that were not finite on some rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from hvd_adaptive import rng, specs
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.compressors.base import all_finite
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.floats import CANCELLED
from hvd_adaptive.layers import Layer

LayerStates: TypeAlias = dict[str, dict[str, Tensor]]
"""What is kept of each layer: 1-D tensors by layer and slot."""


def copied(kept: LayerStates) -> LayerStates:
    """A copy of what is kept of each layer."""
    return {
        name: {slot: tensor.clone() for slot, tensor in slots.items()} for name, slots in kept.items()
    }


ReduceBuffer: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of a buffer of all ranks: what one begins with that has none, and then the reduction over all."""

RESIDUAL = "residual"
"""The slot of gradient mass that has not been sent."""


@dataclass(frozen=True)
class Feedback(ABC):
    """A rule and its options."""

    name: ClassVar[str]
    keeps: ClassVar[bool] = True
    """Whether anything is kept from one step to the next."""
    for_dense: ClassVar[bool] = False
    """Whether layers that are not compressed follow the rule too."""
    needs_selection: ClassVar[bool] = False
    """Whether the rule works only with compressors that send some elements and leave the others."""
    in_warmup: ClassVar[bool] = False
    """Whether the rule is followed from the first dense step on."""

    @property
    def needs_all(self) -> bool:
        """Whether all gradients must be there before the first of them is sent."""
        return False

    @abstractmethod
    def memory(self, context: FeedbackContext) -> FeedbackState:
        """The buffers of one optimizer on one rank, still empty."""


@dataclass
class FeedbackContext:
    """What a memory may ask about the run.

    Args:
        rate: the learning rate of a layer, by its index.
        ranks: number of ranks.
        seed: of the run.
        rank: of the process.
        rates: the rate with which each layer's residual was kept (by name), where a rule looks at it.
    """

    rate: Callable[[int], float]
    ranks: Callable[[], int]
    seed: int = 0
    rank: int = 0
    rates: dict[str, float] = field(default_factory=dict)


class FeedbackState(ABC):
    """What one rank keeps of its layers between steps.

    Buckets may be rebuilt during training (:meth:`attach`); what is kept of a layer follows the layer.
    """

    slots: ClassVar[tuple[str, ...]] = (RESIDUAL,)
    needs_gradient_after_commit: ClassVar[bool] = False
    """Whether :meth:`commit`, or :meth:`restore` of what was not committed, looks at the gradients."""

    def __init__(self, context: FeedbackContext, dtype: torch.dtype = torch.float32) -> None:
        self._context = context
        self._dtype = dtype
        self._flats: dict[tuple[str, int], Tensor] = {}
        self._buckets: tuple[Bucket, ...] = ()

    def attach(self, buckets: Sequence[Bucket], kept: LayerStates) -> None:
        """Make buffers for ``buckets``; take from ``kept`` what belongs in them.

        Buckets whose layers stay the same keep their buffers: fresh memory costs a page fault for
        every 4 KiB, at every change of plan.
        """
        places = {bucket.layers: bucket.index for bucket in self._buckets}
        before = self._flats
        self._buckets = tuple(buckets)
        self._flats = {
            (slot, bucket.index): flat
            for bucket in buckets
            for (slot, index), flat in before.items()
            if index == places.get(bucket.layers)
        }
        for bucket in buckets:
            for slot in self.slots:
                if (slot, bucket.index) not in self._flats:
                    flat = torch.zeros(bucket.numel, dtype=self._dtype, device=bucket.device)
                    self._flats[slot, bucket.index] = flat
                for layer, view in zip(bucket.layers, self.views(slot, bucket), strict=True):
                    held = kept.get(layer.name, {}).pop(slot, None)
                    if held is None:
                        view.zero_()
                    elif held.data_ptr() != view.data_ptr():
                        view.copy_(held)

    def kept(self) -> LayerStates:
        """What is kept of each layer: views, not copies."""
        return {
            layer.name: {slot: self.views(slot, bucket)[position] for slot in self.slots}
            for bucket in self._buckets
            for position, layer in enumerate(bucket.layers)
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(flat.nbytes for flat in self._flats.values())

    def views(self, slot: str, bucket: Bucket) -> list[Tensor]:
        """The layers in one of the bucket's buffers."""
        return split(self._flats[slot, bucket.index], bucket.layers)

    def observe_all(self, grads: Mapping[int, Tensor]) -> None:
        """Look at all gradients (by layer index) before the first bucket begins."""
        del grads

    def preview(self, bucket: Bucket, grads: Sequence[Tensor]) -> list[Tensor]:
        """What of each layer would be compressed now, 1-D float32; changes nothing."""
        flats = [grad.reshape(-1).float() for grad in grads]
        if not self.slots:
            return flats
        held = self.views(self.slots[0], bucket)
        return [view.float() + flat for view, flat in zip(held, flats, strict=True)]

    def merge_ranks(self, bucket: Bucket, meet: ReduceBuffer, fresh: bool) -> None:
        """Ranks have come or gone: one that has kept nothing begins as :data:`ReduceBuffer` says."""
        for slot in self.slots:
            flat = self._flats[slot, bucket.index]
            start, _ = meet(flat)
            if fresh:
                flat.copy_(start)

    @abstractmethod
    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The flat float32 buffer that is compressed, and what is added to its layers first."""

    def commit(
        self, bucket: Bucket, x: Tensor, grads: Sequence[Tensor], good: Sequence[bool], step: int
    ) -> None:
        """Keep the remainder in ``x``.

        Layers that are not ``good`` are as :meth:`begin` gave them, but for rounding.
        """
        del bucket, x, grads, good, step

    def finish(self, bucket: Bucket, outs: Sequence[Tensor], good: Sequence[bool]) -> None:
        """What was reduced is in ``outs``; layers that are not ``good`` were NaN on some rank."""
        del bucket, outs, good

    def postpone(self, bucket: Bucket, position: int, excess: Tensor) -> None:
        """Keep for the next step what the reduced gradient of one layer cannot hold.

        Args:
            bucket: the bucket.
            position: of the layer in it.
            excess: this rank's share of it, 1-D float32.
        """
        del bucket, position, excess

    def clear_sent(
        self, bucket: Bucket, clear: Callable[[Sequence[Tensor]], None], good: Sequence[bool]
    ) -> None:
        """``clear`` sets those elements of a list of layers to 0 that this rank has sent."""
        del bucket, clear, good

    def restore(
        self,
        bucket: Bucket,
        position: int,
        grad: Tensor,
        own: Tensor | None,
    ) -> None:
        """Go back to the state before the step, for one layer that was not finite on some rank.

        Args:
            bucket: the bucket.
            position: of the layer in it.
            grad: this rank's gradient.
            own: what this rank has sent; None where the remainder was not committed.
        """
        del bucket, position, grad, own


# --- none -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """What was left out is dropped. Memory: one float32 buffer for each bucket that is coded."""

    name = "none"
    keeps = False

    def memory(self, context: FeedbackContext) -> FeedbackState:
        """Scratch space only."""
        return _Scratch(context)


class _Scratch(FeedbackState):
    """Buffers that are cleared at each use, made on demand: buckets that are only summed need none."""

    slots = ()

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Zeros, and the gradients."""
        del step
        flat = self._flats.get(("", bucket.index))
        if flat is None:
            flat = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
            self._flats["", bucket.index] = flat
        return flat.zero_(), grads


# --- error feedback -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """What was left out is added to the next gradient.

    Memory: one residual a gradient element, of 4 or 2 bytes. Source: Seide et al., "1-Bit Stochastic
    Gradient Descent" (Interspeech 2014); Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML
    2019).

    Args:
        decay: what the residual is multiplied with before the gradient is added: 1 keeps all of it,
            less forgets old gradients.
        dtype: ``fp32``, or ``bf16`` for half the memory. A bf16 residual is rounded at random, so that
            small gradients are added up in expectation instead of being rounded away.
        lr_correction: multiply the residual by the ratio of the last learning rate to this one, so
            that an old gradient counts with the rate of its own step. A rate below a 10,000th of the
            last counts as 0, at which nothing is corrected.

    Raises:
        ValueError: a decay outside (0, 1], or another dtype.
    """

    decay: float = 1.0
    dtype: str = "fp32"
    lr_correction: bool = False

    name = "ef"

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"ef: decay must lie in (0, 1], got {self.decay}: 1 keeps the residual whole"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"ef: dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}")

    def memory(self, context: FeedbackContext) -> FeedbackState:
        """Residuals."""
        return _Residuals(self, context)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_LARGEST_RATIO = 1e4
"""A learning rate that falls further within one step counts as 0: nearly nothing is applied at it."""
_LARGEST = 1e36
"""Magnitude at which residuals and velocities saturate: sums of some hundreds stay finite."""


def _scale_(x: Tensor, factor: float) -> None:
    """Multiply; what would come near the end of float32 saturates, and is not Inf forever after."""
    x.mul_(factor)
    if factor > 1.0:
        x.clamp_(-_LARGEST, _LARGEST)


class _KeepsResidual(FeedbackState):
    """A memory with a slot of gradient mass that waits."""

    def postpone(self, bucket: Bucket, position: int, excess: Tensor) -> None:
        """Add it to what waits."""
        self.views(RESIDUAL, bucket)[position].add_(excess)


class _Residuals(_KeepsResidual):
    """The residuals of error feedback."""

    def __init__(self, rule: ErrorFeedback, context: FeedbackContext) -> None:
        super().__init__(context, _DTYPES[rule.dtype])
        self._rule = rule

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The residual itself (a float32 copy of it where it is kept in bf16), and the gradients."""
        del step
        kept = self._flats[RESIDUAL, bucket.index]
        x = kept if kept.dtype == torch.float32 else kept.float()
        if self._rule.decay != 1.0:
            x.mul_(self._rule.decay)
        if self._rule.lr_correction:
            for layer, view in zip(bucket.layers, split(x, bucket.layers), strict=True):
                now = self._context.rate(layer.index)
                before = self._context.rates.get(layer.name, now)
                # at a rate of 0, or next to it, nothing is applied, and nothing is to be corrected
                if now > before / _LARGEST_RATIO:
                    _scale_(view, before / now)
                    self._context.rates[layer.name] = now
        return x, grads

    def commit(
        self, bucket: Bucket, x: Tensor, grads: Sequence[Tensor], good: Sequence[bool], step: int
    ) -> None:
        """Round what is kept in bf16; float32 was changed in place."""
        del grads, good
        kept = self._flats[RESIDUAL, bucket.index]
        if kept.dtype == torch.bfloat16:
            context = self._context
            (key,) = rng.layer_keys(context.seed, context.rank, step, [-1 - bucket.index])
            for_device(x.device).quantized.round_at_random_(kept, x, int(key))

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """Remainder + what was sent - gradient; what that leaves of rounding alone becomes 0."""
        if own is None:
            return
        kept = self.views(RESIDUAL, bucket)[position]
        total = kept.float() + own
        back = total - grad
        back[back.abs() <= CANCELLED * grad.abs()] = 0.0
        kept.copy_(back)


# --- EF21 -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EF21(Feedback):
    """Every rank keeps an estimate of its gradient and sends what the estimate lacks.

    Rank m sends ``c = C(g - h)`` and adds it to its estimate ``h``; all step with the mean of the
    estimates, ``H``. Estimates start from the last gradient of the dense warm-up (from 0 without one).
    Memory: two float32 a gradient element. For biased compressors; converges without bounded
    gradients. Source: Richtarik, Sokolov and Fatkhullin, "EF21" (NeurIPS 2021), algorithm 1, layer by
    layer as in Kimad (Xin et al., 2023).
    """

    name = "ef21"
    in_warmup = True

    def memory(self, context: FeedbackContext) -> FeedbackState:
        """Estimates and their mean."""
        return _Estimates(context)


class _Estimates(FeedbackState):
    """``-h`` in the place of a residual: with the gradient added it is what is to be compressed."""

    slots = ("estimate", "mean")
    needs_gradient_after_commit = True

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``-h``, and the gradients. A bucket that is sent whole starts from 0: that is exact."""
        del step
        estimate = self._flats["estimate", bucket.index]
        if all(part.compressor.name == "none" for part in bucket.parts):
            estimate.zero_()
            self._flats["mean", bucket.index].zero_()
        return estimate, grads

    def commit(
        self, bucket: Bucket, x: Tensor, grads: Sequence[Tensor], good: Sequence[bool], step: int
    ) -> None:
        """The remainder is ``g - h - c``: less ``g`` it is ``-(h + c)``."""
        del x, step
        for view, grad, fine in zip(self.views("estimate", bucket), grads, good, strict=True):
            if fine:
                view.sub_(grad.reshape(-1))

    def finish(self, bucket: Bucket, outs: Sequence[Tensor], good: Sequence[bool]) -> None:
        """``H`` grows by what was sent, and is what all step with."""
        for view, out, fine in zip(self.views("mean", bucket), outs, good, strict=True):
            if fine:
                out.copy_(view.add_(out.view(-1)).view_as(out))

    def merge_ranks(self, bucket: Bucket, meet: ReduceBuffer, fresh: bool) -> None:
        """``H`` becomes the mean of the estimates of the ranks that there are now."""
        estimate = self._flats["estimate", bucket.index]
        start, reduced = meet(estimate)
        if fresh:
            estimate.copy_(start)
        self._flats["mean", bucket.index].copy_(reduced).neg_()

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """Take from ``h`` what was sent."""
        del grad
        if own is not None:
            self.views("estimate", bucket)[position].add_(own)


# --- momentum correction --------------------------------------------------------------------------


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Momentum is applied before compression, to the local gradient: Deep Gradient Compression.

    ``u = momentum * u + g; v = v + u``; the top of ``v`` is sent; where an element was sent, ``u`` and
    ``v`` become 0. The wrapped optimizer must then have no momentum of its own. Layers that are not
    compressed send ``u`` whole. Memory: two float32 a gradient element. Source: Lin et al., "Deep
    Gradient Compression" (ICLR 2018), sections 3.1 to 3.3.

    Args:
        momentum: factor of the velocity ``u``, in [0, 1).
        masking: clear ``u`` where an element was sent (momentum factor masking), so that stale
            momentum does not carry weights in the wrong direction.
        clip: clip the norm of each rank's whole gradient at ``clip / sqrt(ranks)`` before it is
            added; 0 does not. Clipping waits for all gradients, so nothing is sent during the
            backward pass.

    Raises:
        ValueError: a momentum outside [0, 1), or a negative clip.
    """

    momentum: float = 0.9
    masking: bool = True
    clip: float = 0.0

    name = "dgc"
    for_dense = True
    in_warmup = True
    needs_selection = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"dgc: momentum must lie in [0, 1), got {self.momentum}")
        if not 0.0 <= self.clip < math.inf:
            raise ValueError(f"dgc: clip is the largest norm of a gradient, or 0, got {self.clip}")

    @property
    def needs_all(self) -> bool:
        """The norm of the whole gradient does."""
        return self.clip > 0.0

    def memory(self, context: FeedbackContext) -> FeedbackState:
        """Residuals and velocities."""
        return _Velocities(self, context)


class _Velocities(_KeepsResidual):
    """``v`` in the place of the residual, ``u`` in that of the gradient."""

    slots = (RESIDUAL, "velocity")
    needs_gradient_after_commit = True

    def __init__(self, rule: MomentumCorrection, context: FeedbackContext) -> None:
        super().__init__(context)
        self._rule = rule
        self._factor = 1.0

    def observe_all(self, grads: Mapping[int, Tensor]) -> None:
        """Find the factor that clips the whole gradient; one that is not finite is not clipped."""
        if not self._rule.clip:
            return
        squares = sum(float(grad.double().square().sum()) for grad in grads.values())
        limit = self._rule.clip / math.sqrt(self._context.ranks())
        norm = math.sqrt(squares) if math.isfinite(squares) else 0.0
        self._factor = min(1.0, limit / norm) if norm > 0.0 else 1.0

    def begin(
        self, bucket: Bucket, grads: Sequence[Tensor], step: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """``v``, and the velocities; a gradient that is not finite stands for itself."""
        del step
        adds: list[Tensor] = []
        for grad, velocity in zip(grads, self.views("velocity", bucket), strict=True):
            flat = grad.reshape(-1)
            if all_finite(flat):
                velocity.mul_(self._rule.momentum).add_(flat, alpha=self._factor)
                if not all_finite(velocity):
                    velocity.clamp_(-_LARGEST, _LARGEST)  # Inf would stay forever
                adds.append(velocity)
            else:
                adds.append(flat)
        return self._flats[RESIDUAL, bucket.index], adds

    def clear_sent(
        self, bucket: Bucket, clear: Callable[[Sequence[Tensor]], None], good: Sequence[bool]
    ) -> None:
        """Factor masking; layers that are to be restored are left alone."""
        if self._rule.masking:
            views = self.views("velocity", bucket)
            clear([v if fine else v.clone() for v, fine in zip(views, good, strict=True)])

    def restore(self, bucket: Bucket, position: int, grad: Tensor, own: Tensor | None) -> None:
        """``v = remainder + sent - u``, then ``u = (u - g) / momentum``."""
        flat = grad.reshape(-1)
        if not all_finite(flat):
            return  # nothing was done on this rank
        velocity = self.views("velocity", bucket)[position]
        if own is not None:
            self.views(RESIDUAL, bucket)[position].add_(own).sub_(velocity)
        if self._rule.momentum:
            velocity.sub_(flat, alpha=self._factor).div_(self._rule.momentum)
        else:
            velocity.zero_()


REGISTRY: Mapping[str, type[Feedback]] = {
    rule.name: rule for rule in (NoFeedback, ErrorFeedback, EF21, MomentumCorrection)
}


def parse(spec: str | Feedback | None) -> Feedback | None:
    """Make a rule of ``"name"`` or ``"name:option=value"``; None stays None.

    Raises:
        ValueError: unknown name or option, or a value that does not fit.
        TypeError: not a specification of a rule.

    Example:
        >>> parse("ef:dtype=bf16")
        ErrorFeedback(decay=1.0, dtype='bf16', lr_correction=False)
    """
    if spec is None or isinstance(spec, Feedback):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"feedback must be text such as 'ef' or 'ef:decay=0.9', or None, got {spec!r}")
    return specs.read("feedback", REGISTRY, spec)


def format_rule(rule: Feedback) -> str:
    """The text that :func:`parse` reads back as an equal rule: its name, and what is not default.

    Example:
        >>> format_rule(ErrorFeedback()), format_rule(ErrorFeedback(decay=0.9))
        ('ef', 'ef:decay=0.9')
    """
    return specs.write(rule.name, rule, defaults=False)


def split(flat: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Views of the layers that stand side by side in ``flat``."""
    return list(torch.split(flat, [layer.numel for layer in layers]))
