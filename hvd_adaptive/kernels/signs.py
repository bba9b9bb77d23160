"""Random signs of a vector's elements, in the shape of a product of rows and columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_measured

__all__ = ["COLUMNS", "DRAWS", "GROUPS", "SignedSums", "Signs"]

DRAWS, GROUPS, COLUMNS = 4, 4, 2048
"""Independent draws of all signs; parts of each row that are added up apart; elements of a row."""


class Signs(NamedTuple):
    """The sign of element ``r * COLUMNS + c`` in a draw is ``rows[draw, r] * columns[draw, c]``.

    Args:
        rows: ``float32[DRAWS, R]`` of 1 and -1, in host memory; the last row may be incomplete.
        columns: ``float32[DRAWS, COLUMNS]``, likewise.
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, numel: int, seed: int) -> Signs:
        """Of a vector of so many elements, drawn from a seed below 2^63."""
        draw = np.random.PCG64(seed)
        return cls(_signs(numel // COLUMNS + 1, draw), _signs(COLUMNS, draw))

    def check(self, x: Tensor, minus: Tensor | None = None) -> None:
        """ValueError unless they are 1-D contiguous float32, of one size, and no longer than this."""
        tensors = [x] if minus is None else [x, minus]
        for each in tensors:
            check_measured(each)
        sizes, most = [each.numel() for each in tensors], self.rows.shape[1] * COLUMNS
        if len(set(sizes)) > 1 or max(sizes) > most:
            raise ValueError(f"signs of {most} elements do not fit tensors of {sizes}")


def _signs(count: int, draw: np.random.PCG64) -> Tensor:
    """``float32[DRAWS, count]``, a bit each: a number of its own would take ten times as long."""
    words = draw.random_raw(DRAWS * -(-count // 64))
    bits = np.unpackbits(words.view(np.uint8).reshape(DRAWS, -1), axis=1, count=count)
    return torch.from_numpy(2 * bits.astype(np.float32) - 1)


class SignedSums(NamedTuple):
    """Sums of a vector's elements.

    Args:
        numbers: ``float64[DRAWS, GROUPS]``: of those of a group of columns, with the signs of a draw.
        energy: of their squares.
        nonzero: how many are not 0.
    """

    numbers: npt.NDArray[np.float64]
    energy: float
    nonzero: int
