"""What the library costs when it cannot help.

    python -m benchmarks.micro.overhead          # two minutes; tables, results/overhead.json and .png
    python -m benchmarks.micro.overhead --quick  # a smoke run that writes no file
    python -m benchmarks.micro.overhead --check  # 1 if a stored target is missed

Two questions:

1. ``compression=none`` against stock Horovod, in turn within one run, on a model of few large layers
   and on one of 300 small layers: how much longer is a step? (Next to it, ``topk``.)
2. What do Python and the kernels' calls cost for each layer and each bucket, without a network, and
   which part of a step spends it?
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import command_line, lab
from benchmarks.report import report
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.network import NetworkTransport
from hvd_adaptive.comm.request import Request

STEP_TARGET = 1.03
SHARE_TARGET = 0.05
RANKS = 2
ROUNDS, BLOCK = 20, 10
"""Turns of each optimizer, and steps in a turn."""
QUICK = (2, 3)
CALLS = {"calls of none": "none", "calls of topk": "topk"}
METHODS = {"none": "none", "topk": "topk 1 %"}
"""What the calls' compressors are named among the steps."""
PARTS = ("hooks, compressing, launching", "waiting, decompressing, handing back", "telemetry")


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


def measure_steps(title: str, rounds: int, block: int) -> dict[str, Any]:
    """Median step times of each optimizer on one model, blocks of steps in turn."""
    import hvd_adaptive as hva

    hva.init()
    torch.set_num_threads(1)
    optimizers: dict[str, Callable[..., Any]] = {
        "stock": hvd.DistributedOptimizer,
        METHODS["none"]: hva.DistributedOptimizer,
        METHODS["topk"]: functools.partial(hva.DistributedOptimizer, compression="topk"),
    }
    runs = {name: _run(MODELS[title], wrap) for name, wrap in optimizers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            # an equal start: a rank that is ahead would charge its waiting to the other optimizer
            hvd.barrier()
            measured = [next(run) for _ in range(block)]
            if number:
                times[name].extend(measured)
    return _compare(times)


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


class LoneTransport(NetworkTransport):
    """Answers at once what a process set of one rank would: what remains is our own cost."""

    size, rank = 1, 0

    def __init__(self) -> None:
        super().__init__(hvd.Average, None)

    def submit(self, request: Request, name: str, step: int) -> Tensor:
        """The handle is the tensor."""
        del name, step
        return request.tensor

    def wait(self, handle: Tensor) -> Tensor:
        """A sum over one rank is its summand."""
        return handle

    def traffic(self, request: Request, received: int) -> int:
        """Nothing is sent."""
        del request, received
        return 0


class LoneControl(Control):
    """Agreement of one rank with itself."""

    size, rank = 1, 0

    def allgather(self, value: Any) -> list[Any]:
        """Its own value, as it would come back from others."""
        return [json.loads(json.dumps(value))]


def measure_calls(compression: str, repeats: int) -> dict[str, Any]:
    """Fit ``seconds = a + b * layers + c * buckets`` over layouts; gives microseconds.

    The parts are those of 300 layers in one bucket.
    """
    layouts = [(layers, buckets) for layers in (75, 150, 300) for buckets in (1, 5, 25)]
    rows = [(1.0, float(layers), float(buckets)) for layers, buckets in layouts]
    parts = [_overhead(compression, layers, buckets, repeats) for layers, buckets in layouts]
    seconds = [sum(each) for each in parts]
    (_, per_layer, per_bucket), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)
    whole = parts[layouts.index((300, 1))]
    return {
        "layer": 1e6 * per_layer,
        "bucket": 1e6 * per_bucket,
        "300 layers": 1e6 * sum(whole),
        "parts": {name: 1e6 * each for name, each in zip(PARTS, whole, strict=True)},
    }


def _overhead(compression: str, layers: int, buckets: int, repeats: int) -> list[float]:
    """Seconds of each of :data:`PARTS` in one step, the gradients being there already."""
    from hvd_adaptive.config import CompressionConfig, ReducerOptions
    from hvd_adaptive.engine.exchange import Exchange
    from hvd_adaptive.engine.reducer import Reducer
    from hvd_adaptive.telemetry import Meter

    params = [nn.Parameter(torch.zeros(32, 32)) for _ in range(layers)]
    cap = layers * params[0].nbytes / buckets
    meter = Meter()
    exchange = Exchange(LoneTransport(), meter, "overhead")
    reducer = Reducer(
        [(f"{index}", p) for index, p in enumerate(params)],
        CompressionConfig.of(compression, None, None),
        ReducerOptions(bucket_cap_bytes=cap),
        LoneControl("lone"),
        exchange,
    )
    times = []
    for step in range(repeats):
        for p in params:
            p.grad = torch.randn_like(p)
        moments = [time.perf_counter()]
        for index in reversed(range(layers)):
            reducer.arrive(index)
        moments.append(time.perf_counter())
        reducer.synchronize()
        moments.append(time.perf_counter())
        meter.end_step(step)
        moments.append(time.perf_counter())
        times.append(np.diff(moments))
    return [float(part) for part in np.median(times[repeats // 4 :], axis=0)]


# --- the program --------------------------------------------------------------------------------------


def work(title: str, quick: bool, out: Path) -> None:
    """What every rank does."""
    figures = measure_steps(title, *(QUICK if quick else (ROUNDS, BLOCK)))
    if hvd.rank() == 0:
        out.write_text(json.dumps(figures))


def measure(wanted: list[str], figures: dict[str, Any], out: Path | None) -> None:
    """Add each grid point to ``figures``, and to the file, as soon as it is measured."""
    torch.set_num_threads(1)
    for name in wanted:
        print(f"{name} ...", flush=True)
        if name in MODELS:
            words = ["--only", name, *(["--quick"] if out is None else [])]
            figures["steps"][name] = lab.figures_here(RANKS, "micro.overhead", words)
        else:
            repeats = 8 if out is None else 60
            figures["calls"][CALLS[name]] = measure_calls(CALLS[name], repeats)
        if out is not None:
            report.write(out.stem, figures, out.parent)
            plot(figures, out.with_suffix(".png"))


def load(out: Path | None) -> dict[str, Any]:
    """What has been measured before."""
    known = {} if out is None or not out.exists() else json.loads(out.read_text())
    return {"ranks": RANKS, "steps": known.get("steps", {}), "calls": known.get("calls", {})}


def share(figures: Mapping[str, Any], name: str) -> float | None:
    """Of the step of the 300 layers, what our own calls take; None where one is not known."""
    steps, calls = figures["steps"].get("300 small layers"), figures["calls"].get(name)
    if steps is None or calls is None:
        return None
    return float(calls["300 layers"] / 1e3 / steps["milliseconds"][METHODS[name]])


def step_rows(figures: Mapping[str, Any]) -> list[list[object]]:
    """A table: one row a model."""
    own = list(METHODS.values())
    rows: list[list[object]] = [["model", "stock Horovod's step", *(f"{name} / stock" for name in own)]]
    for title, found in figures["steps"].items():
        ratios = [f"{found['ratio'][name]:.3f}" for name in own]
        rows.append([title, f"{found['milliseconds']['stock']:.1f} ms", *ratios])
    return rows


def call_rows(figures: Mapping[str, Any]) -> list[list[object]]:
    """A table: one row a compressor."""
    fixed = ("our own, µs", "a layer", "a bucket", "300 layers of 1,024", "of the step")
    rows: list[list[object]] = [[*fixed, *PARTS]]
    for name, cost in figures["calls"].items():
        part = share(figures, name)
        of_step = "-" if part is None else f"{100 * part:.1f} %"
        fitted = [f"{cost['layer']:.1f}", f"{cost['bucket']:.0f}", f"{cost['300 layers']:.0f}"]
        rows.append([name, *fitted, of_step, *(f"{cost['parts'][each]:.0f}" for each in PARTS)])
    return rows


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Steps against stock Horovod's, and the parts of our own calls."""
    plt = report.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4))
    for place, found in enumerate(figures["steps"].values()):
        for row, name in enumerate(METHODS.values()):
            left.barh(place + 0.4 * row, found["ratio"][name], 0.35, color=f"C{row}", label=name)
    left.axvline(1, color="black", linestyle=":", label="stock Horovod")
    left.axvline(STEP_TARGET, color="red", linestyle=":", label="target of none")
    left.set_yticks([place + 0.2 for place in range(len(figures["steps"]))], list(figures["steps"]))
    left.set(xlabel="step, of stock Horovod's")
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    left.legend(handles.values(), handles.keys(), loc="lower left")
    names, start = list(figures["calls"]), np.zeros(len(figures["calls"]))
    for part in PARTS:
        widths = np.array([figures["calls"][name]["parts"][part] for name in names])
        right.barh(names, widths, left=start, label=part)
        start = start + widths
    right.set(xlabel="µs of our own for 300 layers of 1,024 in one bucket, without a network")
    if names:
        right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def missed(figures: Mapping[str, Any]) -> list[str]:
    """The targets that are not met."""
    found = [
        f"{title}: none takes {row['ratio']['none']:.3f} x stock Horovod's step"
        for title, row in figures["steps"].items()
        if row["ratio"]["none"] > STEP_TARGET
    ]
    part = share(figures, "topk")
    if part is not None and part > SHARE_TARGET:
        found.append(f"the calls of topk are {part:.1%} of the step")
    return found


def main() -> int:
    """Command line."""
    names = [*MODELS, *CALLS]
    options = command_line.parser(__doc__, names, "overhead")
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    wanted = command_line.chosen(options, args.only, names)
    if args.worker:
        work(wanted[0], args.quick, args.worker)
        return 0
    out = None if args.quick else args.out
    figures = load(out)
    if not args.redo and not args.quick:
        known = {*figures["steps"], *(key for key, name in CALLS.items() if name in figures["calls"])}
        wanted = [name for name in wanted if name not in known]

    def tell() -> None:
        print(report.table(step_rows(figures)), report.table(call_rows(figures)), sep="\n\n")

    return command_line.complete(
        (lambda: measure(wanted, figures, out)) if wanted else None,
        tell,
        lambda: [] if args.quick else missed(figures),  # few steps say nothing
        args.check,
    )


if __name__ == "__main__":
    sys.exit(main())
