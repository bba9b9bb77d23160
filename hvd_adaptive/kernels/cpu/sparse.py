"""Sparse kernels for host memory: see :class:`hvd_adaptive.kernels.base.SparseKernels`."""

from hvd_adaptive.kernels.cpu.compression import compress_, recompress_
from hvd_adaptive.kernels.cpu.cut_compression import compress_cut_
from hvd_adaptive.kernels.cpu.decompression import clear_, decompress_add_, decompress_sum_
from hvd_adaptive.kernels.cpu.sparse_reduction import reduce_
from hvd_adaptive.kernels.cpu.spectra import (
    moments,
    position_bits,
    refined_spectrum,
    sample_spectrum,
    spectrum,
    summary,
)

__all__ = [
    "clear_",
    "compress_",
    "compress_cut_",
    "decompress_add_",
    "decompress_sum_",
    "moments",
    "position_bits",
    "recompress_",
    "reduce_",
    "refined_spectrum",
    "sample_spectrum",
    "spectrum",
    "summary",
]
