"""Checkpoints: what shapes the rest of a run, saved between two iterations, restored by --resume.

    out/checkpoint/          the newest: a Hugging Face folder, which `--model` takes, and state.pt,
                             optimizer-0.pt (one file per rank of the trainer), run.json
                             (iteration, settings, date), manifest.json (checksums)
    out/checkpoint-before/   the one before it, used if the newest is not what its manifest says
    out/checkpoint-best/     the model alone, of the evaluation with the highest success so far, if
                             that is above the one before training

The .pt files are read with `torch.load(weights_only=True)`: one from someone else cannot run code.
On a CPU, with the same number of threads, a resumed run is bitwise identical to one that never
stopped. A checkpoint is written to .checkpoint-new and renamed, after the one before it: a kill at
any moment leaves one of the two whole. Of the global random generators only torch's for the CPU is
saved. Nothing draws from Python's, NumPy's and a GPU's.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from freshper.config import Config
from freshper.episode import Episode, StoredImage
from freshper.errors import Interrupted

if TYPE_CHECKING:
    from freshper.report import Report

MANIFEST = "manifest.json"
# This is the only class in state.pt. It holds bytes, which nothing runs.
torch.serialization.add_safe_globals([StoredImage])


class Saved(NamedTuple):
    """A checkpoint whose files are those of its manifest."""

    folder: Path
    iteration: int
    settings: dict[str, Any]
    today: date  # of the run's first start, which chat templates may show
    damage: str  # of the newest checkpoint, if this is the one before it


class Checkpoints:
    """Restore a run from the checkpoint of --resume, if there is one, and save it when it is due.

    `parts` are the objects with `state_dict` and `load_state_dict`, the trainer among them."""

    def __init__(self, report: "Report", **parts: Any):
        self.config = report.config
        self.report = report
        self.parts = parts | {"report": report}
        self.policy = report.policy
        if report.saved:
            self.restore(report.saved)
        elif self.config.resume:
            report.say(f"there is no checkpoint in {report.folder} yet: the run starts over")
        # From here on a first Ctrl-C waits for the iteration to end.
        report.ending.training = True

    def restore(self, saved: Saved) -> None:
        """Load the state of a checkpoint. Raises OSError if it does not hold plain data."""
        folder = saved.folder
        say = self.report.say
        if saved.damage:
            newest = f"the newest checkpoint is damaged ({saved.damage})"
            say(f"{newest}, so it is removed and the one before it used")
            # The next save would make it the one before, and so remove the whole one.
            remove(folder.with_name("checkpoint"))

        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            self.parts["trainer"].load_optimizer(str(folder))
            state["buffer"]["episodes"] = unpack_episodes(state["buffer"]["episodes"])
            # The schedule ends with the run, although --iterations, K or epochs may have changed.
            left = self.config.iterations - saved.iteration
            steps = left * self.config.updates_per_iteration
            state["trainer"]["total_updates"] = state["trainer"]["step"] + steps
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.policy.features.update(state["features"])
            torch.set_rng_state(state["torch"])
        # A file from someone else may hold anything.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise OSError(f"{folder} is not a checkpoint of this run: {reason}") from error

        done = f"iteration {saved.iteration} of {self.config.iterations}"
        say(f"resuming from {folder}, after {done}")
        for name, value in vars(self.config).items():
            if value != saved.settings[name] and name != "resume":
                say(f"{name} is {value}, was {saved.settings[name]}")

    def save_if_due(self) -> None:
        """Save every `save_every` iterations, at a best evaluation, at the end and after a signal.

        Raises Interrupted after a signal, and OSError if the checkpoint cannot be written."""
        done = self.report.done
        every = self.config.save_every
        evaluations = self.report.evaluations()
        finished = done == self.config.iterations
        regular = every and done % every == 0
        # Of equal evaluations the first counts.
        best = done == max(evaluations, key=evaluations.__getitem__)

        signal = self.report.ending.signal
        if best or regular or finished or signal:
            self.save(best)
        if signal and not finished:
            raise Interrupted(signal)

    def save(self, best: bool) -> None:
        """Write the newest checkpoint and, if it is the best, the model alone."""
        out = self.report.folder
        try:
            # The best comes first: a run that is killed between the two evaluates it again.
            if best:
                replace_folder(out / "checkpoint-best", self.parts["trainer"].save)
            replace_folder(out / "checkpoint", self.fill, before=out / "checkpoint-before")
            self.report.write_config()
        # safetensors, torch and the system each have errors of their own for a full disk.
        except Exception as error:
            shutil.rmtree(out / ".checkpoint-new", ignore_errors=True)
            # torch.save hides the error of the disk behind its own.
            hidden = error.__context__
            reason = hidden if isinstance(hidden, OSError) else error
            checkpoint = f"the checkpoint after iteration {self.report.done}"
            raise OSError(f"{checkpoint} was not written to {out}: {reason}") from error

    def fill(self, folder: str) -> None:
        """Write model, state and settings into a new folder, and last the manifest of them all."""
        self.parts["trainer"].save(folder)
        self.parts["trainer"].save_optimizer(folder)

        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["buffer"]["episodes"] = pack_episodes(state["buffer"]["episodes"])
        # The last bit of a feature can depend on the batch in which it was computed.
        state["features"] = self.policy.features
        state["torch"] = torch.get_rng_state()

        new = Path(folder)
        # With a path instead of a file, torch does not say that the disk is full.
        with open(new / "state.pt", "wb") as file:
            torch.save(state, file)
        run = {
            "iteration": self.report.done,
            "settings": vars(self.config),
            "today": self.policy.today.isoformat(),
        }
        (new / "run.json").write_text(json.dumps(run))
        files = [path for path in new.rglob("*") if path.is_file()]
        manifest = {str(path.relative_to(new)): fingerprint(path) for path in files}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1))


def find_saved(config: Config) -> Saved | None:
    """Return the newest whole checkpoint of --resume, None if there is none yet.

    Raises ValueError if all are damaged, or if the system cannot read one: nothing is removed."""
    if not config.resume:
        return None
    damage = ""
    for name in ("checkpoint", "checkpoint-before"):
        folder = Path(config.resume, name)
        if folder.exists():
            try:
                return read_saved(folder, damage)
            # A damaged file may hold anything, or be gone. Other errors of the system are none.
            except Exception as error:
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                    raise ValueError(f"--resume is {config.resume}, but: {error}") from error
                damage = damage or str(error)
    if damage:
        raise ValueError(
            f"--resume is {config.resume}, but all of its checkpoints are damaged: {damage}"
        )
    return None


def read_saved(folder: Path, damage: str) -> Saved:
    """Return a checkpoint. Raises ValueError, or whatever JSON can raise, if it is damaged."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name in {"state.pt", "run.json", *manifest}:
        if fingerprint(folder / name) != manifest[name]:
            raise ValueError(f"{name} has changed")
    run = json.loads((folder / "run.json").read_bytes())
    settings = {name: run["settings"][name] for name in vars(Config())}
    today = date.fromisoformat(run["today"])
    return Saved(folder, run["iteration"], settings, today, damage)


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
        remove(before)
        folder.rename(before)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def remove(folder: Path) -> None:
    """Remove a folder, or a link to one, if it is there."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Return episodes as columns, one per field.

    Arrays stand end to end with their lengths, because tens of thousands of small tensors would
    take long to save. An image that episodes share is saved once."""
    columns = {}
    for field in fields(Episode):
        column: Any = [getattr(episode, field.name) for episode in episodes]
        if column and isinstance(column[0], np.ndarray):
            lengths = [len(values) for values in column]
            column = {"values": torch.from_numpy(np.concatenate(column)), "lengths": lengths}
        columns[field.name] = column
    return columns


def unpack_episodes(columns: dict[str, Any]) -> list[Episode]:
    """Return the episodes of `pack_episodes`."""
    for name, column in columns.items():
        if isinstance(column, dict):
            parts = column["values"].split(column["lengths"])
            # They are copies, so that no episode keeps the arrays of all others in memory.
            columns[name] = [part.numpy().copy() for part in parts]
    return list(map(Episode, *columns.values()))
