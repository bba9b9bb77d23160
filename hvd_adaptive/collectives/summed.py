"""Summed payloads: rounds of flat buffers, reduced by whatever operation the scheme has."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive import rng
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.buckets import Bucket, Segment
from hvd_adaptive.collectives.base import (
    BucketIO,
    Steps,
    as_float32,
    hand_over,
    saturated,
    shaped,
)
from hvd_adaptive.comm.request import Request
from hvd_adaptive.compressors.checks import all_finite
from hvd_adaptive.compressors.linear import CastCompressor, LinearBatch, LinearCompressor, Rounds
from hvd_adaptive.feedback import FeedbackState, split

Reduction: TypeAlias = Callable[[Tensor, BucketIO], Generator[Request, Tensor, Tensor]]
"""Reduces a flat buffer over the ranks; returns the result."""


def reduce_summable(bucket: Bucket, grads: list[Tensor], io: BucketIO, reduction: Reduction) -> Steps:
    """Reduce a bucket of summable payloads: casts in one copy, other compressors in their rounds."""
    if not sends_plain_casts(bucket, io.feedback):
        yield from _run_rounds(bucket, grads, io, reduction)
        return
    # an overflow becomes Inf, as with Horovod: nobody would keep what saturation cuts off
    torch._foreach_copy_(io.buffers.views, grads)
    observe_casts(bucket, grads, io.buffers.views, io)
    reduced = yield from reduction(io.buffers.flat, io)
    results = io.buffers.views if reduced is io.buffers.flat else shaped(reduced, bucket)
    torch._foreach_copy_(grads, [saturated(*pair) for pair in zip(results, grads, strict=True)])


def observe_casts(
    bucket: Bucket, grads: Sequence[Tensor], casts: Sequence[Tensor], io: BucketIO
) -> None:
    """Measure what casting leaves of the layers, in the steps in which that is wanted."""
    if io.energy_weight:
        energy = _energies(grads)
        io.observe_energy(bucket, energy, energy if casts is grads else _energies(casts))


def _energies(tensors: Sequence[Tensor]) -> Float64s:
    """Squared L2 norms; 0 where one is not finite. Cost: a pass over the tensors."""
    norms = [float(torch.linalg.vector_norm(each.float())) for each in tensors]
    for index in np.flatnonzero(~np.isfinite(norms)).tolist():  # or too large for float32
        norms[index] = float(torch.linalg.vector_norm(tensors[index], dtype=torch.float64))
    return np.square(np.where(np.isfinite(norms), norms, 0.0))


def sends_plain_casts(bucket: Bucket, feedback: FeedbackState) -> bool:
    """Whether the payload is the gradients themselves, cast, and nothing is kept of them."""
    return not feedback.slots and all(
        isinstance(segment.compressor, CastCompressor) for segment in bucket.segments
    )


def _run_rounds(bucket: Bucket, grads: list[Tensor], io: BucketIO, reduction: Reduction) -> Steps:
    """Run the compressors' own rounds; feedback changes only where all ranks are finite."""
    feedback = io.feedback
    work = [as_float32(grad) for grad in grads]
    x, adds = feedback.begin(bucket, work, io.step)
    # a rule that looks at the gradients again keeps them; else the results take their place
    keeps_gradients = feedback.needs_gradient_after_commit
    results = [torch.empty_like(each) for each in work] if keeps_gradients else work
    total = torch.empty_like(x)
    kept, rests = split(x, bucket.layers), split(total, bucket.layers)
    for rest, held, add in zip(rests, kept, adds, strict=True):
        torch.add(held, add.view(-1), out=rest)
    outs = [each.view(-1) for each in results]
    before = total.clone() if io.energy_weight else None
    running = [
        _linear(segment).rounds(_batch(bucket, segment, rests, outs, io)) for segment in bucket.segments
    ]
    pending = [next(each) for each in running]
    rounds: list[Rounds | None] = [*running]
    while any(rounds):
        tensors = [tensor for some in pending for tensor in some]
        flat = torch.cat([tensor.reshape(-1).to(bucket.dtype) for tensor in tensors])
        reduced = yield from reduction(flat, io)
        pending = _advance(rounds, pending, reduced)
    if before is not None:
        energy = _energies(split(before, bucket.layers))
        io.observe_energy(bucket, energy, _energies(split(before.sub_(total), bucket.layers)))
    finite = [all_finite(each) for each in outs]
    for segment in (segment for segment in bucket.segments if segment.keeps):
        for position in (each for each in range(segment.start, segment.stop) if finite[each]):
            kept[position].copy_(rests[position])
    feedback.commit(bucket, x, work, finite, io.step)
    for position in (position for position, fine in enumerate(finite) if not fine):
        feedback.restore(bucket, position, work[position], None)
    feedback.finish(bucket, results, finite)
    hand_over(bucket, results, grads, io)


def _batch(
    bucket: Bucket, segment: Segment, x: Sequence[Tensor], outs: Sequence[Tensor], io: BucketIO
) -> LinearBatch:
    """One linear compressor's share of a bucket."""
    return LinearBatch(
        x[segment.start : segment.stop],
        outs[segment.start : segment.stop],
        bucket.layers[segment.start : segment.stop],
        segment.levels,
        io.keys(bucket, segment, rng.SHARED),
        io.codec_states.get(segment.compressor.state_key),
        bucket.dtype,
        io.ranks if segment.keeps and io.feedback.slots else 1,
    )


def _linear(segment: Segment) -> LinearCompressor:
    assert isinstance(segment.compressor, LinearCompressor), segment
    return segment.compressor


def _advance(
    rounds: list[Rounds | None], pending: list[list[Tensor]], reduced: Tensor
) -> list[list[Tensor]]:
    """Hand each compressor its reduced tensors; returns what they send next.

    One that needs fewer rounds than the others becomes None and sends nothing in the later ones.
    """
    pieces = iter(torch.split(reduced, [tensor.numel() for some in pending for tensor in some]))
    following: list[list[Tensor]] = []
    for position, each in enumerate(rounds):
        sends: list[Tensor] = []
        if each is not None:
            try:
                sends = each.send([next(pieces) for _ in pending[position]])
            except StopIteration:
                rounds[position] = None
        following.append(sends)
    return following
