"""Checkpoints that are either complete or not there.

One checkpoint is a file a rank (random state, what compression has not sent yet) and one file of rank
0 (model, optimizer, place in the data). Rank 0's is written when all ranks have theirs: where it
exists, the checkpoint is complete.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from agreement import RunError, agree

FORMAT = 1
KEPT = 2
_COMMON = re.compile(r"step-(\d+)\.pt")
_OF_RANK = re.compile(r"step-(\d+)\.rank-(\d+)\.pt")


@dataclass(frozen=True)
class Position:
    """Where a run stands: steps done, and the steps of the running epoch among them."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0


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

    # ---------------------------------------------------------------------------------- writing

    def save(self, position: Position) -> Path:
        """Writes a checkpoint, then removes all but this rank's newest two.

        Raises:
            RunError: on all ranks, if any rank could not write.
        """
        agree("saving a checkpoint", lambda: self._save_rank(position))
        agree("saving a checkpoint", lambda: self._save_common(position))
        self._remove_old()
        return self._common_path(position.step)

    def _save_rank(self, position: Position) -> None:
        compression = None
        if hasattr(self.optimizer, "compression_state_dict"):
            compression = self.optimizer.compression_state_dict()
        state = {"rng": torch.get_rng_state(), "compression": compression}
        self._write(self._rank_path(position.step), position, state)

    def _save_common(self, position: Position) -> None:
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            self._write(self._common_path(position.step), position, state)

    def _write(self, path: Path, position: Position, state: dict[str, Any]) -> None:
        header = {"format": FORMAT, "identity": self.identity, "position": asdict(position)}
        partial = path.with_name(f"{path.name}.tmp")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                torch.save(header | state, file)
                file.flush()
                # Without it a power cut could leave the new name with no content.
                os.fsync(file.fileno())
            partial.replace(path)
        except RuntimeError as error:
            # This is how torch's writer reports a full disk.
            raise OSError(f"cannot write {path}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def _remove_old(self) -> None:
        """A rank looks at its own files only: those of others may be on other disks."""
        patterns = [self._steps(_OF_RANK, self.rank)]
        if self.rank == 0:
            patterns.append(self._steps(_COMMON))
        for files in patterns:
            for step in sorted(files)[:-KEPT]:
                files[step].unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------- reading

    def restore(self, required: bool) -> Position | None:
        """Loads the newest complete checkpoint into model, optimizer and random state.

        Returns:
            Where the run goes on; None if there is no checkpoint and none is required.

        Raises:
            RunError: on all ranks, if there is none though required, or it is damaged, or it is
                another run's.
        """
        step = self._newest()
        if step is None:
            if required:
                raise RunError(
                    f"--resume: no complete checkpoint in {self.folder}; name another"
                    " --checkpoint-dir, or write --resume auto to start anew where there is none"
                )
            return None
        # Rank 0's file travels by broadcast, so that only the rank files must be on every host.
        common = agree(
            "resuming", lambda: self._read(self._common_path(step)) if self.rank == 0 else None
        )
        common = hvd.broadcast_object(common, root_rank=0, name="checkpoint.common")
        agree("resuming", lambda: self._load(common, self._read(self._rank_path(step))))
        return Position(**common["position"])

    def refuse_to_mix(self) -> None:
        """Raises RunError if the folder holds another run: resuming would find the wrong one."""
        step = self._newest()
        if step is not None:
            raise RunError(
                f"{self.folder} holds a checkpoint of step {step}: add --resume to go on from it,"
                " name another --checkpoint-dir, or remove its files"
            )

    def _newest(self) -> int | None:
        """Rank 0's view, on all ranks: another one's may be older, or of another disk."""
        steps = agree("looking for checkpoints", lambda: self._steps(_COMMON))
        newest: int | None = hvd.broadcast_object(
            max(steps, default=None), root_rank=0, name="checkpoint.newest"
        )
        return newest

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"{path} is no checkpoint of this program (format {FORMAT})")
        found = state["identity"]
        for key in sorted(self.identity.keys() | found.keys()):
            if found.get(key) != self.identity.get(key):
                raise ValueError(
                    f"{path} was written with {key} = {found.get(key)!r}, but this run has"
                    f" {self.identity.get(key)!r}; resume with the same, or name another"
                    " --checkpoint-dir"
                )
        return state

    def _load(self, common: dict[str, Any], own: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(common["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of another model: {error}") from error
        self.optimizer.load_state_dict(common["optimizer"])
        if own["compression"] is not None:
            self.optimizer.load_compression_state_dict(own["compression"])
        torch.set_rng_state(own["rng"])

    # ------------------------------------------------------------------------------------ names

    def _common_path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.pt"

    def _rank_path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.rank-{self.rank}.pt"

    def _steps(self, pattern: re.Pattern[str], *numbers: int) -> dict[int, Path]:
        """The files here whose names match, by step; `numbers` are the groups after the step."""
        found: dict[int, Path] = {}
        for file in self.folder.glob("step-*.pt"):
            match = pattern.fullmatch(file.name)
            if match and tuple(map(int, match.groups()[1:])) == numbers:
                found[int(match[1])] = file
        return found
