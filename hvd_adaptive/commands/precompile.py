"""``hva precompile``: compile every kernel into Numba's cache.

Also ``python -m hvd_adaptive.commands.precompile``.
Worth one line in a job script: without it each rank compiles, in its first steps, for up to a minute.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch

from hvd_adaptive import compressors, kernel_cache
from hvd_adaptive.commands import run_command
from hvd_adaptive.compressors import Compressor, GatheredCompressor, Learner, MultiLevel
from hvd_adaptive.compressors.base import LayerBatch, LayerContext
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.signs import Signs
from hvd_adaptive.planning import knapsack

_OPTIONS = ("alq:coding=huffman", "redsync:values=sign", "qsgdinf:rotate=hadamard")
"""Besides every member with its defaults: what takes other paths through the kernels."""


def precompile() -> float:
    """Run every kernel on a few elements, which compiles it; returns the seconds that took."""
    start = time.perf_counter()
    for name in (*compressors.REGISTRY, *_OPTIONS):
        _use(compressors.parse(name))
    _use_huffman()
    kernels = for_device(torch.device("cpu"))
    kernels.sparse.sample_spectrum(torch.ones(64))
    kernels.measuring.signed_sums(torch.ones(64), Signs.of(64, 0))
    for solve in (knapsack.min_cost, knapsack.min_error):
        solve([[0.0, 1.0], [0.0, 2.0]], [[4.0, 1.0], [4.0, 1.0]], 5.0)
    kernel_cache.mark_complete()
    return time.perf_counter() - start


def _use(compressor: Compressor) -> None:
    """Compress, recompress, decompress, measure."""
    x = torch.linspace(-1, 1, 64)
    state = compressor.new_state()
    if isinstance(state, Learner):
        state.collecting = True  # compresses, and looks at the distribution
    level = compressor.level
    if isinstance(compressor, GatheredCompressor):
        grads = [torch.ones(64)]
        body, _ = compressor.compress_layers_(
            LayerBatch(x.clone(), np.array([0, 64]), [level], grads, state=state)
        )
        compressor.decompress_layers_sum_([body], [torch.zeros(64)], 1.0)
        one_layer = LayerBatch(x.clone(), np.array([0, 64]), [level], state=state, learns=False)
        compressor.reduce_layers_([body], one_layer, keeps=True)
    payload = compressor.compress_(x, level, LayerContext(shape=(8, 8), state=state))
    if isinstance(compressor, MultiLevel):
        payload = compressor.recompress_(payload, x, level / 2)
    compressor.decompress_add_(payload, torch.zeros(64))
    compressor.errors(x, [level], LayerContext(shape=(8, 8), state=state))


def _use_huffman() -> None:
    """Compress and decompress two layers of which a Huffman code saves something."""
    qsgd = compressors.parse("qsgd:coding=huffman")
    assert isinstance(qsgd, GatheredCompressor)
    x = torch.zeros(8192)
    x[::64] = 1.0
    body, _ = qsgd.compress_layers_(LayerBatch(x, np.array([0, 4096, 8192]), [qsgd.level] * 2))
    qsgd.decompress_layers_add_(body, [torch.zeros(4096), torch.zeros(4096)], 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Compile every kernel into Numba's cache, for all processes that use it."
    parser.epilog = "example, in a job script:\n  hva precompile && horovodrun -np 16 python train.py"


def run(_options: argparse.Namespace) -> int:
    """Compile, and say how long that took."""
    print(f"hvd_adaptive kernels ready after {precompile():.1f} s")
    return 0


def main() -> None:
    """Run the command, as of this process."""
    sys.exit(run_command("precompile"))


if __name__ == "__main__":
    main()
