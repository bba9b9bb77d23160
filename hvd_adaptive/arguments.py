"""Arguments of :func:`hvd_adaptive.DistributedOptimizer`: checked, and made the same on all ranks."""

from __future__ import annotations

import math
import numbers
import os
import reprlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive import planning
from hvd_adaptive.adaptation.automatic import expand
from hvd_adaptive.adaptation.candidates import check_per_rank_levels
from hvd_adaptive.comm.request import ADASUM, AVERAGE
from hvd_adaptive.comm.world import World
from hvd_adaptive.compressors import CastCompressor, Compressor, NoCompression, format_spec
from hvd_adaptive.config import (
    DEFAULT_SCHEME,
    CompressionConfig,
    ReducerOptions,
    Spec,
    parse_as,
    read_lr_warmup,
)
from hvd_adaptive.engine.routing import check_dtypes, unfit_dtypes
from hvd_adaptive.feedback import Feedback
from hvd_adaptive.planning import Recipe
from hvd_adaptive.telemetry import Telemetry

# Horovod asks for this module's name to know its own optimizer (see the wrapped optimizer's methods).
HOROVOD_MODULE = "horovod.torch.optimizer"


@dataclass(frozen=True)
class Checked:
    """What was made of the arguments.

    Args:
        config: the compressors.
        options: how gradients are sent.
        named: the optimizer's parameters in its order, with their names.
        reduction: what else must be equal on all ranks, by what a message should call it.
    """

    config: CompressionConfig
    options: ReducerOptions
    named: list[tuple[str, Parameter]]
    reduction: Mapping[str, str]

    def digest(self) -> dict[str, str]:
        """What must be equal on all ranks, by what a message should call it."""
        digest = {**self.reduction, **self.config.digest()}
        digest.update({key: str(value) for key, value in vars(self.options).items()})
        for name, parameter in self.named:
            digest[f"parameter {name!r}"] = f"{parameter.dtype} {tuple(parameter.shape)}"
        return digest


@dataclass(frozen=True)
class Arguments:
    """What a user passed; see :func:`hvd_adaptive.DistributedOptimizer`, which documents all of it."""

    optimizer: torch.optim.Optimizer
    named_parameters: Iterable[tuple[str, Parameter]] | None
    compression: Spec
    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    groups: int | list[list[Tensor]] | None
    sparse_as_dense: bool
    process_set: Any
    feedback: str | Feedback | None
    scheme: str | Mapping[str, str]
    planner: str | Recipe | None
    candidates: Sequence[Spec]
    dense_steps: int | str
    bucket_cap_mb: float
    telemetry: Telemetry | str | os.PathLike[str] | None
    overrides: Mapping[str, Spec] | None
    seed: int

    def check(self, world: World, active: bool) -> Checked:
        """Make what the optimizer is built of.

        Args:
            world: what connects the ranks.
            active: whether this rank sends gradients.

        Raises:
            ValueError: an argument is out of range, or a name is unknown.
            TypeError: an argument is of the wrong type.
        """
        world.check_process_set(self.process_set)
        _check_optimizer(self.optimizer)
        passes = at_least(1, "backward_passes_per_step", self.backward_passes_per_step)
        _check_operation(world, self.op, self.gradient_predivide_factor)
        _check_seed(self.seed)
        Telemetry.parse(self.telemetry)
        named = _named(self.optimizer, self.named_parameters)
        if active:
            trained = {name: parameter.dtype for name, parameter in named if parameter.requires_grad}
            check_dtypes(unfit_dtypes(trained))
        chosen = expand(
            from_horovod(self.compression),
            self.planner,
            _candidates(self.candidates),
            self.scheme,
            DEFAULT_SCHEME,
            self.optimizer.param_groups,
        )
        config = CompressionConfig.of(chosen.compression, self.overrides, self.feedback, chosen.scheme)
        config = replace(config, start=chosen.start)
        config.check_patterns([name for name, _ in named])
        _check_momentum(config, self.optimizer)
        dense_steps, lr_warmup = _dense_steps(self.dense_steps)
        if self.op == ADASUM and not _is_plain(config, dense_steps or lr_warmup):
            raise ValueError(
                "op=Adasum combines whole gradients: it works only with compression='none' and "
                "without overrides; use op=Average or op=Sum with compression"
            )
        alternatives = _candidates(chosen.candidates)
        options = ReducerOptions(
            passes,
            _flag("sparse_as_dense", self.sparse_as_dense),
            dense_steps,
            lr_warmup,
            _positive("bucket_cap_mb", self.bucket_cap_mb) * (1 << 20),
            _group_names(self.groups, named),
            _recipe(chosen.planner, config, alternatives),
            alternatives,
        )
        return Checked(config, options, named, self._reduction(world))

    def _reduction(self, world: World) -> dict[str, str]:
        return {
            "op": world.operations.get(self.op, str(self.op)),
            "seed": str(int(self.seed)),
            "gradient_predivide_factor": str(float(self.gradient_predivide_factor)),
        }


def warn_without_dense_steps(checked: Checked) -> None:
    """Warn where elements wait in residuals from the first step on, which costs accuracy."""
    config, options = checked.config, checked.options
    selecting = [each for each in config.compressors if each.selects and each.biased]
    if selecting and not (options.dense_steps or options.lr_warmup) and config.start is None:
        warnings.warn(
            f"compression={format_spec(selecting[0])!r} without dense_steps: in short training runs, "
            "what is sent late costs accuracy; write dense_steps=N for some 5 to 10 % of the steps, or "
            "compare with compression='none'",
            stacklevel=4,
        )


def _check_optimizer(optimizer: Any) -> None:
    if getattr(type(optimizer), "__module__", None) == HOROVOD_MODULE:
        raise ValueError(
            "optimizer is wrapped already: pass the torch optimizer that was wrapped, once"
        )
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not callable(getattr(optimizer, "step", None)):
        raise TypeError(
            f"optimizer must be an optimizer of torch, got {_shown(optimizer)}: write "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )


def _check_operation(world: World, op: Any, predivide: Any) -> None:
    """Refuse what Horovod refuses, and what does not exist."""
    if op == ADASUM and op not in world.operations:
        raise ValueError(f"op=Adasum is Horovod's alone: with {world.name}, use Average or Sum")
    if isinstance(op, bool) or not isinstance(op, int) or op not in world.operations:
        raise ValueError(f"op must be hvd.Average, hvd.Sum or hvd.Adasum, got {_shown(op)}")
    factor = _positive("gradient_predivide_factor", predivide)
    if not _LEAST_FACTOR <= factor <= 1 / _LEAST_FACTOR:
        raise ValueError(
            f"gradient_predivide_factor must be a number that float32 can divide by, from "
            f"{_LEAST_FACTOR:.2g} to {1 / _LEAST_FACTOR:.2g}, got {_shown(predivide)}"
        )
    if factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor works only with op=hvd.Average")


_LEAST_FACTOR = 2.0**-126
"""The least normal float32, whose inverse is finite."""


def _check_momentum(config: CompressionConfig, optimizer: torch.optim.Optimizer) -> None:
    """Refuse momentum that would be applied twice."""
    if config.feedback is None or not config.feedback.for_dense:
        return
    if any(group.get("momentum", 0.0) for group in optimizer.param_groups):
        raise ValueError(
            f"feedback {config.feedback.name!r} applies momentum before compression: build the "
            f"optimizer with momentum=0 and write feedback='{config.feedback.name}:momentum=0.9'"
        )


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, of numpy or of Python."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _whole(name: str, value: Any) -> int:
    if not _is_whole(value):
        raise TypeError(f"{name} must be a whole number, got {_shown(value)}")
    return int(value)


def at_least(least: int, name: str, value: Any) -> int:
    number = _whole(name, value)
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {number}")
    return number


_ENDS = ("total_steps", "T_max", "total_iters")
"""What torch's schedulers call the number of their steps."""


def horizon_of(scheduler: Any) -> int:
    """How many times a learning rate scheduler is stepped until it ends.

    Raises:
        ValueError: it has no end.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> horizon_of(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=90))
        90
    """
    known = [getattr(scheduler, name) for name in _ENDS if getattr(scheduler, name, None)]
    if not known:
        raise ValueError(
            f"{type(scheduler).__name__} does not tell when it ends: write the number of steps"
        )
    return int(known[0])


def _dense_steps(value: Any) -> tuple[int, int]:
    """How many dense steps, or after how many without a rise of the learning rate they end."""
    if isinstance(value, str) and value.startswith("lr_warmup"):
        return 0, read_lr_warmup(value)
    return at_least(0, "dense_steps", value), 0


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


def _recipe(
    planner: str | Recipe | None, config: CompressionConfig, candidates: Sequence[Compressor]
) -> Recipe | None:
    """The planner; ValueError if there is nothing that it could decide, or more than it can."""
    if planner is None:
        return None
    recipe = planning.parse(planner)
    if all(isinstance(each, CastCompressor) or each.whole_model for each in config.compressors):
        raise ValueError(
            f"planner={planner!r} has nothing to decide: no compressor here has levels for each layer. "
            "Name one, such as compression='topk:density=0.01'"
        )
    check_per_rank_levels(recipe, config.compressors, candidates)
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


def from_horovod(compression: Any) -> Spec:
    """Accept Horovod's own compressors under ``compression=``."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and compression is horovod.Compression.none:
        return "none"
    if horovod is not None and compression is horovod.Compression.fp16:
        return "fp16"
    return compression  # type: ignore[no-any-return]


def _is_plain(config: CompressionConfig, dense_steps: int) -> bool:
    """Whether nothing is compressed at all."""
    return all(isinstance(each, NoCompression) for each in config.compressors) and dense_steps == 0
