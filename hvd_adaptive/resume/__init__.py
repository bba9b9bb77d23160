"""Stopping and resuming a training run: signals, checkpoints, errors of all ranks together.

The batch scripts of ``hva slurm`` give a script ``--checkpoint-dir DIR --resume auto``, send SIGUSR1
before the time limit, and requeue a job whose ranks end with 75. With what is here a script does its
part on Horovod's ranks and on those of torch.distributed; ``launch/train.py`` is built of it.
"""

from hvd_adaptive.resume.agreement import (
    EXIT_CODES,
    RunError,
    StopVote,
    require_equal,
    run_on_all_ranks,
)
from hvd_adaptive.resume.checkpoints import Checkpoints, Position

__all__ = [
    "EXIT_CODES",
    "Checkpoints",
    "Position",
    "RunError",
    "StopVote",
    "require_equal",
    "run_on_all_ranks",
]
