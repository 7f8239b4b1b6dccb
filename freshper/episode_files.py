"""The replay buffer in a checkpoint: files of episodes, written once and copied from checkpoint to checkpoint.

Nothing here is in the paper. Between two checkpoints a buffer of 50,000 episodes gains a few hundred, and the rest do
not change: an episode is never touched again once it is stored. So a checkpoint packs and compresses only those that
the one before it does not hold, and copies the files with the others, whole:

    episodes-000000.safetensors    a few long arrays (freshper/packing.py), and as `json`, in UTF-8, what is no array
    episodes-000001.safetensors    the episodes that were new at the next checkpoint, and so on

Copies, not links: one bit that flips must not reach every checkpoint. A copy is compared with its SHA-256 as it is
made; what does not fit any more is written again from memory. All is packed into one file anew where more than
half of what would be copied has been evicted, or the files have become many.
"""

import hashlib
import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from freshper.episode import Episode
from freshper.packing import flatten, pack_episodes, unflatten, unpack_episodes

MOST_FILES = 64


class EpisodeFiles:
    """Knows which file of the newest checkpoint holds which episode."""

    def __init__(self) -> None:
        self.places: weakref.WeakKeyDictionary[Episode, tuple[str, int]] = weakref.WeakKeyDictionary()
        self.files: dict[str, dict[str, Any]] = {}  # name -> bytes and SHA-256, as in a manifest
        self.sizes: dict[str, int] = {}  # name -> episodes in it

    def write(self, episodes: list[Episode], before: Path, new: Path) -> dict[str, Any]:
        """Make the folder `new` hold these episodes, from the folder `before` where that has them. Returns where
        each one is, for `read`. Raises OSError or SafetensorError where something cannot be written."""
        used = Counter(self.places[e][0] for e in episodes if e in self.places)
        if len(used) >= MOST_FILES or sum(self.sizes[name] for name in used) > 2 * sum(used.values()):
            used.clear()
        kept = [name for name in sorted(used) if _copy(before / name, new / name, self.files[name]["sha256"])]
        fresh = [e for e in episodes if e not in self.places or self.places[e][0] not in kept]
        if fresh:
            numbers = [int(name[9:15]) + 1 for name in self.files]
            name = f"episodes-{max(numbers, default=0):06d}.safetensors"
            arrays: dict[str, torch.Tensor] = {}
            text = json.dumps(flatten(pack_episodes(fresh), arrays))
            arrays["json"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            save_file(arrays, new / name)
            self.places.update((e, (name, row)) for row, e in enumerate(fresh))
            self.sizes[name] = len(fresh)
            self.files[name] = describe(new / name)
            kept.append(name)
        self.files = {name: self.files[name] for name in kept}
        number = {name: k for k, name in enumerate(kept)}
        places = np.array([(number[name], row) for name, row in map(self.places.__getitem__, episodes)], np.int64)
        return {"files": kept, "places": places.reshape(-1, 2)}

    def read(self, index: dict[str, Any], folder: Path, files: dict[str, dict[str, Any]]) -> list[Episode]:
        """The episodes that `write` put into `folder`; `files` are those of its manifest."""
        held = []
        for name in index["files"]:
            arrays = load_file(folder / name)
            tree = json.loads(arrays.pop("json").numpy().tobytes())
            held.append(unpack_episodes(unflatten(tree, arrays)))
            self.files[name], self.sizes[name] = files[name], len(held[-1])
        episodes = [held[k][row] for k, row in index["places"].tolist()]
        self.places.update((held[k][row], (index["files"][k], row)) for k, row in index["places"].tolist())
        return episodes


def describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as a manifest gives them."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _copy(source: Path, target: Path, sha256: str) -> bool:
    """Whether the copy has this SHA-256; where it has not, there is none."""
    if not source.is_file():
        return False
    digest = hashlib.sha256()
    with source.open("rb") as old, target.open("wb") as new:
        while chunk := old.read(1 << 20):
            digest.update(chunk)
            new.write(chunk)
    if digest.hexdigest() != sha256:
        target.unlink()
        return False
    return True
