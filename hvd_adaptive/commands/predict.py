"""``hva predict``: some dense steps of an unchanged Horovod script, and what other choices would take.

The script starts as under ``hva run``, trains some steps in half precision, and ends; rank 0 then
predicts. With ``--from`` nothing is trained: the trace of an earlier call is predicted from, for other
ranks or other links.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hvd_adaptive.commands import run as run_command

PROGRAM: Final = "hva predict"
LEAST_STEPS: Final = 24
SETTLING: Final = 12
"""Steps that are not timed: the first ones, and those from the last timed one to the end."""
EPILOG: Final = """\
After its dense steps the script ends, on all ranks with status 0: nothing after the training loop runs.

examples:
  horovodrun -np 4 hva predict --json steps.json -- python train.py --epochs 3
  srun --mpi=pmix hva predict --steps 60 --candidate powersgd -- train.py
  hva predict --from steps.json --ranks 8,64,512 --rate 10gbit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.usage = (
        "hva predict [OPTIONS] -- python SCRIPT [ARGUMENTS]\n       hva predict [OPTIONS] --from FILE"
    )
    parser.description = (
        "Predict a script's step time with each compressor, on more ranks and other links."
    )
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--steps", type=int, default=40, metavar="N", help="dense steps to measure (%(default)s)")
    add("--ranks", type=_numbers, metavar="N,N", default=(),
        help="ranks to predict for (default: 1, 2, 4, 8 and 16 times as many as now)")  # fmt: skip
    add("--hosts", type=_numbers, metavar="N,N", default=(),
        help="the same in hosts, with as many ranks on each as now")  # fmt: skip
    add("--rate", type=_rate, metavar="RATE",
        help="links between hosts to predict for, such as 10gbit (default: as now)")  # fmt: skip
    add("--traced-rate", type=_rate, metavar="RATE",
        help="links between hosts as they were measured, such as 1gbit: as much as operations made of "
        "them is then expected of --rate (default: 95 %%)")  # fmt: skip
    add("--at-step", type=int, default=1000, metavar="N",
        help="step at which auto plans: later it may compress more (%(default)s)")  # fmt: skip
    add("--total-steps", type=int, default=0, metavar="N", help="steps of the whole training run")
    add("--accuracy", choices=("strict", "balanced", "fast"), default="balanced",
        help="limits of auto (%(default)s)")  # fmt: skip
    add("--candidate", action="append", metavar="SPEC", default=[],
        help="a compressor to predict in the place of topk and qsgdinf; may be repeated")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write what was measured and predicted")
    add(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="predict from such a file; trains nothing",
    )
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Become the script, or predict from a file; returns the exit status."""
    words = run_command.script_words(options.command)
    try:
        _check(options, words)
        if options.source is not None:
            return _from_file(options)
        command = run_command.command_of(words, PROGRAM)
    except (OSError, ValueError) as error:
        return run_command.refused(str(error), PROGRAM)
    return run_command.become(command, _settings(options, command), PROGRAM)


def _check(options: argparse.Namespace, words: list[str]) -> None:
    if options.source is not None and words:
        raise ValueError("--from FILE trains nothing: leave the script out, or --from")
    if options.source is None and options.hosts:
        raise ValueError("--hosts goes with --from FILE: write --ranks")
    if options.hosts and options.ranks:
        raise ValueError("--hosts and --ranks say the same: write one of them")
    if options.traced_rate is not None and options.rate is None:
        raise ValueError("--traced-rate says what --rate is to be compared with: write --rate, too")
    if options.steps < LEAST_STEPS:
        raise ValueError(f"--steps {options.steps}: write at least {LEAST_STEPS}, some are not timed")
    if options.at_step < 1 or options.total_steps < 0:
        raise ValueError("--at-step must be at least 1, and --total-steps at least 0")


def _question(options: argparse.Namespace) -> dict[str, Any]:
    """What is asked, as of :class:`~hvd_adaptive.commands.prediction_text.Question`."""
    names = ("ranks", "rate", "traced_rate", "at_step", "total_steps")
    return {name: getattr(options, name) for name in names}


def _settings(options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """What :func:`~hvd_adaptive.commands.substitution.install` takes."""
    timed, period = options.steps - SETTLING, options.steps
    auto = f"auto:accuracy={options.accuracy},timed_steps={timed},period={period}"
    arguments: dict[str, Any] = {"compression": auto}
    if options.candidate:
        first, *others = options.candidate
        arguments = {"compression": first, "planner": auto, "candidates": others, "scheme": "auto"}
    return {
        "program": PROGRAM,
        "arguments": arguments,
        "niceness": None,
        "command": command,
        "rehearsal": {
            "steps": options.steps,
            "json": None if options.json is None else str(options.json.absolute()),
            "question": _question(options),
        },
    }


def _from_file(options: argparse.Namespace) -> int:
    # here, because these import torch, which a script that is started imports by itself
    from hvd_adaptive.adaptation.step_trace import StepTrace
    from hvd_adaptive.commands.prediction_text import Question, answer

    try:
        state = json.loads(options.source.read_text(encoding="utf-8"))["trace"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{options.source} is no file of hva predict --json: {type(error).__name__}: {error}"
        ) from error
    trace = StepTrace.from_dict(state)
    recipe = re.sub(r"accuracy=\w+,?", "", trace.recipe.partition(":")[2])
    asked = f"auto:accuracy={options.accuracy}" + (f",{recipe}" if recipe else "")
    question = Question(**_question(options))
    if options.hosts:
        ranks = tuple(trace.ranks_per_host * number for number in options.hosts)
        question = replace(question, ranks=ranks)
    found = answer(replace(trace, recipe=asked), question)
    print(found.text)
    if options.json is not None:
        options.json.write_text(json.dumps(found.record), encoding="utf-8")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"write numbers with commas between, such as 8,16,32, not {text!r}"
        )
    return found


_UNITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def _rate(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"write a rate such as 200mbit or 10gbit, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]
