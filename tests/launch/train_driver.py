"""Runs several command lines of launch/train.py in one launch: starting ranks costs more than they do.

    horovodrun -np 2 python -m tests.launch.train_driver COMMANDS.json RESULTS

COMMANDS.json holds a list of `{"name": ..., "arguments": [...]}`; `"copy": [from, to, step]` copies a
checkpoint before, `"damage": [how, file]` spoils a file of it, and `"edit": [file, keys, value]` sets
one value in a file of JSON, or removes it where there is none. Each rank writes its exit statuses and
outputs to RESULTS-<rank>.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd

from launch.training import main as train

TEXTS = {"empty": "", "list": "[]", "number": "2", "null": "null", "deep": "[" * 100_000}


def copy_checkpoint(source: str, target: str, step: int) -> None:
    if hvd.rank() == 0:
        Path(target).mkdir(parents=True)
        for file in Path(source).glob(f"step-{step:09d}*"):
            shutil.copy(file, target)
    hvd.barrier()


def damage(how: str, name: str) -> None:
    path = Path(name)
    if hvd.rank() == 0:
        if how == "remove":
            path.unlink()
        elif how == "tear":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif how in TEXTS:
            path.write_text(TEXTS[how])
        elif how == "flip":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        else:  # another rank's file in its place
            shutil.copy(path.with_name(path.name.replace("rank-1", "rank-0")), path)
    hvd.barrier()


def edit(name: str, keys: list[str], *value: Any) -> None:
    path = Path(name)
    if hvd.rank() == 0:
        content = json.loads(path.read_text())
        holder = content
        for key in keys[:-1]:
            holder = holder[key]
        if value:
            holder[keys[-1]] = value[0]
        else:
            del holder[keys[-1]]
        path.write_text(json.dumps(content))
    hvd.barrier()


def run(command: dict[str, Any]) -> dict[str, Any]:
    hvd.init()
    if "copy" in command:
        copy_checkpoint(*command["copy"])
    if "damage" in command:
        damage(*command["damage"])
    if "edit" in command:
        edit(*command["edit"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = train.main(command["arguments"])
        except SystemExit as end:
            status = int(end.code or 0)
    return {"name": command["name"], "status": status, "output": output.getvalue()}


def main() -> None:
    commands = json.loads(Path(sys.argv[1]).read_text())
    results = [run(command) for command in commands]
    Path(f"{sys.argv[2]}-{hvd.rank()}.json").write_text(json.dumps(results))


main()
