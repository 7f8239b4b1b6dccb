"""Checkpoints: what shapes the rest of a run, saved between two iterations, restored by --resume.

    checkpoint/              the newest: a Hugging Face folder, which `--model` takes, and state.pt,
                             optimizer-0.pt (one file per rank of the trainer), run.json (settings
                             and a hash of the rows of --data, date, threads), manifest.json
                             (checksums)
    checkpoint-before/       the one before it, used if the newest is not what its manifest says

The .pt files are read with `torch.load(weights_only=True)`: one from someone else cannot run code.
On a CPU a resumed run is bitwise identical to one that never stopped. It computes with the same
number of threads, unless OMP_NUM_THREADS says another or the machine has fewer. A checkpoint is
written to .checkpoint-new. Then the newest is renamed to checkpoint-before, and the new one to
checkpoint: a kill at any moment leaves one of the two whole. Nothing draws from a global random
generator, so none is saved.
"""

import hashlib
import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from envs.base import UserError
from freshper.episode import Episode, StoredImage
from freshper.errors import reason_of

MANIFEST = "manifest.json"
# Of a larger file the manifest has the size alone: to read the 100 GB of a 7B model and its
# optimizer again would take minutes at each save (SHA-256: 0.7 GB/s).
LARGE = 2**30
# This is the only class in state.pt. It holds bytes, which nothing runs.
torch.serialization.add_safe_globals([StoredImage])

Parts = dict[str, Any]  # by name, objects with `state_dict` and `load_state_dict`


class Saved(NamedTuple):
    """A checkpoint whose files match its manifest."""

    folder: Path
    damage: str  # of the newest checkpoint, if this is the one before it
    made_with: dict[str, Any]  # settings, and a hash of the rows of --data
    today: date  # of the run's first start, which chat templates may show
    threads: int  # on which the order of sums depends


def save(out: Path, parts: Parts, made_with: dict[str, Any]) -> None:
    """Write the newest checkpoint of a run. What was the newest becomes the one before.

    `parts` are at least `trainer`, `engine` and `buffer`. Raises UserError if it cannot be
    written: the other checkpoints stay."""
    new = out / ".checkpoint-new"
    newest = out / "checkpoint"
    before = out / "checkpoint-before"
    state = {name: part.state_dict() for name, part in parts.items()}
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        fill(new, parts, state, made_with)
        if newest.exists():
            shutil.rmtree(before, ignore_errors=True)
            newest.rename(before)
        new.rename(newest)
    except UserError:
        raise
    # safetensors, torch and the system each have errors of their own for a full disk.
    except Exception as error:
        shutil.rmtree(new, ignore_errors=True)
        # torch.save hides the error of the disk behind its own.
        hidden = error.__context__
        reason = reason_of(hidden if isinstance(hidden, OSError) else error)
        raise UserError(f"the checkpoint was not written to {out}: {reason}") from error


def fill(folder: Path, parts: Parts, state: dict[str, Any], made_with: dict[str, Any]) -> None:
    """Write model and state into a new folder, and last the checksums of them all."""
    parts["trainer"].save(str(folder))
    parts["trainer"].save_optimizer(str(folder))

    policy = parts["engine"].policy
    state["buffer"]["episodes"] = pack_episodes(state["buffer"]["episodes"])
    # The last bit of a feature can depend on the batch in which it was computed.
    state["features"] = policy.features
    state["held_out_features"] = policy.held_out_features
    # With a path instead of a file, torch does not say that the disk is full.
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)

    run = {
        "made_with": made_with,
        "today": policy.today.isoformat(),
        "threads": torch.get_num_threads(),
    }
    (folder / "run.json").write_text(json.dumps(run))
    (folder / MANIFEST).write_text(json.dumps(checksums(folder), indent=1))


def load(saved: Saved, parts: Parts) -> None:
    """Give the parts the state of a checkpoint. Raises UserError if it does not hold plain data."""
    folder = saved.folder
    try:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        parts["trainer"].load_optimizer(str(folder))
        state["buffer"]["episodes"] = unpack_episodes(state["buffer"]["episodes"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
        policy = parts["engine"].policy
        policy.features.update(state["features"])
        policy.held_out_features.update(state["held_out_features"])
    # A file from someone else may hold anything.
    except Exception as error:
        raise UserError(f"{folder} is not a checkpoint of this run: {reason_of(error)}") from error


def find_saved(run: str) -> Saved | None:
    """Return the newest whole checkpoint in the folder of a run ("": no run), or None.

    Raises UserError if all are damaged, or the system cannot read one: nothing is removed."""
    damage = ""
    for name in ("checkpoint", "checkpoint-before") if run else ():
        folder = Path(run, name)
        try:
            if folder.exists():
                return read_saved(folder, damage)
        except OSError as error:
            raise UserError(f"{folder} cannot be read: {error}") from error
        # A damaged file may hold anything.
        except Exception as error:
            damage = damage or str(error)
    if damage:
        raise UserError(f"all checkpoints of {run} are damaged: {damage}")
    return None


def read_saved(folder: Path, damage: str) -> Saved:
    """Return a checkpoint. Raises ValueError, or whatever JSON can raise, if it is damaged."""
    found = checksums(folder)
    if MANIFEST not in found:
        raise ValueError(f"it has no {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name in {"state.pt", "run.json", *manifest}:
        if found.get(name) != manifest[name]:
            raise ValueError(f"{name} has changed")
    run = json.loads((folder / "run.json").read_bytes())
    threads = max(1, int(run["threads"]))
    return Saved(folder, damage, dict(run["made_with"]), date.fromisoformat(run["today"]), threads)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by its path there. Of a LARGE one: its size."""
    sums = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        name = str(path.relative_to(folder))
        size = path.stat().st_size
        if size > LARGE:
            sums[name] = f"{size} bytes"
            continue
        with open(path, "rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Return episodes as columns, one per field.

    Arrays stand end to end, with their lengths, because tens of thousands of small tensors would
    take long to save."""
    columns: dict[str, Any] = {}
    for name in Episode.__dataclass_fields__:
        values = [getattr(episode, name) for episode in episodes]
        columns[name] = values
        if values and isinstance(values[0], np.ndarray):
            end_to_end = torch.from_numpy(np.concatenate(values))
            columns[name] = (end_to_end, [len(array) for array in values])
    return columns


def unpack_episodes(columns: dict[str, Any]) -> list[Episode]:
    """Return the episodes of `pack_episodes`."""
    for name, column in columns.items():
        if isinstance(column, tuple):
            parts = torch.split(*column)
            # They are copies, so that no episode keeps the arrays of all others in memory.
            columns[name] = [part.numpy().copy() for part in parts]
    # A column that is missing is an error, although its field has a default.
    return list(map(Episode, *(columns[name] for name in Episode.__dataclass_fields__)))
