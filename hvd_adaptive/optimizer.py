"""DistributedOptimizer: Horovod's signature and behaviour, with compressed gradients."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import os
import reprlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive import planning
from hvd_adaptive.adaptation.candidates import check_per_rank_levels
from hvd_adaptive.adaptation.controller import AdaptationController
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import HorovodChannel, open_channel
from hvd_adaptive.comm.excepthook import name_this_rank
from hvd_adaptive.comm.transport import Transport
from hvd_adaptive.comm.watchdog import watch
from hvd_adaptive.compressors import CastCompressor, Compression, Compressor, NoCompression
from hvd_adaptive.engine.elastic import ElasticReducer, follow, is_elastic
from hvd_adaptive.engine.exchange import Exchange
from hvd_adaptive.engine.reducer import Options, Reducer
from hvd_adaptive.engine.routing import CompressionConfig, Spec, check_dtypes, parse_as, unfit_dtypes
from hvd_adaptive.feedback import Feedback
from hvd_adaptive.planning import Plan, Recipe
from hvd_adaptive.telemetry import Meter, Telemetry

# Horovod asks for this module's name to know its own optimizer (see _Methods).
_HOROVOD_MODULE: str = hvd.DistributedOptimizer.__module__

_OPERATIONS = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}

_counter = itertools.count()


def DistributedOptimizer(  # noqa: N802 (Horovod's name and signature)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Spec = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    *,
    feedback: str | Feedback | None = None,
    planner: str | Recipe | None = None,
    candidates: Sequence[Spec] = (),
    warmup_steps: int = 0,
    bucket_cap_mb: float = 25.0,
    telemetry: Telemetry | str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Wrap a torch optimizer so that it steps with gradients reduced over all ranks.

    A drop-in for ``hvd.DistributedOptimizer``: same arguments, same methods. Gradients are compressed
    as ``compression`` says, sent in buckets while the backward pass goes on, and what compression
    leaves out is added to the next gradient.

    Args:
        optimizer: the optimizer to wrap; its parameters and state are shared, not copied.
        named_parameters: names of the parameters, usually ``model.named_parameters()``.
        compression: text such as ``"topk:density=0.01"``, or a member of :class:`Compression`.
            Biases, norms and tensors under 1,024 elements travel dense unless an override names them.
        backward_passes_per_step: backward passes whose gradients are added up before they travel.
        op: ``hvd.Average``, ``hvd.Sum``, or ``hvd.Adasum`` (only without compression).
        gradient_predivide_factor: splits the averaging before and after the sum (``Average`` only).
        num_groups: older name of ``groups`` as a number.
        groups: parameters whose gradients travel together: lists of tensors, or a number of groups.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks to reduce over; other ranks step with their own gradients.
        feedback: ``"ef"``, ``"ef21"``, ``"dgc"`` or ``"none"``, with options as in ``"ef:decay=0.9"``,
            or None for what each compressor needs.
        planner: what chooses each layer's level during training: ``"lgreco"``, ``"lgreco-time"``,
            ``"kimad"``, ``"kimad+"``, ``"gravac"``, ``"accordion"``, ``"accordion+lgreco"``,
            ``"gravac+lgreco"`` or ``"cgx"``, with options as in ``"lgreco:period=200"``; None keeps the
            levels that ``compression`` and ``overrides`` name.
        candidates: compressors whose levels a planner may choose beside those of ``compression``.
        warmup_steps: steps at the start that send dense gradients.
        bucket_cap_mb: dense MiB at which a bucket is closed.
        telemetry: folder for TensorBoard and JSON lines, or a :class:`Telemetry`.
        overrides: compressors by parameter name pattern, as in ``{"*.bias": "none"}``; the first
            pattern that matches counts.
        seed: of random rounding and random selection: a whole number from -2**63 to 2**64 - 1.

    Returns:
        An optimizer of a class derived from ``optimizer``'s, with beside its own methods
        ``synchronize()``, ``skip_synchronize()``, ``set_backward_passes_per_step()``, ``plan``,
        ``meter``, ``set_compression()``, ``feedback_bytes``, ``compression_state_dict()`` and
        ``load_compression_state_dict()``.

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
    number = next(_counter)
    # a rank that names no ranks tells all of them, or those that wait for it would never hear
    known = _is_registered(process_set)
    control = Control(f"hva.{number}.control", process_set if known else hvd.global_process_set)
    active = _takes_part(process_set if known else hvd.global_process_set)
    name_this_rank(hvd.rank())

    def check() -> tuple[CompressionConfig, Options, list[tuple[str, Parameter]]]:
        _check_process_set(process_set)
        _check_optimizer(optimizer)
        passes = _at_least(1, "backward_passes_per_step", backward_passes_per_step)
        _check_operation(op, gradient_predivide_factor)
        _check_seed(seed)
        Telemetry.parse(telemetry)
        named = _named(optimizer, named_parameters)
        if active:
            trained = {name: parameter.dtype for name, parameter in named if parameter.requires_grad}
            check_dtypes(unfit_dtypes(trained))
        choice = CompressionConfig.of(_from_horovod(compression), overrides, feedback)
        choice.check_patterns([name for name, _ in named])
        _check_momentum(choice, optimizer)
        if op == hvd.Adasum and not _is_plain(choice, warmup_steps):
            raise ValueError(
                "op=Adasum combines whole gradients: it works only with compression='none' and "
                "without overrides; use op=Average or op=Sum with compression"
            )
        alternatives = _candidates(candidates)
        options = Options(
            passes,
            _flag("sparse_as_dense", sparse_as_dense),
            _at_least(0, "warmup_steps", warmup_steps),
            _positive("bucket_cap_mb", bucket_cap_mb) * (1 << 20),
            _group_names(groups, named),
            _recipe(planner, choice, alternatives),
            alternatives,
        )
        return choice, options, named

    def digest(built: tuple[CompressionConfig, Options, list[tuple[str, Parameter]]]) -> dict[str, str]:
        return {
            "op": _OPERATIONS.get(op, str(op)),
            "seed": str(int(seed)),
            "gradient_predivide_factor": str(float(gradient_predivide_factor)),
            **_digest(*built),
        }

    elastic = active and is_elastic()
    # a rank that joins an elastic run builds this while the others train: they compare when they meet
    built = control.agree("DistributedOptimizer", check, digest, alone=elastic or not active)
    choice, options, named = built
    if active and not elastic:
        watch(control)
    if op == hvd.Adasum and (hvd.size() > 1 or elastic):
        stock: torch.optim.Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            process_set=process_set,
        )
        return stock
    ranks = process_set.size() if active else 1
    meter = _open_meter(telemetry, control, active and not elastic, ranks)
    meter.configuration(_configuration(digest(built), ranks))
    transport = Transport(op, process_set, float(gradient_predivide_factor))
    exchange = Exchange(transport, meter, f"hva.{number}", int(seed), hvd.rank())

    def new_controller() -> AdaptationController | None:
        if not active or options.planner is None:
            return None
        name = f"hva.{number}.plan"
        return AdaptationController(
            options.planner,
            HorovodChannel(name, process_set) if elastic else open_channel(name, control, process_set),
            meter,
            control.rank,
            control.size,
            options.candidates,
            exchange.states,
        )

    parts = named, choice, options, control, exchange, active, new_controller()
    reducer: Reducer
    if elastic:
        reducer = ElasticReducer(
            *parts,
            agree=lambda: control.agree("DistributedOptimizer", lambda: built, digest),
            new_controller=new_controller,
            configure=lambda size: meter.configuration(_configuration(digest(built), size)),
        )
    else:
        reducer = Reducer(*parts)
    reduce_loss = functools.partial(_mean, f"hva.{number}.loss", process_set) if active else None
    return _wrap(optimizer, reducer, meter, named, reduce_loss)


def _mean(name: str, process_set: hvd.ProcessSet, value: Tensor) -> Tensor:
    """The mean over the ranks of a number."""
    mean: Tensor = hvd.allreduce(value, op=hvd.Average, name=name, process_set=process_set)
    return mean


class _Methods:
    """What a wrapped optimizer does beside, or instead of, what its own class does.

    These methods are put into a class derived from the user's optimizer class alone, because Horovod
    calls ``super(optimizer.__class__, optimizer).step()`` in ``broadcast_optimizer_state`` when the
    class's module is that of its own optimizer, and must then reach the user's class.
    """

    __module__ = _HOROVOD_MODULE

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
        """Within this context ``step()`` does not synchronise, because that has been done."""
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
        """Change the number of backward passes whose gradients are added up before they travel."""
        self.backward_passes_per_step = _at_least(1, "backward_passes_per_step", passes)
        self._reducer.set_passes(self.backward_passes_per_step)

    @property
    def plan(self) -> Plan:
        """Compressor, level and bytes of every layer; prints as a table."""
        return self._reducer.plan

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
        self._reducer.choose(
            lambda before: CompressionConfig.of(_from_horovod(compression), overrides, before.feedback)
        )

    def compression_state_dict(self) -> dict[str, Any]:
        """This rank's compression state (residuals, warm starts, learnt levels).

        Save one a rank beside the model. Loaded by the same number of ranks it continues bit for bit;
        for another number see :func:`hvd_adaptive.merge_compression_states`.
        """
        return self._reducer.state_dict()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`compression_state_dict` returned on this rank; all ranks call it.

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
    if isinstance(reducer, ElasticReducer):
        follow(cls)
    alive = weakref.ref(wrapped)
    reducer.param_groups = lambda: _groups_of(alive())
    weakref.finalize(wrapped, reducer.close)
    result: torch.optim.Optimizer = wrapped
    return result


def _groups_of(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


_NOT_METHODS = ("__dict__", "__weakref__", "__annotations__", "__doc__")


# --- arguments ------------------------------------------------------------------------------------


def _takes_part(process_set: hvd.ProcessSet) -> bool:
    """Whether this rank communicates: as Horovod decides it."""
    return bool(process_set.included()) and (process_set.size() > 1 or is_elastic())


def _is_registered(process_set: Any) -> bool:
    """Whether Horovod knows it: then it can carry messages."""
    return isinstance(process_set, hvd.ProcessSet) and process_set.process_set_id is not None


def _check_process_set(process_set: Any) -> None:
    if not isinstance(process_set, hvd.ProcessSet):
        raise TypeError(
            f"process_set must be a process set of Horovod, got {_shown(process_set)}: write "
            "hvd.global_process_set, or leave it out"
        )
    if not _is_registered(process_set):
        raise ValueError(
            f"process_set is one that Horovod does not know, {process_set}: pass it to "
            "hvd.init(process_sets=...) or to hvd.add_process_set() first, on all ranks"
        )


def _check_optimizer(optimizer: Any) -> None:
    if getattr(type(optimizer), "__module__", None) == _HOROVOD_MODULE:
        raise ValueError(
            "optimizer is wrapped already: pass the torch optimizer that was wrapped, once"
        )
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not callable(getattr(optimizer, "step", None)):
        raise TypeError(
            f"optimizer must be an optimizer of torch, got {_shown(optimizer)}: write "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )


def _check_operation(op: Any, predivide: Any) -> None:
    """Refuse what Horovod refuses, and what does not exist."""
    if isinstance(op, bool) or not isinstance(op, int) or op not in _OPERATIONS:
        raise ValueError(f"op must be hvd.Average, hvd.Sum or hvd.Adasum, got {_shown(op)}")
    factor = _positive("gradient_predivide_factor", predivide)
    if not _LEAST_FACTOR <= factor <= 1 / _LEAST_FACTOR:
        raise ValueError(
            f"gradient_predivide_factor must be a number that float32 can divide by, from "
            f"{_LEAST_FACTOR:.2g} to {1 / _LEAST_FACTOR:.2g}, got {_shown(predivide)}"
        )
    if factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor works only with op=hvd.Average")


_LEAST_FACTOR = 2.0**-126
"""The least normal float32, whose inverse is finite."""


def _check_momentum(choice: CompressionConfig, optimizer: torch.optim.Optimizer) -> None:
    """Refuse momentum that would be applied twice."""
    if choice.feedback is None or not choice.feedback.for_dense:
        return
    if any(group.get("momentum", 0.0) for group in optimizer.param_groups):
        raise ValueError(
            f"feedback {choice.feedback.name!r} applies momentum before compression: build the "
            "optimizer with momentum=0 and write feedback='dgc:momentum=0.9'"
        )


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, of numpy or of Python."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _whole(name: str, value: Any) -> int:
    if not _is_whole(value):
        raise TypeError(f"{name} must be a whole number, got {_shown(value)}")
    return int(value)


def _at_least(least: int, name: str, value: Any) -> int:
    number = _whole(name, value)
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {number}")
    return number


def _check_seed(seed: Any) -> None:
    """What torch takes as a seed; keys are made of its 64 bits, so others would be equal to these."""
    if not -(1 << 63) <= _whole("seed", seed) < 1 << 64:
        raise ValueError(f"seed must be a whole number from -2**63 to 2**64 - 1, got {seed}")


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number above 0, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {_shown(value)}")
    return number


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, str) or value not in (False, True):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")
    return bool(value)


def _shown(value: object) -> str:
    """An argument in a message: a model or a list of tensors would fill pages."""
    return reprlib.repr(value)


def _candidates(candidates: Any) -> tuple[Compressor, ...]:
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        one = candidates if isinstance(candidates, str) else "topk"
        raise TypeError(
            f"candidates must be a list of compressors, got {_shown(candidates)}: write [{one!r}]"
        )
    return tuple(parse_as("candidates", spec) for spec in candidates)


def _open_meter(
    telemetry: Telemetry | str | os.PathLike[str] | None, control: Control, active: bool, ranks: int
) -> Meter:
    """The meter; where rank 0 cannot write, all ranks say so."""

    def build() -> Meter:
        return Meter(telemetry, rank=hvd.rank(), dense_traffic=2 * (ranks - 1) / ranks)

    return control.agree("DistributedOptimizer", build, lambda _: {}, alone=not active)


def _recipe(
    planner: str | Recipe | None, choice: CompressionConfig, candidates: Sequence[Compressor]
) -> Recipe | None:
    """The planner; ValueError if there is nothing that it could decide, or more than it can."""
    if planner is None:
        return None
    recipe = planning.parse(planner)
    if all(isinstance(each, CastCompressor) or each.whole_model for each in choice.compressors):
        raise ValueError(
            f"planner={planner!r} has nothing to decide: no compressor here has levels for each layer. "
            "Name one, such as compression='topk:density=0.01'"
        )
    check_per_rank_levels(recipe, choice.compressors, candidates)
    return recipe


def _named(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None,
) -> list[tuple[str, Parameter]]:
    """The optimizer's parameters in its order, with their names."""
    groups = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(groups)
            for j, parameter in enumerate(group)
        ]
    if not isinstance(named_parameters, Iterable):
        raise TypeError(
            "named_parameters should be a sequence of tuples (name, parameter), got "
            f"{_shown(named_parameters)}: write model.named_parameters()"
        )
    rows: list[Any] = list(named_parameters)
    for row in rows:
        pair = isinstance(row, tuple) and len(row) == 2
        if not pair or not isinstance(row[0], str) or not isinstance(row[1], Tensor):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually "
                f"model.named_parameters(), but holds {_shown(row)}"
            )
    repeated = [name for name, count in Counter(name for name, _ in rows).items() if count > 1]
    if repeated:
        raise ValueError(
            f"parameter names in named_parameters must be unique, found twice: {', '.join(repeated)}"
        )
    names = {parameter: name for name, parameter in rows}
    missing = [
        f"{i}.{j} of shape {tuple(parameter.shape)}"
        for i, group in enumerate(groups)
        for j, parameter in enumerate(group)
        if parameter not in names
    ]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more parameters of the optimizer were not "
            f"named: parameter (group.position) {', '.join(missing)}"
        )
    return [(names[parameter], parameter) for group in groups for parameter in group]


def _group_names(
    groups: Any, named: Sequence[tuple[str, Parameter]]
) -> int | tuple[tuple[str, ...], ...]:
    """``groups`` by names instead of tensors."""
    if groups is None:
        return 0
    if _is_whole(groups) and groups >= 0:
        return int(groups)
    if not isinstance(groups, list):
        kind = ValueError if _is_whole(groups) else TypeError
        raise kind(
            "groups should be a non-negative integer or a list of list of torch.Tensor, got "
            f"{_shown(groups)}"
        )
    names = {parameter: name for name, parameter in named}
    # the rows of a tensor are tensors, too
    lists = [group for group in groups if isinstance(group, Iterable) and not isinstance(group, Tensor)]
    rows = [list(group) for group in lists]
    members = [member for row in rows for member in row]
    if len(lists) < len(groups) or not all(isinstance(member, Tensor) for member in members):
        raise ValueError(f"groups must consist of lists of torch.Tensor, got {_shown(groups)}")
    if len({id(member) for member in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")
    return tuple(tuple(names[member] for member in row if member in names) for row in rows)


def _from_horovod(compression: Any) -> Spec:
    """Accept Horovod's own compressors under ``compression=``."""
    if compression is hvd.Compression.none:
        return "none"
    if compression is hvd.Compression.fp16:
        return "fp16"
    return compression  # type: ignore[no-any-return]


def _is_plain(choice: CompressionConfig, warmup_steps: int) -> bool:
    """Whether nothing is compressed at all."""
    return all(isinstance(each, NoCompression) for each in choice.compressors) and warmup_steps == 0


def _digest(
    choice: CompressionConfig, options: Options, named: Sequence[tuple[str, Parameter]]
) -> dict[str, str]:
    """What must be equal on all ranks, by what a message should call it."""
    digest = choice.digest()
    digest.update({key: str(value) for key, value in vars(options).items()})
    for name, parameter in named:
        digest[f"parameter {name!r}"] = f"{parameter.dtype} {tuple(parameter.shape)}"
    return digest


def _configuration(digest: Mapping[str, str], size: int) -> dict[str, str]:
    """The settings as they are shown, without the parameters."""
    shown = {key: value for key, value in digest.items() if not key.startswith("parameter ")}
    return {"ranks": str(size), "horovod": horovod.__version__, "torch": torch.__version__, **shown}
