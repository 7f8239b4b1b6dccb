"""The state of a run as JSON and arrays, and back: what `freshper/checkpoint.py` writes to files.

Episodes are stored as one long array a field, with their lengths, also what the trainer noted of each token in `info`;
equal pictures once, each compressed with zlib. Not in the paper.
"""

import zlib
from typing import Any

import numpy as np
import torch

from freshper.episode import Episode, picture_key


def flatten(tree: Any, arrays: dict[str, torch.Tensor], path: str = "") -> Any:
    """What JSON can say of a nest of dicts, lists, numbers, strings and arrays; the arrays go to `arrays`, by path.

    Tuples come back as lists. Raises TypeError on anything else.
    """
    if isinstance(tree, torch.Tensor):
        arrays[path] = tree.detach().cpu().contiguous()
        return {"__torch__": path}
    if isinstance(tree, np.ndarray):
        arrays[path] = torch.from_numpy(np.array(tree, order="C"))
        return {"__numpy__": path}
    if isinstance(tree, dict):
        if all(isinstance(key, str) for key in tree):
            return {key: flatten(value, arrays, f"{path}/{key}") for key, value in tree.items()}
        return {"__items__": [[key, flatten(value, arrays, f"{path}/{key}")] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [flatten(value, arrays, f"{path}/{k}") for k, value in enumerate(tree)]
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{path} is a {type(tree).__name__}, which a checkpoint cannot hold")


def unflatten(tree: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """The inverse of `flatten`. Arrays are copies in memory of their own, not views of a file."""
    if isinstance(tree, list):
        return [unflatten(value, arrays) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if "__torch__" in tree:
        return arrays[tree["__torch__"]].clone()
    if "__numpy__" in tree:
        return arrays[tree["__numpy__"]].numpy().copy()
    if "__items__" in tree:
        return {key: unflatten(value, arrays) for key, value in tree["__items__"]}
    return {key: unflatten(value, arrays) for key, value in tree.items()}


_PER_TOKEN = ("tokens", "action_mask", "behavior_logprobs")


def pack_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """A list of episodes as a few long arrays: n episodes, sum T tokens, each different picture once."""
    slots: dict[bytes, int] = {}  # content of a picture -> its number
    known: dict[int, int] = {}  # its address -> its number: the buffer shares equal pictures
    pictures: list[np.ndarray] = []
    for image in (image for e in episodes for image in e.images):
        if id(image) not in known:
            known[id(image)] = slots.setdefault(picture_key(image), len(pictures))
            if known[id(image)] == len(pictures):
                pictures.append(image)
    blobs = [np.frombuffer(zlib.compress(image.tobytes(), 1), np.uint8) for image in pictures]
    per_episode = {
        "lengths": np.array([len(e.tokens) for e in episodes], np.int64),
        "turns": np.array([len(e.turn_rewards) for e in episodes], np.int64),
        "shown": np.array([len(e.images) for e in episodes], np.int64),
        "rewards": np.array([e.reward for e in episodes], np.float64),
        "steps": np.array([e.step for e in episodes], np.int64),
        "seeds": np.array([e.seed for e in episodes], np.int64),
    }
    long = {name: _joined([getattr(e, name) for e in episodes]) for name in (*_PER_TOKEN, "turn_rewards")}
    noted = [name for name in (episodes[0].info if episodes else ()) if all(_of_tokens(e, name) for e in episodes)]
    return per_episode | {
        **long,
        "notes": {name: _joined([e.info[name] for e in episodes]) for name in noted},  # log pi_ref and the like
        "images": np.array([known[id(image)] for e in episodes for image in e.images], np.int64),
        "picture_bytes": _joined(blobs),
        "picture_sizes": np.array([len(blob) for blob in blobs], np.int64),
        "picture_shapes": [list(image.shape) for image in pictures],
        "envs": [e.env for e in episodes],
        "infos": [{name: value for name, value in e.info.items() if name not in noted} for e in episodes],
    }


def unpack_episodes(packed: dict[str, Any]) -> list[Episode]:
    """The inverse of `pack_episodes`. Equal pictures are one array."""
    pictures = [
        np.frombuffer(zlib.decompress(blob.tobytes()), np.uint8).reshape(shape)
        for blob, shape in zip(_split(packed["picture_bytes"], packed["picture_sizes"]), packed["picture_shapes"],
                               strict=True)
    ]  # fmt: skip
    columns: list[list[Any]] = [_split(packed[name], packed["lengths"]) for name in _PER_TOKEN]
    columns += [packed["rewards"].tolist(), _split(packed["turn_rewards"], packed["turns"])]
    columns += [[[pictures[i] for i in shown] for shown in _split(packed["images"], packed["shown"])]]
    notes = {name: _split(long, packed["lengths"]) for name, long in packed["notes"].items()}
    infos = [info | {name: rows[k] for name, rows in notes.items()} for k, info in enumerate(packed["infos"])]
    columns += [packed["steps"].tolist(), packed["envs"], packed["seeds"].tolist(), infos]
    return [Episode(*fields) for fields in zip(*columns, strict=True)]


def _of_tokens(episode: Episode, name: str) -> bool:
    """Whether `info` holds a number for each token under this name."""
    value = episode.info.get(name)
    return isinstance(value, np.ndarray) and value.shape == episode.tokens.shape


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _split(long: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Copies, so that one episode does not keep the arrays of all the others in memory."""
    ends = np.cumsum(lengths).tolist()
    return [long[end - n : end].copy() for end, n in zip(ends, lengths.tolist(), strict=True)]
