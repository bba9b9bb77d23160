"""``hva run``: an unchanged Horovod script gets this package's optimizer.

The script is started as it would be without this command, by ``exec``: same process, same arguments,
same ``__main__``. Python imports ``bootstrap/sitecustomize.py`` at its start, which waits for
``horovod.torch`` to be imported and then lets
:mod:`~hvd_adaptive.commands.substitution` replace what is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BOOTSTRAP: Final = Path(__file__).resolve().parent / "bootstrap"
PROGRAM: Final = "hva run"
VARIABLE: Final = "HVA_RUN"
"""Environment variable with what was asked for, for one process; sitecustomize.py removes it."""

LAUNCHERS: Final = ("horovodrun", "mpirun", "mpiexec", "orterun", "srun", "torchrun", "jsrun")
OPTIONS: Final = (
    ("compression", str, "SPEC", "how gradients are compressed, such as qsgd:bits=4"),
    ("planner", str, "SPEC", "what chooses each layer's level during training, such as lgreco"),
    (
        "feedback",
        str,
        "SPEC",
        "what becomes of what compression leaves out: ef, ef21, ef21-sgdm, dgc, none",
    ),
    (
        "scheme",
        str,
        "NAME",
        "how encoded gradients are reduced: auto, allgather, two_shot ...",
    ),
    ("dense_steps", int, "N", "steps at the start that send dense gradients"),
    ("bucket_cap_mb", float, "MIB", "size at which a bucket of gradients is sent"),
    ("telemetry", str, "FOLDER", "where TensorBoard's files and JSON lines are written"),
    ("seed", int, "N", "of random rounding and random selection"),
)
"""Arguments of ``hvd_adaptive.DistributedOptimizer`` that are options here: what is not given is left
to the script, or to the default."""

EPILOG: Final = """\
The script's hvd.DistributedOptimizer(...) becomes hvd_adaptive.DistributedOptimizer(...), and its
hvd.init() becomes hvd_adaptive.init(). The script keeps its own compression= unless --compression is
given. Rank 0 says in one line what was replaced, or why nothing was.

examples:
  horovodrun -np 2 hva run --compression auto -- python train.py --epochs 3
  mpirun -np 4 hva run --compression qsgd:bits=4 --scheme two_shot -- train.py
  srun --mpi=pmix hva run --compression powersgd --telemetry runs/first -- python -m project.train
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.usage = "hva run [OPTIONS] -- python SCRIPT [ARGUMENTS]"
    parser.description = "Train an unchanged Horovod script with compressed gradients."
    parser.epilog = EPILOG
    for name, kind, shown, what in OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=shown, help=what)
    parser.add_argument(
        "--override", action="append", type=_override, metavar="PATTERN=SPEC", default=[],
        help="another compressor for the parameters whose names match; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--candidate", action="append", metavar="SPEC", default=[],
        help="a compressor whose levels a planner may choose, too; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--niceness", type=int, choices=range(20), metavar="0..19",
        help="how much lower the priority of Horovod's thread is (default: as hvd_adaptive.init())",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Become the script; returns only where that cannot be done, with status 2."""
    try:
        command = command_of(script_words(options.command))
    except ValueError as error:
        return refused(str(error))
    return become(command, _settings(options, command))


def script_words(command: Sequence[str]) -> list[str]:
    """What stands after ``--``."""
    return list(command[1:] if command[:1] == ["--"] else command)


def command_of(words: Sequence[str], program: str = PROGRAM) -> list[str]:
    """The command line that is started.

    Args:
        words: what stands after ``--``.
        program: the command that is to start it.

    Raises:
        ValueError: it is no script; the message says what to write.

    Example:
        >>> command_of(["python", "train.py", "--epochs", "3"])
        ['python', 'train.py', '--epochs', '3']
        >>> command_of(["train.py"])[1:]
        ['train.py']
        >>> command_of(["srun", "python", "train.py"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: srun starts the ranks...: write 'srun hva run [OPTIONS] -- python train.py'
    """
    if not words:
        raise ValueError(f"which script? Write '{program} [OPTIONS] -- python train.py'")
    name = os.path.basename(words[0])
    if name in LAUNCHERS:
        place = next(
            (i for i, word in enumerate(words) if re.match(r"python|.*\.py$", word)), len(words)
        )
        before, script = " ".join(words[:place]), " ".join(words[place:]) or "python train.py"
        raise ValueError(
            f"{name} starts the ranks, and this command runs in each: write '{before} {program} "
            f"[OPTIONS] -- {script}'"
        )
    if words[0].startswith("-"):
        raise ValueError(f"{words[0]} is no option of this command: see '{program} --help'")
    if name.endswith(".py"):
        return [sys.executable, *words]
    if re.fullmatch(r"python[\d.]*", name):
        _check_flags(words)
    return list(words)


def _check_flags(words: Sequence[str]) -> None:
    """Refuse an interpreter that would not import what replaces the optimizer."""
    for word in words[1:]:
        if not word.startswith("-") or word in ("-c", "-m", "-"):
            return
        if re.match(r"-[a-zA-Z]*[EIS]", word):
            raise ValueError(
                f"Python's {word} ignores PYTHONPATH or site-packages, by which the optimizer is "
                "replaced: leave it out"
            )


def environment_of(settings: Mapping[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    """The variables with which the script is started.

    Args:
        settings: what :func:`~hvd_adaptive.commands.substitution.install` takes.
        before: this process's environment.
    """
    path = before.get("PYTHONPATH")
    return {
        VARIABLE: json.dumps({"pythonpath": path, "settings": settings}),
        "PYTHONPATH": str(BOOTSTRAP) + (os.pathsep + path if path else ""),
    }


def _settings(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    arguments = {
        name: getattr(options, name) for name, *_ in OPTIONS if getattr(options, name) is not None
    }
    if options.override:
        arguments["overrides"] = dict(options.override)
    if options.candidate:
        arguments["candidates"] = options.candidate
    return {"arguments": arguments, "niceness": options.niceness, "command": list(command)}


def _override(text: str) -> tuple[str, str]:
    pattern, found, spec = text.partition("=")
    if not (found and pattern and spec):
        raise argparse.ArgumentTypeError(f"write PATTERN=SPEC, such as '*.bias=none', not {text!r}")
    return pattern, spec


def become(command: list[str], settings: Mapping[str, Any], program: str = PROGRAM) -> int:
    """Become a script whose Horovod is replaced; returns only where that cannot be, with status 2.

    Args:
        command: its command line.
        settings: as of :func:`environment_of`.
        program: the command that starts it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    path = shutil.which(command[0])
    if path is None:
        why = f"there is no command {command[0]!r}: write '{program} -- python train.py'"
        return refused(why, program)
    try:
        os.execve(path, command, {**os.environ, **environment_of(settings, os.environ)})
    except OSError as error:
        return refused(f"{command[0]} cannot be started: {error.strerror}", program)


def refused(why: str, program: str = PROGRAM) -> int:
    """Say so; the exit status of a wrong command line."""
    print(f"{program}: {why}", file=sys.stderr)
    return 2
