"""Collective schemes: how the payloads of all ranks are reduced to one gradient.

A scheme is a generator: it yields the operations that it needs
(:class:`~hvd_adaptive.comm.request.Request`) and receives their results. The engine drives the
generators of all buckets, in the same order on all ranks; a scheme knows neither the transport nor what
the bytes of a payload mean.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.buckets import Bucket, Segment
from hvd_adaptive.collectives.chunks import Chunks
from hvd_adaptive.collectives.costs import Workload
from hvd_adaptive.collectives.shards import Balance, Shards, cut, expected_bytes
from hvd_adaptive.comm.link_costs import LinkCosts
from hvd_adaptive.comm.request import Direction, Request
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.compressors.base import CodecState, Compressor, GatheredCompressor, LayerStats
from hvd_adaptive.feedback import FeedbackState, split
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.checks import HALVES
from hvd_adaptive.layers import PayloadKind

Steps: TypeAlias = Generator[Request, Tensor, None]
"""One bucket's operations in one step."""

EnergyObserver: TypeAlias = Callable[[Bucket, Float64s, Float64s], None]
"""Receives, of each layer of a bucket, the squared L2 norms of what was compressed and of what its
payload decodes to."""


ROOM = 8
"""Numbers that may travel behind a bucket of casts."""


class Buffers:
    """Buffers that a bucket needs at every step: offsets and, made on demand, a flat tensor.

    Args:
        bucket: the bucket.
        per_rank_levels: whether other ranks have other levels.
    """

    def __init__(self, bucket: Bucket, per_rank_levels: bool = False) -> None:
        self._bucket, self.per_rank_levels = bucket, per_rank_levels
        self.offsets = bucket.offsets
        self.dense_bytes = bucket.dense_bytes
        self._shards: Shards | None = None
        self._balance = Balance([])
        self._chunks: Chunks | None = None
        self.is_gathered = False
        """Whether feedback keeps nothing outside this rank's chunk; the same on all ranks."""

    @property
    def name(self) -> str:
        """Of the bucket's first layer, by which a checkpoint knows the bucket."""
        return self._bucket.layers[0].name

    def shards(self, ranks: int) -> Shards:
        """How the bucket is shared out among so many owners."""
        if self._shards is None or len(self._shards.bounds) != ranks + 1:
            even = [1.0] * len(self._bucket.layers)  # what ranks know alike, whatever their levels
            weights = even if self.per_rank_levels else expected_bytes(self._bucket)
            self._shards = cut(self._bucket, weights, ranks)
            self._balance = Balance([0] * ranks)
        return self._shards

    def note_loads(self, received: Sequence[int]) -> None:
        """Count the bytes that each owner has received; shards may be others in the next step."""
        assert self._shards is not None
        self._shards = self._balance.note(self._shards, received)

    def shards_dict(self) -> dict[str, Any] | None:
        """How the bucket is shared out, and why, for :meth:`load_shards`; None if it is not."""
        if self._shards is None:
            return None
        return {"bounds": list(self._shards.bounds), **asdict(self._balance)}

    def load_shards(self, found: Mapping[str, Any]) -> None:
        """Share the bucket out as :meth:`shards_dict` says, if that is of this bucket."""
        bounds = tuple(found["bounds"])
        if bounds[0] == 0 and bounds[-1] == self._bucket.numel:
            self._shards = Shards(self._bucket, bounds)
            self._balance = Balance(list(found["loads"]), found["steps"], found["window"])

    def chunks(self, ranks: int, local_rank: int) -> Chunks:
        """How the bucket is shared out among the ranks of a node, of which this is one."""
        if self._chunks is None or (self._chunks.ranks, self._chunks.local_rank) != (ranks, local_rank):
            self._chunks = Chunks(self._bucket, ranks, local_rank)
        return self._chunks

    @functools.cached_property
    def of_chunk(self) -> Buffers:
        """Those of the chunk that this rank reduces for its node."""
        assert self._chunks is not None
        return Buffers(self._chunks.own, self.per_rank_levels)

    @functools.cached_property
    def _roomy(self) -> Tensor:
        """``flat``, and room behind it."""
        size = self._bucket.numel + ROOM
        return torch.zeros(size, dtype=self._bucket.dtype, device=self._bucket.device)

    @functools.cached_property
    def flat(self) -> Tensor:
        """The payload of a bucket of casts, in its wire dtype."""
        return self._roomy[: self._bucket.numel]

    def with_passengers(self, passengers: Tensor) -> Tensor:
        """``flat``, and these few numbers behind it, rounded to the wire dtype."""
        numel = self.flat.numel()
        whole = self._roomy[: numel + len(passengers)]
        whole[numel:] = passengers
        return whole

    @functools.cached_property
    def views(self) -> list[Tensor]:
        """The layers in ``flat``, in their shapes."""
        return shaped(self.flat, self._bucket)


@dataclass(frozen=True, slots=True)
class PreparedPayload:
    """What compressing a bucket of one segment gives, where that was done before its turn.

    Args:
        code: uint8: room for a frame's header, and the body.
        rest: float32, 1-D: the remainder of the whole bucket.
        stats: what was seen on the way.
    """

    code: Tensor
    rest: Tensor
    stats: LayerStats


def nothing_prepared(bucket: Bucket) -> PreparedPayload | None:
    """None: buckets are compressed in their turn."""
    del bucket
    return None


class RandomArguments(TypedDict):
    """Arguments of a :class:`~hvd_adaptive.compressors.base.LayerBatch`, described there."""

    keys: npt.NDArray[np.uint64] | None
    dithers: npt.NDArray[np.uint64] | None
    rotation: int


@dataclass(frozen=True, slots=True)
class BucketIO:
    """What a scheme works with in one step of one bucket, besides the gradients.

    Args:
        feedback: what the bucket's feedback rule keeps.
        buffers: made once for each bucket.
        codec_states: what compressors have learned, by :attr:`Compressor.state_key`.
        step: number of the step, the same on all ranks.
        ranks: number of ranks that exchange payloads.
        place: of this rank among them.
        rank: of this process, for its random numbers.
        scale: factor of a sum over the ranks: ``1 / ranks`` for an average, 1 for a sum.
        share: what each rank must send so that the reduction gives a tensor.
        seed: of random rounding and selection, the same on all ranks.
        observe_energy: called once by schemes that encode; by others where ``energy_weight`` is not 0.
        topology: the nodes of all ranks.
        prepared: a bucket's payload, where there is one already.
        energy_weight: how many steps this one stands for, where energies take a pass of their own over
            the gradients; 0 in the other steps.
        passengers: at most :data:`ROOM` numbers that are summed along with the bucket, in place; only
            where the scheme :meth:`~Scheme.takes_passengers`.
    """

    feedback: FeedbackState
    buffers: Buffers
    codec_states: Mapping[Compressor, CodecState]
    step: int
    ranks: int
    place: int
    rank: int
    scale: float
    share: Callable[[Tensor], Tensor]
    seed: int
    observe_energy: EnergyObserver
    topology: Topology
    prepared: Callable[[Bucket], PreparedPayload | None] = nothing_prepared
    energy_weight: int = 0
    passengers: Tensor | None = None

    def keys(self, bucket: Bucket, segment: Segment, rank: int) -> npt.NDArray[np.uint64]:
        """Keys of the random numbers of one segment's layers in this step."""
        layers = [layer.index for layer in bucket.layers[segment.start : segment.stop]]
        return rng.layer_keys(self.seed, rank, self.step, layers)

    def random_arguments(self, bucket: Bucket, segment: Segment) -> RandomArguments:
        """All of a :class:`LayerBatch` that decides random numbers, for what this rank sends."""
        compressor = segment.compressor
        assert isinstance(compressor, GatheredCompressor), segment
        keys = dithers = None
        if compressor.correlated and self.ranks > 1:
            keys = self.keys(bucket, segment, rng.SHARED)
            dithers = rng.dithers(keys, self.place, self.ranks)
        elif compressor.draws:
            keys = self.keys(bucket, segment, self.rank)
        rotation = rng.rotation_key(self.seed, self.step)
        return {"keys": keys, "dithers": dithers, "rotation": rotation}


class Scheme(ABC):
    """One way of reducing a bucket over the ranks.

    Example:
        >>> from hvd_adaptive.collectives import SCHEMES
        >>> SCHEMES["allgather"]().link_bytes(1000, ranks=4)
        3000.0
        >>> SCHEMES["two_shot"]().link_bytes(1000, ranks=4)
        1500.0
    """

    name: ClassVar[str]
    level = 0.0
    """Of the second compression, where there is one and it differs from the first; else 0."""
    carries: ClassVar[PayloadKind]
    """The payloads that it can reduce, as compressors declare them."""
    shots: ClassVar[int] = 1
    """Operations that follow each other; gradients are overwritten only after the last of them."""
    recompresses: ClassVar[bool] = False
    """Whether sums are compressed again, by the owner of a shard, who then keeps what that leaves."""
    returned: ClassVar[float] = 0.0
    """Share of the bytes on a link that are such sums, where both compressions have one level."""

    def direction(self, request: Request) -> Direction:
        """Which way one of its operations goes: sums that were compressed again come down."""
        sums = request.operation == "allgather" and request.group != "node"
        return "down" if self.recompresses and sums else "up"

    def shots_on(self, topology: Topology) -> int:
        """``shots``, among ranks of these nodes."""
        del topology
        return self.shots

    def takes_passengers(self, bucket: Bucket, feedback: FeedbackState) -> bool:
        """Whether some numbers can be summed along with a bucket, whatever its gradients are.

        Args:
            bucket: the bucket.
            feedback: what is kept of it.
        """
        del bucket, feedback
        return False

    @abstractmethod
    def run(self, bucket: Bucket, grads: list[Tensor], io: BucketIO) -> Steps:
        """Reduce a bucket.

        All ranks yield the same operations whatever their gradients hold.

        Args:
            bucket: the bucket.
            grads: its layers' local gradients, which are overwritten with the reduced ones. Dense,
                except for a bucket of a sparse layer.
            io: what it works with.

        Raises:
            WireError: a payload of another rank is damaged.
        """

    @abstractmethod
    def link_bytes(self, payload: float, ranks: int, ranks_per_node: int = 1) -> float:
        """Bytes on one rank's link in one direction, where each rank has ``payload`` bytes.

        Args:
            payload: bytes of a rank that compresses a whole gradient.
            ranks: number of ranks.
            ranks_per_node: how many of them share a node. Schemes that know nodes count what leaves
                the node, divided by its ranks; the others send the same wherever ranks are, and count
                all of it.
        """


class EncodedScheme(Scheme):
    """A scheme of payloads that must be decoded to be added: there are several to choose from."""

    carries = PayloadKind.ENCODED

    @abstractmethod
    def seconds(self, work: Workload, ranks: int, link: LinkCosts) -> float:
        """What reducing a bucket takes after its first compression, as far as schemes differ.

        Args:
            work: the bucket.
            ranks: how many there are.
            link: of the network between them.
        """


def encoder_of(segment: Segment) -> GatheredCompressor:
    """The compressor of a segment of a bucket of encoded payloads."""
    assert isinstance(segment.compressor, GatheredCompressor), segment
    return segment.compressor


def shaped(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Views of the bucket's layers in ``flat``, in their shapes."""
    views = split(flat, bucket.layers)
    return [view.view(layer.shape) for view, layer in zip(views, bucket.layers, strict=True)]


def as_float32(grad: Tensor) -> Tensor:
    """``grad`` itself if kernels can work on it, else a contiguous float32 copy."""
    if grad.dtype == torch.float32 and grad.is_contiguous():
        return grad
    return grad.to(torch.float32).contiguous()


def readable(grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients as kernels read them: :func:`as_float32`, or float16 and bfloat16 ones as they are.

    Args:
        grads: of one device.
    """
    kinds = {grad.dtype for grad in grads}
    if len(kinds) == 1 and kinds <= {*HALVES} and for_device(grads[0].device).reads_halves:
        return [grad.contiguous() for grad in grads]
    return [as_float32(grad) for grad in grads]


def room_for_results(grads: list[Tensor]) -> list[Tensor]:
    """Contiguous float32 tensors of the shapes of ``grads``: these, if they are such tensors."""
    if all(grad.dtype == torch.float32 for grad in grads):
        return grads
    return [torch.empty_like(grad, dtype=torch.float32) for grad in grads]


def saturated(result: Tensor, grad: Tensor) -> Tensor:
    """``result``, clamped where rounding to the gradient's dtype would make Inf of a finite value."""
    if grad.dtype != torch.float16 or result.dtype == torch.float16:
        return result
    wide, limit = result.float(), torch.finfo(grad.dtype).max
    if not bool((wide.abs() > limit).any()):
        return result
    return torch.where(wide.isfinite(), wide.clamp(-limit, limit), wide)


def hand_over(bucket: Bucket, results: Sequence[Tensor], grads: Sequence[Tensor], io: BucketIO) -> None:
    """Copy the results that were not formed in the gradients' own memory.

    What float16 cannot hold waits in the feedback, because residuals can be larger than any gradient.
    """
    for position, (grad, result) in enumerate(zip(grads, results, strict=True)):
        if result is grad:
            continue
        held = saturated(result, grad)
        if held is not result:
            excess = (result - held).nan_to_num_(0.0, 0.0, 0.0)  # where both are Inf
            io.feedback.postpone(bucket, position, io.share(excess.view(-1)))
            io.buffers.is_gathered = False
        grad.copy_(held)
