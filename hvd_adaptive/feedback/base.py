"""Feedback: what happens to what compression left out.

A rule is a frozen dataclass of options; its *state* owns the flat buffers in which a bucket's layers
are compressed. Because a compressor leaves in its input exactly what it did not send, error feedback
needs no arithmetic of its own: the buffer is the residual, and the next gradient is added to it.

One step of a bucket calls, in this order:

* :meth:`FeedbackState.begin` gives the buffer and what the compressor is to add to it;
* :meth:`FeedbackState.commit` takes the remainder that the compressor left in the buffer;
* :meth:`FeedbackState.finish` sees the reduced result, and changes it where the rule says so;
* :meth:`FeedbackState.restore` takes back what was done for layers that were not finite on some rank.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from hvd_adaptive.buckets import Bucket
from hvd_adaptive.feedback.owned import OwnedPieces, OwnedResiduals
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
    estimates: ClassVar[bool] = False
    """Whether what is compressed is the gradient's difference from an estimate, never the gradient."""
    hosts_others: ClassVar[bool] = False
    """Whether layers that keep nothing may share the buckets of layers that follow the rule."""

    @property
    def needs_all(self) -> bool:
        """Whether all gradients must be there before the first of them is sent."""
        return False

    @abstractmethod
    def new_state(self, context: FeedbackContext) -> FeedbackState:
        """The buffers of one optimizer on one rank, still empty."""


@dataclass
class FeedbackContext:
    """What a feedback state may ask about the run.

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
    shared: ClassVar[tuple[str, ...]] = ()
    """The slots that all ranks hold alike; of the others only the sum over the ranks counts."""
    needs_gradient_after_commit: ClassVar[bool] = False
    """Whether :meth:`commit`, or :meth:`restore` of what was not committed, looks at the gradients."""

    def __init__(self, context: FeedbackContext, dtype: torch.dtype = torch.float32) -> None:
        self._context = context
        self._dtype = dtype
        self._flats: dict[tuple[str, int], Tensor] = {}
        self._buckets: tuple[Bucket, ...] = ()
        self._owned = OwnedResiduals()
        self._parts: dict[int, FeedbackState] = {}

    def attach(self, buckets: Sequence[Bucket], kept: LayerStates) -> None:
        """Make buffers for ``buckets``; take from ``kept`` what belongs in them.

        Buckets whose layers stay the same keep their buffers: fresh memory costs a page fault for
        every 4 KiB, at every change of plan.
        """
        places = {bucket.layers: bucket.index for bucket in self._buckets}
        before = self._flats
        self._buckets = tuple(buckets)
        self._parts.clear()
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
        return sum(flat.nbytes for flat in self._flats.values()) + self._owned.nbytes

    def views(self, slot: str, bucket: Bucket) -> list[Tensor]:
        """The layers in one of the bucket's buffers."""
        return split(self._flats[slot, bucket.index], bucket.layers)

    # --- of the part that this rank compresses for its node ---------------------------------------

    def part(self, bucket: Bucket, part: Bucket, start: int) -> FeedbackState:
        """What is kept of the elements of ``part`` alone, which begin at ``start`` of the bucket.

        The memory is that of the whole bucket.
        """
        state = self._parts.get(bucket.index)
        if state is None or state._buckets != (part,):
            state = self._parts[bucket.index] = copy.copy(self)
            state._buckets = (part,)
            state._flats = {
                (slot, part.index): self._flats[slot, bucket.index][start : start + part.numel]
                for slot in self.slots
            }
        return state

    def gathered_slots(self, bucket: Bucket) -> list[Tensor]:
        """The flat buffers of the bucket of which only the sum over the ranks counts."""
        return [self._flats[slot, bucket.index] for slot in self.slots if slot not in self.shared]

    # --- of the shard that this rank owns ---------------------------------------------------------

    def owned(self, bucket: Bucket, start: int, stop: int) -> Tensor | None:
        """What has not been passed on of the sum of elements ``start:stop`` of the bucket.

        Returns:
            1-D float32, in the units of a sum over the ranks, for a scheme to compress with the next
            sum and to leave the remainder in; None where nothing is kept.
        """
        return self._owned.of(bucket, start, stop, self._hand_back) if self.slots else None

    def keep_owned(self, buckets: Sequence[Bucket]) -> None:
        """Hand back what is owned of other buckets than these: it goes with this rank's gradients."""
        self._owned.keep_only(buckets, self._hand_back)

    def owned_pieces(self) -> OwnedPieces:
        """All that is owned, by layer: views."""
        return self._owned.pieces()

    def load_owned(self, pieces: OwnedPieces) -> None:
        """Own these pieces, too; what fits no shard any more is handed back."""
        self._owned.load(pieces)

    def _hand_back(self, name: str, start: int, piece: Tensor) -> None:
        for bucket in self._buckets:
            for layer, view in zip(bucket.layers, self.views(self.slots[0], bucket), strict=True):
                if layer.name == name:
                    view[start : start + piece.numel()].add_(piece)

    def observe_all(self, grads: Mapping[int, Tensor]) -> None:
        """Look at all gradients (by layer index) before the first bucket begins."""
        del grads

    @property
    def previews_exactly(self) -> bool:
        """Whether :meth:`preview` is to the bit what :meth:`begin` gives, and :meth:`begin` changes
        nothing else."""
        return False

    def preview(self, bucket: Bucket, grads: Sequence[Tensor]) -> list[Tensor]:
        """What of each layer would be compressed now, 1-D float32; changes nothing."""
        flats = [grad.reshape(-1).float() for grad in grads]
        if not self.slots:
            return flats
        held = self.views(self.slots[0], bucket)
        return [view.float() + flat for view, flat in zip(held, flats, strict=True)]

    def merge_ranks(self, bucket: Bucket, reduce: ReduceBuffer, fresh: bool) -> dict[str, Tensor]:
        """Ranks have come or gone: one that has kept nothing begins as :data:`ReduceBuffer` says.

        Returns:
            The reduction over all ranks of each slot that they do not share.
        """
        found = {}
        for slot in self.slots:
            if slot not in self.shared:
                flat = self._flats[slot, bucket.index]
                start, found[slot] = reduce(flat)
                if fresh:
                    flat.copy_(start)
        return found

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


def split(flat: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Views of the layers that stand side by side in ``flat``."""
    return list(torch.split(flat, [layer.numel for layer in layers]))


LARGEST_MAGNITUDE = 1e36
"""Magnitude at which residuals and velocities saturate: sums of some hundreds stay finite."""


class ResidualState(FeedbackState):
    """A state with a slot of gradient mass that waits."""

    def postpone(self, bucket: Bucket, position: int, excess: Tensor) -> None:
        """Add it to what waits."""
        self.views(RESIDUAL, bucket)[position].add_(excess)
