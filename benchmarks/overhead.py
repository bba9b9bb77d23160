"""What the library costs when it cannot help.

Two questions:

1. ``compression=none`` against stock Horovod, in turn within one run, on a model of few large layers
   and on one of 300 small layers: how much longer is a step?
2. What do Python and the kernels' calls cost for each layer and each bucket, without a network?

    python benchmarks/overhead.py            # starts its own ranks, prints tables, writes JSON
    python benchmarks/overhead.py --check    # exit code 1 if a bar is missed
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import report

STEP_BAR = 1.03
SHARE_BAR = 0.05


# --- models -------------------------------------------------------------------------------------------


def few_large_layers() -> tuple[nn.Module, Tensor]:
    """6.3 million parameters in three matrices."""
    model = nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    return model, torch.randn(64, 1024)


def many_small_layers() -> tuple[nn.Module, Tensor]:
    """300 matrices of 64 x 64, as deep networks with small channels have them."""
    layers = itertools.chain.from_iterable(
        (nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(300)
    )
    return nn.Sequential(*layers), torch.randn(256, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "few large layers": few_large_layers,
    "300 small layers": many_small_layers,
}


# --- steps in turn, under a real launcher -------------------------------------------------------------


def measure_steps(rounds: int, block: int) -> dict[str, Any]:
    """Median step times of each optimizer on each model, blocks of steps in turn."""
    import horovod.torch as hvd

    import hvd_adaptive as hva

    hva.init()
    torch.set_num_threads(1)
    optimizers: dict[str, Callable[..., Any]] = {
        "stock": hvd.DistributedOptimizer,
        "none": hva.DistributedOptimizer,
        "topk 1 %": lambda *args, **kw: hva.DistributedOptimizer(*args, **kw, compression="topk"),
    }
    figures: dict[str, Any] = {"ranks": hvd.size()}
    for title, build in MODELS.items():
        runs = {name: _run(build, wrap) for name, wrap in optimizers.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                # an equal start: a rank that is ahead would charge its waiting to the other optimizer
                hvd.barrier()
                measured = [next(run) for _ in range(block)]
                if number:
                    times[name].extend(measured)
        figures[title] = _compare(times)
    return figures


def _run(build: Callable[[], tuple[nn.Module, Tensor]], wrap: Callable[..., Any]) -> Iterator[float]:
    """Train; yield the seconds of each step."""
    torch.manual_seed(0)
    model, batch = build()
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=1e-4), named_parameters=model.named_parameters()
    )
    while True:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        yield time.perf_counter() - started


def _compare(times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "steps": len(times["stock"]),
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "ratio": {name: value / medians["stock"] for name, value in medians.items()},
    }


# --- cost a layer and a bucket, without a network -----------------------------------------------------


class LoneTransport:
    """Answers at once what a process set of one rank would: what remains is our own cost."""

    size = 1
    scale = 1.0

    def submit(self, request: Any, name: str) -> Any:
        """The handle is the tensor."""
        del name
        return request.tensor

    def wait(self, handle: Any) -> Any:
        """A sum over one rank is its summand."""
        return handle

    def traffic(self, request: Any, received: int) -> int:
        """Nothing travels."""
        del request, received
        return 0


class LoneControl:
    """Agreement of one rank with itself."""

    size = 1

    def allgather(self, value: Any) -> list[Any]:
        """Its own value, as it would come back from others."""
        return [json.loads(json.dumps(value))]


def measure_calls(compression: str, repeats: int = 60) -> dict[str, float]:
    """Fit ``seconds = a + b * layers + c * buckets`` over layouts; gives microseconds."""
    layouts = [(layers, buckets) for layers in (75, 150, 300) for buckets in (1, 5, 25)]
    rows = [(1.0, float(layers), float(buckets)) for layers, buckets in layouts]
    seconds = [_overhead(compression, layers, buckets, repeats) for layers, buckets in layouts]
    (_, per_layer, per_bucket), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)
    whole = seconds[layouts.index((300, 1))]
    return {"layer": 1e6 * per_layer, "bucket": 1e6 * per_bucket, "300 layers": 1e6 * whole}


def _overhead(compression: str, layers: int, buckets: int, repeats: int) -> float:
    """Seconds that hooks and synchronize() take in one step, the gradients being there already."""
    from hvd_adaptive.exchange import Exchange
    from hvd_adaptive.reducer import Options, Reducer
    from hvd_adaptive.routing import Choice
    from hvd_adaptive.telemetry import Meter

    params = [nn.Parameter(torch.zeros(32, 32)) for _ in range(layers)]
    cap = layers * params[0].nbytes / buckets
    meter = Meter()
    exchange = Exchange(LoneTransport(), meter, "overhead")  # type: ignore[arg-type]
    reducer = Reducer(
        [(f"{index}", p) for index, p in enumerate(params)],
        Choice.of(compression, None, None),
        Options(bucket_cap_bytes=cap),
        LoneControl(),  # type: ignore[arg-type]
        exchange,
    )
    times = []
    for step in range(repeats):
        for p in params:
            p.grad = torch.randn_like(p)
        started = time.perf_counter()
        for index in reversed(range(layers)):
            reducer._arrive(index)
        reducer.synchronize()
        meter.end_step(step)
        times.append(time.perf_counter() - started)
    return float(np.median(times[repeats // 4 :]))


# --- the program --------------------------------------------------------------------------------------


def launch(ranks: int, rounds: int, block: int) -> dict[str, Any]:
    """Run :func:`measure_steps` under horovodrun; its figures from rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        command = ["horovodrun", "-np", str(ranks), sys.executable, __file__, "--worker", str(out)]
        command += ["--rounds", str(rounds), "--block", str(block)]
        settings = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{done.stdout}\n{done.stderr}")
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def show(steps: dict[str, Any], calls: dict[str, dict[str, float]]) -> None:
    """Print both tables."""
    names = list(steps["few large layers"]["ratio"])
    heading = [f"{steps['ranks']} ranks, median step", *names, *(f"{n} / stock" for n in names[1:])]
    rows: list[list[object]] = [heading]
    for title in MODELS:
        figures = steps[title]
        rows.append(
            [
                title,
                *(f"{figures['milliseconds'][name]:.2f} ms" for name in names),
                *(f"{figures['ratio'][name]:.3f}" for name in names[1:]),
            ]
        )
    print(report.table(rows))
    heading = ["microseconds of our own", "a layer", "a bucket", "300 layers of 1,024", "of the step"]
    rows = [heading]
    for name, cost in calls.items():
        rows.append(
            [
                name,
                f"{cost['layer']:.2f}",
                f"{cost['bucket']:.1f}",
                f"{cost['300 layers']:.0f}",
                f"{100 * cost['share']:.1f} %",
            ]
        )
    print("\n" + report.table(rows))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each optimizer")
    parser.add_argument("--block", type=int, default=10, help="steps in a turn")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--quick", action="store_true", help="few steps; no bars, no file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.block = 2, 3
    if args.worker:
        import horovod.torch as hvd

        figures = measure_steps(args.rounds, args.block)
        if hvd.rank() == 0:
            Path(args.worker).write_text(json.dumps(figures))
        return 0
    torch.set_num_threads(1)
    calls = {name: measure_calls(name) for name in ("none", "topk")}
    steps = launch(args.ranks, args.rounds, args.block)
    milliseconds = steps["300 small layers"]["milliseconds"]
    calls["none"]["share"] = calls["none"]["300 layers"] / 1e3 / milliseconds["none"]
    calls["topk"]["share"] = calls["topk"]["300 layers"] / 1e3 / milliseconds["topk 1 %"]
    show(steps, calls)
    if args.quick:
        return 0
    print(f"\nwritten to {report.write('overhead', {'steps': steps, 'calls': calls})}")
    missed = [title for title in MODELS if steps[title]["ratio"]["none"] > STEP_BAR]
    if calls["topk"]["share"] > SHARE_BAR:
        missed.append("share of the calls under topk")
    for title in missed:
        print(f"bar missed: {title}")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
