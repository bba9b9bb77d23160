"""The compressors, by name.

A new member is one class and one row of :class:`Compression`, from which ``REGISTRY`` is made.
"""

from __future__ import annotations

from hvd_adaptive import specs
from hvd_adaptive.compressors.base import (
    CodecState,
    Compressor,
    GatheredCompressor,
    LayerBatch,
    LayerContext,
    LayerStats,
    Learner,
    Level,
    MultiLevel,
    Payload,
)
from hvd_adaptive.compressors.dense import BFloat16, Float16, NoCompression
from hvd_adaptive.compressors.layerwise import LayerwiseCompressor
from hvd_adaptive.compressors.learned import ALQ, AMQ
from hvd_adaptive.compressors.linear import CastCompressor, LinearBatch, LinearCompressor
from hvd_adaptive.compressors.lowrank import PowerSGD
from hvd_adaptive.compressors.quantizers import (
    NUQSGD,
    QSGD,
    Natural,
    OneBit,
    QSGDInf,
    SignSGD,
    TernGrad,
)
from hvd_adaptive.compressors.randomk import RandomK
from hvd_adaptive.compressors.sparse import DGC, GlobalTopK, RedSync, Threshold, TopK
from hvd_adaptive.deprecation import renamed


class Compression:
    """The compressors as attributes: ``Compression.fp16``, ``Compression.topk(density=0.01)``.

    The rows of :data:`REGISTRY`: each member stands here under its ``name``.
    """

    none = NoCompression
    fp16 = Float16
    bf16 = BFloat16
    topk = TopK
    globaltopk = GlobalTopK
    threshold = Threshold
    dgc = DGC
    redsync = RedSync
    randomk = RandomK
    powersgd = PowerSGD
    qsgd = QSGD
    qsgdinf = QSGDInf
    nuqsgd = NUQSGD
    natural = Natural
    terngrad = TernGrad
    signsgd = SignSGD
    onebit = OneBit
    alq = ALQ
    amq = AMQ


REGISTRY: dict[str, type[Compressor]] = {
    name: member for name, member in vars(Compression).items() if isinstance(member, type)
}
"""The compressors by name, in the order of :class:`Compression`."""


def parse(spec: str | Compressor | type[Compressor]) -> Compressor:
    """Make a compressor of ``"name"`` or ``"name:option=value,option=value"``.

    Args:
        spec: text, or a compressor (returned as it is), or a class of one (made with its defaults).

    Raises:
        ValueError: unknown name or option, or a value that does not fit; the message lists what is
            valid.
        TypeError: not a specification of a compressor.

    Example:
        >>> parse("topk:density=0.05,values=int8")
        TopK(density=0.05, values='int8')
        >>> parse("topk:kind=exact")
        Traceback (most recent call last):
        ...
        ValueError: topk has no option 'kind': its options are density, values, levels
    """
    if isinstance(spec, Compressor):
        return spec
    if isinstance(spec, type) and issubclass(spec, Compressor):
        return spec()
    if not isinstance(spec, str):
        raise TypeError(
            f"compression must be text such as 'topk:density=0.01' or a member of Compression, got "
            f"{spec!r}"
        )
    return specs.read("compressor", REGISTRY, spec)


def format_spec(compressor: Compressor) -> str:
    """The text that :func:`parse` reads back as an equal compressor.

    Example:
        >>> format_spec(TopK(density=0.05))
        'topk:density=0.05,values=bf16'
    """
    return specs.write(compressor.name, compressor)


__all__ = [
    "ALQ",
    "AMQ",
    "DGC",
    "NUQSGD",
    "QSGD",
    "REGISTRY",
    "BFloat16",
    "CastCompressor",
    "CodecState",
    "Compression",
    "Compressor",
    "Float16",
    "GatheredCompressor",
    "GlobalTopK",
    "LayerBatch",
    "LayerContext",
    "LayerStats",
    "LayerwiseCompressor",
    "Learner",
    "Level",
    "LinearBatch",
    "LinearCompressor",
    "MultiLevel",
    "Natural",
    "NoCompression",
    "OneBit",
    "Payload",
    "PowerSGD",
    "QSGDInf",
    "RandomK",
    "RedSync",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "format_spec",
    "parse",
]


__getattr__ = renamed(__name__, {"Batch": "hvd_adaptive.compressors.LinearBatch"})
