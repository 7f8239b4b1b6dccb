"""Saves that are cut off lose nothing but themselves, and what is saved comes back as it was."""

import hashlib
import io
import os
import shutil
from datetime import date
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import done, make_episode

from freshper import checkpoint
from freshper.checkpoint import checksums, find_saved, pack_episodes, unpack_episodes
from freshper.episode import compressed


def save(out, done):
    """Save a run of stand-ins after `done` iterations."""
    states = {"trainer": {}, "engine": {}, "buffer": {"episodes": []}}
    states["metrics"] = {"rows": [{}] * (done + 1)}
    parts = {name: Mock(**{"state_dict.return_value": x}) for name, x in states.items()}
    parts["engine"].policy = Mock(features={}, held_out_features={}, today=date.today())
    saved = find_saved(str(out))
    if saved and saved.damage:
        shutil.rmtree(out / "checkpoint")  # as `Run.restore` does
    checkpoint.save(out, parts, {})


class Crash(BaseException):
    """The power is cut."""


def cut_off(monkeypatch, number, out, done):
    """Save, with a crash before the n-th change of the file system. Returns whether it came."""
    calls = []

    def counted(real):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == number:
                raise Crash
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(torch, "save", counted(torch.save))
        try:
            save(out, done)
        except Crash:
            return True
    return False


@pytest.mark.parametrize("damaged", [False, True])
def test_two_crashes_lose_nothing_but_an_unfinished_save(tmp_path, monkeypatch, damaged):
    begun = tmp_path / "begun"
    begun.mkdir()
    if damaged:
        save(begun, 1)
        (begun / "checkpoint").rename(begun / "checkpoint-before")
        save(begun, 2)
        (begun / "checkpoint/state.pt").write_bytes(b"")

    crashes = []
    for numbers in product(range(1, 16), repeat=2):
        out = shutil.copytree(begun, tmp_path / str(numbers))
        for number in numbers:
            saved = done(out)
            crashes.append(cut_off(monkeypatch, number, out, saved + 1))
            assert done(out) in ((saved, saved + 1) if crashes[-1] else (saved + 1,))
        save(out, done(out) + 1)
        assert find_saved(str(out)).folder == out / "checkpoint"
    assert any(crashes) and not all(crashes)


def test_of_a_large_file_the_manifest_has_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LARGE", 3)
    (tmp_path / "large").write_bytes(b"1234")
    (tmp_path / "small").write_bytes(b"123")
    sums = checksums(tmp_path)
    assert sums == {"large": "4 bytes", "small": hashlib.sha256(b"123").hexdigest()}


def test_episodes_come_back_as_they_were():
    rng = np.random.default_rng(0)
    images = [compressed(rng.integers(0, 256, (2, width, 3), dtype=np.uint8)) for width in (1, 2)]
    episodes = [make_episode(rng, images=images[: k % 3], step=k) for k in range(9)]
    file = io.BytesIO()
    torch.save(pack_episodes(episodes), file)
    file.seek(0)
    back = unpack_episodes(torch.load(file, weights_only=True))
    with np.printoptions(floatmode="unique"):
        assert [repr(vars(e)) for e in back] == [repr(vars(e)) for e in episodes]
    assert all(e.tokens.base is None for e in back)  # own memory
    assert len({id(image) for e in back for image in e.images}) == 2
    assert unpack_episodes(pack_episodes([])) == []
