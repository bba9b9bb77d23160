"""The work of reducing a bucket, of which schemes foresee the seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CodecCosts:
    """Seconds of a compressor's work.

    Args:
        compress: of an element that is compressed.
        decompress: of an element that is written when payloads are summed.
        decompress_byte: of a byte of a payload that is summed.
        compress_byte: of a byte of the payload that is made; 0 in older measurements.
    """

    compress: float
    decompress: float
    decompress_byte: float
    compress_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A bucket as costs see it.

    Args:
        numel: elements of its layers.
        nbytes: of one rank's payload.
        codec: of its compressors.
    """

    numel: int
    nbytes: float
    codec: CodecCosts

    def compressing(self, share: float = 1.0) -> float:
        """Seconds of compressing a share of the elements."""
        return share * (self.codec.compress * self.numel + self.codec.compress_byte * self.nbytes)

    def sums(self, payloads: float, share: float = 1.0) -> float:
        """Seconds of summing ``payloads`` payloads, of a share of the elements."""
        codec = self.codec
        return share * (codec.decompress * self.numel + codec.decompress_byte * payloads * self.nbytes)
