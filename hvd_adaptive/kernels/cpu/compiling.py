"""The decorators of kernels."""

from __future__ import annotations

from typing import Any

from hvd_adaptive.kernel_cache import jit


def compiled(*freedoms: str, inline: bool = False) -> Any:
    """A decorator: without the GIL, cached on disk, a division by 0 gives Inf or NaN.

    Args:
        freedoms: what LLVM may do with floats: ``reassoc`` (reorder sums), ``contract`` (fuse a product
            and a sum).
        inline: whether LLVM must inline it, however large it is: part of an inner loop.
    """
    return jit(nogil=True, error_model="numpy", fastmath=set(freedoms), forceinline=inline)


kernel = compiled()
"""For most kernels: every float operation as it is written."""
inlined = compiled(inline=True)
"""For parts of inner loops."""
reordered = compiled("reassoc")
"""For sums of what is finite, or may give any NaN: their order may change."""
fused = compiled("reassoc", "contract")
"""For sums whose terms are products, which may be fused with them."""
