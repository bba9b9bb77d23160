"""The layout: all layers in one order, their routes, their buckets, and what all of these use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from hvd_adaptive.adaptation.base import Assignment, Controller
from hvd_adaptive.adaptation.candidates import check_per_rank_levels
from hvd_adaptive.buckets import Bucket, Route, build_buckets, check_gathered
from hvd_adaptive.collectives import AUTO, planned_link_bytes, scheme_for, scheme_named
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.compressors import CastCompressor
from hvd_adaptive.config import CompressionConfig, ReducerOptions
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.feedback_states import FeedbackStates
from hvd_adaptive.engine.hooks import GradientHooks
from hvd_adaptive.engine.known_costs import KnownCosts
from hvd_adaptive.engine.launch_order import LaunchOrder
from hvd_adaptive.engine.layer_agreement import agree_on_layers, report_layers
from hvd_adaptive.engine.learning_rates import LearningRates
from hvd_adaptive.engine.routing import make_plan, routes_of
from hvd_adaptive.engine.scheme_choice import SchemeChoice
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.planning import Plan


@dataclass(slots=True)
class Progress:
    """How far a run is; the same on all ranks.

    Args:
        rates: the learning rates, with those of the last step.
        rounds: how often gradients were synchronized.
        dense_until: of them, those after which the learning rate's warm-up had ended; None before that,
            and where dense steps are counted.
        flat: for how many of them the learning rate has not risen, as long as that counts.
    """

    rates: LearningRates
    rounds: int = 0
    dense_until: int | None = None
    flat: int = 0

    def note_rates(self, rising: bool, patience: int) -> None:
        """End the dense steps once the learning rate has not risen for ``patience`` steps.

        Args:
            rising: whether it has risen in the running step, on any rank.
            patience: 0 where dense steps are counted.
        """
        if patience and self.dense_until is None:
            self.flat = 0 if rising else self.flat + 1
            if self.flat >= patience:
                self.dense_until = self.rounds + 1


class Layout:
    """What every layer does now, and the buckets that follow from it.

    Args:
        hooks: the parameters.
        config: the compressors.
        options: how gradients are sent.
        control: agreement between ranks.
        exchange: sends the buckets.
        feedback: what is kept of each layer.
        progress: how far the run is.
        controller: changes levels during training.
        messages: agreement on plans.
        costs: of network and compressors, where others go by them, too.
    """

    def __init__(
        self,
        hooks: GradientHooks,
        config: CompressionConfig,
        options: ReducerOptions,
        control: Control,
        exchange: Exchange,
        feedback: FeedbackStates,
        progress: Progress,
        controller: Controller,
        messages: Control,
        costs: KnownCosts | None = None,
    ) -> None:
        self.config = config
        """The compressors, with what a planner has assigned."""
        self.controller = controller
        """What changes levels during training."""
        self.order: list[str] = []
        """Names of all layers in the order in which they are sent; empty until that is agreed."""
        self.sparse: frozenset[str] = frozenset()
        """Names of the layers with sparse gradients on some rank."""
        self.launches = LaunchOrder()
        self._hooks = hooks
        self._options = options
        self._control, self._messages = control, messages
        self._exchange = exchange
        self._feedback = feedback
        self._progress = progress
        self._agreed_ranks = 0
        self._costs = costs or KnownCosts(exchange.transport, control, f"{exchange.prefix}.costs")
        self._schemes = SchemeChoice(self._costs)
        layers = hooks.layers()
        config.check_patterns([layer.name for layer in layers])
        self.plan: Plan = make_plan(layers, routes_of(config, layers, self.sparse), version=0, step=0)
        """What every layer does now, as users see it."""

    @property
    def buckets(self) -> tuple[Bucket, ...] | None:
        """The buckets; None until ranks have agreed on their layers."""
        return self.launches.buckets

    @property
    def steps(self) -> int:
        """Steps since the end of the dense ones; negative before it."""
        if not self._options.lr_warmup:
            return self._progress.rounds - self._options.dense_steps
        until = self._progress.dense_until
        return -1 if until is None else self._progress.rounds - until

    @property
    def other_ranks(self) -> bool:
        """Whether nothing is agreed with the ranks that there are now: in the first step."""
        return self._control.size != self._agreed_ranks

    def shards_dict(self) -> dict[str, Any]:
        """See :meth:`Exchange.shards_dict`."""
        return self._exchange.shards_dict()

    def load_shards(self, found: Mapping[str, Any]) -> None:
        """Use them from the next :meth:`build` on."""
        self._exchange.load_shards(found)

    def costs_dict(self) -> dict[str, Any] | None:
        """See :meth:`KnownCosts.state_dict`."""
        return self._costs.state_dict()

    def load_costs(self, found: Mapping[str, Any] | None) -> None:
        """Use them from the next :meth:`build` on."""
        self._costs.load_state_dict(found)

    def forget_costs(self) -> None:
        """Measure the network again before it is next asked for; all ranks call it."""
        self._costs.forget_network()
        self._schemes.forget()

    def forget_ranks(self) -> None:
        """Ranks must agree again."""
        self.forget_costs()
        self._agreed_ranks = 0

    def agree(self, arrivals: Sequence[int], seen_sparse: set[str]) -> None:
        """Agree with all ranks on the layers and their order; all of them call it.

        Args:
            arrivals: layers in the order in which their gradients arrived here.
            seen_sparse: layers with sparse gradients here.

        Raises:
            ValueError: ranks train different layers.
        """
        self._schemes.forget()  # ranks may not have tried as many steps
        report = report_layers(
            self._hooks.layers(),
            rounds=self._progress.rounds,
            arrivals=[self._hooks.names[index] for index in arrivals],
            order=self.order,
            sparse=sorted(self.sparse | seen_sparse),
        )
        agreed = agree_on_layers(self._control, report)
        self._progress.rounds, self.order, self.sparse = agreed.rounds, agreed.order, agreed.sparse

    def build(self, names: Sequence[str] | None = None) -> None:
        """Build buckets of the named layers, or of all; what is kept of each layer moves with it."""
        by_name = {layer.name: layer for layer in self._hooks.layers()}
        layers = [by_name[name] for name in (self.order if names is None else names)]
        sparse = frozenset() if self._options.sparse_as_dense else self.sparse
        step, rounds = self.steps, self._progress.rounds
        routes = routes_of(self.config, layers, sparse, max(0, step), warmup=step < 0)
        groups = grouped(self._options.groups, list(by_name))
        planned = build_buckets(layers, routes, self._options.bucket_cap_bytes, groups)
        controller = self.controller
        tries = not controller.plans  # who plans by times must not take a trial's for its own
        buckets = self._schemes.choose(planned, controller.per_rank_levels, tries)
        for bucket in buckets:
            for layer in bucket.layers:
                routes[layer.name] = replace(routes[layer.name], scheme=bucket.scheme)
        twice = [bucket for bucket in buckets if scheme_named(bucket.scheme).recompresses]
        check_gathered([bucket for bucket in buckets if bucket not in twice], self._control.size)
        check_gathered(twice, 1)  # shards of all ranks' payloads are as much as one payload
        states = self._feedback.attach(buckets)
        self._exchange.attach(buckets, states, self.controller.per_rank_levels)
        self.launches.set(buckets, self._exchange.takes_passengers)
        self._exchange.meter.scalar("memory/feedback_bytes", self._feedback.nbytes, rounds)
        if self.controller.plans:
            self._attach_controller(buckets, routes, step < 0)
        self._agreed_ranks = self._control.size
        in_order = [layer for name, layer in by_name.items() if name in routes]
        version, per_rank = self.plan.version + 1, self.controller.per_rank_levels
        expected = self.controller.expected
        self.plan = make_plan(
            in_order, routes, version, rounds, expected, per_rank, self._schemes.reasons
        )
        self._exchange.meter.plan(self.plan, rounds)

    def _attach_controller(
        self,
        buckets: Sequence[Bucket],
        routes: Mapping[str, Route],
        idle: bool,
    ) -> None:
        """Tell it which layers it may decide on: those that the user's choice compresses by itself."""
        layers = [
            (layer, own, self._scheme_of(layer, routes))
            for layer in self._hooks.layers()
            if layer.name not in self.sparse
            and not isinstance(own := self.config.compressor_of(layer), CastCompressor)
            and not own.whole_model
        ]
        places = {layer.name: bucket.index for bucket in buckets for layer in bucket.layers}
        mine = [row for row in layers if row[0].name in places]
        planned = {layer.name for layer, *_ in mine}
        others = [
            layer
            for bucket in buckets
            for layer in bucket.layers
            if layer.name not in planned and bucket.kind is not PayloadKind.SPARSE
        ]
        rows = make_plan(others, routes, version=0, step=0)
        per_node = self._exchange.transport.topology.ranks_per_node
        bytes_of_others = sum(
            planned_link_bytes(row.wire_bytes, row.scheme, self._control.size, per_node) for row in rows
        )
        self.controller.attach(mine, places, bytes_of_others, idle)

    def _scheme_of(self, layer: Layer, routes: Mapping[str, Route]) -> str:
        """The scheme that planners count with for what is encoded of a layer."""
        scheme = self.config.scheme_of(layer)
        if scheme != AUTO:
            return scheme
        route = routes.get(layer.name)
        if route is not None and route.kind is PayloadKind.ENCODED:
            return route.scheme
        chosen = [each.scheme for each in routes.values() if each.kind is PayloadKind.ENCODED]
        return chosen[0] if chosen else scheme_for(PayloadKind.ENCODED)

    def tries_next(self) -> bool:
        """Whether a trial of schemes goes on with another one, or ends: buckets must be built again.

        All ranks call it at the end of the same step.
        """
        return self._schemes.end_step(perf_counter())

    def follow(self, collect: bool, ready: bool) -> None:
        """Collect what was measured, or take over a plan, where the ranks' votes say so."""
        controller, rounds, started = self.controller, self._progress.rounds, perf_counter()
        if collect:
            controller.start_collection(rounds)
        if ready:
            self.switch(controller.apply_decision(rounds))
        if controller.outlook is not None:
            controller.outlook.spent += perf_counter() - started

    def switch(self, assignments: Mapping[str, Assignment] | None) -> None:
        """Compress as planned from the next gradient on; None changes nothing. All ranks call it.

        Raises:
            ValueError: ranks hold different plans.
        """
        if assignments is None:
            return
        self.config = replace(self.config, planned=assignments, sums=self.controller.sum_levels())
        self.build()
        digests = self._messages.allgather(self.plan.digest)
        for rank, digest in enumerate(digests):
            if digest != self.plan.digest:
                raise ValueError(
                    f"rank {rank} of the process set has the plan {digest}, this rank has "
                    f"{self.plan.digest}: all ranks must build the same model and pass the same options"
                )

    def configure(
        self,
        build: Callable[[CompressionConfig], CompressionConfig],
        require_between_steps: Callable[[str], None],
        alone: bool,
    ) -> None:
        """Compress in another way from the next step on; what is kept of each layer stays.

        Args:
            build: makes the new configuration of the present one.
            require_between_steps: raises where a step has begun.
            alone: whether there is nobody to agree with.

        Raises:
            ValueError: it could not be made on some rank, or ranks made different ones; on all ranks.
            RuntimeError: gradients have arrived that have not been synchronized; on all ranks.
        """

        def checked() -> CompressionConfig:
            require_between_steps("compression can only be changed")
            config = build(self.config)
            config.check_patterns([layer.name for layer in self._hooks.layers()])
            if self._options.planner is not None:
                check_per_rank_levels(
                    self._options.planner, config.compressors, self._options.candidates
                )
            return config

        self.config = self._control.agree(
            "set_compression", checked, CompressionConfig.digest, alone=alone
        )
        self.controller.invalidate()
        if self.buckets is not None:
            self.build()
        else:
            layers = self._hooks.layers()
            routes = routes_of(self.config, layers, self.sparse)
            self.plan = make_plan(layers, routes, self.plan.version + 1, self._progress.rounds)


def grouped(groups: int | tuple[tuple[str, ...], ...], names: Sequence[str]) -> Sequence[Sequence[str]]:
    """Names of the layers that are to be sent together.

    Args:
        groups: names, or a number of groups of about the same number of layers, or 0.
        names: of all layers.

    Example:
        >>> grouped(2, ["a", "b", "c"]), grouped(0, ["a"])
        ([['a', 'b'], ['c']], ())
    """
    if isinstance(groups, tuple):
        return groups
    groups = min(groups, len(names))  # the others would be empty
    if groups == 0:
        return ()
    size, extra = divmod(len(names), groups)
    cuts = [number * size + min(number, extra) for number in range(groups + 1)]
    return [names[start:stop] for start, stop in itertools.pairwise(cuts)]
