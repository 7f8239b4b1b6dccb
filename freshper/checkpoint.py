"""A checkpoint on disk: what is in it, how it is written, and how a whole one is told from a damaged one.

Nothing here is in the paper; a run of its length (400 iterations, a buffer of 50,000 episodes) needs it.

    out/checkpoint/            the newest, in the Hugging Face format: `--model` and `from_pretrained` take it
        config.json, model.safetensors, tokenizer.json, ...   model, tokenizer, image processor
        episodes-*.safetensors the episodes of the replay buffer (freshper/episode_files.py)
        state.safetensors      every other array: optimizer, priorities, random number generators
        state.json             everything else, with {"__torch__": name} or {"__numpy__": name} where an array was
                               (freshper/packing.py)
        manifest.json          format, version, iterations done; size and SHA-256 of each file and of the rest of
                               the manifest itself
    out/checkpoint-000040/     an older one, after 40 iterations (the last few and the best are kept)

Nothing is pickled, so a checkpoint from someone else can be read without running their code.

A checkpoint is written under another name, flushed to the disk, and renamed, manifest last. Whatever the moment
of a crash, some folder holds a whole one: `checkpoint`, `checkpoint-*`, or the new one before its renaming.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from freshper.episode import Episode
from freshper.episode_files import EpisodeFiles, describe
from freshper.models import Policy
from freshper.packing import flatten, unflatten

FORMAT, VERSION = "freshper checkpoint", 4
UNFINISHED, DAMAGED = ".checkpoint-unfinished", "damaged-checkpoint"
NUMBERED = "checkpoint-" + "[0-9]" * 6  # what else stands in the folder is its owner's


class Checkpoint(NamedTuple):
    """A checkpoint that was found whole."""

    folder: Path
    done: int  # iterations
    state: dict[str, Any]
    files: dict[str, dict[str, Any]]  # of the manifest


# -- writing -------------------------------------------------------------------------------------------------


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there as a whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8", newline="")
        _flush(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def save(
    out: Path,
    done: int,
    policy: Policy,
    state: dict[str, Any],
    best: int,
    keep: int,
    episodes: list[Episode] | None = None,
    episode_files: EpisodeFiles | None = None,
) -> None:
    """Make out/checkpoint the state after `done` iterations; the checkpoint before it becomes out/checkpoint-<done>.

    `episode_files` is that of the last save or read, so that only `episodes` that are new since are packed.
    Of the older ones the newest `keep` - 1 stay, and the `best`, named by its iterations. Raises OSError where
    something cannot be written; what was there stays then.
    """
    new = out / UNFINISHED
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        policy.save(str(new))
        episode_files = episode_files or EpisodeFiles()
        state = state | {"episodes": episode_files.write(episodes or [], out / "checkpoint", new)}
        arrays: dict[str, torch.Tensor] = {}
        (new / "state.json").write_text(json.dumps(flatten(state, arrays)), encoding="utf-8")
        save_file(arrays, new / "state.safetensors")
        files = {}
        for path in sorted(path for path in new.rglob("*") if path.is_file()):
            _flush(path)
            files[path.relative_to(new).as_posix()] = episode_files.files.get(path.name) or describe(path)
        manifest = {"format": FORMAT, "version": VERSION, "done": done, "files": files}
        manifest["sha256"] = _own_sum(manifest)
        write_whole(new / "manifest.json", json.dumps(manifest, indent=1) + "\n")
        _flush(new)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"the checkpoint of iteration {done} could not be written to {out}/: {error}") from error
    _put_in_place(out, new)
    older = sorted((int(path.name.split("-")[1]), path) for path in out.glob(NUMBERED))
    newest = [n for n, _ in older if n < done][::-1][: keep - 1]
    for n, path in older:
        if n >= done or n not in (*newest, best):  # those of later iterations stem from before a fall-back
            shutil.rmtree(path)


def _put_in_place(out: Path, new: Path) -> None:
    """Rename: what is out/checkpoint steps aside under its number, `new` takes its place."""
    current = out / "checkpoint"
    if current.exists():
        try:
            aside = out / f"checkpoint-{_manifest(current)['done']:06d}"
        except ValueError:
            aside = out / DAMAGED
        shutil.rmtree(aside, ignore_errors=True)
        current.rename(aside)
    new.rename(current)
    _flush(out)


def adopt(found: Checkpoint) -> None:
    """Before a resumed run goes on: make the checkpoint it goes on from out/checkpoint. One that is in the way gets its
    number; a damaged one is kept as out/damaged-checkpoint, for its owner to look at."""
    current = found.folder.parent / "checkpoint"
    if found.folder == current:
        return
    if current.exists():
        try:
            _check_files(current, _manifest(current)["files"])
        except ValueError:
            shutil.rmtree(current.with_name(DAMAGED), ignore_errors=True)
            current.rename(current.with_name(DAMAGED))
    _put_in_place(current.parent, found.folder)


def _flush(path: Path) -> None:
    """fsync a file or a folder: renaming promises nothing about the content that is not on the disk yet."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _own_sum(manifest: dict[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


class OtherVersionError(ValueError):
    """Written by another version of this format: refused, never guessed at."""


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked against its own sum. Raises ValueError with what is wrong."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError("manifest.json is missing")
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("manifest.json cannot be read") from error
    if isinstance(version, int) and version != VERSION:
        raise OtherVersionError(f"{folder} has the checkpoint format {version}, but must have {VERSION}")
    if manifest.get("sha256") != _own_sum(manifest):
        raise ValueError("manifest.json does not have the SHA-256 that it gives for itself")
    return manifest


def _check_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raises ValueError with the first file that is not what the manifest says."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        if describe(path) != expected:
            raise ValueError(f"{name} does not have the SHA-256 that the manifest gives")


def find(out: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run (None where it had not saved any yet), and a sentence on each that is
    damaged. Raises ValueError where there are checkpoints but none is whole, or one has another format version."""
    manifests, problems = [], []
    folders = [path for path in (out / "checkpoint", *sorted(out.glob(NUMBERED), reverse=True)) if path.is_dir()]
    if (out / UNFINISHED / "manifest.json").is_file():  # without one it was never finished: nothing to report
        folders.append(out / UNFINISHED)
    for folder in folders:
        try:
            manifests.append((_manifest(folder), folder))
        except OtherVersionError:
            raise
        except ValueError as error:
            problems.append(f"{folder} is damaged: {error}")
    for manifest, folder in sorted(manifests, key=lambda pair: -pair[0]["done"]):
        try:
            _check_files(folder, manifest["files"])
        except ValueError as error:
            problems.append(f"{folder} is damaged: {error}")
            continue
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(folder, manifest["done"], state, manifest["files"]), problems
    if problems:
        raise ValueError(f"no checkpoint of it is whole: {'; '.join(problems)}")
    return None, []


def read_state(found: Checkpoint, episode_files: EpisodeFiles | None = None) -> dict[str, Any]:
    """The state as `save` was given it (tuples as lists), with the `episodes`."""
    state = unflatten(found.state, load_file(found.folder / "state.safetensors"))
    files = episode_files or EpisodeFiles()
    return state | {"episodes": files.read(state["episodes"], found.folder, found.files)}
