"""The ranks of torch.distributed, with Horovod installed or without."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch.distributed as dist
from torch import Tensor

from hvd_adaptive.comm import launcher
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import Channel
from hvd_adaptive.comm.request import AVERAGE, SUM, Group
from hvd_adaptive.comm.topology import Topology, node_name
from hvd_adaptive.comm.torch_channel import TorchChannel
from hvd_adaptive.comm.torch_operations import Groups
from hvd_adaptive.comm.torch_ranks import TorchRanks, meet
from hvd_adaptive.comm.torch_transport import TorchTransport
from hvd_adaptive.comm.transport import ProcessSet
from hvd_adaptive.comm.world import NodeGroups, World


class TorchWorld(World):
    """See :class:`~hvd_adaptive.comm.world.World`.

    Ranks that are built with the same arguments name their groups alike: by counting.
    """

    name = "torch.distributed"
    operations: ClassVar[Mapping[int, str]] = {AVERAGE: "Average", SUM: "Sum"}

    def __init__(self) -> None:
        # weak, so that its threads end when the script destroys it
        self._default: Callable[[], object] = lambda: None
        self._generation = 0
        self._control: dict[tuple[int, ...], Groups] = {}
        self._transports = itertools.count()

    @property
    def version(self) -> str:  # type: ignore[override]
        """The backends."""
        return str(dist.get_backend_config())

    @property
    def everyone(self) -> ProcessSet:
        """All ranks of the default group."""
        return TorchRanks.everyone()

    @property
    def rank(self) -> int:
        """Of this process."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def local_size(self) -> int:
        """What torchrun says; one where nobody does."""
        return launcher.find().local_size or 1

    @property
    def hosts(self) -> int:
        """Number of hosts, if all have as many ranks."""
        return -(-self.size // self.local_size)

    def as_process_set(self, given: Any) -> Any:
        """A process group of torch.distributed is taken by its ranks."""
        if isinstance(given, dist.ProcessGroup):
            return TorchRanks(dist.get_process_group_ranks(given))
        if given == dist.GroupMember.NON_GROUP_MEMBER:
            return TorchRanks(())
        return given

    def is_process_set(self, given: Any) -> bool:
        """Whether it is one of ours."""
        return isinstance(given, TorchRanks)

    def check_process_set(self, given: Any) -> None:
        """It must have been a process group."""
        if not self.is_process_set(given):
            raise TypeError(
                f"process_set must be a process group of torch.distributed, got {given!r:.100}: write "
                "torch.distributed.new_group([...]), or leave it out"
            )

    def covers_all(self, process_set: ProcessSet) -> bool:
        """Whether it has as many ranks as there are."""
        return process_set.size() == self.size

    def gather(self, data: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        """An allgather among these ranks."""
        del name
        return self._groups(process_set).gather(data)

    def mean(self, value: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        """An allreduce."""
        del name
        total = value.clone()
        self._groups(process_set).sum_(total)
        return total / process_set.size()

    def begin_maximum(self, values: Tensor, name: str) -> Callable[[], Tensor]:
        """By the group that agreement among all ranks is sent by, which keeps operations in order."""
        del name
        return self._groups(self.everyone).begin_maximum(values)

    def transport(
        self,
        op: int,
        process_set: ProcessSet,
        gradient_predivide_factor: float = 1.0,
        topology: Topology | None = None,
        groups: Mapping[Group, ProcessSet] | None = None,
        obstacle: str = "",
    ) -> TorchTransport:
        """Over groups of its own."""
        return TorchTransport(
            self._named("transport"),
            op,
            cast(TorchRanks, process_set),
            gradient_predivide_factor,
            topology,
            cast("Mapping[Group, TorchRanks] | None", groups),
            obstacle,
        )

    def open_channel(self, name: str, control: Control, process_set: ProcessSet) -> Channel:
        """A group of its own."""
        del name, control
        return TorchChannel(self._named("channel"), cast(TorchRanks, process_set))

    def node_groups(self, control: Control) -> NodeGroups:
        """Those of this rank."""
        topology = Topology(tuple(control.allgather(node_name())))
        if not topology.is_layered:
            return NodeGroups(topology)
        neighbors, peers = topology.neighbors(self.rank), topology.peers(self.rank)
        return NodeGroups(topology, {"node": TorchRanks(neighbors), "peers": TorchRanks(peers)})

    def _groups(self, process_set: ProcessSet) -> Groups:
        """What agreement among these ranks is sent by."""
        prefix = self._prefix()
        ranks = cast(TorchRanks, process_set)
        key = tuple(ranks.ranks)
        if key not in self._control:
            self._control[key] = Groups(ranks.size(), ranks.group(f"{prefix}/control"))
        return self._control[key]

    def _named(self, what: str) -> str:
        """A name that no other group has."""
        return f"{self._prefix()}/{what}/{next(self._transports)}"

    def _prefix(self) -> str:
        """Of all names since torch.distributed was last initialized."""
        if self._default() is not dist.group.WORLD:
            meet()
            self._default = weakref.ref(dist.group.WORLD)
            self._generation += 1
            self._control.clear()
            self._transports = itertools.count()
        return str(self._generation)
