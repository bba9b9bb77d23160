"""Compressed gradients for ``DistributedDataParallel``: a communication hook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from hvd_adaptive.config import Spec
from hvd_adaptive.optimizer import DistributedOptimizer


def ddp_comm_hook(
    model: DistributedDataParallel,
    compression: Spec = "auto",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Any:
    """Have DDP send compressed gradients; everything else stays DDP's.

    As gradients arrive in DDP's buckets they are handed to what
    :func:`hvd_adaptive.DistributedOptimizer` is made of, which sends them in buckets of its own:
    schemes, feedback, planners and checkpoints are the same. ``no_sync()`` works as always.

    Memory: what feedback keeps. Time: the hook of DDP's last bucket waits for all of them.

    Args:
        model: wrapped in ``DistributedDataParallel``, without a hook.
        compression: as of ``DistributedOptimizer``.
        optimizer: whose learning rates feedback and planners follow; None is a constant rate.
        options: of ``DistributedOptimizer``, but for ``backward_passes_per_step`` (write
            ``model.no_sync()``), ``process_set`` (it is DDP's) and ``named_parameters``.

    Returns:
        What has ``plan``, ``meter``, ``report_loss()``, ``set_horizon()``, ``set_compression()``,
        ``compression_state_dict()`` and ``load_compression_state_dict()`` of a wrapped optimizer.

    Raises:
        TypeError: ``model`` is no ``DistributedDataParallel``, or an option is not for DDP.
        ValueError, RuntimeError: as from ``DistributedOptimizer`` and ``register_comm_hook``.

    Example:
        ``hook = hva.ddp_comm_hook(model, "topk:density=0.01", optimizer=optimizer)``
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be a DistributedDataParallel, got {type(model).__name__}: wrap it first, or "
            "use hvd_adaptive.DistributedOptimizer, which needs no wrapper"
        )
    refused = sorted({"backward_passes_per_step", "process_set", "named_parameters"} & set(options))
    if refused:
        raise TypeError(f"DDP decides on {', '.join(refused)}: leave it out, and see model.no_sync()")
    options["process_set"] = model.process_group
    hook = _Hook(model, compression, optimizer, options)
    model.register_comm_hook(hook, _reduce)
    return hook.reducing


class _Following(torch.optim.Optimizer):
    """Steps nothing, and has the learning rates of another optimizer.

    Args:
        parameters: whose gradients are reduced.
        shown: of each parameter of the model, the one here.
        optimizer: the other one; None has a constant rate.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        shown: dict[Parameter, Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._theirs = optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        mine = [[shown[each] for each in group["params"] if each in shown] for group in groups]
        known = {parameter for group in mine for parameter in group}
        rest = [parameter for parameter in parameters if parameter not in known]
        super().__init__([{"params": each} for each in (*mine, rest)], {"lr": 1.0})
        self.follow()

    def follow(self) -> None:
        """Take over the other's settings."""
        theirs = [] if self._theirs is None else self._theirs.param_groups
        for mine, group in zip(self.param_groups, theirs, strict=False):
            mine.update({key: value for key, value in group.items() if key != "params"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The model's own optimizer does it."""


class _Hook:
    """What DDP hands its buckets to."""

    def __init__(
        self,
        model: DistributedDataParallel,
        compression: Spec,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
    ) -> None:
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        # gradients of their own, which are DDP's buckets; the memory of the weights is the model's
        self._shown = {parameter: Parameter(parameter.detach()) for _, parameter in named}
        self._following = _Following(self._shown.values(), self._shown, optimizer)
        self.reducing: Any = DistributedOptimizer(
            self._following,
            named_parameters=[(name, self._shown[parameter]) for name, parameter in named],
            compression=compression,
            **options,
        )
        every = [each for group in self._following.param_groups for each in group["params"]]
        self._sends = dist.get_world_size(model.process_group) > 1
        self._index = {parameter: index for index, parameter in enumerate(every)}
        self._waiting: list[tuple[Tensor, list[Parameter], list[Tensor], Future[Tensor]]] = []

    def take(self, bucket: Any) -> Future[Tensor]:
        """Begin to reduce a bucket; the last one waits for all."""
        device = bucket.buffer().device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        shown = [self._shown[parameter] for parameter in bucket.parameters()]
        views = bucket.gradients()
        if not self._waiting:
            self._following.follow()
        for parameter, view in zip(shown, views, strict=True):
            parameter.grad = view
            if self._sends:
                self.reducing._reducer.arrive(self._index[parameter])
        self._waiting.append((bucket.buffer(), shown, views, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.reducing.step()
        for buffer, shown, views, future in waiting:
            for parameter, view in zip(shown, views, strict=True):
                if parameter.grad is not None and parameter.grad is not view:
                    view.copy_(parameter.grad)
                parameter.grad = None
            future.set_result(buffer)


_BUCKET: Any = vars(dist)["GradBucket"]
"""What torch's own types leave out."""


def _reduce(hook: _Hook, bucket: Any) -> Future[Tensor]:
    """As DDP calls it."""
    return hook.take(bucket)


# DDP compares them with the types, and does not read text
_reduce.__annotations__ |= {"bucket": _BUCKET, "return": Future[Tensor]}
