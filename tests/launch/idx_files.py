"""Files in the format of MNIST."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Bytes of any shape, compressed."""
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), 1))
