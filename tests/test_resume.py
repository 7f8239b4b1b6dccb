"""Nothing is lost: a run that was stopped, killed or found damaged goes on as if nothing had happened."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from kill_loop import contents, kill_and_resume
from test_train import rows, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from compare import finished as finished_run
from freshper import checkpoint
from freshper.config import Config
from freshper.engine_hf import HFEngine
from freshper.packing import flatten, pack_episodes, unflatten, unpack_episodes

LONGER = ["--iterations", "6", "--save_every", "2", "--max_turns", "3"]


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory):
    """A run of six iterations with checkpoints after 2, 4 and 6, for tests to copy."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(model_folder, out, *LONGER) == 0
    assert {p.name for p in out.glob("checkpoint*")} == {"checkpoint", "checkpoint-000002", "checkpoint-000004"}
    return out


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def stop_at_call(monkeypatch, number, signals):
    """The embedded engine, which sends signals to its own process at the n-th call."""
    generate, calls = HFEngine.generate, []

    def generate_and_signal(self, *args):
        calls.append(1)
        if len(calls) == number:
            for sent in signals:
                signal.raise_signal(sent)
        return generate(self, *args)

    monkeypatch.setattr(HFEngine, "generate", generate_and_signal)


VARIANTS = {
    "text": ("frozenlake", []),
    "automatic tau": ("frozenlake", ["--tau", "auto"]),
    "decay by draws": ("frozenlake", "--decay draws --tau 2".split()),
    "vision, KL": ("frozenlake_vlm", ["--kl_loss_coef", "0.05"]),
    "everything else": ("frozenlake", """--kl_reward_coef 0.05 --replay_advantage stored --capacity 6
        --eviction lowest_priority --age_unit iteration --is_correction True --decay none --ppo_epochs 2""".split()),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_never_was(model_folder, tmp_path, monkeypatch, variant):
    """SIGTERM in the middle of a rollout: the iteration is finished, saved, and the rest is bit for bit the same."""
    env, flags = VARIANTS[variant]
    assert run(model_folder, tmp_path / "plain", *LONGER, *flags, env=env) == 0
    with monkeypatch.context() as patch:
        stop_at_call(patch, 8, [signal.SIGTERM])
        assert run(model_folder, tmp_path / "stopped", *LONGER, *flags, env=env) == 143
    assert len(rows(tmp_path / "stopped")) < 6
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert contents(tmp_path / "stopped") == contents(tmp_path / "plain")


@pytest.mark.parametrize(("sent", "status"), [([signal.SIGINT] * 2, 130), ([signal.SIGTERM] * 2, 143)])
def test_a_second_signal_ends_the_run_at_once(model_folder, tmp_path, monkeypatch, finished, sent, status):
    """And what was saved before it stays, to go on from."""
    with monkeypatch.context() as patch:
        stop_at_call(patch, 14, sent)  # in the fourth iteration: three turns each, and an evaluation
        assert run(model_folder, tmp_path / "run", *LONGER) == status
    assert checkpoint.find(tmp_path / "run")[0].done == 2
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert contents(tmp_path / "run") == contents(finished)


def test_killed_again_and_again(model_folder, tmp_path):
    """SIGKILL at random moments, saves included (50 times: python tests/kill_loop.py)."""
    kills = int(os.environ.get("FRESHPER_KILLS", "10"))
    hits, _ = kill_and_resume(model_folder["text"], tmp_path, iterations=15, kills=kills, seed=1)
    assert hits >= 1


def test_a_run_without_a_checkpoint_yet_starts_again(copy, finished):
    for folder in copy.glob("checkpoint*"):
        shutil.rmtree(folder)
    assert train.main(["--resume", str(copy)]) == 0
    assert contents(copy) == contents(finished)


def test_a_finished_run_is_only_reported_again(copy, finished, capsys):
    (copy / "curve.png").unlink()
    (copy / "metrics.csv").write_text("cut off in the mid")
    assert train.main(["--resume", str(copy)]) == 0
    assert (copy / "curve.png").exists()
    assert contents(copy) == contents(finished)
    assert (copy / "episodes.html").read_text() == (finished / "episodes.html").read_text()


def test_compare_knows_a_finished_run(copy, tmp_path):
    assert finished_run(copy)
    lines = (copy / "metrics.csv").read_text().splitlines(keepends=True)
    (copy / "metrics.csv").write_text("".join(lines[:-1]))
    assert not finished_run(copy)
    assert not finished_run(tmp_path / "nowhere")
    (copy / "metrics.csv").write_text(lines[0])
    assert not finished_run(copy)


def test_every_kept_checkpoint_is_a_model(copy):
    for folder in copy.glob("checkpoint*"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert sum(p.numel() for p in model.parameters()) == 118_592
        assert AutoTokenizer.from_pretrained(folder).chat_template
    assert not [p for p in copy.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl")]


def damage(path, how, at):
    data = bytearray(path.read_bytes())
    at %= 8 * len(data)
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: at // 8])
    else:
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize(
    "name", ["state.safetensors", "model.safetensors", "state.json", "manifest.json", "episodes-000000.safetensors"]
)
def test_a_damaged_checkpoint_is_seen_and_the_one_before_it_used(finished, tmp_path_factory, how, name):
    """Wherever the damage is. A flip in the number of the format's version is a version that nobody knows."""
    copy = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("*.png", "*.html"))
    path = copy / "checkpoint" / name
    whole = path.read_bytes()

    @settings(deadline=None, max_examples=10)
    @given(st.integers(0, 8 * len(whole) - 1))
    def holds_anywhere(at):
        path.write_bytes(whole)
        damage(path, how, at)
        try:
            found, problems = checkpoint.find(copy)
        except checkpoint.OtherVersionError:
            assert (name, how) == ("manifest.json", "flipped")
            return
        assert (found.done, found.folder.name) == (4, "checkpoint-000004")
        assert len(problems) == 1
        assert name in problems[0]

    holds_anywhere()


def test_going_on_behind_a_damaged_checkpoint(copy, finished, capsys):
    damage(copy / "checkpoint" / "model.safetensors", "flipped", 80_001)
    assert train.main(["--resume", str(copy)]) == 0
    said = capsys.readouterr().err
    assert "model.safetensors does not have the SHA-256 that the manifest gives" in said
    assert "checkpoint-000004, after iteration 4" in said
    assert contents(copy) == contents(finished)
    assert (copy / "damaged-checkpoint").is_dir()


def test_a_crash_between_the_two_renames_loses_nothing(copy):
    (copy / "checkpoint").rename(copy / checkpoint.UNFINISHED)
    assert checkpoint.find(copy)[0].done == 6
    assert train.main(["--resume", str(copy)]) == 0
    assert (copy / "checkpoint" / "model.safetensors").exists()


def test_a_crash_before_the_two_renames_loses_nothing(copy):
    """What is whole and in the way gets its number; so it stays what --resume can fall back to."""
    (copy / "checkpoint").rename(copy / checkpoint.UNFINISHED)
    (copy / "checkpoint-000004").rename(copy / "checkpoint")
    checkpoint.adopt(checkpoint.find(copy)[0])
    assert {p.name for p in copy.glob("*checkpoint*")} == {"checkpoint", "checkpoint-000002", "checkpoint-000004"}
    assert checkpoint.find(copy)[0].done == 6


def test_the_owner_s_own_folders_stay(copy):
    shutil.copytree(copy / "checkpoint", copy / "checkpoint-backup")
    assert train.main(["--resume", str(copy), "--iterations", "7", "--override", "iterations"]) == 0
    assert (copy / "checkpoint-backup" / "manifest.json").exists()


def refusal(capsys, *arguments):
    try:
        status = train.main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_none_whole(copy, capsys):
    for folder in copy.glob("checkpoint*"):
        (folder / "state.json").unlink()
    sentence = refusal(capsys, "--resume", str(copy))
    assert "no checkpoint of it is whole" in sentence
    assert sentence.count("state.json is missing") == 3


def test_another_format_version(copy, capsys):
    path = copy / "checkpoint" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 4', '"version": 5'))
    assert "has the checkpoint format 5, but must have 4" in refusal(capsys, "--resume", str(copy))


def test_conflicting_flags(copy, capsys):
    before = (copy / "metrics.csv").read_bytes()
    sentence = refusal(capsys, "--resume", str(copy), "--lr", "0.5", "--tau", "7", "--alpha", "0.6")
    assert "--tau is 7.0, --lr is 0.5, but must be 20.0, 0.001" in sentence
    assert "--override tau lr" in sentence
    sentence = refusal(capsys, "--resume", str(copy), "--lr", "0.5", "--tau", "7", "--override", "lr")
    assert "--tau is 7.0, but must be 20.0" in sentence
    assert "cannot change that" in refusal(capsys, "--resume", str(copy), "--seed", "1")
    for name, value in (("seed", "1"), ("eviction", "lowest_priority"), ("age_unit", "iteration")):
        sentence = refusal(capsys, "--resume", str(copy), f"--{name}", value, "--override", name)
        assert f"--override is {name}, but" in sentence
    sentence = refusal(capsys, "--resume", str(copy), "--iterations", "5", "--override", "iterations")
    assert "--iterations is 5, but must be at least the 6 that are done" in sentence
    assert (copy / "metrics.csv").read_bytes() == before


def test_an_override_takes_effect(copy, finished):
    flags = "--iterations 8 --lr 0.01 --rollout_batch_size 2 --override iterations lr rollout_batch_size".split()
    assert train.main(["--resume", str(copy), *flags]) == 0
    table = rows(copy)
    assert [int(r["episodes"]) for r in table] == [4, 8, 12, 16, 20, 24, 26, 28]
    assert table[:6] == rows(finished)
    cosine = 0.5 * (1 + np.cos(np.pi * (18 + 3 - 10) / (8 * 3 - 10)))  # 21 of 24 updates, 10 of them warm-up
    assert float(table[6]["lr"]) == pytest.approx(0.01 * cosine)
    assert json.loads((copy / "config.json").read_text())["iterations"] == 8


@pytest.mark.parametrize("flags", ["--decay auto", "--replay_ratio 1"])
def test_an_override_that_starts_something(model_folder, tmp_path, flags):
    """An estimate of tau, or replay, that the run did without so far; and back."""
    out, flag = tmp_path / "run", flags.split()[0]
    assert run(model_folder, out, "--save_every", "1", flag, {"--decay": "exponential"}.get(flag, "0")) == 0
    for n, chosen in enumerate((flags.split(), [flag, {"--decay": "none"}.get(flag, "0")]), 4):
        changed = ["--iterations", str(n), *chosen, "--override", "iterations", flag[2:]]
        assert train.main(["--resume", str(out), *changed]) == 0
        assert len(rows(out)) == n


@pytest.mark.parametrize("end", [None, "1", "1,2"])
def test_rows_of_replays_that_are_lost_or_torn(copy, finished, end):
    """A missing replay.csv starts anew; what a kill left of the last row is cut off."""
    log = copy / "replay.csv"
    whole = log.read_text()
    log.unlink()
    if end is not None:
        log.write_text(whole + end)
    assert train.main(["--resume", str(copy)]) == 0
    assert log.read_text() == (whole.splitlines(keepends=True)[0] if end is None else whole)


def test_two_processes_cannot_write_to_one_folder(copy, text_policy, capsys):
    from freshper.report import Report

    holding = Report(dataclasses.replace(Config(), resume=str(copy)), text_policy)
    assert "another process is writing to it" in refusal(capsys, "--resume", str(copy))
    os.close(holding.lock)


def test_the_newest_and_the_best_are_kept(text_policy, tmp_path):
    for done in range(1, 8):
        checkpoint.save(tmp_path, done, text_policy, {}, best=min(done, 3), keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint", "checkpoint-000006", "checkpoint-000003"}
    assert checkpoint.find(tmp_path)[0].done == 7


def test_state_comes_back_as_it_was():
    tree = {
        "bf16": torch.randn(3).bfloat16(), "scalar": torch.tensor(2.5), "none": None, "big": 2**127, "nan": np.inf,
        "keys": {0: [1, {"x": np.arange(5, dtype=np.uint32)}], 7: "seven"}, "empty": np.zeros((0, 3)), "bool": True,
    }  # fmt: skip
    arrays = {}
    back = unflatten(json.loads(json.dumps(flatten(tree, arrays))), arrays)
    assert torch.equal(back["bf16"], tree["bf16"])
    assert back["bf16"].dtype == torch.bfloat16
    assert (back["scalar"].shape, back["empty"].shape) == ((), (0, 3))
    assert np.array_equal(back["keys"][0][1]["x"], np.arange(5))
    assert back["keys"][0][1]["x"].dtype == np.uint32
    assert (back["big"], back["nan"], back["keys"][7], back["bool"], back["none"]) == (
        2**127,
        np.inf,
        "seven",
        True,
        None,
    )
    with pytest.raises(TypeError, match="/part is a set"):
        flatten({"part": {1}}, {})


def test_equal_pictures_are_stored_once():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (28, 28, 3)).astype(np.uint8)
    images = [image, image.copy(), image, rng.integers(0, 256, (14, 28, 3)).astype(np.uint8), None]
    episodes = [
        make_episode(rng, image=i, step=k, seed=k, env="x", info={"success": True}) for k, i in enumerate(images)
    ]
    for e in episodes:  # what the trainer notes of each token, and arrays that are not of tokens
        e.info |= {"ref_logprobs": rng.normal(size=len(e.tokens)).astype(np.float32), "other": np.arange(3)}
    arrays = {}
    packed = json.loads(json.dumps(flatten(pack_episodes(episodes), arrays)))
    assert len(packed["picture_shapes"]) == 2
    for before, after in zip(episodes, unpack_episodes(unflatten(packed, arrays)), strict=True):
        for name in ("tokens", "action_mask", "behavior_logprobs", "turn_rewards"):
            a, b = getattr(before, name), getattr(after, name)
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
        assert all(np.array_equal(a, b) for a, b in zip(before.images, after.images, strict=True))
        for name in ("ref_logprobs", "other"):
            a, b = before.info.pop(name), after.info.pop(name)
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
        assert dataclasses.astuple(dataclasses.replace(before, **dict.fromkeys(ARRAYS))) == dataclasses.astuple(
            dataclasses.replace(after, **dict.fromkeys(ARRAYS))
        )


ARRAYS = ("tokens", "action_mask", "behavior_logprobs", "turn_rewards", "images")


def test_no_code_is_read_from_files():
    """No unpickling, no torch.load, no trust_remote_code, no numpy object arrays, anywhere in the project."""
    root = Path(__file__).parent.parent
    sources = [p for folder in (".", "freshper", "envs", "examples") for p in root.glob(f"{folder}/*.py")]
    assert len(sources) > 15
    for path in sources:
        text = path.read_text()
        for word in (
            "pickle.load",
            "from pickle",
            "Unpickler",
            "marshal",
            "joblib",
            "dill",
            "yaml.load(",
            "torch.load(",
            "torch.save(",
            "trust_remote_code",
            "allow_pickle=True",
            "eval(",
            "exec(",
        ):
            assert word not in text.replace(".eval()", ""), (path, word)
