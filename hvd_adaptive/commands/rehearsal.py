"""Some dense steps of a user's script, after which all ranks end: what ``hva predict`` measures."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, Final

from hvd_adaptive.commands.prediction_text import Question, answer, check_ranks

__all__ = ["Rehearsal"]

LEAST_STEPS: Final = 24
"""Of a rehearsal: some are not timed, and medians need some that are."""
PATIENCE: Final = 4
"""By how many times as many steps as were asked for nothing will come of it any more."""


class Rehearsal:
    """Ends the script once its dense steps have been measured, on all ranks, with status 0.

    The script's optimizer is ``auto``'s, which starts dense, and has measured all that its first plan
    needs when that would take effect: at the same step on all ranks. No step is compressed.

    Args:
        hvd: the module ``horovod.torch``.
        settings: ``steps``, ``json`` (a file, or None), and ``question``.
    """

    def __init__(self, hvd: ModuleType, settings: Mapping[str, Any]) -> None:
        self._hvd = hvd
        self._steps = int(settings["steps"])
        self._file = settings["json"]
        self._question = Question(
            **{**settings["question"], "ranks": tuple(settings["question"].get("ranks", ()))}
        )
        self._taken = 0
        self._over = False

    def watch(self, optimizer: Any) -> None:
        """Count its steps.

        Raises:
            SystemExit: there is one rank, which sends nothing, or ranks were asked for that do not fill
                hosts; with status 2.
        """
        if self._hvd.size() == 1:
            self._end("one rank sends nothing: start it with horovodrun, mpirun or srun", 2)
        try:
            check_ranks(self._question.ranks, self._hvd.local_size())
        except ValueError as error:
            self._end(str(error), 2)
        step = type(optimizer).step

        def counted(self_: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(self_, *args, **kwargs)
            self._look_at(optimizer)
            return result

        # of what is registered last this is done first, while Horovod still runs
        atexit.register(self._ended_early)
        # bound, because a learning rate scheduler looks at what it is bound to
        optimizer.step = MethodType(counted, optimizer)

    def _look_at(self, optimizer: Any) -> None:
        self._taken += 1
        outlook = optimizer._reducer.controller.outlook
        if outlook.plans:
            self._conclude(outlook.trace())
        if self._taken >= PATIENCE * self._steps:
            self._end(
                f"{self._taken} steps have shown nothing: no layer could be compressed",
                1,
            )

    def _conclude(self, trace: Any) -> None:
        """Rank 0 answers; then all ranks end."""
        if self._hvd.rank() == 0:
            hosts = max(1, self._hvd.size() // max(1, self._hvd.local_size()))
            answered = answer(replace(trace, hosts=hosts), self._question)
            print(answered.text, flush=True)
            self._write(answered.record)
        self._over = True
        self._hvd.barrier()
        raise SystemExit(0)

    def _write(self, record: Mapping[str, Any]) -> None:
        """What was answered must not be lost where it cannot be written."""
        if self._file is None:
            return
        try:
            Path(self._file).write_text(json.dumps(record), encoding="utf-8")
        except OSError as error:
            self._say(f"--json {self._file} cannot be written: {error.strerror}")

    def _ended_early(self) -> None:
        """The script is through before its dense steps were: no status of its own is left to say so."""
        if self._over:
            return
        remedy = f"let it train for at least {LEAST_STEPS}"
        if self._taken >= LEAST_STEPS:
            between = f"{LEAST_STEPS} to {self._taken}"
            remedy = f"write --steps with a number from {between}, or let it train longer"
        self._say(
            f"the script ended after {self._taken} steps, before its dense steps were measured: "
            f"{remedy}"
        )
        self._hvd.shutdown()
        sys.stdout.flush()
        os._exit(1)

    def _end(self, why: str, status: int) -> None:
        self._over = True
        self._say(why)
        raise SystemExit(status)

    def _say(self, why: str) -> None:
        if self._hvd.rank() == 0:
            print(f"hva predict: {why}", file=sys.stderr, flush=True)
