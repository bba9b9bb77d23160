"""What all backends agree on about the rotation of layers.

A layer is cut into chunks, from its front: as many of :data:`CHUNK` elements as there are, and of what
is left as many as there are of the next smaller power of four, and so on down to single elements, so
that nothing is padded. Each chunk is multiplied by random signs, the same ones for every chunk (for a
small one, the first of them), and by the Hadamard matrix ``H``, divided by the square root of its size.
That is a power of two, so only sums are rounded. ``H`` is applied in butterflies of a distance of 1, 2,
4, ...: this order of additions makes the result the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1024
"""Elements of the largest chunk: 4 KiB, which are worked on in the nearest cache. A power of four."""
LARGEST_ROTATED = 2.0**96
"""Magnitudes above it are not rotated: sums of a chunk, their norm, and sums over ranks stay finite."""
LARGEST_BACK = 2.0**117
"""What is above it saturates when it is rotated back, so that even damaged norms give finite values."""


def chunks(numel: int) -> Iterator[tuple[int, int, int]]:
    """The chunks of a layer by size: (first element, size, how many).

    Example:
        >>> list(chunks(3400))
        [(0, 1024, 3), (3072, 256, 1), (3328, 64, 1), (3392, 4, 2)]
    """
    start, size = 0, CHUNK
    while start < numel:
        count = (numel - start) // size
        if count:
            yield start, size, count
        start += count * size
        size //= 4
