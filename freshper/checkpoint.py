"""Checkpoints: everything that shapes the rest of a run, saved between two iterations and put back by --resume.

    out/checkpoint/          the newest: a Hugging Face folder, which `--model` and `from_pretrained` take, and state.pt
    out/checkpoint-before/   the one before it, used if the newest cannot be read
    out/checkpoint-best/     the model alone, of the evaluation with the highest success so far

state.pt holds tensors, numbers and strings, checked by the CRC-32 of its zip format and read with
`torch.load(weights_only=True)`: a file from someone else cannot run code. Environments need no state, since each
episode is reset with a seed of its own. On a CPU, with the same number of threads, a resumed run is bitwise identical
to one that never stopped. Not in the paper.

A checkpoint is written to .checkpoint-new and flushed to disk. Then checkpoint-before is removed, checkpoint becomes
checkpoint-before, and .checkpoint-new becomes checkpoint. A kill can leave an unfinished .checkpoint-new or
checkpoint-before beside a whole checkpoint, or, between the two renames, a whole checkpoint-before and no checkpoint.
Reading takes checkpoint, then checkpoint-before, and nothing else. A run killed in its first save starts again.
"""

import dataclasses
import os
import random
import shutil
import signal
import sys
import zlib
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open

from freshper.config import Config
from freshper.episode import Episode
from freshper.errors import Interrupted
from freshper.models import Policy
from freshper.report import Report


class StopSignals:
    """A context manager in which Ctrl-C and SIGTERM raise `Interrupted`. While `graceful`, the first one is only noted
    in `received`."""

    def __init__(self) -> None:
        self.graceful, self.received = False, 0

    def __enter__(self) -> "StopSignals":
        self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.graceful or self.received:
            raise Interrupted(number)
        self.received = number
        # not print: the signal may have come in the middle of one
        os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once, without\n")


class RunState:
    """Saves and restores a run. `parts` are the objects with `state_dict` and `load_state_dict`, by name."""

    def __init__(self, config: Config, policy: Policy, report: Report, signals: StopSignals, **parts: Any):
        self.config, self.policy, self.report, self.signals = config, policy, report, signals
        self.parts = parts | {"report": report}
        transformers.utils.logging.disable_progress_bar()  # of every save, across ours

    def restore(self) -> None:
        """Load the state of --resume, if there is one. From here on a first Ctrl-C waits for the iteration to end."""
        folder = newest(self.report.folder, quiet=True) if self.config.resume else None
        if folder:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            arrays = {name: x.numpy() for name, x in state["buffer"].items() if isinstance(x, torch.Tensor)}
            state["buffer"] |= arrays | {"episodes": unpack_episodes(state["buffer"]["episodes"])}
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.policy._features.update({key: x.to(self.policy.device) for key, x in state["features"].items()})
            random.setstate(state["python"])
            np.random.set_state(state["numpy"])
            torch.set_rng_state(state["torch"])
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
            if folder.name != "checkpoint":  # a damaged one must not replace the one before it at the next save
                shutil.rmtree(folder.with_name("checkpoint"), ignore_errors=True)
            self.report.say(f"resuming from {folder}, after iteration {self.report.done} of {self.config.iterations}")
        self.signals.graceful = True

    def save_if_due(self) -> None:
        """Save every `save_every` iterations, at a new best evaluation, at the end, and after a signal.

        Raises Interrupted after a signal, having saved, and OSError if the checkpoint cannot be written.
        """
        done, out, every = self.report.done, self.report.folder, self.config.save_every
        best, finished = self.report.best() == done, done == self.config.iterations
        if best or finished or self.signals.received or (every and done % every == 0):
            policy, state = self.parts["trainer"].whole_policy(), self._state()
            try:
                if best:  # first: a run that is killed after this comes to the same evaluation again
                    _write(out / "checkpoint-best", policy)
                _write(out / "checkpoint", policy, state)
            except (OSError, RuntimeError, SafetensorError) as error:
                shutil.rmtree(out / ".checkpoint-new", ignore_errors=True)
                reason = error.__context__ or error  # torch.save raises a RuntimeError after an OSError
                raise OSError(f"the checkpoint after iteration {done} was not written to {out}: {reason}") from error
        if self.signals.received and not finished:
            raise Interrupted(self.signals.received)

    def _state(self) -> dict[str, Any]:
        """Return what state.pt holds. Features of a frozen vision tower are in it, because their last bit can depend on
        the other images of the batch in which they were computed."""
        state = {name: part.state_dict() for name, part in self.parts.items()} | {"features": self.policy._features}
        state["buffer"] |= {"episodes": pack_episodes(state["buffer"]["episodes"])}
        state |= {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        return plain(state | {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()})


def newest(out: Path, quiet: bool = False) -> Path | None:
    """Return the checkpoint folder that a resumed run loads; None if the run had not saved one yet.

    Says on stderr if the newest is damaged. Raises ValueError if there are checkpoints but none can be read.
    """
    problems = []
    for folder in filter(Path.exists, (out / "checkpoint", out / "checkpoint-before")):
        try:
            with ZipFile(folder / "state.pt") as file:
                if name := file.testzip():
                    raise ValueError(f"{name} in state.pt does not have its CRC-32")
            torch.load(folder / "state.pt", map_location="cpu", weights_only=True, mmap=True)
            for path in list(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
                safe_open(path, "pt").keys()
        except (OSError, ValueError, RuntimeError, BadZipFile, UnpicklingError, SafetensorError) as error:
            problems.append(f"{folder} is damaged: {' '.join(str(error).split())[:200]}")
        else:
            if problems and not quiet:
                print(problems[0], file=sys.stderr)
            return folder
    if problems:
        raise ValueError(f"--resume is {out}, but none of its checkpoints can be read: {'; '.join(problems)}")
    return None


def _write(folder: Path, policy: Policy, state: dict[str, Any] | None = None) -> None:
    """Replace a folder by a model or, with a state, by a checkpoint; the checkpoint that was there is kept."""
    new = folder.with_name(".checkpoint-new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    policy.save(str(new))
    if state is not None:
        with open(new / "state.pt", "wb") as file:
            torch.save(state, file)
    for path in (*new.rglob("*"), new):  # after a power failure a renamed file could otherwise be empty
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    if state is not None and folder.exists():
        shutil.rmtree(folder.with_name("checkpoint-before"), ignore_errors=True)
        folder.rename(folder.with_name("checkpoint-before"))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def plain(tree: Any) -> Any:
    """Return a state without NumPy's types. Raises TypeError on a type that could be saved but not loaded."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(plain, tree))
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, torch.Tensor) or type(tree) in (bool, int, float, str, bytes):
        return tree
    raise TypeError(f"a checkpoint cannot hold a {type(tree).__name__}: {tree}")


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Return episodes as columns, one per field. Each image object (the buffer shares them) is stored once."""
    images = {id(image): image for e in episodes for image in e.images}
    number = {key: k for k, key in enumerate(images)}
    columns = {field.name: [getattr(e, field.name) for e in episodes] for field in dataclasses.fields(Episode)}
    columns["images"] = [np.array([number[id(image)] for image in e.images], np.int64) for e in episodes]
    blobs = [np.frombuffer(zlib.compress(image.tobytes(), 1), np.uint8) for image in images.values()]
    shapes = [image.shape for image in images.values()]
    return {"columns": {name: _join(x) for name, x in columns.items()}, "blobs": _join(blobs), "shapes": shapes}


def unpack_episodes(packed: dict[str, Any]) -> list[Episode]:
    """Return the episodes that `pack_episodes` was given, from what `plain` made of it; equal images are one array."""
    pixels = [np.frombuffer(zlib.decompress(blob), np.uint8) for blob in _split(packed["blobs"])]
    images = [flat.reshape(shape) for flat, shape in zip(pixels, packed["shapes"], strict=True)]
    columns = {name: _split(column) for name, column in packed["columns"].items()}
    columns["images"] = [[images[k] for k in shown] for shown in columns["images"]]
    return [Episode(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _join(column: list[Any]) -> Any:
    """Return arrays as one with their lengths, numbers as an array, and anything else as it is."""
    if column and isinstance(column[0], np.ndarray):
        return {"values": np.concatenate(column), "lengths": np.array([len(part) for part in column])}
    return np.array(column) if column and isinstance(column[0], int | float) else column


def _split(column: Any) -> list[Any]:
    """Return what `_join` was given. Arrays are copies: one episode must not keep those of all others in memory."""
    if isinstance(column, dict):
        ends = column["lengths"].cumsum(0)[:-1].tolist()
        return [part.copy() for part in np.split(column["values"].numpy(), ends)]
    return column.tolist() if isinstance(column, torch.Tensor) else column
