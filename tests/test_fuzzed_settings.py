"""1,000 damaged or random settings, as config.json of a run to --resume and as flags: no traceback, no hang.

Each is refused in one sentence with exit status 2, or is a run that starts. What may be large in a sound run (a
billion iterations, a batch of a million) is cut down before it is started: patience is not what is tested here.
"""

import dataclasses
import json
import random
import time

import pytest

import train
from freshper.config import parse_args

SMALL = {
    "iterations": 1, "rollout_batch_size": 2, "batch_size": 2, "eval_episodes": 1, "ppo_epochs": 1, "replay_ratio": 1,
    "capacity": 10, "max_turns": 2, "max_new_tokens": 6, "max_tokens": 1000, "cell_size": 56, "baseline_window": 8,
}  # fmt: skip
VALUES = [
    None, True, False, 0, 1, 2, -1, 7, 10**6, 2**31, 2**63, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, -0.5, 1.5, 1e-320,
    1e308, float("nan"), float("inf"), -float("inf"), "", " ", "0", "nan", "tiny", "none", "per", "hf", "cuda", "meta",
    "cpu:7", "frozenlake_vlm", "gsm8k", "nq_search", "../..", "/", ".", "~", "a/b", "http://x", "file:///etc/passwd",
    "\x00", "a\x00b", "\ud800", "\udc80", "x" * 5000, "{}", "%s", "%", "é√漢", "\n", "--lr", [], ["lr"], {}, {"lr": 1},
    [[]], "__class__",
]  # fmt: skip

PIECES = [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"1e999", b"\xff\xfe", b"NaN", b",", b'"', b":", b"\x00"]


def settings_of(model):
    """As a run would leave them that had not come to its first checkpoint."""
    return dataclasses.asdict(parse_args(["--model", model])) | SMALL


def damaged(text, rng):
    """The bytes of a file that was cut, flipped, overwritten, or had something come between."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(0, 40))
        how = rng.randrange(6)
        if how == 0:
            del data[at:]
        elif how == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            del data[at:end]
        elif how == 3:
            data[at:at] = data[at:end] * rng.randint(1, 3)
        elif how == 4:
            data[at:end] = rng.randbytes(rng.randint(0, 30))
        else:
            data[at:at] = rng.choice(
                [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"1e999", b"\xff\xfe", b"NaN", b","]
            )
    return bytes(data)


def another(value, rng):
    """A value for a setting: half the time one of the type that it has."""
    alike = [v for v in VALUES if type(v) is type(value)] + [0.1, 1] * isinstance(value, int | float)
    return rng.choice(alike if alike and rng.random() < 0.5 else VALUES)


def changed(text, rng):
    """Other values for a few settings; sometimes a setting more or less."""
    settings = json.loads(text)
    for name in rng.sample(list(settings), rng.choice([1, 1, 2, 4])):
        settings[name] = another(settings[name], rng)
    if rng.random() < 0.1:
        del settings[rng.choice(list(settings))]
    if rng.random() < 0.1:
        settings[str(rng.choice(VALUES))] = rng.choice(VALUES)
    return json.dumps(settings).encode()


def as_flags(settings, rng):
    """Random values on the command line, where everything is a string."""
    names = rng.sample(list(settings), rng.choice([1, 1, 2, 4]))
    given = [(name, another(settings[name], rng)) for name in names]
    flags = [part for name, value in given for part in (f"--{name}", str(value).replace("\x00", ""))]
    return flags + rng.choice([[], ["--override", *names], ["--override"], ["--override", "out"]])


def tried(arguments, started, monkeypatch, capfd):
    """The exit status of the real train.py. Only the first few that are accepted play and train: a run takes a
    thousand times as long as a refusal."""
    capfd.readouterr()

    def small(argv):
        config = parse_args(argv)
        return dataclasses.replace(config, **{name: min(getattr(config, name), SMALL[name]) for name in SMALL})

    monkeypatch.setattr(train, "parse_args", small)
    if started >= 4:
        monkeypatch.setattr(train, "train", lambda *_: None)
    try:
        status = train.main(arguments)
    except SystemExit as stop:
        status = stop.code
    said, complaint = capfd.readouterr()
    assert "Traceback" not in said + complaint
    if status == 2:
        assert ": error: " in complaint  # over two lines where the value has a line break
    elif status == 1:  # such numbers as no float can hold
        assert "stopped in iteration 0: " in said
    else:
        assert status == 0
    return status


@pytest.mark.parametrize("kind", ["damaged", "changed", "flags"])
def test_fuzzed_settings(kind, model_folder, tmp_path, monkeypatch, capfd):
    rng, number = random.Random(kind), {"damaged": 350, "changed": 450, "flags": 200}[kind]
    monkeypatch.chdir(tmp_path)
    sound = json.dumps(settings_of(model_folder["text"]))
    statuses, longest = [], 0.0
    for k in range(number):
        (tmp_path / f"run{k}").mkdir()
        content = {"damaged": damaged, "changed": changed}[kind](sound, rng) if kind != "flags" else sound.encode()
        (tmp_path / f"run{k}/config.json").write_bytes(content)
        flags = as_flags(json.loads(sound), rng) if kind == "flags" else []
        began = time.process_time()
        try:
            statuses.append(tried(["--resume", f"run{k}", *flags], statuses.count(0), monkeypatch, capfd))
        except BaseException as error:
            error.add_note(f"config.json: {content[:3000]}, flags: {flags}")
            raise
        longest = max(longest, time.process_time() - began)
    assert longest < 30
    assert statuses.count(2) > number / 2
    assert statuses.count(0)  # a few are accepted
