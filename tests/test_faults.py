"""Faults, caused on purpose: the run goes on, or ends with a sentence and a status. It never goes on with nonsense."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from test_resume import LONGER, stop_at_call
from test_train import ROOT, SHORT, rows, run

import train
from envs.frozenlake import FrozenLake
from freshper import checkpoint
from freshper.engine_hf import HFEngine, Sampling
from freshper.models import load_policy
from freshper.rollout import Reply, rollout
from freshper.time_limit import limited


def in_process_of_its_own(model_folder, out, *flags, **options):
    command = [sys.executable, "train.py", "--model", model_folder["text"], "--out", str(out), *SHORT, *LONGER, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, **options
    )


def on_a_full_disk(model, folder):
    """What tests/full_disk.py prints: on a file system of its own where this process may mount one, as root or in a
    user namespace, else under a limit of file sizes; and which of these it was."""
    script = [sys.executable, "tests/full_disk.py"]
    commands = {
        "tmpfs": ["unshare", "-m", *script, "tmpfs"],
        "tmpfs in a user namespace": ["unshare", "-rm", *script, "tmpfs"],
        "RLIMIT_FSIZE": [*script, "limit"],
    }
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    for how, command in commands.items():
        if shutil.which(command[0]):
            done = subprocess.run(
                [*command, model, str(folder)], cwd=ROOT, env=one_thread, capture_output=True, text=True
            )
            if not re.search("^(unshare|mount): ", done.stderr, re.MULTILINE):
                assert done.returncode == 0, (how, done.stderr)
                return how, json.loads(done.stdout)
    raise AssertionError(done.stderr)


def test_a_disk_that_runs_full(model_folder, tmp_path):
    """While rows are written, while a checkpoint is, and from the start: exit status 1 or 2 and one sentence; the
    checkpoint before stays whole, and with space again the run goes on."""
    (tmp_path / "disk").mkdir()
    how, runs = on_a_full_disk(model_folder["text"], tmp_path / "disk")
    print(how)
    full = "File too large" if how == "RLIMIT_FSIZE" else "No space left on device"
    assert {name: (r["status"], r["done"]) for name, r in runs.items()} == {
        "before": (0, 4), "checkpoint": (1, 4), "metrics": (1, 4), "nothing": (2, 4), "after": (0, 6)
    }  # fmt: skip
    assert not any(r["problems"] or "Traceback" in r["stderr"] + r["stdout"] for r in runs.values())
    assert not any(".new" in name or "unfinished" in name for r in runs.values() for name in r["files"])
    stopped = {name: [x for x in r["stdout"].splitlines() if x.startswith("stopped")] for name, r in runs.items()}
    (sentence,) = stopped["checkpoint"]
    assert "stopped in iteration 5: the checkpoint of iteration 6 could not be written to " in sentence
    assert full in sentence
    (sentence,) = stopped["metrics"]
    assert "metrics.csv or replay.csv could not be written in " in sentence
    assert full in sentence
    assert "but must be a folder that can be written to: " in runs["nothing"]["stderr"].splitlines()[-1]
    assert runs["metrics"]["files"] == runs["before"]["files"]
    assert len(runs["after"]["rows"].splitlines()) == 7


def test_a_failed_save_leaves_the_one_before_it(text_policy, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, text_policy, {}, best=0, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match=r"checkpoint of iteration 2 could not be written.*No space left"):
            checkpoint.save(tmp_path, 2, text_policy, {}, best=0, keep=2)
    assert checkpoint.find(tmp_path)[0].done == 1
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint"}


def test_read_only_output_folder(model_folder, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)

    def no_superpowers():
        if os.geteuid() == 0:  # root may write anywhere unless it gives up CAP_DAC_OVERRIDE
            ctypes.CDLL(None).prctl(24, 1)

    done = in_process_of_its_own(model_folder, tmp_path / "closed" / "run", preexec_fn=no_superpowers)
    assert done.returncode == 2
    sentence = done.stderr.strip().splitlines()[-1]
    assert f"--out is {tmp_path}/closed/run, but must be a folder that can be written to" in sentence
    assert "Permission denied" in sentence
    assert not list((tmp_path / "closed").iterdir())


def break_step(monkeypatch, change, at=20):
    """FrozenLake whose step number `at` goes through `change(result)`."""
    step, calls = FrozenLake.step, []

    def broken(self, reply):
        calls.append(reply)
        result = step(self, reply)
        return change(result) if len(calls) == at else result

    monkeypatch.setattr(FrozenLake, "step", broken)


def test_an_environment_that_raises(model_folder, tmp_path, monkeypatch, capsys):
    def fail(result):
        raise KeyError("lake")

    break_step(monkeypatch, fail)
    with pytest.raises(KeyError):
        run(model_folder, tmp_path / "run", *LONGER)  # a bug of the environment: its author wants the traceback too
    said = capsys.readouterr().out
    assert "stopped in iteration 1: KeyError: 'lake'; in environment frozenlake, episode seed 42000007, turn 2" in said


def test_a_first_prompt_of_a_later_batch_that_is_too_long(model_folder, tmp_path, monkeypatch, capsys):
    reset = FrozenLake.reset

    def wordy(self, seed):
        observation, info = reset(self, seed=seed)
        return (observation._replace(text=observation.text * 100), info) if seed == 42000005 else (observation, info)

    monkeypatch.setattr(FrozenLake, "reset", wordy)
    assert run(model_folder, tmp_path / "run", *LONGER) == 1
    sentence = r"stopped in iteration 1: --max_tokens is 512, but must be at least \d+: the first turn of episode seed "
    assert re.search(sentence + r"42000005 takes a prompt of \d+ and --max_new_tokens 6\n", capsys.readouterr().out)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_an_environment_that_returns_no_number(model_folder, tmp_path, monkeypatch, capsys, reward):
    break_step(monkeypatch, lambda result: (result[0], reward, *result[2:]))
    assert run(model_folder, tmp_path / "run", *LONGER) == 1
    said = capsys.readouterr().out
    assert f"stopped in iteration 1: the rollout met a reward {reward}" in said
    assert "episode seed 42000007, turn 2" in said
    assert len(rows(tmp_path / "run")) == 1


def sleep():
    time.sleep(600)


def spin():
    while True:
        pass


def retry_for_ever():
    while True:
        try:
            time.sleep(600)
        except Exception:
            continue


@pytest.mark.parametrize(
    ("method", "hang"), [("step", sleep), ("step", spin), ("step", retry_for_ever), ("reset", sleep)]
)
def test_an_environment_that_hangs_is_cut_off(model_folder, tmp_path, monkeypatch, capsys, method, hang):
    """The run ends with a sentence, and goes on from its last checkpoint."""
    real, calls = getattr(FrozenLake, method), []

    def hanging(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == (50 if method == "step" else 35):
            hang()
        return real(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(FrozenLake, method, hanging)
        began = time.monotonic()
        assert run(model_folder, tmp_path / "run", *LONGER, "--env_timeout", "0.3") == 1
    assert time.monotonic() - began < 60
    captured = capsys.readouterr()
    said = captured.out
    where = r"in environment frozenlake, episode seed 420000\d\d, (turn \d|reset)"
    sentence = rf"stopped in iteration \d: the environment took longer than the 0.3 s of --env_timeout; {where}\n"
    assert re.search(sentence, said)
    assert "Traceback" not in said + captured.err
    assert len(rows(tmp_path / "run")) >= 2
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert [int(r["iteration"]) for r in rows(tmp_path / "run")] == list(range(6))


def test_environments_that_answer_all_at_once_are_cut_off_too(text_policy, monkeypatch):
    """As nq_search does, whose one request is made before the first of them answers."""

    class Slow(FrozenLake):
        @classmethod
        def step_many(cls, envs, replies):
            sleep()

    engine = HFEngine(text_policy, Sampling(), 0)
    with pytest.raises(TimeoutError, match=r"took longer than the 0\.2 s") as error:
        rollout(engine, text_policy, [Slow(), Slow()], [7, 8], 512, 6, name="slow", env_timeout=0.2)
    assert error.value.__notes__ == ["in environment slow, episode seed 7, turn 1"]


def test_the_time_limit_leaves_nothing_behind():
    """A call in time, one that fails, one that is cut off: no timer runs on, and SIGALRM is whose it was."""
    before = signal.getsignal(signal.SIGALRM)
    assert limited(5, max, [1, 3], key=abs) == 3
    assert limited(0, max, [1, 3], key=abs) == 3
    with pytest.raises(ZeroDivisionError):
        limited(5, lambda: 1 / 0)
    with pytest.raises(TimeoutError):
        limited(0.01, sleep)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_an_environment_that_hangs_can_be_stopped(model_folder, tmp_path):
    """The first SIGTERM waits for an iteration that never ends, the second does not."""
    script = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
import train
from envs.frozenlake import FrozenLake
step, calls = FrozenLake.step, []
def hang(self, reply):
    calls.append(1)
    if len(calls) == 50:
        for wait in (0.2, 0.6):
            threading.Timer(wait, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(600)
    return step(self, reply)
FrozenLake.step = hang
sys.exit(train.main(sys.argv[1:]))
"""
    flags = ["--model", model_folder["text"], "--out", str(tmp_path / "run"), *SHORT, *LONGER]
    command = [sys.executable, "-c", script, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 143
    assert "stopping after this iteration" in done.stderr
    assert "interrupted by SIGTERM" in done.stdout
    assert checkpoint.find(tmp_path / "run")[0].done == 2


def replies_of(monkeypatch, make):
    """An engine whose replies are `make(policy, reply, number of its call)`."""
    generate, calls = HFEngine.generate, []

    def changed(self, conversations, max_new_tokens):
        calls.append(1)
        replies = generate(self, conversations, max_new_tokens)
        return make(self.policy, replies, max_new_tokens)

    monkeypatch.setattr(HFEngine, "generate", changed)


def as_reply(tokens):
    return Reply(list(tokens), [-1.0] * len(tokens))


REPLIES = {
    "only eos": lambda policy, limit: [policy.eos_id],
    "as long as may be, without eos": lambda policy, limit: [policy.tokenizer.encode(" a")[0]] * limit,
    "not UTF-8": lambda policy, limit: [policy.tokenizer.convert_tokens_to_ids("ÿ")] * (limit - 1) + [policy.eos_id],
}


@pytest.mark.parametrize("kind", REPLIES)
def test_strange_replies_are_unreadable_ones(model_folder, tmp_path, monkeypatch, kind):
    """They cost their turn, are trained on and stored like any other. Bytes need a model that may say them."""
    policy = load_policy(model_folder["text"], "cpu", torch.float32)
    policy.model.generation_config.suppress_tokens = None
    policy.save(str(tmp_path / "model"))
    replies_of(monkeypatch, lambda p, replies, limit: [as_reply(REPLIES[kind](p, limit)) for _ in replies])
    assert run({"text": str(tmp_path / "model")}, tmp_path / "run", *LONGER) == 0
    assert [float(r["invalid"]) for r in rows(tmp_path / "run")] == [1.0] * 6
    assert all(np.isfinite(float(r["loss"])) for r in rows(tmp_path / "run"))


WRONG = {
    "fewer replies": (lambda replies: replies[:-1], "the engine returned 3 replies"),
    "an empty reply": (lambda replies: [Reply([], []), *replies[1:]], "of [0, "),
    "one too long": (lambda replies: [as_reply([7] * 99), *replies[1:]], "of [99, "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_engine_that_breaks_its_contract(model_folder, tmp_path, monkeypatch, capsys, kind):
    make, sentence = WRONG[kind]
    replies_of(monkeypatch, lambda policy, replies, limit: make(replies))
    with pytest.raises(RuntimeError, match="but must return one to each, of 1 to 6 tokens"):
        run(model_folder, tmp_path / "run", *LONGER)
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("source", ["engine", "trainer"])
def test_nan_in_one_log_prob(model_folder, tmp_path, monkeypatch, capsys, source):
    if source == "engine":
        replies_of(monkeypatch, lambda policy, replies, limit: [replies[0]._replace(
            logprobs=[float("nan")] * len(replies[0].tokens)), *replies[1:]])  # fmt: skip
    else:
        from freshper import trainer

        real = trainer.action_logprobs

        def poisoned(*args):
            logprobs, entropies = real(*args)
            return logprobs.masked_fill(
                args[1].action_mask & (torch.arange(len(logprobs)) == 1)[:, None], torch.nan
            ), entropies

        monkeypatch.setattr(trainer, "action_logprobs", poisoned)
    assert run(model_folder, tmp_path / "run", *LONGER) == 1
    said = capsys.readouterr().out
    assert "stopped in iteration 0" in said
    assert "episode seed 4200000" in said


def test_a_clock_that_jumps(model_folder, tmp_path, monkeypatch):
    """Back by a year, forward by a year: nothing is saved too often or too late, and no time is negative."""
    jumps = iter([-3e7, 3e7] * 100_000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    assert run(model_folder, tmp_path / "run", *LONGER, "--save_every", "0", "--eval_every", "100") == 0
    times = [float(r["wall_s"]) for r in rows(tmp_path / "run")]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 100
    assert {p.name for p in (tmp_path / "run").glob("checkpoint*")} == {"checkpoint"}


def test_the_log_of_replays_is_bounded(model_folder, tmp_path, monkeypatch):
    """Six iterations of eight replayed episodes, and room for twenty rows: those of every third iteration."""
    monkeypatch.setattr("freshper.report.REPLAY_ROWS", 20)
    assert run(model_folder, tmp_path / "run", *LONGER, "--replay_ratio", "2", "--batch_size", "4") == 0
    lines = (tmp_path / "run" / "replay.csv").read_text().splitlines()[1:]
    assert [int(line.partition(",")[0]) for line in lines] == [0] * 8 + [3] * 8
    assert all(np.isfinite(float(r["replay_loss"])) for r in rows(tmp_path / "run"))


def test_save_minutes(model_folder, tmp_path):
    """So few minutes that every iteration takes longer."""
    flags = ["--save_every", "0", "--save_minutes", "1e-9", "--eval_every", "100", "--keep_checkpoints", "9"]
    assert run(model_folder, tmp_path / "run", *LONGER, *flags) == 0
    assert len(list((tmp_path / "run").glob("checkpoint*"))) == 6


def test_a_reply_with_a_script_is_text_in_the_page(model_folder, tmp_path, monkeypatch):
    """Through the real train.py: what a model writes never runs in the browser of whoever looks at the games."""

    def scripted(policy, replies, limit):
        return [as_reply([*policy.tokenizer.encode("<script>alert(1)</script>"), policy.eos_id])] * len(replies)

    policy = load_policy(model_folder["text"], "cpu", torch.float32)
    policy.model.generation_config.suppress_tokens = None
    policy.save(str(tmp_path / "model"))
    replies_of(monkeypatch, scripted)
    assert run({"text": str(tmp_path / "model")}, tmp_path / "run", *LONGER, "--max_new_tokens", "40") == 0
    page = (tmp_path / "run" / "episodes.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page


def test_ctrl_c_waits_for_the_iteration_and_saves(model_folder, tmp_path, monkeypatch):
    stop_at_call(monkeypatch, 8, [signal.SIGINT])
    assert run(model_folder, tmp_path / "run", *LONGER) == 130
    assert checkpoint.find(tmp_path / "run")[0].done == len(rows(tmp_path / "run"))
