"""Checkpoints that are either complete or not there.

One checkpoint is a file a rank (random state, what compression has not sent yet) and one file of rank
0 (model, optimizer, step, place in the data). Rank 0's is written last, after all ranks have theirs:
where it exists, the checkpoint is complete.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from agreement import RunError, agree
from torch import nn

FORMAT = 1
KEPT = 2
_COMPLETE = re.compile(r"step-(\d+)\.pt")
_OF_RANK = re.compile(r"step-(\d+)\.rank-(\d+)\.pt")


@dataclass(frozen=True)
class Position:
    """Where a training run stands: steps done, and the place in the data."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


class Checkpoints:
    """Saves and restores one run; all ranks call each method, and all succeed or fail together.

    Args:
        folder: where the files are; made if missing. Hosts need not share it.
        identity: what a checkpoint must have in common with the run that continues it.
        model: its parameters and buffers are saved.
        optimizer: a wrapped optimizer; its compression state is saved if it has one.
    """

    def __init__(
        self, folder: Path, identity: dict[str, Any], model: nn.Module, optimizer: Any
    ) -> None:
        self.folder = folder
        self.identity = identity | {"ranks": hvd.size()}
        self.model = model
        self.optimizer = optimizer
        self.rank: int = hvd.rank()

    def save(self, position: Position) -> Path:
        """Writes a checkpoint, then removes all but the newest two.

        Raises:
            RunError: on all ranks, if any rank could not write.
        """
        path = self._path(position.step)
        agree("saving a checkpoint", lambda: self._save_rank(position))
        agree("saving a checkpoint", lambda: self._save_common(position, path))
        self._remove_old()
        return path

    def restore(self, required: bool) -> Position | None:
        """Loads the newest complete checkpoint into model and optimizer.

        Returns:
            Where the run goes on; None if there is no checkpoint and none is required.

        Raises:
            RunError: on all ranks, if there is none though required, or it is damaged, or it belongs
                to another run.
        """
        # Rank 0 chooses and reads: another rank's view of the folder may be older, or of another disk.
        found = self._newest() if self.rank == 0 else None
        step: int | None = hvd.broadcast_object(found, root_rank=0, name="checkpoint.step")
        if step is None:
            if required:
                raise RunError(
                    f"--resume: there is no complete checkpoint in {self.folder} on rank 0's host;"
                    " name another --checkpoint-dir, or write --resume auto to start anew"
                )
            return None
        common = agree("resuming", lambda: self._read_common(step) if self.rank == 0 else None)
        common = hvd.broadcast_object(common, root_rank=0, name="checkpoint.common")
        own = agree("resuming", lambda: self._read(self._rank_path(step, self.rank)))
        agree("resuming", lambda: self._load(common, own))
        return Position(**common["position"])

    # ---------------------------------------------------------------------------------- writing

    def _save_rank(self, position: Position) -> None:
        state: dict[str, Any] = {"rng": torch.get_rng_state(), "compression": None}
        if hasattr(self.optimizer, "compression_state_dict"):
            state["compression"] = self.optimizer.compression_state_dict()
        self._write(self._rank_path(position.step, self.rank), position, state)

    def _save_common(self, position: Position, path: Path) -> None:
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            self._write(path, position, state)

    def _write(self, path: Path, position: Position, state: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        header = {"format": FORMAT, "identity": self.identity, "position": vars(position)}
        partial = path.with_name(f"{path.name}.tmp")
        try:
            with partial.open("wb") as file:
                torch.save(header | state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except RuntimeError as error:
            # torch's zip writer reports a full disk so.
            raise OSError(f"cannot write {path}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """Removes this rank's older files, and what an interrupted save has left of them."""
        complete = self._complete_steps()
        for file in self.folder.glob("step-*.pt"):
            common, of_rank = _COMPLETE.fullmatch(file.name), _OF_RANK.fullmatch(file.name)
            match = common or of_rank
            owner = int(of_rank[2]) if of_rank else 0
            if match and owner == self.rank and int(match[1]) not in complete[-KEPT:]:
                # Another host's rank 0 file is not here to tell which steps are complete.
                if complete:
                    file.unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------- reading

    def _read_common(self, step: int) -> dict[str, Any]:
        return self._read(self._path(step))

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"{path} is no checkpoint of this program (format {FORMAT})")
        found = state["identity"]
        for key in self.identity.keys() | found.keys():
            if found.get(key) != self.identity.get(key):
                raise ValueError(
                    f"{path} was written with {key} = {found.get(key)!r}, but this run has"
                    f" {self.identity.get(key)!r}; resume with the same, or name another"
                    " --checkpoint-dir"
                )
        return state

    def _load(self, common: dict[str, Any], own: dict[str, Any]) -> None:
        if own["position"] != common["position"]:
            raise ValueError(f"the files of step {common['position']['step']} do not belong together")
        try:
            self.model.load_state_dict(common["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of another model: {error}") from error
        self.optimizer.load_state_dict(common["optimizer"])
        torch.set_rng_state(own["rng"])

    def load_compression(self, position: Position) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ names

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.pt"

    def _rank_path(self, step: int, rank: int) -> Path:
        return self.folder / f"step-{step:09d}.rank-{rank}.pt"

    def _complete_steps(self) -> list[int]:
        names = (_COMPLETE.fullmatch(file.name) for file in self.folder.glob("step-*.pt"))
        return sorted(int(match[1]) for match in names if match)

    def _newest(self) -> int | None:
        return max(self._complete_steps(), default=None)
