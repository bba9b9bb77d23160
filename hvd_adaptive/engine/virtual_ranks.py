"""Training of one model with the gradients of many ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive import planning
from hvd_adaptive.adaptation.automatic import expand
from hvd_adaptive.adaptation.base import Controller, NullController
from hvd_adaptive.adaptation.controller import AdaptationController
from hvd_adaptive.adaptation.step_trace import StepTrace
from hvd_adaptive.comm.control_channel import ChannelControl
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.local_group import LocalGroup, LocalRank
from hvd_adaptive.comm.request import AVERAGE
from hvd_adaptive.comm.simulated_network import SimulatedNetwork
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.compressors import parse
from hvd_adaptive.config import (
    DEFAULT_SCHEME,
    CompressionConfig,
    ReducerOptions,
    Spec,
    read_lr_warmup,
)
from hvd_adaptive.engine.cost_measurement import CostMeasurement
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.known_costs import KnownCosts
from hvd_adaptive.engine.reducer import Reducer
from hvd_adaptive.feedback import Feedback
from hvd_adaptive.planning import Plan, Recipe
from hvd_adaptive.telemetry import Meter


class VirtualRanks:
    """What ``size`` ranks with :func:`~hvd_adaptive.DistributedOptimizer` would do to gradients.

    Every rank has residuals and random numbers of its own, and all planners work; the model is there
    once. Results are those of real ranks to the bit (see :mod:`hvd_adaptive.comm.local_group`). What
    planners learn of times is of this process, or of a ``network`` that is simulated.

    Memory: what feedback keeps, for each rank, and one gradient for each rank in a step.

    A planner that foresees seconds (``auto``) works with the network that ``link`` names.

    Args:
        size: number of ranks.
        named_parameters: names of the model's parameters, the same objects as in its optimizer.
        compression: as of ``DistributedOptimizer``, like all that follows.
        feedback: rule for what was left out.
        scheme: how what is encoded meets.
        planner: what chooses levels.
        candidates: compressors that it may choose, too.
        overrides: compressors by name pattern.
        dense_steps: dense steps at the start.
        op: ``hvd.Average`` or ``hvd.Sum``.
        seed: of random rounding and selection.
        param_groups: the optimizer's parameter groups, whose learning rates count.
        ranks_per_node: how many ranks, one after the other, share a virtual node.
        link: what the network is assumed to cost; None is an Ethernet of 1 Gbit/s.
        network: that collectives take their time on; None where planners time this process.
        compute_seconds: that forward and backward pass are assumed to take.
        optimizer_state: the optimizer's state of each parameter, whose second moments count.
        clock: seconds by which planners time steps, where no network has its own.

    Raises:
        ValueError: an argument is out of range, or a name is unknown.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 64, bias=False)
        >>> ranks = VirtualRanks(3, model.named_parameters(), "topk:density=0.25")
        >>> ranks.reduce([{"weight": torch.full((64, 64), float(rank))} for rank in range(3)])
        >>> int(model.weight.grad.count_nonzero()), len(ranks.compression_state_dicts())
        (1024, 3)
    """

    def __init__(
        self,
        size: int,
        named_parameters: Any,
        compression: Spec = "none",
        *,
        feedback: str | Feedback | None = None,
        scheme: str | Mapping[str, str] = DEFAULT_SCHEME,
        planner: str | Recipe | None = None,
        candidates: Sequence[Spec] = (),
        overrides: Mapping[str, Spec] | None = None,
        dense_steps: int | str = 0,
        bucket_cap_mb: float = 25.0,
        op: int = AVERAGE,
        seed: int = 0,
        param_groups: Callable[[], list[dict[str, Any]]] = list,
        ranks_per_node: int = 1,
        link: LinkCosts | None = None,
        network: SimulatedNetwork | None = None,
        compute_seconds: float = 0.1,
        optimizer_state: Callable[[], Mapping[Any, Any]] = dict,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._named: list[tuple[str, Parameter]] = list(named_parameters)
        self.group = LocalGroup(size, Topology.of_nodes(size, ranks_per_node), link, network)
        self._compute_seconds = compute_seconds
        auto = expand(compression, planner, candidates, scheme, DEFAULT_SCHEME, param_groups())
        given = CompressionConfig.of(auto.compression, overrides, feedback, auto.scheme)
        choice = replace(given, start=auto.start)
        options = ReducerOptions(
            dense_steps=dense_steps if isinstance(dense_steps, int) else 0,
            lr_warmup=read_lr_warmup(dense_steps) if isinstance(dense_steps, str) else 0,
            bucket_cap_bytes=bucket_cap_mb * (1 << 20),
            planner=None if auto.planner is None else planning.parse(auto.planner),
            candidates=tuple(parse(spec) for spec in auto.candidates),
        )

        def build(rank: LocalRank) -> _Member:
            # a rank's gradients need parameters of their own, which share the model's memory
            own = [(name, Parameter(p.detach(), p.requires_grad)) for name, p in self._named]
            exchange = self._exchange(rank, op, seed, clock)
            control = rank.control("local.control")
            costs = KnownCosts(exchange.transport, control, "local.costs")
            controller: Controller = NullController()
            if options.planner is not None:
                measured = self._costs(costs, choice, options)
                controller = self._controller(rank, options.planner, options, exchange, measured)
            messages = ChannelControl(control, lambda: rank.channel("local.messages"))
            parts = own, choice, options, control, exchange, True, controller, messages, costs
            reducer = Reducer(*parts)
            reducer.set_param_groups(lambda: _as_groups_of(own, self._named, param_groups()))
            reducer.second_moments.state = lambda: _as_state_of(own, self._named, optimizer_state())
            return _Member(own, reducer)

        self._members = self.group.run(build)

    def _exchange(self, rank: LocalRank, op: int, seed: int, clock: Callable[[], float]) -> Exchange:
        """What a rank sends with, timed on the network that is simulated, where there is one."""
        network, timer = self.group.network, perf_counter
        if network is not None:
            clock = timer = network.now
        return Exchange(rank.transport(op), Meter(clock=clock), "local", seed, rank.rank, timer)

    def _controller(
        self,
        rank: LocalRank,
        planner: Recipe,
        options: ReducerOptions,
        exchange: Exchange,
        costs: CostMeasurement,
    ) -> Controller:
        """What lets a planner choose a rank's levels."""
        return AdaptationController(
            planner,
            rank.channel("local.plan"),
            exchange.meter,
            rank.rank,
            rank.size,
            options.candidates,
            exchange.codec_states.by_key,
            exchange.transport.topology.ranks_per_node,
            costs,
        )

    def _costs(
        self, known: KnownCosts, choice: CompressionConfig, options: ReducerOptions
    ) -> CostMeasurement:
        """Of the compressors here, and of the network that is assumed."""
        return CostMeasurement(
            known,
            choice.scheme_texts,
            options.bucket_cap_bytes,
            self.group.link,
            self._compute_seconds,
        )

    def reduce(self, gradients: Sequence[Mapping[str, Tensor | None]]) -> None:
        """One step: reduce each rank's gradients, and leave the result in the model's ``grad``.

        Args:
            gradients: by parameter name, of each rank in turn; overwritten. None, or no entry, where a
                rank has none.

        Raises:
            ValueError: there are not as many as ranks.
            Exception: whatever a real rank would raise.
        """
        if len(gradients) != self.group.size:
            raise ValueError(
                f"{len(gradients)} ranks' gradients given for a group of {self.group.size} ranks"
            )

        def step(rank: LocalRank) -> None:
            member, mine = self._members[rank.rank], gradients[rank.rank]
            for name, parameter in member.parameters:
                parameter.grad = mine.get(name)
            member.reducer.synchronize()

        if self.group.network is not None:
            self.group.network.compute(self._compute_seconds)
        self.group.run(step)
        for (_, model), (_, own) in zip(self._named, self._members[0].parameters, strict=True):
            model.grad = own.grad
        for member in self._members:
            for _, parameter in member.parameters:
                parameter.grad = None

    def set_horizon(self, steps: int) -> None:
        """How many steps the whole training run has."""
        for member in self._members:
            member.reducer.set_horizon(steps)

    def report_loss(self, loss: float) -> None:
        """The training loss of the next step."""
        for member in self._members:
            member.reducer.report_loss(loss)

    @property
    def plan(self) -> Plan:
        """Compressor, level and bytes of every layer, on rank 0."""
        return self._members[0].reducer.plan

    def trace(self) -> StepTrace | None:
        """What the last plan of ``auto`` was made from; None before there is one, and without it."""
        outlook = self._members[0].reducer.controller.outlook
        return None if outlook is None else outlook.trace()

    def compression_state_dicts(self) -> list[dict[str, Any]]:
        """Every rank's compression state."""
        return self.group.run(lambda rank: self._members[rank.rank].reducer.state_dict())

    def load_compression_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what :meth:`compression_state_dicts` returned."""
        self.group.run(lambda rank: self._members[rank.rank].reducer.load_state_dict(states[rank.rank]))


class _Member:
    """One virtual rank: its parameters, and what reduces their gradients."""

    def __init__(self, parameters: list[tuple[str, Parameter]], reducer: Reducer) -> None:
        self.parameters = parameters
        self.reducer = reducer


def _as_groups_of(
    own: Sequence[tuple[str, Parameter]],
    named: Sequence[tuple[str, Parameter]],
    groups: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, with a rank's parameters in the place of the model's."""
    mine = {model: parameter for (_, model), (_, parameter) in zip(named, own, strict=True)}
    return [{**group, "params": [mine[p] for p in group["params"] if p in mine]} for group in groups]


def _as_state_of(
    own: Sequence[tuple[str, Parameter]],
    named: Sequence[tuple[str, Parameter]],
    state: Mapping[Any, Any],
) -> dict[Parameter, Any]:
    """An optimizer's state, by a rank's parameters in the place of the model's."""
    pairs = zip(named, own, strict=True)
    return {mine: state[model] for (_, model), (_, mine) in pairs if model in state}
