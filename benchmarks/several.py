"""Several trainings by the same ranks, one after the other: starting ranks takes longer than steps.

    mpirun -np 4 python benchmarks/several.py '[["--steps", "9"], ["--steps", "99"]]' --result FILE

Each list holds the arguments of one run of launch/train.py: it writes FILE.0, the next one FILE.1, and
so on.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from pathlib import Path

# In place of this folder, which has modules of the same names.
sys.path[0] = str(Path(__file__).resolve().parents[1] / "launch")


def main() -> int:
    """Command line; the exit code of the first training that fails."""
    import data
    import train

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
