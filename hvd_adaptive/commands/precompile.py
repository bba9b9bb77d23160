"""``hva precompile``: compile every kernel into Numba's cache.

Also ``python -m hvd_adaptive.commands.precompile``.
Worth one line in a job script: without it ranks wait in their first steps, for a minute or two, while
one of each host compiles. This command shares the work among processes on up to four cores.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hvd_adaptive import compressors, kernel_cache
from hvd_adaptive.commands import run_command
from hvd_adaptive.compressors import GatheredCompressor, Learner, MultiLevel
from hvd_adaptive.compressors.base import LayerBatch, LayerContext
from hvd_adaptive.compressors.quantized import Quantizer
from hvd_adaptive.kernels import for_device
from hvd_adaptive.kernels.signs import Signs
from hvd_adaptive.planning import knapsack

_OPTIONS = ("alq:coding=huffman", "redsync:values=sign", "qsgdinf:rotate=hadamard")
"""Besides every member with its defaults: what takes other paths through the kernels."""


_MOST_PROCESSES = 4
"""Each takes some hundred MB while it compiles, and kernels call each other: more would mostly wait."""


def precompile(index: int = 0, processes: int = 1) -> float:
    """Run every kernel on a few elements, which compiles it; returns the seconds that took.

    Processes that do so at the same time share the work, however long kernels take: each begins
    elsewhere, goes on with what the others come to last, and loads what they have compiled.

    Args:
        index: of this process among them.
        processes: how many they are.
    """
    start = time.perf_counter()
    uses = _uses()
    first, share = index * len(uses) // processes, -(-len(uses) // processes)
    uses = [*uses[first:], *uses[:first]]
    for use in (*uses[:share], *reversed(uses[share:])):
        if index and kernel_cache.is_complete():
            break
        use()
    kernel_cache.mark_complete()
    return time.perf_counter() - start


@contextmanager
def _helpers(number: int) -> Iterator[None]:
    """So many processes that compile as well."""
    program = "from hvd_adaptive.commands import precompile\nprecompile.precompile({}, {})"
    programs = [program.format(each, number + 1) for each in range(1, number + 1)]
    started = [subprocess.Popen([sys.executable, "-c", each]) for each in programs]
    try:
        yield
    except BaseException:
        for helper in started:
            helper.kill()
        raise
    finally:
        for helper in started:
            helper.wait()


def _uses() -> list[Callable[[], None]]:
    """What together needs every kernel."""
    compress = (functools.partial(_use, name) for name in (*compressors.REGISTRY, *_OPTIONS))
    return [*compress, _use_huffman, _use_measuring, _use_alone, _use_planning]


def _use(name: str) -> None:
    """Compress, also for several receivers, recompress, decompress, measure."""
    compressor = compressors.parse(name)
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
        halves = [np.array([0, 32]), np.array([32, 64])]
        compressor.compress_shards_(LayerBatch(x.clone(), np.array([0, 64]), [level], grads), halves)
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
    assert isinstance(qsgd, Quantizer)
    x = torch.zeros(8192)
    x[::64] = 1.0
    body, _ = qsgd.compress_layers_(LayerBatch(x, np.array([0, 4096, 8192]), [qsgd.level] * 2))
    qsgd.decompress_layers_add_(body, [torch.zeros(4096), torch.zeros(4096)], 1.0)
    # what kernels of a GPU, or the reference, have done to the codes on the host
    entropy = for_device(body.device).entropy
    tables, codes, start = entropy.read_codebooks(body.numpy(), qsgd.rule)
    entropy.decode(body, start, [4096, 4096], qsgd.rule, tables, codes)


def _use_measuring() -> None:
    kernels, x = for_device(torch.device("cpu")), torch.ones(64)
    kernels.sparse.sample_spectrum(x)
    kernels.sparse.position_bits(x, np.array([2]))
    kernels.measuring.signed_sums(x, Signs.of(64, 0))


def _use_alone() -> None:
    """What no compressor calls with its defaults: residuals in bfloat16, a random subset as numbers."""
    kernels = for_device(torch.device("cpu"))
    kernels.quantized.round_at_random_(torch.zeros(64, dtype=torch.bfloat16), torch.ones(64), 1)
    kernels.subset.first_indices(64, 2, 1)


def _use_planning() -> None:
    for solve in (knapsack.min_cost, knapsack.min_error):
        solve([[0.0, 1.0], [0.0, 2.0]], [[4.0, 1.0], [4.0, 1.0]], 5.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = "Compile every kernel into Numba's cache, for all processes that use it."
    parser.epilog = "example, in a job script:\n  hva precompile && horovodrun -np 16 python train.py"


def run(_options: argparse.Namespace) -> int:
    """Compile, and say how long that took."""
    cores = len(os.sched_getaffinity(0))
    processes = 1 if kernel_cache.is_complete() else min(cores, _MOST_PROCESSES)
    with _helpers(processes - 1):
        seconds = precompile(0, processes)
    print(f"hvd_adaptive kernels ready after {seconds:.1f} s")
    return 0


def main() -> None:
    """Run the command, as of this process."""
    sys.exit(run_command("precompile"))


if __name__ == "__main__":
    main()
