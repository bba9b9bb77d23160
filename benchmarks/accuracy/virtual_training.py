"""Accuracy without ranks that fight for cores: a preset trains with the gradients of virtual ranks.

    python -m benchmarks.accuracy.virtual_training --virtual-ranks 4 --steps 468 \\
        --preset resnet-fashion --compression topk:density=0.01 [train.py's options]

One model, N gradients in each step, reduced to the bit as N real ranks would. A step takes N forward
and backward passes on one core; its time on a network is measured elsewhere. Shows the training loss
and, at the end, the score on held-out data; with --out both go into a JSON file, with the planned
payload of every step.
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
import torch

import hvd_adaptive as hva
from benchmarks.harness import lab
from benchmarks.report import report
from benchmarks.workers.presets import Batch, Preset, prepare
from hvd_adaptive import VirtualRanks
from hvd_adaptive.comm.link_costs import LinkCosts

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
    add("--rate-floor", type=float, default=0.0, metavar="X",
        help="share of the highest learning rate at which its schedule ends (%(default)s)")  # fmt: skip
    add("--out", type=Path, help="a JSON file for the losses, the bytes and the score")
    return parser.parse_known_args(arguments)


def train(
    preset: Preset, ranks: int, steps: int, mbit: float = 1000.0, floor: float = 0.0
) -> dict[str, Any]:
    """Train; the loss and the planned payload of every step, and the score."""
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
        optimizer_state=lambda: preset.rule.state,
    )
    virtual.set_horizon(steps)
    losses, payloads = [], []
    batches = preset.forever_of_all(ranks)
    started = time.perf_counter()
    for step in range(steps):
        preset.set_rate(step, steps, ranks, floor)
        losses.append(one_step(preset, virtual, next(batches)))
        payloads.append(virtual.plan.wire_bytes)
        if step % SHOW_EVERY == SHOW_EVERY - 1 or step == steps - 1:
            seconds = (time.perf_counter() - started) / (step + 1)
            mean = sum(losses[-SHOW_EVERY:]) / len(losses[-SHOW_EVERY:])
            print(f"step {step + 1:>6,}  loss {mean:.4f}  {seconds:.3f} s per step", flush=True)
            for reason in virtual.plan.reasons[:3]:
                print(f"    {reason}")
    return {"losses": losses, "payload_bytes": payloads, "score": preset.score()}


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
    torch.set_num_threads(1)  # runs may train side by side
    hva.init()
    if hvd.size() > 1:
        print("start this program once, without horovodrun: its ranks are virtual", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    preset = prepare(others)
    figures = train(preset, own.virtual_ranks, own.steps, own.mbit, own.rate_floor)
    score = ", ".join(f"{key} {value:.4f}" for key, value in figures["score"].items())
    print(f"held out: {score}")
    if own.out is not None:
        settings = {"virtual_ranks": own.virtual_ranks, "steps": own.steps, "options": others}
        own.out.parent.mkdir(parents=True, exist_ok=True)
        own.out.write_text(json.dumps({"machine": report.machine(), **settings, **figures}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
