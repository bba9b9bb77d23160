"""The work on elements: one call per bucket.

:mod:`~hvd_adaptive.kernels.base` says what a backend offers and which one a device has; all of them
give the same bytes. What they share is in modules of its own: :mod:`~hvd_adaptive.kernels.selection`
(which elements are sent), :mod:`~hvd_adaptive.kernels.quantization`,
:mod:`~hvd_adaptive.kernels.huffman`, :mod:`~hvd_adaptive.kernels.orders` (random subsets) and
:mod:`~hvd_adaptive.kernels.checks`.
"""

from hvd_adaptive.kernels.base import Kernels, for_device
from hvd_adaptive.kernels.selection import SelectionRule

__all__ = ["Kernels", "SelectionRule", "for_device"]
