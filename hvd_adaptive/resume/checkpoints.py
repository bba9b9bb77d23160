"""Checkpoints that are either complete or not there.

One checkpoint is a file a rank (random state, what compression has not sent yet), one file of rank 0
(model and optimizer), and a manifest (place in the data, digests of all files). The manifest is
written last: where it exists, the checkpoint is complete, and a file that changed since is found out.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import reprlib
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from hvd_adaptive.checkpoint import merge_compression_states
from hvd_adaptive.comm import world
from hvd_adaptive.comm.process_set_control import ProcessSetControl
from hvd_adaptive.resume.agreement import RunError, run_on_all_ranks
from hvd_adaptive.rng import mix

FORMAT = 2
KEPT = 2
_MOST = 2**53
_MANIFEST = re.compile(r"step-(\d+)\.json")
_COMMON = re.compile(r"step-(\d+)\.pt")
_OF_RANK = re.compile(r"step-(\d+)\.rank-(\d+)\.pt")


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    Args:
        step: steps done.
        epoch: epochs done; 0 where a script counts none.
        step_in_epoch: steps done of the epoch that is under way.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0

    def of_ranks(self, saved: int, ranks: int) -> Position:
        """The same place in the epoch's data for another number of ranks, never before it."""
        return replace(self, step_in_epoch=-(-self.step_in_epoch * saved // ranks))

    def with_steps_of(self, steps_per_epoch: int) -> Position:
        """Steps counted as if the epochs so far had had ``steps_per_epoch`` steps."""
        done = min(self.step_in_epoch, steps_per_epoch)
        return replace(self, step=self.epoch * steps_per_epoch + done, step_in_epoch=done)


class Checkpoints:
    """Saves and restores one run; all ranks call each method, and all succeed or fail together.

    Saved are model, optimizer, what compression has not sent yet, and torch's random state of the CPU;
    learning-rate schedulers and the order of the data follow from the position. Costs the bytes of
    model and optimizer on rank 0, and those of the compression state on each rank; the two newest
    checkpoints are kept.

    Args:
        folder: where the files are; made if missing. Hosts need not share it.
        identity: what a checkpoint and the run that continues it must have in common; as JSON holds it.
        model: its parameters and buffers are saved.
        optimizer: a wrapped optimizer; its compression state is saved if it has one.
        compression: what has the compression state, where it is not the optimizer: the hook that
            ``hva.ddp_comm_hook`` returns.
        renamed: makes today's identity of one that was saved, where names in it have changed.
    """

    def __init__(
        self,
        folder: Path | str,
        identity: dict[str, Any],
        model: nn.Module,
        optimizer: Any,
        *,
        compression: Any = None,
        renamed: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self.folder = Path(folder)
        self.identity = identity
        self.model = model
        self.optimizer = optimizer
        self._compression = optimizer if compression is None else compression
        self._renamed = renamed
        self.rank: int = world.current().rank
        self.ranks: int = world.current().size

    # ---------------------------------------------------------------------------------- writing

    def save(self, position: Position) -> Path:
        """Writes a checkpoint, then removes all but this rank's newest two.

        Raises:
            RunError: on all ranks, if any rank could not write.
        """
        digest = run_on_all_ranks("saving a checkpoint", lambda: self._save_rank(position.step))
        digests = ProcessSetControl("checkpoint.digests").allgather(digest)
        run_on_all_ranks("saving a checkpoint", lambda: self._save_common(position, digests))
        self._remove_old()
        return self._manifest_path(position.step)

    def _save_rank(self, step: int) -> str:
        compression = None
        if hasattr(self._compression, "compression_state_dict"):
            compression = self._compression.compression_state_dict()
        state = {"rng": torch.get_rng_state(), "compression": compression}
        return self._write(self._rank_path(step, self.rank), state)

    def _save_common(self, position: Position, digests: list[str]) -> None:
        """On rank 0; the manifest comes last."""
        if self.rank:
            return
        step = position.step
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        files = {self._rank_path(step, rank).name: digest for rank, digest in enumerate(digests)}
        files[self._common_path(step).name] = self._write(self._common_path(step), state)
        manifest = {
            "format": FORMAT,
            "identity": self.identity,
            "position": asdict(position),
            "ranks": self.ranks,
            "sha256": files,
        }
        text = json.dumps(manifest, indent=1).encode()
        _replace(self._manifest_path(step), lambda file: file.write(text))

    def _write(self, path: Path, state: dict[str, Any]) -> str:
        """Returns the file's digest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return _replace(path, lambda file: torch.save(state, file))
        except RuntimeError as error:
            # This is how torch's writer reports a full disk.
            raise OSError(f"cannot write {path}: {error}") from error

    def _remove_old(self) -> None:
        """A rank looks at its own files only: those of others may be on other disks."""
        patterns = [self._steps(_OF_RANK, self.rank)]
        if self.rank == 0:
            # The manifest goes first: what is left of a checkpoint must not look complete.
            patterns = [self._steps(_MANIFEST), self._steps(_COMMON), *patterns]
        for files in patterns:
            # By age, not by step: a run that resumed with more ranks counts fewer steps.
            for path in sorted(files.values(), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
                path.unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------- reading

    def restore(self, required: bool = False) -> Position | None:
        """Loads the newest complete checkpoint into model, optimizer and random state.

        Args:
            required: whether it is an error if there is none.

        Returns:
            Where the run continues; None if there is no checkpoint and none is required.

        Raises:
            RunError: on all ranks, if there is none though required, or it is damaged, or it is
                another run's.
        """
        step = self._newest()
        if step is None:
            if required:
                raise RunError(
                    f"--resume: no complete checkpoint in {self.folder}; name another"
                    " --checkpoint-dir, or write --resume auto to start at step 0 where there is none"
                )
            return None
        manifest = run_on_all_ranks(
            "resuming", lambda: self._read_manifest(step) if self.rank == 0 else None
        )
        manifest = ProcessSetControl("checkpoint.manifest").hand_out(manifest)
        position = Position(**manifest["position"])
        # Rank 0's file is sent by broadcast, so that only the rank files must be on every host.
        path = self._common_path(step)
        common = run_on_all_ranks(
            "resuming", lambda: self._read(path, manifest) if self.rank == 0 else None
        )
        common = ProcessSetControl("checkpoint.common").hand_out(common)
        if manifest["ranks"] == self.ranks:
            path = self._rank_path(step, self.rank)
            # All have read theirs before any loads: the compression state is loaded by all together.
            own = run_on_all_ranks("resuming", lambda: self._read(path, manifest))
            self._load(common, own)
            return position
        self._load_merged(step, manifest, common)
        return position.of_ranks(manifest["ranks"], self.ranks)

    def _load_merged(self, step: int, manifest: dict[str, Any], common: dict[str, Any]) -> None:
        """Continues from a checkpoint of another number of ranks: rank 0 reads all of its files."""
        merged = run_on_all_ranks(
            "resuming", lambda: self._read_merged(step, manifest) if self.rank == 0 else None
        )
        merged = ProcessSetControl("checkpoint.merged").hand_out(merged)
        # No rank can continue with the random numbers that another one drew.
        torch.manual_seed(mix((step << 24) + self.rank) >> 1)
        own = {"rng": torch.get_rng_state(), "compression": merged}
        self._load(common, own)
        if self.rank == 0:
            print(
                f"the checkpoint is of {manifest['ranks']} ranks, this run has {self.ranks}: every rank"
                " continues with the mean of what was not sent yet, and with other random numbers",
                flush=True,
            )

    def refuse_to_mix(self) -> None:
        """Raises RunError if the folder holds another run: resuming would find the wrong one."""
        step = self._newest()
        if step is not None:
            raise RunError(
                f"{self.folder} holds a checkpoint of step {step}: add --resume to continue from it,"
                " name another --checkpoint-dir, or remove its files"
            )

    def _newest(self) -> int | None:
        """Rank 0's view, on all ranks: another one's may be older, or of another disk."""
        steps = run_on_all_ranks("looking for checkpoints", self._by_progress)
        control = ProcessSetControl("checkpoint.newest")
        newest: int | None = control.hand_out(steps[-1] if steps else None)
        return newest

    def _by_progress(self) -> list[int]:
        """Steps of the manifests here, in the order of the data seen; on rank 0.

        Steps do not tell: a run that resumed with more ranks counts fewer of them.
        """
        seen = {}
        for step in self._steps(_MANIFEST) if self.rank == 0 else ():
            manifest = self._read_manifest(step)
            position = Position(**manifest["position"])
            seen[step] = (position.epoch, position.step_in_epoch * manifest["ranks"], step)
        return sorted(seen, key=lambda step: seen[step])

    def _read_manifest(self, step: int) -> dict[str, Any]:
        path = self._manifest_path(step)
        try:
            manifest: Any = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged or no manifest: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f"{path} is no manifest of this program (format {FORMAT})")
        try:
            self._check_content(manifest, step)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        found = self._renamed(manifest["identity"])
        mine = json.loads(json.dumps(self.identity))
        for key in sorted(mine.keys() | found.keys()):
            if found.get(key) != mine.get(key):
                raise ValueError(
                    f"{path} was written with {key} = {found.get(key)!r}, but this run has"
                    f" {mine.get(key)!r}; resume with the same, or name another"
                    " --checkpoint-dir"
                )
        return manifest

    def _check_content(self, manifest: dict[str, Any], step: int) -> None:
        """Raises ValueError, with the key, unless all is there, as `_save_common` writes it."""
        for key in ("identity", "position", "sha256"):
            if not isinstance(manifest.get(key), dict):
                raise _wrong(manifest, key, "an object")
        ranks = _whole_number(manifest, "ranks", 1)
        position, files = manifest["position"], manifest["sha256"]
        for field in fields(Position):
            _whole_number(position, field.name, 0)
        if position["step"] != step:
            raise _wrong(position, "step", f"{step}, as in the file's name")
        if foreign := position.keys() - {field.name for field in fields(Position)}:
            raise ValueError(f"position has a {min(foreign)}, which does not belong there")
        # One by one, because the number of ranks may be anything.
        for path in chain([self._common_path(step)], (self._rank_path(step, r) for r in range(ranks))):
            if not isinstance(files.get(path.name), str):
                raise _wrong(files, path.name, "a SHA-256 digest")
        if len(files) > ranks + 1:
            raise ValueError(f"ranks is {ranks}, but sha256 has {len(files)} files")

    def _read(self, path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
        """The file's content, if it is the one that the manifest means."""
        wanted = manifest["sha256"].get(path.name)
        if wanted is None:
            raise ValueError(f"{path} is not part of the checkpoint that its manifest describes")
        try:
            if _digest(path) != wanted:
                raise ValueError(
                    f"{path} is not the file that was saved (its SHA-256 differs from the manifest's):"
                    " it was cut short, changed or replaced"
                )
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise OSError(
                f"{path} is missing: the checkpoint has a file of each of its {manifest['ranks']}"
                " ranks, and who reads them must see them (with another number of ranks: rank 0, all)"
            ) from error
        except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error
        return state

    def _read_merged(self, step: int, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """What every rank continues with after another number of ranks; all their files are read."""
        paths = [self._rank_path(step, rank) for rank in range(manifest["ranks"])]
        states = [self._read(path, manifest)["compression"] for path in paths]
        if states[0] is None:
            return None  # of Horovod's own optimizer
        return merge_compression_states(states)

    def _load(self, common: dict[str, Any], own: dict[str, Any]) -> None:
        """Puts it all in its place; all ranks must call it, with what they have read."""
        run_on_all_ranks("resuming", lambda: self._load_common(common))
        if own["compression"] is not None:
            # No action of run_on_all_ranks: it agrees by itself, and raises on all ranks.
            try:
                self._compression.load_compression_state_dict(own["compression"])
            except ValueError as error:
                raise RunError(f"resuming: {error}") from error
        torch.set_rng_state(own["rng"])

    def _load_common(self, common: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(common["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of another model: {error}") from error
        self.optimizer.load_state_dict(common["optimizer"])

    # ------------------------------------------------------------------------------------ names

    def _manifest_path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.json"

    def _common_path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.pt"

    def _rank_path(self, step: int, rank: int) -> Path:
        return self.folder / f"step-{step:09d}.rank-{rank}.pt"

    def _steps(self, pattern: re.Pattern[str], *numbers: int) -> dict[int, Path]:
        """The files here whose names match, by step; `numbers` are the groups after the step."""
        found: dict[int, Path] = {}
        for file in self.folder.glob("step-*"):
            match = pattern.fullmatch(file.name)
            if match and tuple(map(int, match.groups()[1:])) == numbers:
                found[int(match[1])] = file
        return found


def _whole_number(holder: dict[str, Any], key: str, least: int) -> int:
    value = holder.get(key)
    if type(value) is not int or not least <= value <= _MOST:
        raise _wrong(holder, key, f"a whole number from {least} to {_MOST}")
    return value


def _wrong(holder: dict[str, Any], key: str, wanted: str) -> ValueError:
    if key not in holder:
        return ValueError(f"it has no {key}, which must be {wanted}")
    return ValueError(f"{key} is {reprlib.repr(holder[key])} and must be {wanted}")


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> str:
    """Writes a file that is either complete or not there; returns its digest."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            # Without it a power cut could leave the new name with no content.
            os.fsync(file.fileno())
        digest = _digest(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return digest


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
