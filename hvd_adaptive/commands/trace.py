"""``hva trace OUT FILE...``: traces of several ranks, and Horovod's timeline, as one file.

Also ``python -m hvd_adaptive.commands.trace``. Files are traces of this package
(``Telemetry(trace=True)``), timelines of Horovod (``HOROVOD_TIMELINE``), and traces of
``torch.profiler``; their clocks are brought to one start. Open the result in Perfetto or
``chrome://tracing``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_adaptive.telemetry.trace import merged, read_events

__all__ = ["add_arguments", "main", "run", "write"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = "Merge traces of ranks, and Horovod's timeline, into one file."
    parser.epilog = "example:\n  hva trace merged.json runs/first/trace.rank0.json timeline.json"
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="traces, of any of the kinds"
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out; returns the exit status."""
    try:
        events = write(args.out, args.files)
    except FileNotFoundError as error:
        said = f"there is no {error.filename}: write 'hva trace OUT FILE ...'"
        print(f"hva trace: {said}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"hva trace: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {events:,} events of {len(args.files)} files")
    return 0


def write(out: Path, files: Sequence[Path]) -> int:
    """Merge files; returns how many events there are.

    Raises:
        OSError: a file cannot be read, or the result cannot be written.
        ValueError: a file is no trace, or does not say when its clock started.
    """
    found = [(path, read_events(path)) for path in files]
    events = merged([("" if _is_ours(events) else path.stem, events) for path, events in found])
    out.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n", encoding="utf-8")
    return len(events)


def _is_ours(events: list[dict[str, Any]]) -> bool:
    """Whether processes have names that tell them apart from those of other files."""
    names = [event["args"].get("name", "") for event in events if event.get("name") == "process_name"]
    return bool(names) and all(str(name).startswith("rank ") for name in names)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="hva trace", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
