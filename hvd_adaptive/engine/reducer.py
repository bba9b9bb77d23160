"""From hooks to buckets: watches gradients arrive, and has them reduced in one order on all ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hvd_adaptive import checkpoint
from hvd_adaptive import feedback as feedback_rules
from hvd_adaptive.adaptation.base import Assignment
from hvd_adaptive.adaptation.candidates import check_per_rank_levels
from hvd_adaptive.adaptation.controller import AdaptationController
from hvd_adaptive.buckets import Bucket, Route, build_buckets, check_gathered
from hvd_adaptive.collectives.link import on_link
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.transport import JoinedRankError
from hvd_adaptive.compressors import CastCompressor, Compressor, Learner, format_spec, parse
from hvd_adaptive.compressors.base import all_finite
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.routing import CompressionConfig, check_dtypes, make_plan, unfit_dtypes
from hvd_adaptive.feedback import EF21, RESIDUAL, FeedbackContext, FeedbackState, LayerStates, copied
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.planning import Plan, Recipe

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
        planner: what changes levels during training.
        candidates: compressors that it may choose beside those of the layers.
    """

    passes: int = 1
    sparse_as_dense: bool = False
    warmup_steps: int = 0
    bucket_cap_bytes: float = 25.0 * (1 << 20)
    groups: int | tuple[tuple[str, ...], ...] = 0
    planner: Recipe | None = None
    candidates: tuple[Compressor, ...] = ()


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
        controller: changes levels during training; None leaves them as they were chosen.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Parameter]],
        choice: CompressionConfig,
        options: Options,
        control: Control,
        exchange: Exchange,
        active: bool = True,
        controller: AdaptationController | None = None,
    ) -> None:
        self._active = active
        self._controller = controller
        self._choice = choice
        self._options = options
        self._control = control
        self._exchange = exchange
        self._memories: dict[str, FeedbackState] = {}
        self._context = FeedbackContext(self._rate, lambda: control.size, exchange.seed, exchange.rank)
        self._names: list[str] = []
        self._params: list[Parameter] = []
        self._hooks: list[RemovableHandle | None] = []
        self._trained: list[bool] = []
        self.passes = options.passes
        """Backward passes before a gradient travels."""
        self._remaining: list[int] = []
        self._arrivals: list[int] = []
        self._grads: dict[int, Tensor] = {}
        """This step's gradients as they were when they arrived, in whose memory results are formed."""
        self._order: list[str] = []
        self._sparse: frozenset[str] = frozenset()
        self._densified: dict[int, Tensor] = {}
        # layers that were frozen since the last step and took part in this one with zeros
        self._frozen: dict[int, None] = {}
        # what was kept of layers whose rule no longer does: residuals are sent with the next gradient
        self._carry: LayerStates = {}
        # what of that was sent in this step, by layer index
        self._carried: dict[int, Tensor] = {}
        # feedback rules that must see all gradients before the first is sent
        self._observes_all: set[str] = set()
        self._learn_next = False
        self._rates: tuple[float, ...] = ()
        self.param_groups: Callable[[], list[dict[str, Any]]] = list
        """The optimizer's parameter groups, for their learning rates."""
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
        self.steps = 0
        """How often the optimizer has stepped."""
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
        self._keep_gradient(index)
        if self._buckets is None:
            self._arrivals.append(index)
            return
        position = self._bucket_of[index]
        if position == _NO_BUCKET:
            return
        self._waiting[position] -= 1
        if (
            position == self._next
            and not self._observes_all
            and not (self._controller and self._controller.exact)
        ):
            self._launch_complete(self._buckets)

    def _keep_gradient(self, index: int) -> None:
        """Hold on to a gradient: until the step ends, ``grad`` may be bound to another tensor."""
        grad = self._params[index].grad
        assert grad is not None
        # an alias, because "grad.data = other" changes the tensor itself; sparse ones are written whole
        self._grads[index] = grad.detach() if grad.layout == torch.strided else grad

    def _begin(self) -> None:
        """A step begins: follow parameters that were frozen or unfrozen since the last one."""
        self.touched = True
        self._exchange.begin_step(self.rounds)
        self._collect()
        changed = [self._watch(index) for index in range(len(self._params))]
        self._added = self._added or any(changed)
        if self._ranks_changed():
            self._buckets = None

    def _vote(self) -> list[str]:
        """Tell all ranks what this one has met in this step, and ask for what rank 0's planner wants.

        A rank that lays out again by itself would wait for the others forever, and they for it: so all
        of them complete the step as it began, and learn at its end what any of them has met.

        Returns:
            Layers whose gradients have arrived and have been dropped since.
        """
        dropped = [self._names[index] for index in self._grads if self._params[index].grad is None]
        collect, ready = self._controller.votes(self.rounds) if self._controller else (False, False)
        self._exchange.vote(
            adapt=self._added,
            relearn=self._rates_fell(),
            dropped=bool(dropped),
            collect=collect,
            ready=ready,
        )
        return dropped

    def _ranks_changed(self) -> bool:
        """Whether nothing is agreed with the ranks that there are now: in the first step."""
        return self._control.size != self._laid_out_for

    @property
    def _alone(self) -> bool:
        """Whether what is set between steps is agreed with nobody."""
        return not self._active

    def _collect(self) -> None:
        """Have compressors collect statistics in this step, if it is one that they learn from."""
        step = self.rounds - self._options.warmup_steps
        for learner in self._learners():
            learner.collecting = step >= 0 and (self._learn_next or learner.due(step))

    def _learners(self) -> list[Learner]:
        """The learning states, in the same order on all ranks."""
        return [state for state in self._exchange.states.values() if isinstance(state, Learner)]

    def _learn(self) -> None:
        """Let the first rank make of all ranks' statistics what every rank then uses."""
        for learner in self._learners():
            if not learner.collecting:
                continue
            learner.collecting = False
            everyone = self._control.allgather(learner.statistics())
            learner.adopt(self._control.decide(functools.partial(learner.fit, everyone)))

    def _rates_fell(self) -> bool:
        """Whether a learning rate has fallen since the last step by what some learner calls a fall."""
        before = self._rates
        self._rates = tuple(float(group.get("lr", 0.0)) for group in self.param_groups())
        drop = min((learner.drop for learner in self._learners()), default=math.inf)
        return any(now < (1.0 - drop) * then for now, then in zip(self._rates, before, strict=False))

    def _rate(self, index: int) -> float:
        """The learning rate of a layer; 0 where the optimizer has none."""
        parameter = self._params[index]
        for group in self.param_groups():
            if any(member is parameter for member in group["params"]):
                return float(group.get("lr", 0.0))
        return 0.0

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
        if self._controller and not self._controller.exact:
            self._measure(self._controller, bucket, grads)
        if self._carry:
            for layer, grad in zip(bucket.layers, grads, strict=True):
                self._add_carried(layer, grad)
        self._exchange.start(bucket, grads)

    def _add_carried(self, layer: Layer, grad: Tensor) -> None:
        """Send the residual of a rule that was left together with the gradient.

        What would make the sum over the ranks overflow in the gradient's dtype waits for the next step.
        """
        residual = self._carry.pop(layer.name, {}).get(RESIDUAL)
        if residual is None:
            return
        self._carried[layer.index] = residual
        if layer.dtype != torch.float16:
            grad.add_(residual.view(layer.shape))
            return
        total = grad.float().add_(residual.view(layer.shape))
        limit = torch.finfo(layer.dtype).max / self._control.size
        sent = torch.where(total.isfinite(), total.clamp(-limit, limit), total)
        rest = total - sent
        grad.copy_(sent)
        if bool(rest.count_nonzero()):
            self._carry[layer.name] = {RESIDUAL: rest.view(-1)}

    def _return_carried(self) -> None:
        """Keep again what was sent with a gradient that was not finite on some rank."""
        for index, residual in self._carried.items():
            if not all_finite(self._densified.get(index, self._grads[index])):
                self._carry[self._names[index]] = {RESIDUAL: residual}
        self._carried.clear()

    def _measure(
        self, controller: AdaptationController, bucket: Bucket, grads: Sequence[Tensor]
    ) -> None:
        """Let the controller see what is about to be compressed."""
        if not controller.observes(self.rounds):
            return
        local = [grad.detach().reshape(-1).float() for grad in grads]
        whole = local
        if controller.sees_feedback or bucket.feedback == EF21.name:
            whole = self._memories[bucket.feedback].preview(bucket, local)
        if bucket.feedback == EF21.name:
            local = whole  # the gradient itself is never compressed
        for layer, grad, x in zip(bucket.layers, local, whole, strict=True):
            controller.observe(layer, grad, x, self.rounds)

    def _dense_grad(self, index: int) -> Tensor:
        """The gradient that is sent and overwritten; zeros where this rank has none."""
        parameter = self._trained_or_cleared(index)
        if parameter.grad is None and index not in self._grads:
            parameter.grad = torch.zeros_like(parameter)
        if index not in self._grads:
            self._keep_gradient(index)
        grad = self._grads[index]
        if grad.layout != torch.strided:
            grad = self._densified[index] = grad.to_dense()
        return grad

    def _sparse_grad(self, layer: Layer) -> Tensor:
        """The gradient of a layer whose gradients are sparse on some rank."""
        parameter = self._trained_or_cleared(layer.index)
        grad = self._grads.get(layer.index, parameter.grad)
        if grad is None:
            indices = torch.empty((1, 0), dtype=torch.int64, device=layer.device)
            values = torch.empty((0, *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
            grad = parameter.grad = torch.sparse_coo_tensor(indices, values, layer.shape)
        elif grad.layout == torch.strided:
            grad = grad.to_sparse(1)
        self._grads[layer.index] = grad
        return grad

    def _trained_or_cleared(self, index: int) -> Parameter:
        """The parameter; without a gradient if it was frozen, because that is of an earlier step."""
        parameter = self._params[index]
        if not self._trained[index]:
            parameter.grad = None
            self._grads.pop(index, None)
            self._frozen[index] = None
        return parameter

    # --- the end of a step ------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Send what has not been sent, wait for everything, leave the results in the gradients.

        Raises:
            ValueError: ranks disagree on their layers.
            WireError: a payload is damaged.
            RuntimeError: a gradient that had arrived was dropped on some rank, or a rank has called
                ``hvd.join()`` where that does not work; on all ranks that synchronize.
            HorovodInternalError: a rank has gone (Horovod's own; elastic runs restore from it).
        """
        if not self._active:
            return
        if not self.touched:
            self._begin()
        try:
            if self._buckets is None:
                self._lay_out_first()
            dropped = self._vote()
            if self._controller and self._controller.exact:
                self._require_all_ranks()  # it decides before anything is sent
            self._complete()
            self._return_carried()
            outcome = self._exchange.voted()
            learns = any(learner.collecting for learner in self._learners())
            if self._controller or outcome["adapt"] or learns:
                self._require_all_ranks()
            if outcome["adapt"]:
                self._adapt()
            self._follow(outcome["collect"], outcome["ready"])
            self._learn()
            self._learn_next = outcome["relearn"]
        except JoinedRankError:
            self._exchange.drain()
            self.reset()
            raise
        except HorovodInternalError:
            self._break_off()
            raise
        self._bind_results()
        self._restore_layouts()
        self.rounds += 1
        self._rearm()
        step = self.rounds - self._options.warmup_steps
        if step == 0 or (step > 0 and self._choice.changes_at(step)):
            self._lay_out(self._order)
        if outcome["dropped"]:
            self._refuse_dropped(dropped)

    def _break_off(self) -> None:
        """Horovod failed: the running step is forgotten, and the next is a first one."""
        self._exchange.abandon()
        self.reset()
        self._laid_out_for = 0

    def _lay_out_first(self) -> None:
        """Agree on the layers, and build their buckets."""
        self._agree()
        self._lay_out(self._order)

    def _require_all_ranks(self) -> None:
        """JoinedRankError where a rank has called ``hvd.join()``: it would never hear of a plan."""
        if self._exchange.missing:
            raise JoinedRankError("planners, with levels that are learned, or when layers change")

    def _bind_results(self) -> None:
        """Put the results into parameters whose ``grad`` was bound to another tensor meanwhile."""
        for index, reduced in self._grads.items():
            parameter = self._params[index]
            grad = parameter.grad
            if grad is None or grad is reduced:
                continue
            if grad.layout != torch.strided or reduced.layout != torch.strided:
                parameter.grad = reduced
            elif grad.data_ptr() != reduced.data_ptr() or grad.stride() != reduced.stride():
                # as Horovod does: whoever holds the new tensor sees the result, too
                grad.set_(reduced)  # type: ignore[call-overload]

    def _refuse_dropped(self, dropped: Sequence[str]) -> None:
        """RuntimeError on all ranks: some parameter would be updated on some of them only."""
        everyone = self._control.allgather(list(dropped))
        found = [f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(everyone) if names]
        raise RuntimeError(
            "gradients that had been sent during backward() were None in step() or synchronize(): "
            f"{'; '.join(found)} of the process set. The other ranks would step with them, and ranks "
            "would differ from then on: to leave a parameter out, call optimizer.synchronize() first "
            "and drop its gradient on all ranks, then step within optimizer.skip_synchronize()"
        )

    def _follow(self, collect: bool, ready: bool) -> None:
        """Do what the first rank's planner asks for."""
        if self._controller is None:
            return
        rate = max(self._rates, default=None)
        self._controller.end_step(self.rounds, rate, self._exchange.timings)
        if collect:
            self._controller.start_collection(self.rounds)
        if ready:
            self._switch(self._controller.apply_decision(self.rounds))

    def _switch(self, assignments: Mapping[str, Assignment] | None) -> None:
        """Compress as planned from the next gradient on; None changes nothing.

        Raises:
            ValueError: ranks hold different plans.
        """
        if assignments is None:
            return
        self._choice = replace(self._choice, planned=assignments)
        self._lay_out(self._order)
        digests = self._control.allgather(self.plan.digest)
        for rank, digest in enumerate(digests):
            if digest != self.plan.digest:
                raise ValueError(
                    f"rank {rank} of the process set has the plan {digest}, this rank has "
                    f"{self.plan.digest}: all ranks must build the same model and pass the same options"
                )

    def _decide_first(self, controller: AdaptationController, buckets: Sequence[Bucket]) -> None:
        """Measure all gradients and plan with them before the first is sent."""
        for bucket in buckets:
            if bucket.collective is not Collective.SPARSE:
                grads = [self._dense_grad(layer.index) for layer in bucket.layers]
                self._measure(controller, bucket, grads)
        self._switch(controller.decide_before_launch(self.rounds))

    def _complete(self) -> None:
        """Launch what has not been launched, and wait for everything."""
        assert self._buckets is not None
        if self._controller and self._controller.exact and not self._next:
            self._decide_first(self._controller, self._buckets)
        if self._observes_all:
            self._observe_all(self._buckets)
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = 0
        self._exchange.finish()

    def _observe_all(self, buckets: Sequence[Bucket]) -> None:
        """Show all gradients to the rules that must see them before the first is sent."""
        for name in sorted(self._observes_all):
            self._memories[name].observe_all(
                {
                    layer.index: self._dense_grad(layer.index)
                    for bucket in buckets
                    if bucket.feedback == name
                    for layer in bucket.layers
                }
            )

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
        kept = self.kept()
        for index in self._frozen:
            parameter = self._params[index]
            residual = kept.get(self._names[index], {}).get(RESIDUAL)
            if residual is not None and parameter.grad is not None:
                residual.add_(self._exchange.share(parameter.grad.detach().float().reshape(-1)))
            parameter.grad = None

    def reset(self) -> None:
        """Forget the running step; what was launched in it is completed first."""
        self._exchange.finish()
        self._exchange.forget_vote()
        self._rearm()

    def _rearm(self) -> None:
        self.touched = False
        self._next = 0
        self._arrivals.clear()
        self._grads.clear()
        self._densified.clear()
        self._carried.clear()
        self._frozen.clear()
        self._remaining = [self.passes] * len(self._params)
        self._waiting = [len(bucket.layers) for bucket in self._buckets or ()]

    def _restore_layouts(self) -> None:
        """Give layers with sparse gradients, sent as dense ones, sparse gradients again."""
        for index, dense in self._densified.items():
            self._params[index].grad = dense.to_sparse(1)
        if self._options.sparse_as_dense:
            for name in self._sparse:
                parameter = self._params[self._names.index(name)]
                if parameter.grad is not None and parameter.grad.layout == torch.strided:
                    parameter.grad = parameter.grad.to_sparse(1)

    # --- layout -----------------------------------------------------------------------------------

    def _layers(self) -> list[Layer]:
        """The layers that are trained now."""
        return [self._layer(index) for index, trained in enumerate(self._trained) if trained]

    def _layer(self, index: int) -> Layer:
        parameter = self._params[index]
        name, shape = self._names[index], tuple(parameter.shape)
        return Layer(index, name, shape, parameter.dtype, parameter.device)

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
            "unfit": unfit_dtypes({layer.name: layer.dtype for layer in self._layers()}),
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
            check_dtypes(other["unfit"])
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
        kept = self.kept()
        by_name = {layer.name: layer for layer in self._layers()}
        layers = [by_name[name] for name in names]
        sparse = frozenset() if self._options.sparse_as_dense else self._sparse
        step = self.rounds - self._options.warmup_steps
        routes = self._choice.routes(layers, sparse, max(0, step), warmup=step < 0)
        self._buckets = build_buckets(
            layers, routes, self._options.bucket_cap_bytes, self._groups(list(by_name))
        )
        check_gathered(self._buckets, self._control.size)
        self._next = 0
        self._attach(self._buckets, kept)
        if self._controller:
            self._attach_controller(self._controller, self._buckets, routes, step < 0)
        self._laid_out_for = self._control.size
        self._bucket_of = [_NO_BUCKET] * len(self._params)
        for bucket in self._buckets:
            for layer in bucket.layers:
                self._bucket_of[layer.index] = bucket.index
        self._waiting = [len(bucket.layers) for bucket in self._buckets]
        in_order = [layer for name, layer in by_name.items() if name in routes]
        expected = self._controller.expected if self._controller else {}
        per_rank_levels = self._controller is not None and self._controller.per_rank_levels
        version = self.plan.version + 1
        self.plan = make_plan(in_order, routes, version, self.rounds, expected, per_rank_levels)
        self._exchange.meter.plan(self.plan, self.rounds)

    def _attach_controller(
        self,
        controller: AdaptationController,
        buckets: Sequence[Bucket],
        routes: Mapping[str, Route],
        idle: bool,
    ) -> None:
        """Tell it which layers it may decide on: those that the user's choice compresses by itself."""
        layers = [
            (layer, own)
            for layer in self._layers()
            if layer.name not in self._sparse
            and not isinstance(own := self._choice.compressor_of(layer), CastCompressor)
            and not own.whole_model
        ]
        places = {layer.name: bucket.index for bucket in buckets for layer in bucket.layers}
        mine = [row for row in layers if row[0].name in places]
        planned = {layer.name for layer, _ in mine}
        others = [
            layer
            for bucket in buckets
            for layer in bucket.layers
            if layer.name not in planned and bucket.collective is not Collective.SPARSE
        ]
        rows = make_plan(others, routes, version=0, step=0)
        bytes_of_others = sum(
            on_link(row.wire_bytes, routes[row.layer].collective, self._control.size) for row in rows
        )
        controller.attach(mine, places, bytes_of_others, idle)

    def _attach(self, buckets: Sequence[Bucket], kept: LayerStates) -> None:
        """Give every bucket the memory of its feedback rule."""
        self._observes_all = set()
        for name in dict.fromkeys([*self._memories, *(bucket.feedback for bucket in buckets)]):
            rule = feedback_rules.parse(name)
            assert rule is not None
            if name not in self._memories:
                self._memories[name] = rule.memory(self._context)
            mine = [bucket for bucket in buckets if bucket.feedback == name]
            self._memories[name].attach(mine, kept)
            if mine and rule.needs_all:
                self._observes_all.add(name)
        self._carry = {name: slots for name, slots in kept.items() if RESIDUAL in slots}
        self._exchange.attach(
            buckets, {bucket.index: self._memories[bucket.feedback] for bucket in buckets}
        )
        self._exchange.meter.scalar("memory/feedback_bytes", self.memory_bytes, self.rounds)

    def _groups(self, names: Sequence[str]) -> Sequence[Sequence[str]]:
        groups = self._options.groups
        if isinstance(groups, tuple):
            return groups
        groups = min(groups, len(names))  # the others would be empty
        if groups == 0:
            return ()
        size, extra = divmod(len(names), groups)
        cuts = [number * size + min(number, extra) for number in range(groups + 1)]
        return [names[start:stop] for start, stop in itertools.pairwise(cuts)]

    # --- state ------------------------------------------------------------------------------------

    def kept(self) -> LayerStates:
        """What is kept of each layer, 1-D by layer and slot: views, not copies."""
        kept = {name: dict(slots) for name, slots in self._carry.items()}
        for memory in self._memories.values():
            for name, slots in memory.kept().items():
                kept.setdefault(name, {}).update(slots)
        return kept

    @property
    def memory_bytes(self) -> int:
        """Memory that feedback keeps from one step to the next."""
        return sum(memory.nbytes for memory in self._memories.values() if memory.slots)

    def choose(self, build: Callable[[CompressionConfig], CompressionConfig]) -> None:
        """Compress in another way from the next step on; what is kept of each layer stays.

        Args:
            build: makes the new choice of the present one.

        Raises:
            ValueError: it could not be made on some rank, or ranks made different ones; on all ranks.
            RuntimeError: gradients have arrived that have not been synchronised; on all ranks.
        """

        def checked() -> CompressionConfig:
            self._require_between_steps("compression can only be changed")
            choice = build(self._choice)
            choice.check_patterns([layer.name for layer in self._layers()])
            if self._options.planner is not None:
                check_per_rank_levels(
                    self._options.planner, choice.compressors, self._options.candidates
                )
            return choice

        self._choice = self._control.agree(
            "set_compression", checked, CompressionConfig.digest, alone=self._alone
        )
        if self._controller:
            self._controller.invalidate()
        if self._buckets is not None:
            self._lay_out(self._order)
        else:
            layers = self._layers()
            routes = self._choice.routes(layers, self._sparse)
            self.plan = make_plan(layers, routes, self.plan.version + 1, self.rounds)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as :mod:`hvd_adaptive.checkpoint` describes it."""
        return {
            "format": checkpoint.STATE_FORMAT,
            "order": list(self._order),
            "routes": {
                layer.name: [format_spec(part.compressor), bucket.feedback]
                for bucket in self._buckets or ()
                for part in bucket.parts
                for layer in bucket.layers[part.start : part.stop]
            },
            "kept": copied(self.kept()),
            "rates": dict(self._context.rates),
            "planned": {
                name: [None if compressor is None else format_spec(compressor), level]
                for name, (compressor, level) in self._choice.planned.items()
            },
            "controller": self._controller.state_dict() if self._controller else None,
            **self._progress(),
        }

    def _progress(self) -> dict[str, Any]:
        """What all ranks hold alike, beside the plan."""
        return {
            "rounds": self.rounds,
            "last_rates": self._rates,
            "learn_next": self._learn_next,
            "codecs": {
                format_spec(key): state.state_dict() for key, state in self._exchange.states.items()
            },
        }

    def _restore(self, progress: Mapping[str, Any]) -> None:
        """Take what :meth:`_progress` returned."""
        self.rounds = int(progress["rounds"])
        self._rates = tuple(progress["last_rates"])
        self._learn_next = bool(progress["learn_next"])
        for spec, learnt in progress["codecs"].items():
            self._exchange.load_state(parse(spec), learnt)

    def _keep(self, kept: LayerStates, rates: Mapping[str, float]) -> None:
        """Keep this of each layer, and nothing else; buckets must be laid out anew."""
        self._context.rates.clear()
        self._context.rates.update(rates)
        self._memories = {}
        self._carry = kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on the same rank, between two steps.

        All ranks call it; where it raises, it does so on all of them, and nothing has changed.

        Raises:
            ValueError: the state is damaged or of another model, or ranks have states of different
                steps or runs: names the item and the rank.
            RuntimeError: gradients have arrived that have not been synchronised.
        """

        def checked() -> Mapping[str, Any]:
            self._require_between_steps("compression state can only be loaded")
            checkpoint.check_state(state, self._run())
            return state

        self._control.agree(
            "load_compression_state_dict",
            checked,
            checkpoint.shared,
            alone=self._alone,
            remedy="every rank must load what it saved at the same step of one run",
        )
        self._restore(state)
        if self._controller and state["controller"] is not None:
            self._controller.load_state_dict(copy.deepcopy(state["controller"]))
            self._choice = replace(self._choice, planned=checkpoint.planned(state))
        self._order = list(state["order"]) if self._buckets is None else self._order
        devices = dict(zip(self._names, (p.device for p in self._params), strict=True))
        kept = {
            name: {slot: held.detach().to(devices[name], copy=True) for slot, held in slots.items()}
            for name, slots in state["kept"].items()
        }
        self._keep(kept, state["rates"])
        if self._buckets is not None:
            self._lay_out(self._order)

    def _run(self) -> checkpoint.Run:
        """What a state is to fit."""
        options = self._options
        layers = [self._layer(index) for index in range(len(self._params))]
        return checkpoint.Run(
            layers,
            self._choice,
            options.warmup_steps,
            options.planner,
            options.candidates,
            self._control.size,
        )

    def _require_between_steps(self, what: str) -> None:
        if self.touched:
            raise RuntimeError(f"{what} between steps: call it before backward(), or after step()")


def _arrived(reducer: Callable[[], Reducer | None], index: int, parameter: Tensor) -> None:
    """The hook of one parameter."""
    del parameter
    alive = reducer()
    if alive is not None:
        alive._arrive(index)
