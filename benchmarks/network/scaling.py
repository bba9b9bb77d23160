"""From which number of ranks on do gathered payloads lose to a dense allreduce, and do two shots?

1. Every collective scheme is measured at 1 to 16 ranks with several payloads: on hosts with slow links
   (launch/netlab.sh, one rank on each), on the same hosts without a limit, and without hosts.
2. The bandwidth of each is fitted to few ranks, and tried on more and on a payload it never saw; where
   several ranks send to one at once, also what they lose by that.
   Where ranks share this machine's cores, what the machine alone needs is known from links without a
   limit.
3. With it and with what a core needs to compress, a step's communication is carried on to 1,024 ranks.

    sudo -E python -m benchmarks.network.scaling                     # minutes; resumable
    sudo -E python -m benchmarks.network.scaling --networks 200mbit  # a part
    python -m benchmarks.network.scaling --networks                  # fit and print only
    python -m benchmarks.network.scaling --quick                     # seconds; no root, no file
    python -m benchmarks.network.scaling --check                     # 1 if a stored target is missed

`--fresh` forgets what was measured before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.harness import command_line, lab
from benchmarks.network.scaling_model import (
    Line,
    Point,
    ScaledMethod,
    Work,
    crossing,
    fit,
)
from benchmarks.report import report
from hvd_adaptive import compressors
from hvd_adaptive.comm.link_costs import seconds_of_byte
from hvd_adaptive.compressors.base import GatheredCompressor, LayerBatch
from hvd_adaptive.compressors.linear import CastCompressor, LinearBatch, LinearCompressor
from hvd_adaptive.layers import Layer

RANKS = (1, 2, 4, 8, 16)
RATES = {"200mbit": 200e6, "1gbit": 1e9}
"""What fits are made for."""
UNLIMITED = "unlimited"
"""The same hosts, with links far faster than this machine's cores: what the machine alone needs."""
NETWORKS = ("200mbit", UNLIMITED, "1gbit", "loopback")

COLLECTIVES = {
    "ring fp32": ("allreduce", 1),
    "ring fp16": ("allreduce", 1),
    "powersgd": ("allreduce", 2),
    "allgather": ("allgather", 1),
    "two-shot": ("two-shot", 1),
}
"""Of each scheme of scaling_rank.py, and how many of them follow each other."""
SIZES = {
    "allreduce": [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20],
    "allgather": [4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20],
    "two-shot": [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20],
}
POINT_SECONDS = 0.5
HELD_OUT_SIZE = {"allreduce": 1 << 20, "allgather": 256 << 10, "two-shot": 1 << 20}
HELD_OUT_RANKS = 8
"""Fits see fewer ranks than these, and not the size above."""
ERROR_TARGET = 0.15
BUSY_TARGET = 0.10
"""Of the cores: where others take more, the figures are worth little."""

FAR = 1024
FAR_RATES = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "25 Gbit/s": 2.5e10, "100 Gbit/s": 1e11}
MODELS = {"25 M": 25e6, "100 M": 100e6}
BUCKET_BYTES = 25e6
ALPHA = 20e-6
"""Seconds of a message between two hosts of a cluster with TCP: stated, not measured."""
SPECS = {
    "fp16": "fp16",
    "top-k 1 %": "topk:density=0.01",
    "top-k 0.1 %": "topk:density=0.001",
    "quantizer 4 bit": "qsgd:bits=4",
    "PowerSGD rank 4": "powersgd:rank=4",
    "random-k 1 %": "randomk:density=0.01",
}
DENSE = "fp16, allreduce"
GATHERED = ("allgather", "two-shot")
"""What compressed payloads meet by."""
FASTER_AT = ("25 M", "10 Gbit/s")
"""The model and rate at which 4 bit and top-k 1 % must be faster than fp16, with so many ranks."""
FASTER = ("quantizer 4 bit, two-shot", "top-k 1 %, two-shot")

Seconds = dict[str, dict[str, dict[str, dict[str, float]]]]
"""By network, scheme, bytes and ranks."""


# --- measuring collectives ----------------------------------------------------------------------------


class Jobs:
    """Runs jobs of scaling_rank.py, each on as many ranks as asked."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._labs = contextlib.ExitStack()
        self._hosts: lab.Lab | None = None

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        self._labs.close()

    def _launcher(self, network: str) -> list[str]:
        if network == "loopback":
            return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        rate = lab.UNSHAPED if network == UNLIMITED else network
        if self._hosts is None:
            self._hosts = self._labs.enter_context(lab.Lab(self._most, rate))
        self._hosts.set_rate(rate)
        return [*lab.NETLAB, "--name", self._hosts.name, "mpirun"]

    def run(
        self, network: str, ranks: int, points: Sequence[str], seconds: float
    ) -> Iterator[dict[str, Any]]:
        """What rank 0 prints, as it comes."""
        command = [*self._launcher(network), "-np", str(ranks)]
        command += [*lab.module("workers.scaling_rank"), "--seconds", str(seconds), *points]
        settings = {
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **lab.RING,
        }
        job = subprocess.Popen(
            command,
            cwd=lab.ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches it once, from here
        )
        assert job.stdout is not None
        try:
            for line in job.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:
            job.send_signal(signal.SIGINT)
            job.wait()
            raise
        if job.wait():
            raise SystemExit(f"the job failed with status {job.returncode}: {' '.join(command)}")


def busy_elsewhere(seconds: float = 1.0) -> float:
    """The share of this machine's cores that is busy while nothing of this benchmark runs."""

    def ticks() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and waiting for disks

    before = ticks()
    time.sleep(seconds)
    total, idle = (now - then for now, then in zip(ticks(), before, strict=True))
    return 1 - idle / max(1, total)


def measure(
    found: Seconds,
    busy: list[float],
    networks: Sequence[str],
    ranks: Sequence[int],
    sizes: dict[str, list[int]],
    seconds: float,
    save: Callable[[], object],
) -> None:
    """Add to ``found`` what it lacks, and to ``busy`` what others took before each job.

    Each number of ranks meets all networks, forth and back: what is compared is then of one phase of
    the machine. The faster of both times counts, as what else the machine does only slows it down.
    """
    with Jobs(max(ranks)) as jobs:
        for number in ranks:
            both: dict[tuple[str, str, str], float] = {}
            for network in (*networks, *reversed(networks)):
                missing = missing_points(found.get(network, {}), number, sizes)
                if not missing:
                    continue
                busy.append(round(busy_elsewhere(), 3))
                print(f"{network}, {number} rank(s): {len(missing)} points", end=" ", flush=True)
                if busy[-1] > BUSY_TARGET:
                    print(f"(others keep {busy[-1]:.0%} of the cores busy)", end=" ", flush=True)
                for point in jobs.run(network, number, missing, seconds):
                    place = network, point["scheme"], str(point["bytes"])
                    value = float(f"{point['seconds']:.4g}")
                    both[place] = min(value, both.get(place, value))
                    print(".", end="", flush=True)
                print(flush=True)
            for (network, scheme, size), value in both.items():
                rows = found.setdefault(network, {}).setdefault(scheme, {})
                rows.setdefault(size, {})[str(number)] = value
            save()


def missing_points(
    known: dict[str, dict[str, dict[str, float]]], ranks: int, sizes: dict[str, list[int]]
) -> list[str]:
    """What is not known of a network, as words of scaling_rank.py."""
    return [
        f"{scheme}:{size}"
        for scheme, (collective, _) in COLLECTIVES.items()
        for size in sizes[collective]
        if str(ranks) not in known.get(scheme, {}).get(str(size), {})
    ]


# --- measuring compressors ----------------------------------------------------------------------------


def work_of(spec: str, layers: int, side: int, repeats: int) -> Work:
    """What one core does, an element: medians, on square layers of random gradients."""
    compressor = compressors.parse(spec)
    torch.manual_seed(0)
    grads = [torch.randn(side * side) for _ in range(layers)]
    x = torch.zeros(layers * side * side)
    numel, level = x.numel(), [compressor.level] * layers
    offsets = np.arange(layers + 1, dtype=np.int64) * side * side
    encode, decode = [], []
    if isinstance(compressor, GatheredCompressor):
        outs = [torch.zeros_like(grad) for grad in grads]
        for _ in range(repeats + 1):
            started = perf_counter()
            body, _ = compressor.compress_layers_(LayerBatch(x, offsets, level, grads))
            between = perf_counter()
            compressor.decompress_layers_add_(body, outs, 1.0)
            encode.append(between - started)
            decode.append(perf_counter() - between)
        return Work(body.numel() / numel, _median(encode) / numel, _median(decode) / numel)
    assert isinstance(compressor, LinearCompressor)
    described = [Layer(index, str(index), (side, side)) for index in range(layers)]
    parts, outs = list(x.split(side * side)), [torch.empty(side * side) for _ in range(layers)]
    keys, state = np.arange(layers, dtype=np.uint64), compressor.new_state()
    for _ in range(repeats + 1):
        started = perf_counter()
        torch._foreach_add_(parts, grads)
        batch = LinearBatch(parts, outs, described, level, keys, state, dtype=_dtype_of(compressor))
        rounds = compressor.rounds(batch)
        sent = [next(rounds)]
        with contextlib.suppress(StopIteration):
            while True:
                sent.append(rounds.send([tensor.clone() for tensor in sent[-1]]))
        encode.append(perf_counter() - started)
    payload = [tensor for tensors in sent for tensor in tensors]
    nbytes = sum(tensor.nbytes for tensor in payload)
    return Work(nbytes / numel, _median(encode) / numel, 0.0, _adding(payload, repeats) / numel)


def _dtype_of(compressor: LinearCompressor) -> torch.dtype:
    """In which values are sent."""
    half = compressor.wire_dtype if isinstance(compressor, CastCompressor) else None
    return half or torch.float32


def _adding(payload: Sequence[torch.Tensor], repeats: int) -> float:
    """Seconds in which one core adds a payload to another."""
    flat = torch.cat([tensor.reshape(-1) for tensor in payload])
    total, taken = torch.zeros_like(flat), []
    for _ in range(repeats + 1):
        started = perf_counter()
        total.add_(flat)
        taken.append(perf_counter() - started)
    return _median(taken)


def _median(taken: Sequence[float]) -> float:
    """Without the first, which compiles and allocates."""
    return float(np.median(taken[1:]))


# --- fits ---------------------------------------------------------------------------------------------


def points_of(found: Seconds, network: str, scheme: str) -> list[Point]:
    """What was measured of a scheme between ranks on a network, and without a limit."""
    collective, operations = COLLECTIVES[scheme]
    machine = found.get(UNLIMITED, {}).get(scheme, {})
    return [
        Point(collective, operations, int(ranks), int(size), seconds, machine[size][ranks])
        for size, row in found.get(network, {}).get(scheme, {}).items()
        for ranks, seconds in row.items()
        if int(ranks) > 1 and ranks in machine.get(size, {})
    ]


def divide(found: Seconds, network: str, scheme: str) -> tuple[list[Point], list[Point]]:
    """The points that a line is fitted to, and those that it is tried on, whatever they hold."""
    fitted: list[Point] = []
    held_out: list[Point] = []
    for point in points_of(found, network, scheme):
        unseen = point.ranks >= HELD_OUT_RANKS or point.nbytes == HELD_OUT_SIZE[COLLECTIVES[scheme][0]]
        (held_out if unseen else fitted).append(point)
    return fitted, held_out


def fits(found: Seconds) -> dict[str, dict[str, dict[str, float]]]:
    """The line of each scheme on each network, and how far it is off where it has not looked."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for network, rate in RATES.items():
        for scheme in COLLECTIVES:
            fitted, held_out = divide(found, network, scheme)
            if len(fitted) < 3 or not held_out:
                continue
            line = fit(fitted)
            errors = [abs(line.error(point)) for point in held_out]
            result.setdefault(scheme, {})[network] = {
                **asdict(line),
                "rate": seconds_of_byte(rate) / line.beta if line.beta else 0.0,
                "fitted": len(fitted),
                "held out": len(held_out),
                "most ranks held out": max(point.ranks for point in held_out),
                "mean error": float(np.mean(errors)),
                "worst error": float(np.max(errors)),
            }
    return result


# --- many ranks ---------------------------------------------------------------------------------------


def methods(work: dict[str, Work]) -> dict[str, ScaledMethod]:
    """Each compressor by its schemes."""
    gathered = ["top-k 1 %", "top-k 0.1 %", "quantizer 4 bit"]
    return {
        DENSE: ScaledMethod(work["fp16"], "allreduce"),
        "PowerSGD rank 4, allreduce": ScaledMethod(work["PowerSGD rank 4"], "allreduce", 2),
        "random-k 1 %, allreduce": ScaledMethod(work["random-k 1 %"], "allreduce"),
        **{
            f"{name}, {collective}": ScaledMethod(work[name], collective)
            for collective in GATHERED
            for name in gathered
        },
    }


def carried_on(work: dict[str, Work], fixed: float, alpha: float, crowding: float) -> dict[str, Any]:
    """Of each model at each rate: milliseconds at 1,024 ranks, and where gathering loses."""
    result: dict[str, Any] = {}
    for model, elements in MODELS.items():
        buckets = max(1, round(4 * elements / BUCKET_BYTES))
        for rate_name, rate in FAR_RATES.items():
            line = Line(fixed, alpha, seconds_of_byte(rate), crowding)
            rows = {
                name: {
                    "network ms": 1e3 * method.network_seconds(FAR, elements, line, buckets),
                    "one core ms": 1e3 * method.busy(FAR, elements),
                }
                for name, method in methods(work).items()
            }
            result.setdefault(model, {})[rate_name] = {
                "ms": rows,
                "loses from": _crossings(work, elements, line, buckets),
            }
    return result


def _crossings(
    work: dict[str, Work], elements: float, line: Line, buckets: int
) -> dict[str, dict[str, int | None]]:
    """Ranks from which on a payload takes longer than the dense allreduce."""
    ranks, known = range(2, 4 * FAR + 1), methods(work)
    everything = {
        name: {n: method.step(n, elements, line, buckets) for n in ranks}
        for name, method in known.items()
        if method.collective in GATHERED or name == DENSE
    }
    network = {
        name: {n: known[name].network_seconds(n, elements, line, buckets) for n in ranks}
        for name in everything
    }
    return {
        name: {
            "in all": crossing(everything[name], everything[DENSE]),
            "network alone": crossing(network[name], network[DENSE]),
        }
        for name in everything
        if name != DENSE
    }


# --- the report ---------------------------------------------------------------------------------------


def analysed(found: Seconds, work: dict[str, Work]) -> dict[str, Any]:
    """Everything that follows from what was measured."""
    fixed, lines = floor_of(found), fits(found)
    crowding = max((row["crowding"] for row in lines.get("two-shot", {}).values()), default=0.0)
    return {
        "seconds": found,
        "work": {name: asdict(each) for name, each in work.items()},
        "fits": lines,
        "stated": {
            "fixed": fixed,
            "alpha": ALPHA,
            "crowding": crowding,
            "bucket bytes": BUCKET_BYTES,
        },
        "many ranks": carried_on(work, fixed, ALPHA, crowding),
    }


def floor_of(found: Seconds) -> float:
    """Seconds of a collective of one rank, median over schemes and networks: Horovod's own cycle."""
    sizes = [sizes for schemes in found.values() for sizes in schemes.values()]
    floors = [rows["1"] for each in sizes if "1" in (rows := each[min(each, key=int)])]
    return float(np.median(floors)) if floors else 1e-3


def show(figures: dict[str, Any]) -> None:
    """Print the tables."""
    for network, schemes in figures["seconds"].items():
        numbers = sorted({int(n) for sizes in schemes.values() for row in sizes.values() for n in row})
        rows: list[list[object]] = [[f"{network}: ms", "kB", *(f"{n} ranks" for n in numbers)]]
        for scheme, sizes in schemes.items():
            for size in sorted(sizes, key=int):
                row = sizes[size]
                points = [1e3 * row[str(n)] if str(n) in row else "-" for n in numbers]
                rows.append([scheme, int(size) // 1024, *points])
        report.show(rows)
    show_fits(figures["fits"])
    rows = [["one core, ns an element", "compress", "decompress, a payload", "add", "bytes sent"]]
    for name, each in figures["work"].items():
        times = (1e9 * each[key] for key in ("encode", "decode", "add"))
        rows.append([name, *times, each["nbytes"]])
    report.show(rows)
    show_many(figures["many ranks"], figures["stated"])


def show_fits(lines: dict[str, dict[str, dict[str, float]]]) -> None:
    """The models, and how they do where they have not looked."""
    columns = "of TCP's rate, lost by crowding, fitted to, tried on, most ranks, error, worst"
    rows: list[list[object]] = [["model", "network", *columns.split(", ")]]
    for scheme, networks in lines.items():
        for network, row in networks.items():
            counted = ("fitted", "held out", "most ranks held out")
            counts = [int(row[key]) for key in counted]
            shares = [f"{row[key]:.1%}" for key in ("mean error", "worst error")]
            line = [f"{row['rate']:.0%}", f"{row['crowding']:.0%}"]
            rows.append([scheme, network, *line, *counts, *shares])
    report.show(rows)


def show_many(many: dict[str, Any], stated: dict[str, float]) -> None:
    """Milliseconds at 1,024 ranks, and from where on gathering loses."""
    print(
        f"{FAR} ranks, carried on: {1e3 * stated['fixed']:.2g} ms a collective, "
        f"{1e6 * stated['alpha']:.0f} us a message, network + one core"
    )
    for model, by_rate in many.items():
        rows: list[list[object]] = [[f"{model} parameters: ms", *by_rate]]
        for name in next(iter(by_rate.values()))["ms"]:
            points = [each["ms"][name] for each in by_rate.values()]
            rows.append([name, *(f"{c['network ms']:,.0f} + {c['one core ms']:,.0f}" for c in points)])
        rows.append(["fastest of all", *(_fastest(each["ms"]) for each in by_rate.values())])
        report.show(rows)
        rows = [["slower than fp16's ring from so many ranks on (network alone)", *by_rate]]
        for name in next(iter(by_rate.values()))["loses from"]:
            points = [each["loses from"][name] for each in by_rate.values()]
            rows.append(
                [name, *(f"{_ranks(c['in all'])} ({_ranks(c['network alone'])})" for c in points)]
            )
        report.show(rows)
    print(fastest_schemes(many))


def fastest_schemes(many: dict[str, Any]) -> str:
    """By which scheme compressed payloads meet fastest, in a sentence."""
    points = [each["ms"] for by_rate in many.values() for each in by_rate.values()]
    payloads = [name.removesuffix(GATHERED[0]) for name in points[0] if name.endswith(GATHERED[0])]
    wins: dict[str, list[str]] = {kind: [] for kind in GATHERED}
    for milliseconds in points:
        for payload in payloads:
            kind = _fastest(milliseconds, [payload + kind for kind in GATHERED]).removeprefix(payload)
            wins[kind].append(payload.removesuffix(", "))
    counts = [
        f"`{kind}` in {len(won)}" + (f" ({'; '.join(dict.fromkeys(won))})" if won else "")
        for kind, won in wins.items()
    ]
    number = len(points) * len(payloads)
    return (
        f"Fastest scheme for compressed payloads at {FAR:,} ranks, in {number} cases: "
        f"{', '.join(counts)}."
    )


def _fastest(milliseconds: dict[str, dict[str, float]], kinds: Sequence[str] = ("",)) -> str:
    totals = {
        name: each["network ms"] + each["one core ms"]
        for name, each in milliseconds.items()
        if name.endswith(tuple(kinds))
    }
    return min(totals, key=lambda name: totals[name])


def _ranks(number: int | None) -> str:
    return f"> {4 * FAR}" if number is None else str(number)


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    found = [
        f"{scheme} on {network}: the model is {row['mean error']:.0%} off, target {ERROR_TARGET:.0%}"
        for scheme, networks in figures["fits"].items()
        for network, row in networks.items()
        if row["mean error"] > ERROR_TARGET
    ]
    found += [
        f"{scheme} on {network}: too few points for a model and its trial"
        for scheme in COLLECTIVES
        for network in RATES
        if network not in figures["fits"].get(scheme, {})
    ]
    model, rate = FASTER_AT
    totals = {
        name: each["network ms"] + each["one core ms"]
        for name, each in figures["many ranks"][model][rate]["ms"].items()
    }
    found += [
        f"{name}: {totals[name]:.0f} ms at {FAR:,} ranks, {rate}, fp16 {totals[DENSE]:.0f}"
        for name in FASTER
        if totals[name] >= totals[DENSE]
    ]
    busy = max(figures["others busy"], default=0.0)
    if busy > BUSY_TARGET:
        found.append(
            f"others kept up to {busy:.0%} of the cores busy, target {BUSY_TARGET:.0%}: run --fresh"
        )
    return found


def plot(figures: dict[str, Any], path: Path) -> None:
    """Left: measured against the model; right: a step's communication up to 1,024 ranks."""
    pyplot = report.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    _plot_fits(left, figures)
    work = {name: Work(**each) for name, each in figures["work"].items()}
    rate_name, rate = "10 Gbit/s", FAR_RATES["10 Gbit/s"]
    stated = figures["stated"]
    line = Line(stated["fixed"], ALPHA, seconds_of_byte(rate), stated["crowding"])
    elements = MODELS["25 M"]
    ranks = [2**power for power in range(1, 11)]
    for name, method in methods(work).items():
        if name.startswith(("quantizer", "top-k 0.1")) and method.collective != "allgather":
            continue
        seconds = [1e3 * method.step(n, elements, line, 4) for n in ranks]
        right.plot(ranks, seconds, "--" if method.collective == "two-shot" else "-", label=name)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set(xlabel="ranks", ylabel="ms per step", title=f"25 M parameters, {rate_name}: carried on")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_fits(axes: Any, figures: dict[str, Any]) -> None:
    for scheme, networks in figures["fits"].items():
        for network, row in networks.items():
            line = Line(row["fixed"], row["alpha"], row["beta"], row["crowding"])
            divided = divide(figures["seconds"], network, scheme)
            color = None
            for shown, marker in zip(divided, (".", "o"), strict=True):
                (drawn,) = axes.loglog(
                    [1e3 * point.seconds for point in shown],
                    [1e3 * line.seconds(point) for point in shown],
                    marker,
                    color=color,
                    markersize=4,
                    label=f"{scheme}, {network}" if marker == "." else None,
                )
                color = drawn.get_color()
    axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
    axes.set(
        xlabel="ms measured",
        ylabel="ms by the model",
        title="2 to 16 ranks: dots fitted, circles held out",
    )
    axes.legend(fontsize=7)


# --- the program --------------------------------------------------------------------------------------


def previous(out: Path) -> tuple[Seconds, dict[str, Work], list[float]]:
    """What an earlier run has measured."""
    path = out / "scaling.json"
    if not path.exists():
        return {}, {}, []
    content = json.loads(path.read_text())
    work = {name: Work(**each) for name, each in content["work"].items()}
    return content["seconds"], work, content["others busy"]


def quick() -> int:
    """Everything once, small, on this machine alone."""
    found: Seconds = {}
    sizes = {collective: [1 << 10, 16 << 10] for collective in SIZES}
    measure(found, [], ["loopback"], (1, 2), sizes, 0.01, lambda: None)
    work = {name: work_of(spec, layers=2, side=128, repeats=1) for name, spec in SPECS.items()}
    show(analysed(found, work))
    return 0


def main() -> int:
    """Run all, print, write; with --check only compare what was written with the targets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    command_line.quick_or_check(parser)
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    parser.add_argument(
        "--networks", nargs="*", choices=NETWORKS, default=NETWORKS, help="where to measure (all)"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args()
    if options.check:
        return command_line.check("scaling", missed, options.out)
    torch.set_num_threads(1)
    if options.quick:
        return quick()
    found, work, busy = ({}, {}, []) if options.fresh else previous(options.out)

    def save() -> None:
        described = {name: asdict(each) for name, each in work.items()}
        content = {"seconds": found, "work": described, "others busy": busy}
        report.write("scaling", content, options.out)

    interrupted = False
    try:
        for name in [name for name in SPECS if name not in work]:
            print(f"compressing: {name}", flush=True)
            work[name] = work_of(SPECS[name], layers=16, side=1024, repeats=7)
            save()
        measure(found, busy, options.networks, RANKS, SIZES, POINT_SECONDS, save)
    except KeyboardInterrupt:
        interrupted = True
        print("\nstopped; the same command continues from here", flush=True)
        if len(work) < len(SPECS):
            return 130
    figures = {**analysed(found, work), "others busy": busy}
    show(figures)
    bad = missed(figures)
    command_line.tell(bad)
    print(f"written: {report.write('scaling', {**figures, 'missed': bad}, options.out)}")
    plot(figures, options.out / "scaling.png")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
