"""Accuracy without ranks that fight for cores: a preset trains with the gradients of virtual ranks.

    python -m benchmarks.accuracy.virtual_training --virtual-ranks 4 --steps 468 \\
        --preset resnet-fashion --compression topk:density=0.01 [train.py's options]

One model, N gradients in each step, reduced to the bit as N real ranks would. A step takes N forward
and backward passes on one core; its time on a network is measured elsewhere, or simulated: with
--swing, planners see the seconds of links whose rate is a squared sine, with noise. Shows the training
loss and, at the end, the score on held-out data; with --out both go into a JSON file, with the planned
payload of every step, and its seconds and bytes on the simulated links.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

import hvd_adaptive as hva
from benchmarks.harness import lab
from benchmarks.report import report
from benchmarks.workers.presets import Batch, Preset, prepare
from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm.link_costs import LinkCosts, seconds_of_byte
from hvd_adaptive.comm.simulated_network import SimulatedNetwork, sine_squared

SHOW_EVERY = 50


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's options, and those of train.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--virtual-ranks", type=int, required=True, metavar="N", help="how many gradients a step has")
    add("--steps", type=int, required=True, help="how many steps to train")
    add("--mbit", type=float, default=1000.0, metavar="X",
        help="Mbit/s of the network that a planner counts on (%(default)s)")  # fmt: skip
    add("--swing", type=float, nargs=3, metavar=("LOW", "HIGH", "PERIOD"),
        help="simulate links that swing between two rates in Mbit/s, with a period in s")  # fmt: skip
    add("--compute-seconds", type=float, default=0.1, metavar="X",
        help="of forward and backward pass, where a planner counts on them (%(default)s)")  # fmt: skip
    add("--rate-floor", type=float, default=0.0, metavar="X",
        help="share of the highest learning rate at which its schedule ends (%(default)s)")  # fmt: skip
    add("--out", type=Path, help="a JSON file for the losses, the bytes and the score")
    return parser.parse_known_args(arguments)


NOISE, HELD = 0.05, 0.1
"""Standard deviation of a link's rate, as a share, and for how many seconds it stays."""


def swinging(swing: Sequence[float], ranks: int) -> SimulatedNetwork:
    """Links that follow one wave, each with noise of its own: what all exchange waits for the slowest.

    Args:
        swing: least and highest rate in Mbit/s, of which TCP gets 95 %, and the period in seconds.
        ranks: each of which has a link.
    """
    *rates, period = swing
    low, high = (1 / seconds_of_byte(1e6 * each) for each in rates)
    wave = sine_squared(low, high, period)
    noise = np.random.default_rng(0).normal(1.0, NOISE, (4096, ranks)).min(axis=1).clip(0.1)
    return SimulatedNetwork(lambda now: wave(now) * float(noise[int(now / HELD) % len(noise)]))


def train(
    preset: Preset,
    ranks: int,
    steps: int,
    mbit: float = 1000.0,
    floor: float = 0.0,
    network: SimulatedNetwork | None = None,
    compute_seconds: float = 0.1,
) -> dict[str, Any]:
    """Train; the loss and the planned payload of every step, what it took on a network, the score."""
    options = preset.options
    virtual = VirtualRanks(
        ranks,
        preset.model.named_parameters(),
        options.compression,
        feedback=options.feedback,
        scheme=options.scheme,
        planner=options.planner,
        candidates=options.candidates,
        dense_steps=options.dense_steps,
        seed=options.seed,
        param_groups=lambda: preset.rule.param_groups,
        link=LinkCosts(2e-4, 2e-4, 8e-6 / mbit, 8e-6 / mbit),
        network=network,
        compute_seconds=compute_seconds,
        optimizer_state=lambda: preset.rule.state,
    )
    virtual.set_horizon(steps)
    losses, payloads, passed = [], [], [(0.0, 0.0)]
    batches = preset.forever_of_all(ranks)
    started = time.perf_counter()
    for step in range(steps):
        preset.set_rate(step, steps, ranks, floor)
        losses.append(one_step(preset, virtual, next(batches)))
        payloads.append(virtual.plan.wire_bytes)
        if network is not None:
            passed.append((network.now(), network.carried))
        if step % SHOW_EVERY == SHOW_EVERY - 1 or step == steps - 1:
            seconds = (time.perf_counter() - started) / (step + 1)
            mean = sum(losses[-SHOW_EVERY:]) / len(losses[-SHOW_EVERY:])
            print(f"step {step + 1:>6,}  loss {mean:.4f}  {seconds:.3f} s per step", flush=True)
            for reason in virtual.plan.reasons[:3]:
                print(f"    {reason}")
    found = {"losses": losses, "payload_bytes": payloads, "score": preset.score()}
    seconds, traffic = np.diff(passed, axis=0).T.tolist()
    return found | ({} if network is None else {"seconds": seconds, "traffic_bytes": traffic})


def apart(arguments: Sequence[str]) -> dict[str, Any]:
    """What ``--out`` holds after a training in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        command = [*lab.module("accuracy.virtual_training"), *arguments, "--out", str(path)]
        subprocess.run(command, cwd=lab.ROOT, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def one_step(preset: Preset, virtual: VirtualRanks, batches: Sequence[Batch]) -> float:
    """Train on one batch of each virtual rank; the mean loss."""
    loss, gradients = 0.0, []
    for batch in batches:
        loss += preset.backward(batch) / len(batches)
        gradients.append({name: p.grad for name, p in preset.model.named_parameters()})
        preset.model.zero_grad(set_to_none=True)
    virtual.reduce(gradients)
    preset.clip()
    preset.rule.step()
    preset.rule.zero_grad(set_to_none=True)
    return loss


def main(arguments: list[str]) -> int:
    """Train as the command line says."""
    own, others = parse(arguments)
    if own.virtual_ranks < 1 or own.steps < 1:
        print("--virtual-ranks and --steps must be at least 1", file=sys.stderr)
        return 2
    if own.swing and min(own.swing) <= 0:
        print("--swing: write rates in Mbit/s and a period in seconds above 0", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # runs may train side by side
    hva.init()
    if hvd.size() > 1:
        print("start this program once, without horovodrun: its ranks are virtual", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    preset = prepare(others)
    network = swinging(own.swing, own.virtual_ranks) if own.swing else None
    figures = train(
        preset,
        own.virtual_ranks,
        own.steps,
        own.mbit,
        own.rate_floor,
        network,
        own.compute_seconds,
    )
    score = ", ".join(f"{key} {value:.4f}" for key, value in figures["score"].items())
    print(f"held out: {score}")
    if own.out is not None:
        settings = {"virtual_ranks": own.virtual_ranks, "steps": own.steps, "options": others}
        own.out.parent.mkdir(parents=True, exist_ok=True)
        own.out.write_text(json.dumps({"machine": report.machine(), **settings, **figures}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
