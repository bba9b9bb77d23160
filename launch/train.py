"""Trains a model with compressed gradients: the reference for a training script of your own.

    launch/run.sh
    horovodrun -np 16 python launch/train.py --steps 20
    mpirun -np 4 python launch/train.py --preset lstm-sotu --compression topk:density=0.01,values=int8
    python launch/train.py --help

What makes it a Horovod script is all in `training/main.py` and `training/loop.py`: look for `hvd.` and
`hva.`. This file only starts them.
"""

import signal
import sys
import warnings

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # The imports take a second or two. Ctrl-C then ends the process as it would end any other, until
    # StopVote listens: an exception would end in a traceback out of the middle of them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from training.display import outlive_terminal
from training.main import main

if __name__ == "__main__":
    # Of options with old names. Python would hide them: another file gives them.
    warnings.filterwarnings("default", category=DeprecationWarning, module="training")
    outlive_terminal()
    sys.exit(main())
