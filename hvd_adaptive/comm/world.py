"""The library that ranks talk through: Horovod, or torch.distributed where only that was initialized.

This is the one place that chooses. What only one of them needs is imported when it has been chosen.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import Channel
from hvd_adaptive.comm.request import Group
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.comm.transport import ProcessSet, Transport

NODES_REMEDY: Final = (
    "call hvd_adaptive.init(hierarchical=True) in the place of hvd.init(), or set "
    "HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks"
)


class _AllRanks:
    """Stands for all ranks of whichever library is in use."""

    def __repr__(self) -> str:
        return "ALL_RANKS"


ALL_RANKS: Final = _AllRanks()
"""``process_set`` where it is left out."""


@dataclass(frozen=True)
class NodeGroups:
    """What the ranks know of their nodes.

    Args:
        topology: the nodes of all ranks.
        sets: the ranks of this rank's node, and its peers; empty where the topology is not layered.
    """

    topology: Topology
    sets: Mapping[Group, ProcessSet] = field(default_factory=dict)


class World(ABC):
    """All ranks, and the library that connects them."""

    name: ClassVar[str]
    """The library's, as telemetry shows it."""
    version: str
    """What telemetry shows beside the name."""
    operations: ClassVar[Mapping[int, str]]
    """What gradients can be reduced by, and how messages call it."""

    @property
    @abstractmethod
    def everyone(self) -> ProcessSet:
        """All ranks."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Of this process."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def local_size(self) -> int:
        """Number of ranks on this host."""

    @property
    @abstractmethod
    def hosts(self) -> int:
        """Number of hosts."""

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return False

    @abstractmethod
    def as_process_set(self, given: Any) -> Any:
        """What a user passed as ``process_set``, as a :class:`ProcessSet` where it is one."""

    @abstractmethod
    def is_process_set(self, given: Any) -> bool:
        """Whether it names ranks that can carry messages."""

    @abstractmethod
    def check_process_set(self, given: Any) -> None:
        """Raise TypeError or ValueError, with what to write instead, unless it is one."""

    @abstractmethod
    def covers_all(self, process_set: ProcessSet) -> bool:
        """Whether it is that of all ranks."""

    @abstractmethod
    def gather(self, data: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        """The bytes of all ranks, one after the other; each may have another number of them."""

    @abstractmethod
    def mean(self, value: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        """The mean over the ranks."""

    @abstractmethod
    def begin_maximum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to find each element's largest value over all ranks; the call that is returned waits.

        One of a name at a time.
        """

    @abstractmethod
    def transport(
        self,
        op: int,
        process_set: ProcessSet,
        gradient_predivide_factor: float = 1.0,
        topology: Topology | None = None,
        groups: Mapping[Group, ProcessSet] | None = None,
        obstacle: str = "",
    ) -> Transport:
        """Collectives among the ranks; all of them call it."""

    @abstractmethod
    def open_channel(self, name: str, control: Control, process_set: ProcessSet) -> Channel:
        """The best that all ranks have for the decision path; all of them call it."""

    @abstractmethod
    def node_groups(self, control: Control) -> NodeGroups:
        """Agree with all ranks on their nodes; all ranks call it."""

    def stock_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, Parameter]],
        op: int,
        passes: int,
        process_set: ProcessSet,
    ) -> torch.optim.Optimizer:
        """The library's own, for an operation that only it has."""
        raise NotImplementedError(f"{self.name} has no optimizer of its own")


def current() -> World:
    """The library that was initialized; Horovod where both were.

    Raises:
        ValueError: neither was.
    """
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return _horovod()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _torch()
    if horovod is not None:
        return _horovod()  # whose own message says what is missing
    raise ValueError(
        "the ranks are not connected: call hvd_adaptive.init() first, which starts Horovod, or "
        "torch.distributed under torchrun; or call hvd.init() or "
        "torch.distributed.init_process_group() yourself"
    )


def of(process_set: ProcessSet) -> World:
    """The library that these ranks belong to."""
    ranks = sys.modules.get("hvd_adaptive.comm.torch_ranks")
    if ranks is not None and isinstance(process_set, ranks.TorchRanks):
        return _torch()
    return _horovod()


@cache
def _horovod() -> World:
    return _made("horovod_world", "HorovodWorld")


@cache
def _torch() -> World:
    return _made("torch_world", "TorchWorld")


def _made(module: str, name: str) -> World:
    build: Callable[[], World] = getattr(importlib.import_module(f"hvd_adaptive.comm.{module}"), name)
    return build()
