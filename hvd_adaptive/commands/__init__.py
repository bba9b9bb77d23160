"""Commands of the package: ``hva NAME``, ``python -m hvd_adaptive NAME``.

A command is a module of this folder and a row of :data:`COMMANDS`. The module has
``add_arguments(parser)``, which also gives the parser its description and an example, and
``run(options)``, which returns the exit status. A module is imported only when its command is asked
for: ``hva run`` starts in every rank.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NoReturn

import hvd_adaptive

COMMANDS: Final = {
    "run": "train an unchanged Horovod script with compressed gradients",
    "predict": "predict a script's step time with each compressor, on more ranks and other links",
    "doctor": "report versions, hosts and links, and what would make training fail or slow",
    "report": "write one HTML page about one or several training runs",
    "trace": "merge traces of ranks, and Horovod's timeline, into one file",
    "slurm": "write batch scripts for Slurm that requeue and resume a script of your own",
    "install-horovod": "build Horovod against the torch that is installed",
    "precompile": "compile every kernel into Numba's cache",
}
"""Name and summary. The module has the same name, with ``_`` for ``-``."""

EXAMPLE: Final = "horovodrun -np 2 hva run --compression auto -- python train.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, which is 2 for a wrong command line.

    Args:
        arguments: the command's name and what follows it; None takes those of this process.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        hvd_adaptive ...
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in COMMANDS:
        return run_command(words[0], words[1:])
    if words in (["-V"], ["--version"]):
        print(f"hvd_adaptive {hvd_adaptive.__version__}")
        return 0
    parser = _parser()
    if words in ([], ["-h"], ["--help"]):
        parser.print_help(sys.stdout if words else sys.stderr)
        return 0 if words else 2
    parser.error(f"there is no command {words[0]!r}: write one of {', '.join(COMMANDS)}")


def run_command(name: str, words: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        name: a key of :data:`COMMANDS`.
        words: its arguments; None takes those of this process.
    """
    module, options = parse_command(name, words)
    status: int = module.run(options)
    return status


def parse_command(
    name: str, words: Sequence[str] | None = None
) -> tuple[ModuleType, argparse.Namespace]:
    """A command's module and its options; ends the process with status 2 where they are wrong.

    Args:
        name: a key of :data:`COMMANDS`.
        words: its arguments; None takes those of this process.
    """
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    parser = _CommandParser(
        prog=f"hva {name}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return module, parser.parse_args(words)


class _CommandParser(argparse.ArgumentParser):
    """Says where to read what can be written."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}; '{self.prog} --help' shows all options and an example\n")


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:<17} {summary}" for name, summary in COMMANDS.items())
    return argparse.ArgumentParser(
        prog="hva",
        usage="hva COMMAND [OPTIONS]",
        description=f"commands:\n{rows}",
        epilog=f"'hva COMMAND --help' shows a command's options. Example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
