"""The replay buffer in a checkpoint: whatever came, went or was damaged between two saves, all of it is there again."""

import json
import shutil

import numpy as np
from conftest import make_episode
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper import episode_files
from freshper.episode_files import EpisodeFiles, describe
from freshper.packing import flatten, pack_episodes


def said(episodes):
    """All that is in them, in an order and a form that can be compared."""
    arrays = {}
    text = json.dumps(flatten(pack_episodes(episodes), arrays))
    return text, {name: (a.dtype, a.tolist()) for name, a in arrays.items()}


def described(folder):
    return {path.name: describe(path) for path in folder.iterdir()}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.sampled_from(["", "flip", "cut", "lose", "resume"]))))
def test_what_is_written_is_read(tmp_path_factory, saves):
    """Some new episodes and some evicted at every save; now and then a file of the checkpoint before is damaged, or the
    process is a new one."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(len(saves))
    images = [rng.integers(0, 256, (4, 4, 3)).astype(np.uint8) for _ in range(2)]
    files, episodes, before = EpisodeFiles(), [], folder / "none"
    for k, (new, share, event) in enumerate(saves):
        held = sorted(before.glob("*"))
        if held and event in ("flip", "cut", "lose"):
            data = bytearray(held[k % len(held)].read_bytes())
            data[len(data) // 2] ^= 1
            held[k % len(held)].write_bytes(data if event == "flip" else data[:-1])
            if event == "lose":
                held[k % len(held)].unlink()
        episodes = [e for e in episodes if rng.random() < share]
        episodes += [make_episode(rng, image=images[i % 2], seed=i, info={"success": True}) for i in range(new)]
        after = folder / f"{k}"
        after.mkdir()
        index = json.loads(json.dumps(files.write(episodes, before, after), default=np.ndarray.tolist))
        manifest = described(after)
        assert manifest == files.files
        assert sorted(index["files"]) == sorted(manifest)
        again = EpisodeFiles()
        back = again.read(index | {"places": np.array(index["places"])}, after, manifest)
        assert said(back) == said(episodes)
        if event == "resume":
            files, episodes = again, back
        before = after


def test_only_what_is_new_is_packed(tmp_path):
    """A second save copies the first file byte for byte (a copy, not a link) and adds one with the new episodes."""
    rng, files = np.random.default_rng(0), EpisodeFiles()
    episodes = [make_episode(rng) for _ in range(20)]
    for name in "abc":
        (tmp_path / name).mkdir()
    files.write(episodes, tmp_path / "none", tmp_path / "a")
    episodes = episodes[3:] + [make_episode(rng) for _ in range(3)]
    files.write(episodes, tmp_path / "a", tmp_path / "b")
    first, second = "episodes-000000.safetensors", "episodes-000001.safetensors"
    assert (set(described(tmp_path / "a")), set(described(tmp_path / "b"))) == ({first}, {first, second})
    assert (tmp_path / "a" / first).read_bytes() == (tmp_path / "b" / first).read_bytes()
    assert (tmp_path / "b" / first).stat().st_nlink == 1
    assert files.sizes[second] == 3
    files.write(episodes, tmp_path / "b", tmp_path / "c")
    assert described(tmp_path / "b") == described(tmp_path / "c")


def test_files_stay_few_and_hold_little_that_is_gone(tmp_path):
    """A full buffer, first in, first out, over 150 saves."""
    rng, files, episodes, before = np.random.default_rng(0), EpisodeFiles(), [], tmp_path / "none"
    for k in range(150):
        episodes = (episodes + [make_episode(rng, turns=1) for _ in range(2)])[-100:]
        after = tmp_path / f"{k}"
        after.mkdir()
        files.write(episodes, before, after)
        assert len(files.files) <= episode_files.MOST_FILES
        assert sum(files.sizes[name] for name in files.files) <= 2 * len(episodes) + 2
        shutil.rmtree(before, ignore_errors=True)
        before = after
    assert len(files.files) > 1
