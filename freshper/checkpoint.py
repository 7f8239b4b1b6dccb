"""Checkpoints: everything that shapes the rest of a run, saved between two iterations and put back by --resume.

    out/checkpoint/          the newest: a Hugging Face folder, which `--model` and `from_pretrained` take, and
                             state.pt, run.json (iteration and settings), manifest.json (sizes and checksums of all)
    out/checkpoint-before/   the one before it, used if a file of the newest is missing or not what the manifest says
    out/checkpoint-best/     the model alone, of the evaluation with the highest success so far

state.pt is read with `torch.load(weights_only=True)`: a file from someone else cannot run code. On a CPU, with the same
number of threads, a resumed run is bitwise identical to one that never stopped. A checkpoint is written to
.checkpoint-new and renamed, after the one before it: a kill at any moment leaves one of the two whole. A file that
the system cannot read (permissions, a disk) is not damaged: the run stops, and nothing is removed.
"""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any, NamedTuple

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


class StopSignals:
    """A context in which Ctrl-C and SIGTERM raise `Interrupted`. While `graceful`, the first is noted in `received`."""

    graceful, received = False, 0

    def __enter__(self) -> "StopSignals":
        self.before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.graceful or self.received:
            raise Interrupted(number)
        self.received = number
        # not print: the signal may have come in the middle of one
        os.write(
            2,
            b"\nstopping after this iteration, with a checkpoint; once more stops at once, without\n",
        )


class RunState:
    """Saves and restores a run. `parts` are the objects with `state_dict` and `load_state_dict`, by name."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        report: Report,
        signals: StopSignals,
        saved: "Saved | None",
        **parts: Any,
    ):
        self.config, self.policy, self.report, self.signals = config, policy, report, signals
        self.saved = saved
        self.parts = parts | {"report": report}
        transformers.utils.logging.disable_progress_bar()  # of every save, across ours

    def restore(self) -> None:
        """Load the state of the checkpoint of --resume, if there is one. From here on a first Ctrl-C waits for the
        iteration to end. Raises OSError if the state cannot be loaded, or is not the one that came with the policy."""
        if self.saved:
            self._load(*self.saved)
        elif self.config.resume:
            self.report.say(
                f"there is no checkpoint in {self.report.folder} yet: the run starts over"
            )
        self.signals.graceful = True

    def _load(self, folder: Path, manifest: bytes, damage: str) -> None:
        if (folder / MANIFEST).read_bytes() != manifest:
            raise OSError(f"another process has replaced {folder} while it was loaded")
        if damage:  # it must not replace the other at the next save
            self.report.say(
                f"the newest checkpoint is damaged ({damage}), so it is removed and the one before it used"
            )
            shutil.rmtree(folder.with_name("checkpoint"))
        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise OSError(
                f"{folder / 'state.pt'} does not hold plain data: {str(error).splitlines()[0]}"
            ) from error

        arrays = {
            name: x.numpy() for name, x in state["buffer"].items() if isinstance(x, torch.Tensor)
        }
        state["buffer"] |= arrays | {"episodes": unpack_episodes(state["buffer"]["episodes"])}
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.policy._features.update(
            {key: x.to(self.policy.device) for key, x in state["features"].items()}
        )
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
        self.report.say(
            f"resuming from {folder}, after iteration {self.report.done} of {self.config.iterations}"
        )

    def save_if_due(self) -> None:
        """Save every `save_every` iterations, at a new best evaluation, at the end, and after a signal, which is then
        raised as Interrupted. Raises OSError if the checkpoint cannot be written."""
        done, out, every = self.report.done, self.report.folder, self.config.save_every
        found, finished = self.report.evaluations(), done == self.config.iterations
        best = done == max(found, key=found.__getitem__, default=0)  # the first of equals
        if best or finished or self.signals.received or (every and done % every == 0):
            try:
                if (
                    best
                ):  # first: a run that is killed after this comes to the same evaluation again
                    _write(out / "checkpoint-best", self.parts["trainer"].save)
                _write(out / "checkpoint", self._save, before=out / "checkpoint-before")
            except (OSError, RuntimeError, SafetensorError) as error:
                shutil.rmtree(out / ".checkpoint-new", ignore_errors=True)
                reason = (
                    error.__context__ if isinstance(error.__context__, OSError) else error
                )  # torch.save hides it
                raise OSError(
                    f"the checkpoint after iteration {done} was not written to {out}: {reason}"
                ) from error
        if self.signals.received and not finished:
            raise Interrupted(self.signals.received)

    def _save(self, folder: str) -> None:
        """Write model, state and settings, and last the manifest of them all."""
        self.parts["trainer"].save(folder)
        # features of a frozen vision tower: their last bit can depend on the batch in which they were computed
        state = {name: part.state_dict() for name, part in self.parts.items()} | {
            "features": self.policy._features
        }
        state["buffer"] |= {"episodes": pack_episodes(state["buffer"]["episodes"])}
        state |= {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        state |= {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
        new = Path(folder)
        with open(
            new / "state.pt", "wb"
        ) as file:  # by its path, torch would not say that the disk is full
            torch.save(plain(state), file)

        run = {"iteration": self.report.done, "settings": dataclasses.asdict(self.config)}
        (new / "run.json").write_text(json.dumps(run))
        files = [path for path in new.rglob("*") if path.is_file()]
        manifest = {str(path.relative_to(new)): fingerprint(path) for path in files}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1))


class Saved(NamedTuple):
    """A checkpoint whose files are those of its manifest."""

    folder: Path
    manifest: bytes
    damage: str  # of the newest checkpoint, if this is the one before it


def find_saved(config: Config, given: tuple[str, ...]) -> Saved | None:
    """Return the checkpoint to go on from, if there is one. Raises
    ValueError as `newest` does, if a setting may not change, or if the run has done --iterations already."""
    saved = newest(Path(config.resume))
    if not saved:
        return None
    run = json.loads((saved.folder / "run.json").read_bytes())
    check_unchanged(run["settings"], vars(config))
    if "iterations" in given and (done := run["iteration"]) >= config.iterations:
        raise ValueError(
            f"--iterations is {config.iterations}, but must be above {done}, which the run has done"
        )
    return saved


def newest(out: Path) -> Saved | None:
    """Return the newest whole checkpoint, None without any. Raises ValueError if all are damaged, or if a file cannot
    be read."""
    damage = ""
    try:
        for folder in filter(Path.exists, (out / "checkpoint", out / "checkpoint-before")):
            if not (found := find_damage(folder)):
                return Saved(folder, (folder / MANIFEST).read_bytes(), damage)
            damage = damage or found
    except OSError as error:
        raise ValueError(
            f"--resume is {out}, but its checkpoint cannot be read: {error}"
        ) from error
    if damage:
        raise ValueError(f"--resume is {out}, but all of its checkpoints are damaged: {damage}")
    return None


def find_damage(folder: Path) -> str:
    """Return what is wrong with a checkpoint, "" if nothing. Raises OSError if a file is there and cannot be read."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_bytes()))
        for name in sorted({"state.pt", *manifest}):
            if fingerprint(folder / name) != manifest[name]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"{MANIFEST} has changed"
    return ""


def fingerprint(path: Path) -> list:
    """Return a file's size and SHA-256."""
    with open(path, "rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _write(folder: Path, save: Callable[[str], None], before: Path | None = None) -> None:
    """Replace a folder by a new one that `save` fills. What was there becomes `before`, or is removed."""
    new = folder.with_name(".checkpoint-new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    save(str(new))
    if before and folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def plain(tree: Any) -> Any:
    """Return a state with tensors and numbers for NumPy's, which `weights_only` does not load."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(plain, tree))
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    return tree.item() if isinstance(tree, np.generic) else tree


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Return episodes as columns, one per field: arrays end to end with their lengths (tens of thousands of small
    tensors would take long to save), and each image of the buffer, which shares them, once."""
    images: dict[int, Any] = {id(image): image for e in episodes for image in e.images}
    number = {key: k for k, key in enumerate(images)}
    columns: dict[str, Any] = {
        f.name: [getattr(e, f.name) for e in episodes] for f in dataclasses.fields(Episode)
    }
    columns["images"] = [[number[id(image)] for image in shown] for shown in columns["images"]]
    for name, column in columns.items():
        if column and isinstance(column[0], np.ndarray):
            columns[name] = {
                "values": np.concatenate(column),
                "lengths": np.array([len(part) for part in column]),
            }
    return {"columns": columns, "images": [dataclasses.astuple(image) for image in images.values()]}


def unpack_episodes(packed: dict[str, Any]) -> list[Episode]:
    """Return the episodes that `pack_episodes` was given, from what `plain` made of it."""
    images = [StoredImage(*parts) for parts in packed["images"]]
    columns = dict(packed["columns"])
    columns["images"] = [[images[k] for k in shown] for shown in columns["images"]]
    for name, column in columns.items():
        if isinstance(
            column, dict
        ):  # copies: one episode must not keep the arrays of all others in memory
            columns[name] = [
                part.numpy().copy() for part in column["values"].split(column["lengths"].tolist())
            ]
    return [
        Episode(**dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
