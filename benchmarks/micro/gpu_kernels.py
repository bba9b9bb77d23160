"""What Triton's kernels cost on a GPU, in memcpys of the gradient and as a share of its bandwidth.

One command, on a machine with a GPU, without a network. The table is a roofline: *words* are what an
operation must read and write per element, in 4 bytes; *memcpys* are its time over that of a copy of the
gradient in device memory, which moves two words; *share* is the bandwidth of those words over that of
the copy. An operation that does nothing but move its words has a share of 1.

    python -m benchmarks.micro.gpu_kernels              # prints it, writes results/gpu_kernels.json
    python -m benchmarks.micro.gpu_kernels --check      # 1 if a stored target is missed
    python -m benchmarks.micro.gpu_kernels --quick      # small and few; no targets, no file
    python -m benchmarks.micro.gpu_kernels --interpret  # without a GPU: runs all, measures nothing
    python -m benchmarks.micro.gpu_kernels --profile    # what takes the time: each kernel, and the host
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import command_line
from benchmarks.report import report

SIZES = (1 << 22, 25_000_000, 100_000_000)
DENSITY = 0.01
BODIES = 8
REPEATS = 20
LISTED = 12
"""Kernels that a profile names."""

TARGETS = {
    "topk, 1 %": 3.0,
    "qsgd, 4 bits": 3.0,
    f"sum of {BODIES}: topk": 2.0,
    f"sum of {BODIES}: qsgd": 2.0,
}
"""The most memcpys of the gradient that an operation may take, in the largest size."""


@dataclass(frozen=True)
class Operation:
    """What is measured.

    Args:
        run: once; it is free to change the tensors that it was made with.
        words: that it moves per element, at least.
    """

    run: Callable[[], object]
    words: float


def operations(numel: int, device: torch.device) -> dict[str, Operation]:
    """What a step does to a bucket of one layer."""
    from hvd_adaptive.kernels.quantization import ReceivedBody
    from hvd_adaptive.kernels.triton import quantized, reduction, sparse
    from hvd_adaptive.wire import ValueFormat
    from hvd_adaptive.wire.quantized import Norm, QuantizationRule, Rounding

    x, grad, out = (torch.randn(numel, device=device) for _ in range(3))
    one, count = np.array([0, numel]), np.array([max(1, int(DENSITY * numel))])
    rule, bits = QuantizationRule(Norm.l2, Rounding.uniform), np.array([4])
    tables = rule.tables

    def topk() -> Tensor:
        return sparse.compress_(x, one, count, ValueFormat.fp16, [grad])[0]

    def qsgd() -> Tensor:
        return quantized.compress_(x, one, bits, rule, tables, [grad])[0]

    chosen, codes = topk().clone(), qsgd().clone()
    payload = codes.numel() / 4 / numel
    received = [ReceivedBody(codes, 0, tables)] * BODIES
    compression = 3 + payload
    return {
        "memcpy": Operation(lambda: out.copy_(grad), 2),
        "topk, 1 %": Operation(topk, 3),
        "qsgd, 4 bits": Operation(qsgd, compression),
        f"sum of {BODIES}: topk": Operation(
            # a value touches a sector of 32 bytes, which is read and written
            lambda: sparse.decompress_sum_([chosen] * BODIES, [out], 1.0),
            1 + 16 * BODIES * DENSITY,
        ),
        f"sum of {BODIES}: qsgd": Operation(
            lambda: quantized.decompress_sum_(received, [out], 1.0, rule),
            1 + BODIES * payload,
        ),
        f"sum of {BODIES} and qsgd": Operation(
            lambda: reduction.reduce_(received, one, bits, rule, tables),
            1 + BODIES * payload + 2 + 1 + payload,
        ),
        "summary": Operation(lambda: sparse.summary(grad), 1),
        "norm histogram": Operation(lambda: quantized.norm_histogram(grad, rule, squared=True), 2),
    }


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call, what the host does included; the first calls compile."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def measure(quick: bool) -> dict[str, Any]:
    """All figures, printed as they come."""
    device, found = torch.device("cuda"), {}
    for numel in SIZES[:1] if quick else SIZES:
        rows, copy = {}, 0.0
        for name, operation in operations(numel, device).items():
            time = milliseconds(operation.run, 3 if quick else REPEATS)
            copy = copy or time
            moved = 4e-9 * numel * operation.words / (time * 1e-3)
            rows[name] = {
                "ms": time,
                "memcpys": time / copy,
                "words": operation.words,
                "gb_per_s": moved,
                "share": operation.words / 2 * copy / time,
                "gradient_tb_per_s": 4e-12 * numel / (time * 1e-3),
            }
        head = [f"{numel:,} elements", *next(iter(rows.values()))]
        report.show(
            [head, *([name, *(f"{v:.3g}" for v in row.values())] for name, row in rows.items())]
        )
        found[str(numel)] = rows
    return {"gpu": torch.cuda.get_device_name(device), "sizes": found}


def profile() -> int:
    """Print where the time of each operation goes, in the largest size."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    repeats = 5
    for name, operation in operations(SIZES[-1], torch.device("cuda")).items():
        whole = milliseconds(operation.run, repeats)
        with profiled(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(repeats):
                operation.run()
            torch.cuda.synchronize()
        rows = [(each.self_device_time_total, each.key) for each in found.key_averages()]
        device = sum(time for time, _ in rows) / 1000 / repeats
        print(f"{name}: {whole:.3f} ms, of which the device takes {device:.3f}")
        for time, kernel in sorted(rows, reverse=True)[:LISTED]:
            print(f"  {time / 1000 / repeats:8.3f} ms  {kernel[:60]}")
    return 0


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    largest = figures["sizes"][max(figures["sizes"], key=int)]
    return [
        f"{name}: {largest[name]['memcpys']:.2f} memcpys, more than {most}"
        for name, most in TARGETS.items()
        if largest[name]["memcpys"] > most
    ]


def interpret() -> int:
    """Run each operation once in host memory, to see that it runs."""
    for name, operation in operations(3000, torch.device("cpu")).items():
        operation.run()
        print(f"{name}: runs, and moves {operation.words:.2f} words per element; nothing was measured")
    return 0


def main() -> int:
    """Measure where there is a GPU."""
    if sys.argv[1:] == ["--interpret"]:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
        return interpret()
    if not {"--check", "-h", "--help"} & {*sys.argv} and not torch.cuda.is_available():
        print("there is no GPU here: nothing was measured, and no file has changed", file=sys.stderr)
        return 1
    if sys.argv[1:] == ["--profile"]:
        return profile()
    others = {
        "--interpret": "without a GPU: run all once, and measure nothing",
        "--profile": "what takes the time; writes no file",
    }
    return command_line.tables(__doc__, "gpu_kernels", measure, missed, others)


if __name__ == "__main__":
    sys.exit(main())
