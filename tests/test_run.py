"""A run that was stopped, killed or damaged ends as the run that never stopped, bit for bit."""

import json
import os
import random
import re
import resource
import shutil
import signal
from datetime import date
from unittest.mock import Mock

import pytest
import torch
from conftest import contents, done, read
from transformers import AutoTokenizer

import train
from envs.base import Observation, UserError
from envs.frozenlake import FrozenLake
from envs.question_answering import Question
from freshper import backends, checkpoint
from freshper.checkpoint import checksums, find_saved
from freshper.config import Config
from freshper.engine_hf import HFEngine
from freshper.flags import parse_args
from freshper.run import Run, compare
from freshper.tiny import SHIPPED

SHORT = """--iterations 6 --save_every 2 --rollout_batch_size 4 --batch_size 4
--eval_episodes 4 --eval_every 2 --max_turns 2 --max_new_tokens 4""".split()


@pytest.fixture(scope="module", autouse=True)
def _random_weights(model_folder):
    """`--model tiny` without its warm start, and no plots, which take as long as the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            backends, "tiny_model", lambda env: model_folder["vision" if "vlm" in env else "text"]
        )
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
        yield


def run(out, *flags):
    return train.main(["--out", str(out), *SHORT, *flags])


def resume(out, *flags):
    return train.main(["--resume", str(out), *flags])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six iterations, for tests to copy."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(out) == 0
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def at_call(monkeypatch, owner, method, number, act):
    """Call `act` after the n-th call of a method."""
    real, calls = getattr(owner, method), []

    def replaced(*args, **kwargs):
        calls.append(1)
        result = real(*args, **kwargs)
        if len(calls) == number:
            act()
        return result

    monkeypatch.setattr(owner, method, replaced)


def send(*signals):
    return lambda: [signal.raise_signal(number) for number in signals]


# -- a resumed run is the run that never stopped ---------------------------------------------------


FLAGS = {
    "frozenlake_vlm": "--kl_loss_coef 0.05 --base_priority advantage",
    "frozenlake": """--method per --eviction lowest_priority --capacity 20 --kl_reward_coef 0.05
    --ppo_epochs 2 --baseline recompute""",
}


@pytest.mark.parametrize("task", FLAGS)
def test_a_stopped_and_resumed_run_is_the_run_that_never_stopped(tmp_path, monkeypatch, task):
    """SIGTERM after the third rollout: the iteration is completed and saved, the rest is the same.
    Policies that can reply: updates change weights and moments."""
    flags = f"""--env {task} --model {SHIPPED / task} --rollout_batch_size 16 --max_turns 3
    --max_new_tokens 6 {FLAGS[task]}""".split()
    assert run(tmp_path / "plain", *flags) == 0
    assert (read(tmp_path / "plain", "metrics.csv")["grad_norm"][4:] > 0).any()
    with monkeypatch.context() as patch:
        at_call(patch, train, "rollout", 3, send(signal.SIGTERM))
        assert run(tmp_path / "stopped", *flags) == 143
    assert done(tmp_path / "stopped") == 3
    assert resume(tmp_path / "stopped") == 0
    assert contents(tmp_path / "stopped") == contents(tmp_path / "plain")


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGTERM, signal.SIGTERM], 143),  # service managers signal the whole group
        ([signal.SIGHUP, signal.SIGTERM], 129),  # a closed terminal
        ([signal.SIGTERM, signal.SIGINT], 130),
    ],
)
def test_signals_save_once_however_often_they_come(tmp_path, monkeypatch, signals, status):
    at_call(monkeypatch, train, "rollout", 3, send(*signals))
    # A checkpoint is due after this iteration, too.
    before = signal.getsignal(signals[0])
    assert run(tmp_path / "run", "--save_every", "1") == status
    assert signal.getsignal(signals[0]) is before
    # The import of train left it, too.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done(tmp_path / "run") == 3


def test_a_run_that_nohup_started_does_not_hear_the_end_of_its_terminal(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_call(monkeypatch, train, "rollout", 3, send(signal.SIGHUP))
    assert run(tmp_path / "run") == 0
    signal.signal(signal.SIGHUP, before)


def no_more():
    return next(iter(()))


def test_an_iterator_s_end_in_an_environment_keeps_its_line(tmp_path, monkeypatch):
    at_call(monkeypatch, FrozenLake, "step", 91, no_more)
    with pytest.raises(StopIteration) as caught:
        run(tmp_path / "run")
    assert caught.traceback[-1].name == "no_more"


@pytest.mark.parametrize("fault", ["Ctrl-C twice", "a bug of an environment"])
def test_a_fault_ends_the_run_at_once_and_it_can_be_resumed(
    tmp_path, monkeypatch, capsys, finished, fault
):
    with monkeypatch.context() as patch:
        if fault == "Ctrl-C twice":
            at_call(patch, HFEngine, "generate", 11, send(signal.SIGINT, signal.SIGINT))
            assert run(tmp_path / "run") == 130
        else:
            at_call(patch, FrozenLake, "step", 91, lambda: int("lake"))
            # it is not taken for bad input, and keeps its traceback
            with pytest.raises(ValueError, match="'lake'"):
                run(tmp_path / "run")
    go_on = f"continue with: python train.py --resume {tmp_path}/run --iterations 6\n"
    assert go_on in capsys.readouterr().out
    assert done(tmp_path / "run") == 2
    assert resume(tmp_path / "run") == 0
    assert contents(tmp_path / "run") == contents(finished)


def test_a_signal_while_the_model_is_loaded_leaves_nothing(tmp_path, monkeypatch):
    at_call(monkeypatch, backends, "load_policy", 1, send(signal.SIGINT))
    assert run(tmp_path / "run") == 130
    assert not (tmp_path / "run").exists()


def test_a_run_in_use_is_not_read(copy, monkeypatch, capsys):
    """Its newest checkpoint may be half written: it is neither loaded nor called damaged."""
    monkeypatch.setattr(checkpoint, "checksums", Mock(side_effect=AssertionError("read")))
    before = sorted(copy.rglob("*"))
    with Run(parse_args(["--resume", str(copy)]), [FrozenLake()]):
        assert resume(copy) == 2
    error = capsys.readouterr().err
    assert error == f"train.py: error: {copy} is in use by another process\n"
    assert sorted(copy.rglob("*")) == before


def test_a_run_goes_on_with_its_own_settings_and_checkpoint_only(
    copy, finished, monkeypatch, capsys
):
    def edit(**changes):
        settings = json.loads((finished / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(settings | changes))

    def refused():
        assert resume(copy, "--iterations", "7") == 2
        return capsys.readouterr().err

    edit(lr=0.002)
    assert "lr is 0.002, but 0.001 in the checkpoint" in refused()
    edit(seed=43)  # as if the checkpoint were that of another run
    assert "seed is 43, but 42 in the checkpoint" in refused()
    edit()
    with monkeypatch.context() as patch:  # another process changes it before this one has the lock
        at_call(patch, train, "make_envs", 1, lambda: edit(micro_batch_size=1))
        assert "has other settings now: start again" in refused()
    edit(out="elsewhere")  # a run that was moved
    assert resume(copy, "--iterations", "7") == 0


def test_the_rows_of_data_are_those_of_the_checkpoint(tmp_path):
    def made_with(answer):
        env = FrozenLake()
        env.rows = {"train": [Question("1 + 1?", answer)]}
        return Run(Config(), [env]).made_with

    compare(made_with("2"), made_with("2"))
    with pytest.raises(UserError, match=r"^data_sha256 is .* in the checkpoint"):
        compare(made_with("3"), made_with("2"))


def stop_before_an_iteration(*call):
    """Resume a run with flags, and interrupt it before its first iteration."""
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, HFEngine, "generate", 1, send(signal.SIGINT, signal.SIGINT))
        assert resume(*call) == 130


def test_a_run_that_is_extended_is_so_from_its_start(copy, finished):
    """Another --resume, begun before this one has ended, reads the new --iterations."""
    stop_before_an_iteration(copy, "--iterations", "7")
    assert resume(copy) == 0
    rows = contents(copy)[0]
    assert rows[:-1] == contents(finished)[0]
    assert float(rows[-1]["lr"]) > 0
    assert AutoTokenizer.from_pretrained(copy / "checkpoint").chat_template


def test_of_damaged_checkpoints_the_one_before_is_used(copy, capsys, finished):
    """A flipped bit, a file that is cut short, other content, none at all."""
    rng = random.Random(0)
    names = "state.pt optimizer-0.pt model.safetensors tokenizer.json manifest.json run.json"
    for path in [copy / "checkpoint" / name for name in names.split()]:
        whole = path.read_bytes()
        damaged = [b"null", b"{}", b"[" * 10**5, whole[:-1], b""]
        for place in (0, *rng.sample(range(len(whole)), 3), len(whole) - 1):
            flipped = whole[place] ^ 1 << rng.randrange(8)
            damaged.append(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        for content in damaged:
            path.write_bytes(content)
            assert done(copy) == 4
        path.write_bytes(whole)
    path.unlink()
    assert resume(copy) == 0
    assert "the newest checkpoint is damaged (run.json has changed)" in capsys.readouterr().out
    assert contents(copy) == contents(finished)

    for folder in copy.glob("checkpoint*"):
        shutil.rmtree(folder)
    stop_before_an_iteration(copy, "--micro_batch_size", "3")
    assert resume(copy) == 0  # it starts over
    assert contents(copy) == contents(finished)
    assert parse_args(["--resume", str(copy)]).micro_batch_size == 3


def test_no_row_of_replay_csv_is_there_twice(copy, finished):
    """It is a log: the run goes on without it, in a new one, also after it was killed there."""
    (copy / "replay.csv").write_text("")
    shutil.rmtree(copy / "checkpoint")
    assert resume(copy) == 0
    header, *rows = (copy / "replay.csv").read_text().splitlines()
    assert [header, *rows] == [header, *(finished / "replay.csv").read_text().splitlines()[-16:]]
    (copy / "replay.csv").write_text("\n".join([header, *rows, "7,1"]))  # half a row
    assert resume(copy, "--iterations", "8") == 0
    assert resume(copy, "--iterations", "7") == 2  # 8 are done
    assert parse_args(["--resume", str(copy)]).iterations == 8
    assert read(copy)["iteration"].tolist() == [5.0] * 8 + [6.0] * 8 + [7.0] * 8 + [8.0] * 8


def test_what_the_system_cannot_read_is_not_damaged(copy, capsys, monkeypatch):
    denied = PermissionError(13, "Permission denied", "state.pt")
    monkeypatch.setattr("freshper.checkpoint.checksums", Mock(side_effect=denied))
    before = sorted(copy.rglob("*"))
    assert resume(copy, "--iterations", "7") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"train.py: error: {copy}/checkpoint cannot be read: {denied}"
    assert sorted(copy.rglob("*")) == before


def forge(folder, name, content):
    """Write a file of a checkpoint and its checksum."""
    if name.endswith(".pt"):
        torch.save(content, folder / name)
    else:
        (folder / name).write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(checksums(folder)))


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


FORGED = {  # a file and what it holds instead, or a change of the state
    "code": ("state.pt", Malicious()),
    "code of the optimizer": ("optimizer-0.pt", {"python": Malicious()}),
    "no date": ("run.json", {"threads": 1, "made_with": {}}),
    "threads that are no number": ("run.json", {"today": "2026-01-01", "threads": "x"}),
    "a row with a text": lambda state: state["metrics"]["rows"][-1].update(loss="x"),
    "no rows": lambda state: state["metrics"]["rows"].clear(),
    "a step that is no number": lambda state: state["trainer"].update(step="x"),
    "no images": lambda state: state["buffer"]["episodes"].pop("images"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_checkpoint_is_one_sentence_and_no_code(copy, monkeypatch, capsys, kind):
    monkeypatch.chdir(copy)
    forged = FORGED[kind]
    if callable(forged):
        state = torch.load("checkpoint/state.pt", weights_only=True)
        forged(state)
        forged = "state.pt", state
    forge(copy / "checkpoint", *forged)
    shutil.rmtree(copy / "checkpoint-before")
    assert resume(copy, "--iterations", "7") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    reason = r"are damaged: |of this run: \w+: .* \(\S+\.py:\d+\)$"
    assert re.match(f"train.py: error: .*({reason})", line)
    assert not (copy / "executed").exists()


def test_the_date_and_the_threads_of_the_first_start_are_kept(tmp_path, model_folder, monkeypatch):
    """A chat template may show the date. The order of sums depends on the threads."""

    def prompt(*flags):
        config = parse_args([*flags])
        saved = find_saved(config.resume)
        policy = backends.load(config, saved, backends.make_env(config))
        return policy.tokenizer.decode(policy.user_turn(Observation("x")))

    model = shutil.copytree(model_folder["text"], tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    assert date.today().strftime("%d %b %Y") in prompt("--model", str(model))

    out = tmp_path / "run"
    assert run(out, "--model", str(model), "--iterations", "1") == 0
    saved = json.loads((out / "checkpoint/run.json").read_text())
    assert saved["threads"] == torch.get_num_threads() == 1
    forge(out / "checkpoint", "run.json", saved | {"today": "2001-02-03", "threads": 3})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "03 Feb 2001" in prompt("--resume", str(out))
    assert torch.get_num_threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(4)
    prompt("--resume", str(out))
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


@pytest.mark.parametrize(("kilobytes", "status"), [(1, 2), (4, 1), (700, 1)])
def test_a_disk_that_runs_full(copy, capsys, kilobytes, status):
    """No file may grow beyond a size: one sentence, and the checkpoints stay as they were. If it is
    full from the start, so do the tables."""
    paths = copy.rglob("*.csv" if status == 2 else "checkpoint*/*")
    before = {path: path.read_bytes() for path in paths}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, hard))
    try:
        assert resume(copy, "--iterations", "8") == status
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr()
    assert "File too large" in said.out + said.err
    assert (f"error: {copy} cannot be written: " in said.err) is (status == 2)
    assert {path: path.read_bytes() for path in before} == before
    assert not (copy / ".checkpoint-new").exists()
