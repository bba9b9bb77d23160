"""Feedback states: what is kept of every layer, by feedback rule, and what is sent of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hvd_adaptive import feedback
from hvd_adaptive.buckets import Bucket
from hvd_adaptive.collectives import scheme_named
from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.feedback import (
    RESIDUAL,
    Feedback,
    FeedbackContext,
    FeedbackState,
    LayerStates,
    copied,
)
from hvd_adaptive.feedback.base import ReduceBuffer
from hvd_adaptive.feedback.owned import OwnedPieces
from hvd_adaptive.layers import Layer


class FeedbackStates:
    """The feedback states of one optimizer on one rank.

    What was kept of a layer whose rule no longer keeps anything is *carried*: it is sent together with
    the layer's next gradient, or in equal parts with several.

    Args:
        context: what the states may ask about the run.
        release_steps: with how many gradients, from now on, what is carried is sent.
    """

    def __init__(
        self, context: FeedbackContext, release_steps: Callable[[], int] | None = None
    ) -> None:
        self.context = context
        self._release_steps = release_steps or (lambda: 1)
        self._releases: dict[str, int] = {}
        """With how many more gradients a layer's carried residual is sent."""
        self._states: dict[str, FeedbackState] = {}
        self._rules: dict[str, Feedback] = {}
        self._observing: tuple[str, ...] = ()
        self._carried: LayerStates = {}
        self._sent_carried: dict[int, tuple[str, Tensor, Tensor | None]] = {}
        """By layer index: its name, what was added to its gradient, and what of that has to wait."""
        self._loaded: OwnedPieces = {}

    def attach(self, buckets: Sequence[Bucket]) -> dict[int, FeedbackState]:
        """Keep what these buckets need from now on; what is kept of each layer moves with it.

        Returns:
            The state of each bucket, by its index.
        """
        self._keep_owned(buckets)
        kept = self.kept()
        for name in dict.fromkeys([*self._states, *(bucket.feedback for bucket in buckets)]):
            if name not in self._states:
                rule = feedback.parse(name)
                assert rule is not None
                self._rules[name], self._states[name] = rule, rule.new_state(self.context)
            self._states[name].attach([each for each in buckets if each.feedback == name], kept)
        used = {bucket.feedback for bucket in buckets}
        self._observing = tuple(sorted(name for name in used if self._rules[name].needs_all))
        self._carried = {name: slots for name, slots in kept.items() if RESIDUAL in slots}
        self._take_loaded(buckets)
        self._keep_owned(buckets)
        return {bucket.index: self._states[bucket.feedback] for bucket in buckets}

    def _keep_owned(self, buckets: Sequence[Bucket]) -> None:
        """Hand back what this rank owns of sums that are no longer compressed again."""
        twice = [bucket for bucket in buckets if scheme_named(bucket.scheme).recompresses]
        for name, state in self._states.items():
            state.keep_owned([bucket for bucket in twice if bucket.feedback == name])

    def _take_loaded(self, buckets: Sequence[Bucket]) -> None:
        """Give the layers' states what was owned where the run was saved."""
        for layer, rule in ((layer, each.feedback) for each in buckets for layer in each.layers):
            pieces = self._loaded.pop(layer.name, [])
            state = self._states[rule]
            if state.slots:
                state.load_owned({layer.name: pieces})
                continue
            for start, piece in pieces:
                slots = self._carried.setdefault(layer.name, {})
                residual = slots.setdefault(RESIDUAL, torch.zeros(layer.numel, device=layer.device))
                residual[start : start + piece.numel()] += piece

    def kept(self) -> LayerStates:
        """What is kept of each layer, 1-D by layer and slot: views, not copies."""
        kept = {name: dict(slots) for name, slots in self._carried.items()}
        for state in self._states.values():
            for name, slots in state.kept().items():
                kept.setdefault(name, {}).update(slots)
        return kept

    def owned(self) -> OwnedPieces:
        """A copy of what this rank owns of sums that were compressed again, by layer."""
        owned = {name: list(pieces) for name, pieces in self._loaded.items() if pieces}
        for state in self._states.values():
            for name, pieces in state.owned_pieces().items():
                owned.setdefault(name, []).extend(pieces)
        return {name: [(start, piece.clone()) for start, piece in owned[name]] for name in owned}

    def replace(
        self, kept: LayerStates, rates: Mapping[str, float], owned: OwnedPieces | None = None
    ) -> None:
        """Keep this of each layer, and nothing else; buckets must be attached again."""
        self.context.rates.clear()
        self.context.rates.update(rates)
        self._states = {}
        self._carried = kept
        self._loaded = {name: list(pieces) for name, pieces in (owned or {}).items()}

    def state_dict(self) -> LayerStates:
        """A copy of what is kept of each layer."""
        return copied(self.kept())

    @property
    def nbytes(self) -> int:
        """Memory of what is kept from one step to the next."""
        return sum(state.nbytes for state in self._states.values() if state.slots)

    @property
    def must_observe_all(self) -> bool:
        """Whether some rule must see all gradients before the first is sent."""
        return bool(self._observing)

    def observe_all(self, buckets: Sequence[Bucket], gradient: Callable[[int], Tensor]) -> None:
        """Show all gradients to the rules that must see them before the first is sent.

        Args:
            buckets: all buckets.
            gradient: the dense gradient of a layer, by its index.
        """
        for name in self._observing:
            members = [each for bucket in buckets if bucket.feedback == name for each in bucket.layers]
            self._states[name].observe_all({layer.index: gradient(layer.index) for layer in members})

    def preview(
        self, bucket: Bucket, grads: Sequence[Tensor], with_feedback: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What a planner is shown of a bucket, 1-D float32 for each layer.

        Args:
            bucket: the bucket.
            grads: its dense gradients.
            with_feedback: whether what feedback adds must be known.

        Returns:
            What errors are measured on, and what would be compressed now.
        """
        local = [grad.detach().reshape(-1).float() for grad in grads]
        estimates = self._rules[bucket.feedback].estimates
        if not with_feedback and not estimates:
            return local, local
        whole = self._states[bucket.feedback].preview(bucket, local)
        return (whole if estimates else local), whole

    def previews_exactly(self, bucket: Bucket) -> bool:
        """Whether what :meth:`preview` shows of a bucket is to the bit what will be compressed."""
        carried = any(layer.name in self._carried for layer in bucket.layers)
        return self._states[bucket.feedback].previews_exactly and not carried

    def merge_ranks(self, bucket: Bucket, reduce: ReduceBuffer, fresh: bool) -> None:
        """Ranks have come or gone: see :meth:`FeedbackState.merge_ranks`.

        Shards have other owners then: what this rank owned goes with its own gradients first.
        """
        self._states[bucket.feedback].keep_owned([])
        self._states[bucket.feedback].merge_ranks(bucket, reduce, fresh)

    # --- carried residuals ------------------------------------------------------------------------

    def add_carried(self, layers: Sequence[Layer], grads: Sequence[Tensor]) -> None:
        """Send the residuals of rules that were left together with the gradients."""
        if self._carried:
            for layer, grad in zip(layers, grads, strict=True):
                self._add_carried(layer, grad)

    def _add_carried(self, layer: Layer, grad: Tensor) -> None:
        """What would make the sum over the ranks overflow in the gradient's dtype waits for a step."""
        residual = self._carried.pop(layer.name, {}).get(RESIDUAL)
        if residual is None:
            return
        residual = self._released(layer.name, residual)
        self._sent_carried[layer.index] = layer.name, residual, None
        if layer.dtype != torch.float16:
            grad.add_(residual.view(layer.shape))
            return
        total = grad.float().add_(residual.view(layer.shape))
        limit = torch.finfo(layer.dtype).max / self.context.ranks()
        sent = torch.where(total.isfinite(), total.clamp(-limit, limit), total)
        rest = total - sent
        grad.copy_(sent)
        if bool(rest.count_nonzero()):
            self._sent_carried[layer.index] = layer.name, residual, rest.view(-1)

    def _released(self, name: str, residual: Tensor) -> Tensor:
        """The part that is sent now; the rest stays carried.

        A residual holds many steps' gradients. Sent with one of them, it would be a step as long as all
        of these together.
        """
        left = self._releases.pop(name, 0) or self._release_steps()
        if left <= 1:
            return residual
        part = residual / left
        self._releases[name] = left - 1
        self._carried[name] = {RESIDUAL: residual - part}
        return part

    def _keep_carried(self, name: str, residual: Tensor) -> None:
        """Carry it, with what is carried of the layer already."""
        held = self._carried.setdefault(name, {}).setdefault(RESIDUAL, torch.zeros_like(residual))
        held.add_(residual)

    def return_carried(self, result: Callable[[int], Tensor]) -> None:
        """Keep what has to wait, or all that was sent where a gradient was not finite on some rank.

        Args:
            result: the reduced gradient of a layer, by its index.
        """
        for index, (name, residual, rest) in self._sent_carried.items():
            kept = rest if all_finite(result(index)) else residual
            if kept is not None:
                self._keep_carried(name, kept)
        self._sent_carried.clear()

    def forget_step(self) -> None:
        """Forget what was sent in the running step, but not what has to wait."""
        for name, _, rest in self._sent_carried.values():
            if rest is not None:
                self._keep_carried(name, rest)
        self._sent_carried.clear()
