"""Compressors that send every element: as it is, or in half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvd_adaptive.compressors.linear import CastCompressor
from hvd_adaptive.layers import PayloadKind


@dataclass(frozen=True)
class NoCompression(CastCompressor):
    """The gradient as it is, in its own dtype: what Horovod sends.

    Unbiased, no memory, no cost. Example:

        >>> from hvd_adaptive.compressors import parse
        >>> x = torch.tensor([1.0, -2.0])
        >>> payload = parse("none").compress_(x, 32)
        >>> payload.nbytes, x.tolist()
        (8, [0.0, 0.0])
    """

    name = "none"
    payload_kind = PayloadKind.SUMMABLE
    wire_dtype = None


@dataclass(frozen=True)
class Float16(CastCompressor):
    """Half precision, summed in half precision by allreduce, as Horovod's ``Compression.fp16``.

    Half the bytes; rounds to nearest (relative error 2^-11 above 6e-5, absolute 3e-8 below).
    Finite values beyond 65,504 saturate. Example:

        >>> from hvd_adaptive.compressors import parse
        >>> x = torch.tensor([1.0, 0.1])
        >>> payload = parse("fp16").compress_(x, 16)
        >>> payload.nbytes, x[0].item(), abs(x[1].item()) < 1e-4
        (4, 0.0, True)
    """

    name = "fp16"
    payload_kind = PayloadKind.SUMMABLE
    wire_dtype = torch.float16


@dataclass(frozen=True)
class BFloat16(CastCompressor):
    """bfloat16 on the wire, summed in float32: float32's range at half the bytes.

    No Horovod operation takes bfloat16, so the sum is made in two rounds: an alltoall brings each
    rank one slice of everybody's payload, it adds them in float32, and an allgather hands the sums
    out. The bytes are those of a ring allreduce of 16-bit values. Relative error 2^-8 for the
    summands and again for the sum. Example:

        >>> from hvd_adaptive.compressors import parse
        >>> x = torch.tensor([1.0, 3e38])
        >>> payload = parse("bf16").compress_(x, 16)
        >>> payload.nbytes, bool(payload.data.isfinite().all())
        (4, True)
    """

    name = "bf16"
    payload_kind = PayloadKind.CAST
    wire_dtype = torch.bfloat16
