"""A training script for the tests of launch/slurm, in which rank 1 fails in the way that is asked for.

Takes the two options that the batch scripts give to every training script.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("exit", "raise", "kill", "try later", "save nothing"))
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--resume", choices=("auto",), required=True)
    how = parser.parse_args().how
    if how == "try later":
        return 75
    if how == "save nothing":
        return 0

    if how == "exit":
        wait_in_mpi()
    wait_in_horovod(how)
    return 0


def say_that_it_fails(ranks: int) -> None:
    print(f"rank 1 of {ranks} fails at {time.time()}", flush=True)


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
