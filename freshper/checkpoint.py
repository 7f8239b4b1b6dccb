"""Checkpoints: what shapes the rest of a run, saved between two iterations, restored by --resume.

    out/checkpoint/          the newest: a Hugging Face folder, which `--model` takes, and state.pt,
                             optimizer-0.pt (one file per rank of the trainer), run.json
                             (iteration and settings), manifest.json (checksums)
    out/checkpoint-before/   the one before it, used if a file of the newest is missing, or is not
                             what the manifest says
    out/checkpoint-best/     the model alone, of the evaluation with the highest success so far, if
                             that is above the one before training

The .pt files are read with `torch.load(weights_only=True)`: one from someone else cannot run code.
On a CPU, with the same number of threads, a resumed run is bitwise identical to one that never
stopped. A checkpoint is written to .checkpoint-new and renamed, after the one before it: a kill at
any moment leaves one of the two whole. A file that the system cannot read (permissions, a disk) is
not damaged: the run stops, and nothing is removed.

A run can be resumed on another device. Of the global random generators only torch's for the CPU is
saved. Nothing draws from Python's, NumPy's and a GPU's.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from freshper.config import Config
from freshper.episode import Episode, StoredImage
from freshper.errors import Interrupted
from freshper.flags import check_unchanged
from freshper.models import Policy
from freshper.report import Report

MANIFEST = "manifest.json"
STOPPING = b"""
stopping after this iteration, with a checkpoint; once more stops at once, without
"""
# This is the only class in state.pt. It holds bytes, which nothing runs.
torch.serialization.add_safe_globals([StoredImage])


class StopSignals(contextlib.ExitStack):
    """A context in which Ctrl-C and SIGTERM raise `Interrupted`.

    While `graceful`, the first one is noted in `received`, and the run ends after its iteration."""

    graceful = False
    received = 0  # the number of the first signal

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._handle)
            # The end of the context restores the handler.
            self.callback(signal.signal, number, before)
        return self

    def _handle(self, number: int, frame: object) -> None:
        if self.received or not self.graceful:
            raise Interrupted(number)
        self.received = number
        # `print` may fail here: the signal may have come in the middle of one.
        os.write(2, STOPPING)


class Saved(NamedTuple):
    """A checkpoint whose files are those of its manifest."""

    folder: Path
    manifest: bytes
    damage: str  # of the newest checkpoint, if this is the one before it


@dataclass
class RunState:
    """Saves and restores a run."""

    config: Config
    policy: Policy
    report: Report
    signals: StopSignals
    saved: Saved | None
    parts: dict[str, Any]  # the objects with `state_dict` and `load_state_dict`, by name

    def restore(self) -> None:
        """Load the state of the checkpoint of --resume, if there is one.

        From here on a first Ctrl-C waits for the iteration to end. Raises OSError if the state
        cannot be loaded, or is not the one that came with the policy."""
        if self.saved:
            self._load(*self.saved)
        elif self.config.resume:
            folder = self.report.folder
            self.report.say(f"there is no checkpoint in {folder} yet: the run starts over")
        self.signals.graceful = True

    def _load(self, folder: Path, manifest: bytes, damage: str) -> None:
        if (folder / MANIFEST).read_bytes() != manifest:
            raise OSError(f"another process has replaced {folder} while it was loaded")
        if damage:
            newest = f"the newest checkpoint is damaged ({damage})"
            self.report.say(f"{newest}, so it is removed and the one before it used")
            # The next save would make it the one before, and so remove the whole one.
            shutil.rmtree(folder.with_name("checkpoint"))

        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            self.parts["trainer"].load_optimizer(str(folder))
        except UnpicklingError as error:
            reason = str(error).splitlines()[0]
            raise OSError(f"{folder} does not hold plain data: {reason}") from error

        buffer = state["buffer"]
        for name, value in buffer.items():
            if isinstance(value, torch.Tensor):
                buffer[name] = value.numpy()
        buffer["episodes"] = unpack_episodes(buffer["episodes"])

        # The schedule ends with the run, although --iterations, K or epochs may have changed.
        run = json.loads((folder / "run.json").read_text())
        left = self.config.iterations - run["iteration"]
        steps = left * self.config.updates_per_iteration
        state["trainer"]["total_updates"] = state["trainer"]["step"] + steps
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.policy.features.update(state["features"])

        torch.set_rng_state(state["torch"])

        progress = f"iteration {self.report.done} of {self.config.iterations}"
        self.report.say(f"resuming from {folder}, after {progress}")

    def save_if_due(self) -> None:
        """Save every `save_every` iterations, at a best evaluation, at the end and after a signal.

        Raises Interrupted after a signal, and OSError if the checkpoint cannot be written."""
        done = self.report.done
        every = self.config.save_every
        evaluations = self.report.evaluations()
        finished = done == self.config.iterations
        regular = every and done % every == 0
        # Of equal evaluations the first counts.
        best = done == max(evaluations, key=evaluations.__getitem__, default=0)

        if best or regular or finished or self.signals.received:
            self._write(best)
        if self.signals.received and not finished:
            raise Interrupted(self.signals.received)

    def _write(self, best: bool) -> None:
        """Write the newest checkpoint and, if it is the best, the model alone."""
        out = self.report.folder
        # It would be drawn across the progress bar of the run.
        transformers.utils.logging.disable_progress_bar()
        try:
            # The best comes first: a run that is killed between the two evaluates it again.
            if best:
                replace_folder(out / "checkpoint-best", self.parts["trainer"].save)
            replace_folder(out / "checkpoint", self._fill, before=out / "checkpoint-before")
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(out / ".checkpoint-new", ignore_errors=True)
            # torch.save hides the error of the disk behind its own.
            hidden = error.__context__
            reason = hidden if isinstance(hidden, OSError) else error
            checkpoint = f"the checkpoint after iteration {self.report.done}"
            raise OSError(f"{checkpoint} was not written to {out}: {reason}") from error

    def _fill(self, folder: str) -> None:
        """Write model, state and settings into a new folder, and last the manifest of them all."""
        self.parts["trainer"].save(folder)
        self.parts["trainer"].save_optimizer(folder)

        state: dict[str, Any] = {
            # The last bit of a feature can depend on the batch in which it was computed.
            "features": self.policy.features,
            "torch": torch.get_rng_state(),
            **{name: part.state_dict() for name, part in self.parts.items()},
        }
        state["buffer"]["episodes"] = pack_episodes(state["buffer"]["episodes"])

        new = Path(folder)
        # With a path instead of a file, torch does not say that the disk is full.
        with open(new / "state.pt", "wb") as file:
            torch.save(without_numpy(state), file)

        run = {"iteration": self.report.done, "settings": vars(self.config)}
        (new / "run.json").write_text(json.dumps(run))
        files = [path for path in new.rglob("*") if path.is_file()]
        manifest = {str(path.relative_to(new)): fingerprint(path) for path in files}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1))


def find_saved(config: Config, flags_given: tuple[str, ...]) -> Saved | None:
    """Return the checkpoint to go on from, if there is one. Raises ValueError as `newest` does, if
    a setting may not change, or if a flag changes a run that has done all of its iterations."""
    saved = newest(Path(config.resume))
    if not saved:
        return None
    run = json.loads((saved.folder / "run.json").read_bytes())
    check_unchanged(run["settings"], vars(config))
    settings_given = {*flags_given} - {"resume"}
    if settings_given and (done := run["iteration"]) >= config.iterations:
        raise ValueError(
            f"--iterations is {config.iterations}, but must be above {done}, which the run has done"
        )
    return saved


def newest(out: Path) -> Saved | None:
    """Return the newest whole checkpoint of a run, None if it has none yet. Raises ValueError if
    all are damaged, or if a file cannot be read."""
    damage = ""
    try:
        for folder in (out / "checkpoint", out / "checkpoint-before"):
            if folder.exists():
                reason = find_damage(folder)
                if not reason:
                    return Saved(folder, (folder / MANIFEST).read_bytes(), damage)
                damage = damage or reason
    except OSError as error:
        raise ValueError(
            f"--resume is {out}, but its checkpoint cannot be read: {error}"
        ) from error
    if damage:
        raise ValueError(f"--resume is {out}, but all of its checkpoints are damaged: {damage}")
    return None


def find_damage(folder: Path) -> str:
    """Return what is wrong with a checkpoint, "" if nothing. Raises OSError if a file is there and
    cannot be read."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_bytes()))
        for name in sorted({"state.pt", "run.json", *manifest}):
            if fingerprint(folder / name) != manifest[name]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"{MANIFEST} has changed"
    return ""


def fingerprint(path: Path) -> str:
    """Return a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_folder(folder: Path, fill: Callable[[str], None], before: Path | None = None) -> None:
    """Replace a folder by a new one that `fill` writes.

    What was there becomes `before`. Without `before` it is removed."""
    new = folder.with_name(".checkpoint-new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    fill(str(new))

    if before and folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def without_numpy(tree: Any) -> Any:
    """Return a state with tensors and numbers for NumPy's, which `weights_only` does not load."""
    if isinstance(tree, dict):
        return {key: without_numpy(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(without_numpy, tree))
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, np.generic):
        return tree.item()
    return tree


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Return episodes as columns, one per field.

    Arrays stand end to end with their lengths, because tens of thousands of small tensors would
    take long to save. An image that episodes share is saved once."""
    columns = {}
    for field in fields(Episode):
        column: Any = [getattr(episode, field.name) for episode in episodes]
        if column and isinstance(column[0], np.ndarray):
            lengths = [len(values) for values in column]
            column = {"values": np.concatenate(column), "lengths": lengths}
        columns[field.name] = column
    return columns


def unpack_episodes(columns: dict[str, Any]) -> list[Episode]:
    """Return the episodes of `pack_episodes`, from tensors in place of its arrays."""
    for name, column in columns.items():
        if isinstance(column, dict):
            parts = column["values"].split(column["lengths"])
            # They are copies, so that no episode keeps the arrays of all others in memory.
            columns[name] = [part.numpy().copy() for part in parts]
    return list(map(Episode, *columns.values()))
