"""A training script for the tests of launch/slurm, in which rank 1 fails in the way that is asked for.

Takes the two options that the batch scripts give to every training script.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

# How a rank fails in the middle of training, which tests/failures/failing_rank.py knows how to do.
IN_TRAINING = ("freeze", "stall", "leave 0", "leave 3")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "how", choices=("exit", "raise", "kill", "try later", "save nothing", *IN_TRAINING)
    )
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--resume", choices=("auto",), required=True)
    arguments = parser.parse_args()
    how = arguments.how
    if how == "try later":
        return 75
    if how == "save nothing":
        return 0

    if how in IN_TRAINING:
        fail_in_training(how, Path(arguments.checkpoint_dir))
    if how == "exit":
        wait_in_mpi()
    wait_in_horovod(how)
    return 0


def say_that_it_fails(ranks: int) -> None:
    print(f"rank 1 of {ranks} fails at {time.time()}", flush=True)


def fail_in_training(how: str, folder: Path) -> None:
    # A script of the same name, which is not beside this one.
    path = Path(__file__).resolve().parents[1] / "failures" / "failing_rank.py"
    spec = importlib.util.spec_from_file_location("training", path)
    assert spec is not None
    assert spec.loader is not None
    training = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(training)

    folder.mkdir(parents=True, exist_ok=True)
    fail = training.FAILURES[how]

    def say_and_fail() -> None:
        say_that_it_fails(2)
        fail()

    training.FAILURES[how] = say_and_fail
    training.train(how, 1, folder)


def wait_in_mpi() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    if world.rank == 1:
        say_that_it_fails(world.size)
        os._exit(3)
    world.Barrier()


def wait_in_horovod(how: str) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1), name="all are here")
    if hvd.rank() == 1:
        say_that_it_fails(hvd.size())
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("as asked for")
    # The others wait for it, as in training.
    hvd.allreduce(torch.ones(1), name="all but one are here")


if __name__ == "__main__":
    sys.exit(main())
