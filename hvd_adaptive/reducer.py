"""From hooks to buckets: watches gradients arrive, and has them reduced in one order on all ranks."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hvd_adaptive import feedback as feedback_rules
from hvd_adaptive.buckets import Bucket, build_buckets
from hvd_adaptive.compressors import NoCompression
from hvd_adaptive.control import Control
from hvd_adaptive.exchange import Exchange
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.planning import Plan
from hvd_adaptive.routing import Choice, make_plan

STATE_FORMAT = 1

_NO_BUCKET = -1


@dataclass(frozen=True)
class Options:
    """How gradients travel, beside the compressors.

    Args:
        passes: backward passes before a gradient travels.
        sparse_as_dense: send sparse gradients as dense ones.
        warmup_steps: steps at the start that send dense gradients.
        bucket_cap_bytes: dense bytes at which a bucket is closed.
        groups: names of layers that travel together, or a number of groups, or 0.
    """

    passes: int = 1
    sparse_as_dense: bool = False
    warmup_steps: int = 0
    bucket_cap_bytes: float = 25.0 * (1 << 20)
    groups: int | tuple[tuple[str, ...], ...] = 0


class Reducer:
    """Reduces the gradients of an optimizer's parameters over the ranks.

    The first step only learns: gradients are sent when all have been computed, in the order in which
    they arrived on rank 0. From then on a bucket is sent from the hook of the gradient that completes
    it. Buckets are always sent in that one order, and a layer without a gradient takes part with
    zeros, so that all ranks launch the same collectives whatever their gradients hold.

    Args:
        named: parameters and their names.
        choice: the compressors.
        options: how gradients travel.
        control: agreement between ranks.
        exchange: sends the buckets.
        active: False on a rank that communicates with nobody; it then does nothing at all.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        choice: Choice,
        options: Options,
        control: Control,
        exchange: Exchange,
        active: bool = True,
    ) -> None:
        self._active = active
        self._choice = choice
        self._options = options
        self._control = control
        self._exchange = exchange
        self._rules = {name: rule() for name, rule in feedback_rules.REGISTRY.items()}
        self._names: list[str] = []
        self._params: list[Parameter] = []
        self._hooks: list[RemovableHandle | None] = []
        self._trained: list[bool] = []
        self.passes = options.passes
        """Backward passes before a gradient travels."""
        self._remaining: list[int] = []
        self._arrivals: list[int] = []
        self._order: list[str] = []
        self._sparse: frozenset[str] = frozenset()
        self._densified: dict[int, Tensor] = {}
        # layers that were frozen since the last step and took part in this one with zeros
        self._frozen: list[int] = []
        # residuals of layers that no feedback rule keeps any more: sent with the next gradient
        self._carry: dict[str, Tensor] = {}
        self._buckets: tuple[Bucket, ...] | None = None
        self._bucket_of: list[int] = []
        self._added = False
        self._waiting: list[int] = []
        self._next = 0
        self._laid_out_for = 0
        self.touched = False
        """Whether a gradient has arrived since the last :meth:`synchronize`."""
        self.rounds = 0
        """How often gradients were synchronised."""
        for name, parameter in named:
            self.add(name, parameter)
        layers = self._layers()
        choice.check_patterns([layer.name for layer in layers])
        self.plan: Plan = make_plan(layers, choice.routes(layers, self._sparse), version=0, step=0)
        """What every layer does now."""

    # --- parameters and their hooks ---------------------------------------------------------------

    def add(self, name: str, parameter: Parameter) -> None:
        """Take one more parameter; from the next step on it is reduced."""
        self._names.append(name)
        self._params.append(parameter)
        self._hooks.append(None)
        self._trained.append(False)
        self._remaining.append(self.passes)
        self._bucket_of.append(_NO_BUCKET)
        self._added = True
        self._watch(len(self._params) - 1)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            if hook is not None:
                hook.remove()

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes before a gradient travels."""
        self.passes = passes
        self._remaining = [passes] * len(self._params)

    def _watch(self, index: int) -> bool:
        """Follow the parameter's ``requires_grad``; True if it changed."""
        parameter = self._params[index]
        if parameter.requires_grad == self._trained[index]:
            return False
        self._trained[index] = parameter.requires_grad
        hook = self._hooks[index]
        if hook is not None:
            hook.remove()
        # the parameter outlives the optimizer: its hook must not keep the optimizer alive
        arrived = functools.partial(_arrived, weakref.ref(self), index)
        self._hooks[index] = (
            parameter.register_post_accumulate_grad_hook(arrived)
            if parameter.requires_grad and self._active
            else None
        )
        return True

    def _arrive(self, index: int) -> None:
        """A backward pass has accumulated the gradient of one parameter."""
        if not self.touched:
            self._begin()
        left = self._remaining[index] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._remaining[index] = left
        if left:
            return
        if self._buckets is None:
            self._arrivals.append(index)
            return
        position = self._bucket_of[index]
        if position == _NO_BUCKET:
            return
        self._waiting[position] -= 1
        if position == self._next:
            self._launch_complete(self._buckets)

    def _begin(self) -> None:
        """A step begins: follow parameters that were frozen or unfrozen since the last one."""
        self.touched = True
        changed = [self._watch(index) for index in range(len(self._params))]
        if self._control.size != self._laid_out_for:
            # the first step, or an elastic run that has gained or lost ranks
            self._buckets = None
        else:
            # A rank that lays out anew alone would wait for the others for ever, and they for it: so
            # all of them go on as before, and hear at the end of this step that one has changed.
            self._exchange.vote(self._added or any(changed))

    # --- launching --------------------------------------------------------------------------------

    def _launch_complete(self, buckets: Sequence[Bucket]) -> None:
        """Launch the buckets whose gradients have all arrived, up to the first that waits."""
        while self._next < len(buckets) and self._waiting[self._next] == 0:
            self._launch(buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if bucket.collective is Collective.SPARSE:
            self._exchange.start(bucket, [self._sparse_grad(bucket.layers[0])])
            return
        grads = [self._dense_grad(layer.index) for layer in bucket.layers]
        if self._carry:
            for layer, grad in zip(bucket.layers, grads, strict=True):
                kept = self._carry.pop(layer.name, None)
                if kept is not None:
                    grad.add_(kept.view(layer.shape))
        self._exchange.start(bucket, grads)

    def _dense_grad(self, index: int) -> Tensor:
        """The gradient that is sent and overwritten; zeros where this rank has none."""
        parameter = self._trained_or_cleared(index)
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        elif grad.layout != torch.strided:
            grad = self._densified[index] = grad.to_dense()
        return grad

    def _sparse_grad(self, layer: Layer) -> Tensor:
        """The gradient of a layer whose gradients are sparse on some rank."""
        parameter = self._trained_or_cleared(layer.index)
        if parameter.grad is None:
            indices = torch.empty((1, 0), dtype=torch.int64, device=layer.device)
            values = torch.empty((0, *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
            parameter.grad = torch.sparse_coo_tensor(indices, values, layer.shape)
        elif parameter.grad.layout == torch.strided:
            parameter.grad = parameter.grad.to_sparse(1)
        return parameter.grad

    def _trained_or_cleared(self, index: int) -> Parameter:
        """The parameter; without a gradient if it was frozen, because that is of an earlier step."""
        parameter = self._params[index]
        if not self._trained[index]:
            parameter.grad = None
            self._frozen.append(index)
        return parameter

    # --- the end of a step ------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Send what has not been sent, wait for everything, leave the results in the gradients.

        Raises:
            ValueError: ranks disagree on their layers.
            WireError: a payload is damaged.
            HorovodInternalError: a rank has gone (Horovod's own; elastic runs restore from it).
        """
        if not self._active:
            return
        if not self.touched:
            self._begin()
        try:
            if self._buckets is None:
                self._agree()
                self._lay_out(self._order)
                self._complete()
            else:
                self._complete()
                if self._exchange.voted():
                    self._adapt()
        except HorovodInternalError:
            self._exchange.abandon()
            self.reset()
            self._laid_out_for = 0
            raise
        self._restore_layouts()
        self.rounds += 1
        self._rearm()
        if self.rounds == self._options.warmup_steps:
            self._lay_out(self._order)

    def _complete(self) -> None:
        """Launch what has not been launched, and wait for everything."""
        assert self._buckets is not None
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = 0
        self._exchange.finish()

    def _adapt(self) -> None:
        """Some rank trains other parameters than before: agree, and reduce those that are new."""
        before = set(self._order)
        self._agree()
        self._take_back_frozen()
        new = [name for name in self._order if name not in before]
        if new:
            self._lay_out(new)
            self._complete()
        self._lay_out(self._order)

    def _take_back_frozen(self) -> None:
        """Layers frozen since the last step have sent what was kept of them: keep it again."""
        kept = self.residuals()
        for index in self._frozen:
            parameter = self._params[index]
            if self._names[index] in kept and parameter.grad is not None:
                sent = self._exchange.share(parameter.grad.detach().float().reshape(-1))
                kept[self._names[index]].add_(sent)
            parameter.grad = None

    def reset(self) -> None:
        """Forget the running step; what was launched in it is completed first."""
        self._exchange.finish()
        self._exchange.voted()
        self._densified.clear()
        self._rearm()

    def _rearm(self) -> None:
        self.touched = False
        self._next = 0
        self._arrivals.clear()
        self._frozen.clear()
        self._remaining = [self.passes] * len(self._params)
        self._waiting = [len(bucket.layers) for bucket in self._buckets or ()]

    def _restore_layouts(self) -> None:
        """Give layers with sparse gradients, sent as dense ones, sparse gradients again."""
        for index, dense in self._densified.items():
            self._params[index].grad = dense.to_sparse(1)
        self._densified.clear()
        if self._options.sparse_as_dense:
            for name in self._sparse:
                parameter = self._params[self._names.index(name)]
                if parameter.grad is not None and parameter.grad.layout == torch.strided:
                    parameter.grad = parameter.grad.to_sparse(1)

    # --- layout -----------------------------------------------------------------------------------

    def _layers(self) -> list[Layer]:
        """The layers that are trained now."""
        return [
            Layer(index, name, tuple(parameter.shape), parameter.dtype, parameter.device)
            for index, (name, parameter) in enumerate(zip(self._names, self._params, strict=True))
            if self._trained[index]
        ]

    def _agree(self) -> None:
        """Learn from all ranks which layers are trained, in which order, and which are sparse.

        Raises:
            ValueError: ranks train different layers.
        """
        names = [layer.name for layer in self._layers()]
        mine = {
            "rounds": self.rounds,
            "layers": names,
            "arrivals": [self._names[index] for index in self._arrivals],
            "order": self._order,
            "sparse": sorted(self._sparse | self._seen_sparse()),
        }
        everyone = self._control.allgather(mine)
        for rank, other in enumerate(everyone):
            different = set(other["layers"]) ^ set(everyone[0]["layers"])
            if different:
                raise ValueError(
                    f"rank {rank} of the process set trains other parameters than rank 0: "
                    f"requires_grad differs for {', '.join(sorted(different))}; freeze and unfreeze "
                    "the same parameters at the same step on all ranks"
                )
        # a rank that joins an elastic run counts on from where the others are
        self.rounds = everyone[0]["rounds"]
        known = dict.fromkeys([*everyone[0]["order"], *everyone[0]["arrivals"]])
        # gradients become ready from the last layer to the first
        known.update(dict.fromkeys(reversed(names)))
        self._order = [name for name in known if name in set(names)]
        self._sparse = frozenset(name for other in everyone for name in other["sparse"])
        self._added = False

    def _seen_sparse(self) -> set[str]:
        return {
            name
            for name, parameter in zip(self._names, self._params, strict=True)
            if parameter.grad is not None and parameter.grad.layout == torch.sparse_coo
        }

    def _lay_out(self, names: Sequence[str]) -> None:
        """Build buckets of the named layers; what is kept of each layer moves with it."""
        kept = self.residuals()
        by_name = {layer.name: layer for layer in self._layers()}
        layers = [by_name[name] for name in names]
        choice = self._choice
        if self.rounds < self._options.warmup_steps:
            choice = Choice(NoCompression())
        sparse = frozenset() if self._options.sparse_as_dense else self._sparse
        routes = choice.routes(layers, sparse)
        self._buckets = build_buckets(
            layers, routes, self._options.bucket_cap_bytes, self._groups(list(by_name))
        )
        self._next = 0
        for name, rule in self._rules.items():
            rule.attach([bucket for bucket in self._buckets if bucket.feedback == name], kept)
        self._carry = kept
        self._exchange.attach(
            self._buckets, {bucket.index: self._rules[bucket.feedback] for bucket in self._buckets}
        )
        self._laid_out_for = self._control.size
        self._bucket_of = [_NO_BUCKET] * len(self._params)
        for bucket in self._buckets:
            for layer in bucket.layers:
                self._bucket_of[layer.index] = bucket.index
        self._waiting = [len(bucket.layers) for bucket in self._buckets]
        in_order = [layer for name, layer in by_name.items() if name in routes]
        self.plan = make_plan(in_order, routes, self.plan.version + 1, self.rounds)

    def _groups(self, names: Sequence[str]) -> Sequence[Sequence[str]]:
        groups = self._options.groups
        if isinstance(groups, tuple):
            return groups
        if groups == 0:
            return ()
        size, extra = divmod(len(names), groups)
        cuts = [number * size + min(number, extra) for number in range(groups + 1)]
        return [names[start:stop] for start, stop in itertools.pairwise(cuts)]

    # --- state ------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """What is kept of each layer, 1-D float32, by name: views, not copies."""
        kept = dict(self._carry)
        for rule in self._rules.values():
            kept.update(rule.residuals())
        return kept

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: see :meth:`load_state_dict`."""
        return {
            "format": STATE_FORMAT,
            "rounds": self.rounds,
            "order": list(self._order),
            "residuals": {name: kept.clone() for name, kept in self.residuals().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on the same rank, between two steps.

        Raises:
            ValueError: the state is of another format or of another model.
            RuntimeError: gradients have arrived that have not been synchronised.
        """
        if self.touched:
            raise RuntimeError(
                "compression state can only be loaded between steps: call it before backward(), or "
                "after step()"
            )
        residuals = self._checked_residuals(state)
        self.rounds = int(state["rounds"])
        order = [name for name in state["order"] if name in self._names]
        self._order = order if self._buckets is None else self._order
        for rule in self._rules.values():
            rule.attach([], {})
        self._carry = residuals
        if self._buckets is not None:
            self._lay_out(self._order)

    def _checked_residuals(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        if state.get("format") != STATE_FORMAT:
            raise ValueError(
                f"compression state has format {state.get('format')!r}, expected {STATE_FORMAT}: it "
                "must come from compression_state_dict()"
            )
        sizes = {name: p.numel() for name, p in zip(self._names, self._params, strict=True)}
        residuals: dict[str, Tensor] = {}
        for name, kept in state["residuals"].items():
            if sizes.get(name) != kept.numel():
                raise ValueError(
                    f"compression state holds {kept.numel()} elements for {name!r}, the model "
                    f"{sizes.get(name, 'no parameter of that name')}: it belongs to another model"
                )
            device = self._params[self._names.index(name)].device
            residuals[name] = kept.detach().to(device, torch.float32, copy=True).view(-1)
        return residuals


def _arrived(reducer: Callable[[], Reducer | None], index: int, parameter: Tensor) -> None:
    """The hook of one parameter."""
    del parameter
    alive = reducer()
    if alive is not None:
        alive._arrive(index)
