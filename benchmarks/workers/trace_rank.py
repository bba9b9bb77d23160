"""One job of prediction.py: dense steps of a preset, and what they have shown.

mpirun -np 2 python -m benchmarks.workers.trace_rank --preset lstm-sotu --result FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_adaptive as hva
from benchmarks.workers.presets import prepare
from launch.training import loop

TIMED, PERIOD = 16, 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the first plan would take effect, then write what it was made from."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", required=True, help="of launch/train.py")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hva.init()
    preset = prepare(["--preset", options.preset])
    optimizer: Any = hva.DistributedOptimizer(
        preset.rule,
        named_parameters=preset.model.named_parameters(),
        compression=f"auto:timed_steps={TIMED},period={PERIOD}",
    )
    hvd.broadcast_parameters(preset.model.state_dict(), root_rank=0)
    batches = preset.forever()
    while not optimizer._reducer.controller.outlook.plans:
        loop.train_step(preset.model, optimizer, [next(batches)], preset.options.clip)
    if hvd.rank() == 0:
        trace = optimizer._reducer.controller.outlook.trace()
        options.result.write_text(json.dumps(replace(trace, hosts=hvd.size()).to_dict()))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
