"""``hva slurm``: write the batch scripts, and what they need, into a folder of one's own.

The files are the package's, in its folder ``commands/batch``; a clone has them as ``launch/slurm``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Final

FILES: Final = Path(__file__).with_name("batch")
IN_A_CLONE: Final = "launch/slurm"
EXECUTABLE: Final = (".sbatch", ".sh")

EPILOG: Final = """\
Edit the lines at the top of the scripts (partition, account, nodes, modules), or give them to sbatch.
The training script gets "--checkpoint-dir DIR --resume auto" before its own options. What saves,
resumes, and stops all ranks when Slurm sends its signal before the time limit: hvd_adaptive.resume.

examples:
  hva slurm --output slurm
  HVA_SCRIPT=train.py sbatch --nodes=4 slurm/train.sbatch --epochs 90
  bash slurm/train.sbatch --help
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Write batch scripts that check, requeue before the time limit and resume, into a folder."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "--output", type=Path, default=Path("slurm"), metavar="FOLDER",
        help="that all nodes of a job see (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite what was edited there, too")


def run(options: argparse.Namespace) -> int:
    """Write all files, or none."""
    folder: Path = options.output
    files = written(folder)
    try:
        edited = [name for name, text in files.items() if _differs(folder / name, text)]
        if edited and not options.force:
            print(
                f"hva slurm: {folder} has files of other content: {', '.join(edited)}. Name another "
                "--output, or overwrite them with --force",
                file=sys.stderr,
            )
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            if name.endswith(EXECUTABLE):
                (folder / name).chmod(0o755)
    except (OSError, UnicodeDecodeError) as error:
        print(f"hva slurm: cannot write {folder}: {error}", file=sys.stderr)
        return 1
    place = shlex.quote(str(folder))
    print(
        f"{len(files)} files in {folder}\n"
        f"  bash {place}/train.sbatch --help    what can be set, and how a job resumes\n"
        f"  HVA_SCRIPT=train.py sbatch {place}/train.sbatch    trains your script; its options follow"
    )
    return 0


def written(folder: Path, python: str = sys.executable) -> dict[str, str]:
    """What is written: names and texts.

    Args:
        folder: where it will be. Slurm runs a copy of a batch script, which cannot look for files next
            to itself: so the place is written into it.
        python: what ranks run where no other environment is active.

    Example:
        >>> "written=/work/slurm written_by=/usr/bin/python3" in written(
        ...     Path("/work/slurm"), "/usr/bin/python3"
        ... )["train.sbatch"]
        True
    """
    texts = {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted(FILES.iterdir())
        if file.suffix in (".sbatch", ".sh", ".py")
    }
    return {name: _placed(text, folder, python) for name, text in texts.items()}


def _placed(text: str, folder: Path, python: str) -> str:
    """A file as one that is in the folder, and was not in a repository."""
    here = (
        f"written={shlex.quote(str(folder.absolute()))} written_by={shlex.quote(python)}\n"
        "helpers=${HVA_HOME:-$written}\n"
    )
    text = re.sub(r"^helpers=.*\n", lambda _: here, text, flags=re.M)
    text = text.replace("submit from the repository's root, or set HVA_HOME", "set HVA_HOME")
    return text.replace(f"{IN_A_CLONE}/", f"{folder}/")


def _differs(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="utf-8") != text
