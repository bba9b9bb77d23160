"""DistributedOptimizer: Horovod's signature and behavior, with compressed gradients."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive.adaptation.base import Controller, NullController
from hvd_adaptive.adaptation.controller import AdaptationController
from hvd_adaptive.arguments import (
    HOROVOD_MODULE,
    Arguments,
    Checked,
    at_least,
    from_horovod,
    horizon_of,
    warn_without_dense_steps,
)
from hvd_adaptive.collectives import AUTO, reduces_in_nodes
from hvd_adaptive.comm import world as worlds
from hvd_adaptive.comm.control_channel import ChannelControl
from hvd_adaptive.comm.excepthook import name_this_rank
from hvd_adaptive.comm.process_set_control import ProcessSetControl
from hvd_adaptive.comm.request import ADASUM, AVERAGE
from hvd_adaptive.comm.transport import ProcessSet
from hvd_adaptive.comm.watchdog import watch
from hvd_adaptive.comm.world import ALL_RANKS, NODES_REMEDY, NodeGroups, World
from hvd_adaptive.compressors import Compression
from hvd_adaptive.config import DEFAULT_SCHEME, CompressionConfig, Spec
from hvd_adaptive.engine.cost_measurement import CostMeasurement
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.known_costs import KnownCosts
from hvd_adaptive.engine.reducer import Reducer
from hvd_adaptive.feedback import Feedback
from hvd_adaptive.planning import Plan, Recipe
from hvd_adaptive.telemetry import Meter, Placement, Telemetry
from hvd_adaptive.telemetry.verdict import usable_cores

_counter = itertools.count()


def DistributedOptimizer(  # noqa: N802 (Horovod's name and signature)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Spec = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = ALL_RANKS,
    *,
    feedback: str | Feedback | None = None,
    scheme: str | Mapping[str, str] = DEFAULT_SCHEME,
    planner: str | Recipe | None = None,
    candidates: Sequence[Spec] = (),
    dense_steps: int | str = 0,
    bucket_cap_mb: float = 25.0,
    telemetry: Telemetry | str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    seed: int = 0,
    warmup_steps: int | None = None,
) -> torch.optim.Optimizer:
    """Wrap a torch optimizer so that it steps with gradients reduced over all ranks.

    A drop-in for ``hvd.DistributedOptimizer``: same arguments, same methods. Gradients are compressed
    as ``compression`` says, sent in buckets while the backward pass continues, and what compression
    leaves out is added to the next gradient. Ranks talk through Horovod, or through torch.distributed
    where that has been initialized and Horovod has not (``torchrun``; see ``docs/torchrun.md``).

    Args:
        optimizer: the optimizer to wrap; its parameters and state are shared, not copied.
        named_parameters: names of the parameters, usually ``model.named_parameters()``.
        compression: text such as ``"topk:density=0.01"``, or a member of :class:`Compression`; or
            ``"auto"``: begin dense, measure, and choose the fastest within limits on accuracy, as in
            ``"auto:accuracy=strict,total_steps=9000"`` (see :class:`hvd_adaptive.planning.Auto`).
            Biases, norms and tensors under 1,024 elements are sent dense unless an override names them.
        backward_passes_per_step: backward passes whose gradients are added up before they are sent.
        op: ``hvd.Average`` (0), ``hvd.Sum`` (1), or ``hvd.Adasum`` (2; only without compression, and
            not under torch.distributed).
        gradient_predivide_factor: splits the averaging before and after the sum (``Average`` only).
        num_groups: older name of ``groups`` as a number.
        groups: parameters whose gradients are sent together: lists of tensors, or a number of groups.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks to reduce over; other ranks step with their own gradients. By default
            all; a process set of Horovod, or a process group of torch.distributed.
        feedback: ``"ef"``, ``"ef21"``, ``"ef21-sgdm"``, ``"dgc"`` or ``"none"``, with options as in
            ``"ef:decay=0.9"``, or None for what each compressor needs.
        scheme: how what is encoded (sparsifiers, quantizers) meets: ``"allgather"``, where every rank
            gets every rank's payload, or ``"two_shot"``, where each rank sums a shard and sends the sum
            compressed again, so that traffic does not grow with the ranks; ``"two_shot:level=8"`` has
            another level for the sums; or ``"hierarchical"``, which adds densely in each node first and
            sends each element once between nodes (call ``hvd_adaptive.init(hierarchical=True)``). Or
            schemes by parameter name pattern, as in ``{"encoder.*": "two_shot"}``.
        planner: what chooses each layer's level during training: ``"lgreco"``, ``"lgreco-time"``,
            ``"kimad"``, ``"kimad+"``, ``"gravac"``, ``"accordion"``, ``"accordion+lgreco"``,
            ``"gravac+lgreco"``, ``"cgx"`` or ``"auto"``, with options as in ``"lgreco:period=200"``;
            None keeps the levels that ``compression`` and ``overrides`` name.
        candidates: compressors whose levels a planner may choose besides those of ``compression``.
        dense_steps: steps at the start that send dense gradients; or ``"lr_warmup"``: until the
            learning rate stops rising, or, as in ``"lr_warmup:500"``, has not risen for so many steps,
            where it is set once per epoch.
        bucket_cap_mb: dense MiB at which a bucket is closed.
        telemetry: folder for TensorBoard and JSON lines, or a :class:`Telemetry`.
        overrides: compressors by parameter name pattern, as in ``{"*.bias": "none"}``; the first
            pattern that matches counts.
        seed: of random rounding and random selection: a whole number from -2**63 to 2**64 - 1.
        warmup_steps: older name of ``dense_steps``.

    Returns:
        An optimizer of a class derived from ``optimizer``'s, with beside its own methods
        ``synchronize()``, ``skip_synchronize()``, ``set_backward_passes_per_step()``, ``plan``,
        ``meter``, ``set_compression()``, ``report_loss()``, ``set_horizon()``, ``feedback_bytes``,
        ``compression_state_dict()`` and ``load_compression_state_dict()``.

    Raises:
        ValueError: an argument is out of range, a name is unknown, or ranks disagree; on all ranks.
            Also on the others where one rank raised TypeError. In an elastic run ranks compare what
            they were built with in their first step together.
        TypeError: an argument is of the wrong type.
        OSError: rank 0 cannot write to the folder ``telemetry``; RuntimeError on the others.

    Example:
        >>> import horovod.torch as hvd, hvd_adaptive as hva
        >>> hvd.init()
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = hva.DistributedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     named_parameters=model.named_parameters(),
        ...     compression="topk:density=0.01",
        ... )
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
    """
    if num_groups != 0:
        warnings.warn(
            "num_groups is Horovod's older name of groups: write groups=N",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if warmup_steps is not None:
        warnings.warn("warmup_steps was renamed: write dense_steps=N", DeprecationWarning, stacklevel=2)
        dense_steps = warmup_steps
    world = worlds.current()
    process_set = world.everyone if process_set is ALL_RANKS else world.as_process_set(process_set)
    return _build(
        world,
        Arguments(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            groups,
            sparse_as_dense,
            process_set,
            feedback,
            scheme,
            planner,
            candidates,
            dense_steps,
            bucket_cap_mb,
            telemetry,
            overrides,
            seed,
        ),
    )


def _build(world: World, arguments: Arguments) -> torch.optim.Optimizer:
    """Agree with all ranks on the arguments, and wrap the optimizer."""
    number = next(_counter)
    process_set = arguments.process_set
    # a rank that names no ranks tells all of them, or those that wait for it would never hear
    known = process_set if world.is_process_set(process_set) else world.everyone
    control = ProcessSetControl(f"hva.{number}.control", known)
    elastic = world.is_elastic and known.included()
    active = known.included() and (known.size() > 1 or elastic)  # as Horovod decides it
    name_this_rank(world.rank)
    # a rank that joins an elastic run builds this while the others train: they compare when they meet
    alone = elastic or not active
    checked = control.agree(
        "DistributedOptimizer", lambda: arguments.check(world, active), Checked.digest, alone=alone
    )
    if world.rank == 0:
        warn_without_dense_steps(checked)
    if active and not elastic:
        watch(control)
    if arguments.op == ADASUM and (world.size > 1 or elastic):
        return world.stock_optimizer(
            arguments.optimizer,
            checked.named,
            arguments.op,
            arguments.backward_passes_per_step,
            process_set,
        )
    ranks = process_set.size() if active else 1
    meter = _open_meter(arguments.telemetry, control, active and not elastic, ranks)
    meter.configuration(_configuration(world, checked.digest(), ranks))
    reducer = _reducer(world, arguments, checked, control, meter, f"hva.{number}", active)
    mean = functools.partial(world.mean, name=f"hva.{number}.loss", process_set=process_set)
    reduce_loss = mean if active else None
    wrapped = _wrap(arguments.optimizer, reducer, meter, checked.named, reduce_loss)
    if elastic:
        from hvd_adaptive.engine.elastic import follow  # which needs Horovod

        follow(type(wrapped))
    return wrapped


def _reducer(
    world: World,
    arguments: Arguments,
    checked: Checked,
    control: ProcessSetControl,
    meter: Meter,
    prefix: str,
    active: bool,
) -> Reducer:
    """What reduces the gradients; in an elastic run, among ranks that come and go."""
    process_set, options = arguments.process_set, checked.options
    elastic = active and world.is_elastic
    nodes, obstacle = _nodes(checked.config, control, process_set, active)
    transport = world.transport(
        arguments.op,
        process_set,
        float(arguments.gradient_predivide_factor),
        nodes.topology if nodes else None,
        nodes.sets if nodes else None,
        obstacle,
    )
    exchange = Exchange(transport, meter, prefix, int(arguments.seed), world.rank)
    costs = KnownCosts(transport, control, f"{prefix}.costs")

    name = f"{prefix}.plan"
    channel = functools.cache(lambda: world.open_channel(name, control, process_set))

    def new_controller() -> Controller:
        if not active or options.planner is None:
            return NullController()
        return AdaptationController(
            options.planner,
            # in an elastic run it is of the ranks that there are
            world.open_channel(name, control, process_set) if elastic else channel(),
            meter,
            control.rank,
            control.size,
            options.candidates,
            exchange.codec_states.by_key,
            transport.topology.ranks_per_node,
            CostMeasurement(costs, checked.config.scheme_texts, options.bucket_cap_bytes),
        )

    parts = (
        checked.named, checked.config, options, control, exchange, active, new_controller(),
    )  # fmt: skip
    if not elastic:
        return Reducer(*parts, ChannelControl(control, channel), costs)
    from hvd_adaptive.engine.elastic import ElasticReducer  # which needs Horovod

    return ElasticReducer(
        *parts,
        None,
        costs,
        agree=lambda: control.agree("DistributedOptimizer", lambda: checked, Checked.digest),
        new_controller=new_controller,
        configure=lambda size: meter.configuration(_configuration(world, checked.digest(), size)),
    )


def _nodes(
    config: CompressionConfig, control: ProcessSetControl, process_set: ProcessSet, active: bool
) -> tuple[NodeGroups | None, str]:
    """The nodes of the ranks, where a scheme reduces in a node first or may do so; and why none does.

    Where nothing is to be gained from that, rank 0 warns, once, if such a scheme was named.
    """
    named = any(map(reduces_in_nodes, config.scheme_texts))
    if not active or not (named or AUTO in config.scheme_texts):
        return None, ""
    nodes, world = None, control.world
    if world.is_elastic:
        obstacle = "ranks come and go in an elastic run"
    elif not world.covers_all(process_set):
        obstacle = "the optimizer has a process set of its own"
    else:
        try:
            nodes = world.node_groups(control)
        except ValueError:
            if named:
                raise
            obstacle = f"there are no process sets of nodes: {NODES_REMEDY}"
        else:
            obstacle = nodes.topology.obstacle
    if obstacle and named and control.rank == 0:
        warnings.warn(
            f"scheme 'hierarchical' reduces as 'two_shot' here: {obstacle}",
            RuntimeWarning,
            stacklevel=5,
        )
    return nodes, obstacle


class _Methods:
    """What a wrapped optimizer does beside, or instead of, what its own class does.

    These methods are put into a class derived from the user's optimizer class alone, because Horovod
    calls ``super(optimizer.__class__, optimizer).step()`` in ``broadcast_optimizer_state`` when the
    class's module is that of its own optimizer, and must then reach the user's class.
    """

    __module__ = HOROVOD_MODULE

    param_groups: list[dict[str, Any]]
    meter: Meter
    backward_passes_per_step: int
    _reducer: Reducer
    _parameter_names: dict[Parameter, str]
    _reduce_loss: Callable[[Tensor], Tensor] | None
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Reduce the gradients now; use :meth:`skip_synchronize` for the ``step()`` that follows."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context ``step()`` does not synchronize, because that has been done."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, then step.

        A closure's gradients are reduced after each of its calls, and the loss that it returns is
        averaged over the ranks, so that an optimizer that looks at it decides the same on all ranks.
        """
        base: Any = super(self.__class__, self)
        if closure is not None:
            result = base.step(lambda: self._closed(closure))
        else:
            if self._should_synchronize:
                self._synchronize_once()
            result = base.step()
        self._synchronized = False
        self.meter.end_step(self._reducer.steps)
        self._reducer.steps += 1
        return result

    def _synchronize_once(self) -> None:
        if self._synchronized:
            # Horovod's own sentence first: scripts filter on it
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). The gradients are not reduced a second time. Write "
                "'with optimizer.skip_synchronize(): optimizer.step()'.",
                stacklevel=3,
            )
        if not self._synchronized or self._reducer.touched:
            self.synchronize()

    def _closed(self, closure: Callable[[], Any]) -> Any:
        """Call the closure, reduce its gradients, average its loss."""
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        if self._reduce_loss is None or loss is None:
            return loss
        mean = self._reduce_loss(torch.as_tensor(loss).detach().to("cpu", torch.float64).view(1))
        return mean[0].to(loss.device, loss.dtype) if isinstance(loss, Tensor) else float(mean)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; not between ``backward()`` and ``step()``."""
        if self._reducer.touched:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause a "
                "race condition."
            )
        super(self.__class__, self).zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters are reduced from the next step on."""
        super(self.__class__, self).add_param_group(param_group)  # type: ignore[misc]
        group = len(self.param_groups) - 1
        for position, parameter in enumerate(self.param_groups[-1]["params"]):
            name = self._parameter_names.get(parameter, f"allreduce.noname.{group}.{position}")
            self._reducer.add(name, parameter)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; a step that had begun is forgotten."""
        self._reducer.reset()
        self._synchronized = False
        self._should_synchronize = True
        super(self.__class__, self).load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes whose gradients are added up before they are sent."""
        self.backward_passes_per_step = at_least(1, "backward_passes_per_step", passes)
        self._reducer.set_passes(self.backward_passes_per_step)

    @property
    def plan(self) -> Plan:
        """Compressor, level and bytes of every layer, and why; prints as a table."""
        return self._reducer.plan

    def report_loss(self, loss: float | Tensor) -> None:
        """Let ``auto`` watch the training loss: call it once per step, before :meth:`step`.

        Optional, and without effect for other planners. The loss of rank 0 of the process set counts.
        A rise that dense steps do not show makes ``auto`` compress less; see ``docs/auto.md``.
        """
        # detached: torch warns of a number that is made of a tensor with a graph
        self._reducer.report_loss(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def set_horizon(self, steps: int | Any, steps_per_update: int = 1) -> None:
        """Let ``auto`` know how long the training run is: what waits is sent before its end.

        Args:
            steps: calls of :meth:`step` in the whole run, or a learning rate scheduler of torch that
                has an end, such as ``OneCycleLR`` or ``CosineAnnealingLR``.
            steps_per_update: calls of :meth:`step` for each of the scheduler's; steps per epoch where
                that is called once per epoch.

        Raises:
            ValueError: the scheduler has no end, or a number is not positive.
        """
        known = horizon_of(steps) if hasattr(steps, "get_last_lr") else steps
        known = at_least(1, "steps", known)
        self._reducer.set_horizon(known * at_least(1, "steps_per_update", steps_per_update))

    @property
    def feedback_bytes(self) -> int:
        """Memory on this rank of what feedback keeps from one step to the next."""
        return self._reducer.memory_bytes

    def set_compression(self, compression: Spec, overrides: Mapping[str, Spec] | None = None) -> None:
        """Compress in another way from the next step on; residuals and warm starts stay.

        Every rank calls it, between the same two steps, with the same arguments.

        Args:
            compression: as in :func:`DistributedOptimizer`.
            overrides: as in :func:`DistributedOptimizer`; they replace the earlier ones.

        Raises:
            ValueError: an unknown name or option, or ranks that disagree; on all ranks.
            RuntimeError: gradients have arrived that have not been reduced.
        """
        self._reducer.configure(
            lambda before: replace(
                CompressionConfig.of(
                    from_horovod(compression), overrides, before.feedback, dict(before.schemes)
                ),
                start=before.start,
            )
        )

    def compression_state_dict(self) -> dict[str, Any]:
        """This rank's compression state (residuals, warm starts, learned levels).

        Save one per rank beside the model. Loaded by the same number of ranks it continues bit for bit;
        for another number see :func:`hvd_adaptive.merge_compression_states`.
        """
        return self._reducer.state_dict()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`compression_state_dict` returned on this rank; all ranks call it.

        Between two steps. Where it raises, it raises on all ranks, and nothing has changed.

        Raises:
            ValueError: a state is damaged or of another model, or ranks give states of different steps
                or runs; the message names the item and the rank.
            RuntimeError: gradients have arrived that have not been reduced.
        """
        self._reducer.load_state_dict(state)


def _wrap(
    optimizer: torch.optim.Optimizer,
    reducer: Reducer,
    meter: Meter,
    named: Sequence[tuple[str, Parameter]],
    reduce_loss: Callable[[Tensor], Tensor] | None,
) -> torch.optim.Optimizer:
    """Make an optimizer of a class derived from the user's that shares everything with his."""
    own = {key: value for key, value in vars(_Methods).items() if key not in _NOT_METHODS}
    cls = type(type(optimizer).__name__, (type(optimizer),), own)
    wrapped: Any = object.__new__(cls)
    # Not by the class's __init__: its arguments are unknown, and defaults and state would be lost. A
    # learning rate scheduler leaves a patched step() in the instance, which must not hide ours.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._reducer = reducer
    wrapped.meter = meter
    wrapped.backward_passes_per_step = reducer.passes
    wrapped._parameter_names = {parameter: name for name, parameter in named}
    wrapped._reduce_loss = reduce_loss
    wrapped._synchronized = False
    wrapped._should_synchronize = True
    alive = weakref.ref(wrapped)
    reducer.set_param_groups(lambda: _groups_of(alive()))
    reducer.second_moments.state = lambda: _state_of(alive())
    weakref.finalize(wrapped, reducer.close)
    result: torch.optim.Optimizer = wrapped
    return result


def _groups_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


def _state_of(optimizer: torch.optim.Optimizer | None) -> Mapping[Parameter, Mapping[str, Any]]:
    # not of all torch optimizers' keys is known that they are parameters
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    return state


_NOT_METHODS = ("__dict__", "__weakref__", "__annotations__", "__doc__")


def _open_meter(
    telemetry: Telemetry | str | os.PathLike[str] | None,
    control: ProcessSetControl,
    active: bool,
    ranks: int,
) -> Meter:
    """The meter; where rank 0 cannot write, all ranks say so."""

    world = control.world
    placement = _placement(world, control if active else None, ranks)

    def build() -> Meter:
        traffic = 2 * (ranks - 1) / ranks
        return Meter(telemetry, rank=world.rank, dense_traffic=traffic, placement=placement)

    return control.agree("DistributedOptimizer", build, lambda _: {}, alone=not active)


def _placement(world: World, control: ProcessSetControl | None, ranks: int) -> Placement:
    """Where the ranks run: which of them share this machine's cores, and how many cores these are."""
    host, cores = socket.gethostname(), usable_cores()
    if control is None:
        return Placement(ranks, world.hosts, world.local_size, len(cores))
    everyone = control.allgather([host, cores])
    here = [theirs for name, theirs in everyone if name == host]
    # ranks may be bound to a core each
    together = {core for theirs in here for core in theirs}
    return Placement(ranks, len({name for name, _ in everyone}), len(here), len(together))


def _configuration(world: World, digest: Mapping[str, str], size: int) -> dict[str, str]:
    """The settings as they are shown, without the parameters."""
    shown = {key: value for key, value in digest.items() if not key.startswith("parameter ")}
    return {"ranks": str(size), world.name: world.version, "torch": torch.__version__, **shown}
