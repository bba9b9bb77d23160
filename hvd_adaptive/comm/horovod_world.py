"""Horovod's ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import horovod
import horovod.torch as hvd
import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_adaptive.comm import horovod_channel, launcher, node_groups
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import Channel
from hvd_adaptive.comm.horovod_exit import leave_together
from hvd_adaptive.comm.horovod_tensors import tensors_held
from hvd_adaptive.comm.horovod_transport import HorovodTransport, joins_named, leftovers_dropped
from hvd_adaptive.comm.request import Group
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.comm.transport import ProcessSet
from hvd_adaptive.comm.world import NodeGroups, World


class HorovodWorld(World):
    """See :class:`~hvd_adaptive.comm.world.World`."""

    name = "horovod"
    version = horovod.__version__
    operations: ClassVar[Mapping[int, str]] = {
        hvd.Average: "Average",
        hvd.Sum: "Sum",
        hvd.Adasum: "Adasum",
    }

    @property
    def everyone(self) -> ProcessSet:
        """The global process set."""
        every: ProcessSet = hvd.global_process_set
        return every

    @property
    def rank(self) -> int:
        """Of this process."""
        return int(hvd.rank())

    @property
    def size(self) -> int:
        """Number of ranks; an elastic run may change it."""
        return int(hvd.size())

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return int(hvd.local_size())

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return int(hvd.cross_size())

    @property
    def is_elastic(self) -> bool:
        """As Horovod decides it."""
        return launcher.is_elastic()

    def as_process_set(self, given: Any) -> Any:
        """As it is."""
        return given

    def is_process_set(self, given: Any) -> bool:
        """Whether Horovod knows it."""
        return isinstance(given, hvd.ProcessSet) and given.process_set_id is not None

    def check_process_set(self, given: Any) -> None:
        """It must be one of Horovod's, and registered."""
        if not isinstance(given, hvd.ProcessSet):
            raise TypeError(
                f"process_set must be a process set of Horovod, got {given!r:.100}: write "
                "hvd.global_process_set, or leave it out"
            )
        if not self.is_process_set(given):
            raise ValueError(
                f"process_set is one that Horovod does not know, {given}: pass it to "
                "hvd.init(process_sets=...) or to hvd.add_process_set() first, on all ranks"
            )

    def covers_all(self, process_set: Any) -> bool:
        """Whether it is the global one."""
        return bool(process_set.process_set_id == 0)

    def gather(self, data: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        """An allgather."""
        with joins_named(), leftovers_dropped():
            gathered: Tensor = hvd.allgather(data, name=name, process_set=process_set)
        return gathered

    def mean(self, value: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        """An allreduce."""
        mean: Tensor = hvd.allreduce(value, op=hvd.Average, name=name, process_set=process_set)
        return mean

    def begin_maximum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """An allreduce that Horovod's thread does."""
        with tensors_held():
            handle = hvd.allreduce_async(values, op=hvd.Max, name=name)

        def finish() -> Tensor:
            largest: Tensor = hvd.synchronize(handle)
            return largest

        return finish

    def transport(
        self,
        op: int,
        process_set: ProcessSet,
        gradient_predivide_factor: float = 1.0,
        topology: Topology | None = None,
        groups: Mapping[Group, ProcessSet] | None = None,
        obstacle: str = "",
    ) -> HorovodTransport:
        """Over Horovod's operations."""
        if groups:
            leave_together()
        return HorovodTransport(op, process_set, gradient_predivide_factor, topology, groups, obstacle)

    def open_channel(self, name: str, control: Control, process_set: ProcessSet) -> Channel:
        """mpi4py, or Horovod, which carries it in elastic runs."""
        if self.is_elastic:
            return horovod_channel.HorovodChannel(name, process_set)
        return horovod_channel.open_channel(name, control, process_set)

    def node_groups(self, control: Control) -> NodeGroups:
        """Makes process sets."""
        return node_groups.node_groups(control)

    def stock_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, Parameter]],
        op: int,
        passes: int,
        process_set: ProcessSet,
    ) -> torch.optim.Optimizer:
        """``hvd.DistributedOptimizer``."""
        stock: torch.optim.Optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            op=op,
            backward_passes_per_step=passes,
            process_set=process_set,
        )
        return stock
