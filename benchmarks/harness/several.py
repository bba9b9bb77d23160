"""Several trainings by the same ranks, one after the other: starting ranks takes longer than steps.

    mpirun -np 4 python -m benchmarks.harness.several '[["--steps", "9"], []]' --result FILE

Each list holds the arguments of one run of launch/train.py: it writes FILE.0, the next one FILE.1, and
so on.
"""

from __future__ import annotations

import functools
import gc
import json
import sys


def main() -> int:
    """Command line; the exit code of the first training that fails."""
    from launch.training import data
    from launch.training import main as train

    trainings, result = json.loads(sys.argv[1]), sys.argv[3]
    # Cutting a text into words takes seconds.
    data.load = functools.cache(data.load)
    for number, arguments in enumerate(trainings):
        status: int = train.main([*arguments, "--result", f"{result}.{number}"])
        if status:
            return status
        # The model and the residuals before the next ones, not at some time within its steps.
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
