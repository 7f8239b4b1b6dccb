"""train.py with real vLLM and DeepSpeed, without a GPU, on one rank and on two.

Every run is a subprocess in a session of its own, so that what it leaves behind can be counted:
nothing, also if vLLM or the trainer is killed. Starting vLLM takes most of the time, so a run
serves several purposes.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import read

from envs import ENVS
from freshper.tiny import build_policy

ROOT = Path(__file__).parents[2]
# With the entropy bonus failures that are alike train, too.
SHORT = """--rollout_batch_size 4 --batch_size 5 --micro_batch_size 2 --eval_episodes 4
--eval_every 2 --max_turns 2 --max_tokens 1600 --max_new_tokens 16 --dtype float32 --lr 0.01
--save_every 1 --entropy_coef 0.01""".split()
FOREVER = ["--iterations", "100000"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models with random weights and tied output layers, as those of Qwen2.5-0.5B and
    VL-3B are."""
    folders = {}
    for name in ("frozenlake", "frozenlake_vlm"):
        # Heads of 32 numbers, the fewest that vLLM's CPU attention knows.
        policy = build_policy(ENVS[name](), heads=2)
        for config in (policy.model.config, policy.model.config.get_text_config()):
            config.tie_word_embeddings = True
        policy.model.tie_weights()
        folders[name] = str(tmp_path_factory.mktemp(name))
        policy.save(folders[name])
    return folders


STARTED = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """Also if a test fails in the middle of a run."""
    yield
    while STARTED:
        for pid in session(STARTED.pop()):
            os.kill(pid, signal.SIGKILL)


def start(out, ranks, *flags, script=("train.py",), nodes="--standalone"):
    command = [sys.executable]
    if ranks > 1 or nodes != "--standalone":
        command += f"-m torch.distributed.run {nodes} --nproc_per_node {ranks}".split()
    with open(f"{out}.log", "a") as log:
        process = subprocess.Popen(
            [*command, *script, *flags],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.sessions = {str(process.pid)}
    STARTED.append(process)
    process.in_memory = in_memory()
    return process


def in_memory():
    return set(Path("/dev/shm").glob("freshper-*"))


def session(process):
    """{pid: command} of every process that is left of a run. torchrun gives its workers sessions of
    their own, which are known from the first look on, so that nothing is lost when a parent
    dies."""
    command = ["ps", "-ww", "-eo", "pid=,ppid=,sid=,stat=,args="]  # in full width
    listing = subprocess.check_output(command, text=True)
    table = [line.split(maxsplit=4) for line in listing.splitlines()]
    sids = process.sessions
    before = 0
    while len(sids) > before:
        before = len(sids)
        parents = {pid for pid, _, sid, *_ in table if sid in sids}
        sids |= {sid for _, ppid, sid, *_ in table if ppid in parents}
    return {int(pid): args for pid, _, sid, stat, args in table if sid in sids and "Z" not in stat}


def wait_until(holds, seconds, log):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)


def finish(process, out, timeout=600):
    """(exit status, output), when no process and no file in shared memory is left."""
    log = Path(f"{out}.log")
    wait_until(lambda: not session(process) and process.in_memory >= in_memory(), timeout, log)
    return process.wait(), log.read_text()


def wait_for_rows(process, out, n):
    """Of metrics.csv, after its header and the evaluation before training."""
    table = out / "metrics.csv"
    log = Path(f"{out}.log")

    def arrived():
        return table.exists() and table.read_text().count("\n") > n + 1

    wait_until(lambda: arrived() or not session(process), 500, log)
    assert session(process), log.read_text()


def rank(number, process):
    """The process of a rank; 0 is the controller."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(pid) for pid in children if "train.py" in session(process)[int(pid)])[number]


def ends_in_one_sentence(process, out):
    """The sentence, from a run in which a process was just killed or stopped."""
    status, output = finish(process, out, timeout=60)
    assert status not in (0, 2)
    (sentence,) = re.findall(r"stopped after iteration \d+: .*", output)
    return sentence


def trained_and_agreed(out):
    """Both updates ran in each iteration, and vLLM had the trainer's weights."""
    table = read(out, "metrics.csv")
    # One fresh, two replayed.
    assert table["step"].tolist() == [3 * k for k in range(len(table["step"]))]
    assert np.isfinite(table["replay_loss"][1:]).all()
    # What vLLM sampled has the log-probs that it said.
    assert (table["mismatch"][1:] < 1e-5).all()
    assert (table["grad_norm"][1:] > 0).all()


def test_text_on_two_ranks_resumed_until_vllm_is_killed(models, tmp_path):
    """The end of a terminal, a scheduler and Ctrl-C reach the whole group of rank 0, with vLLM in
    it, and the iteration is completed; --resume goes on; then vLLM's core is killed in mid-run."""
    out = tmp_path / "run"
    flags = [*SHORT, *"--backend vllm+deepspeed --zero_stage 2 --model".split()]
    flags.append(models["frozenlake"])
    process = start(out, 2, *flags, *FOREVER, "--out", str(out))
    wait_for_rows(process, out, 2)
    group = rank(0, process)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.killpg(group, number)
    _, output = finish(process, out)
    assert "stopped after iteration" in output and "interrupted" in output
    assert "stopping after this iteration, with a checkpoint" in output
    trained_and_agreed(out)
    Path(f"{out}.log").unlink()
    rows = len(read(out, "metrics.csv")["step"])
    process = start(out, 2, "--resume", str(out))
    wait_for_rows(process, out, rows + 1)
    cores = [pid for pid, args in session(process).items() if args.startswith("VLLM::EngineCore")]
    os.kill(min(cores), signal.SIGKILL)
    phase = r": (the rollout with vLLM|handing the weights to vLLM) failed: "
    assert re.search(phase, ends_in_one_sentence(process, out))
    trained_and_agreed(out)


def test_images_on_two_ranks_until_the_trainer_is_killed(models, tmp_path):
    out = tmp_path / "run"
    flags = "--backend vllm+deepspeed --zero_stage 3 --env frozenlake_vlm --model".split()
    flags += [models["frozenlake_vlm"], *SHORT, *FOREVER, "--out", str(out)]
    process = start(out, 2, *flags)
    wait_for_rows(process, out, 3)
    os.kill(rank(0, process), signal.SIGKILL)
    assert finish(process, out, timeout=60)[0] == 1
    trained_and_agreed(out)


def test_a_skipped_sync_is_refused_in_the_next_iteration(models, tmp_path):
    """Before, vLLM has a KV cache of seven blocks: it takes blocks away from conversations and
    computes them again, which changes no log-prob."""
    wrong = """import sys, vllm, train, freshper.engine_vllm as engine_vllm
start = vllm.LLM
small = {"num_gpu_blocks_override": 7, "disable_log_stats": False}
vllm.LLM = lambda **options: start(**options | small)
def skip(engine, trainer):
    counts = {metric.name: metric for metric in engine.llm.get_metrics()}
    print("preempted", counts["vllm:num_preemptions"].value)
    return {}
engine_vllm.VLLMEngine.sync = skip
sys.exit(train.main())"""
    flags = """--env frozenlake_vlm --backend vllm+torch --rollout_batch_size 16 --batch_size 16
    --max_turns 4 --max_tokens 190 --max_new_tokens 32 --model""".split()
    out = tmp_path / "run"
    flags = [*SHORT, *flags, models["frozenlake_vlm"], "--out", str(out)]
    process = start(out, 1, *flags, script=("-c", wrong))
    status, output = finish(process, out)
    assert status == 1, output
    assert re.search(r"preempted [1-9]", output)
    assert (read(out, "metrics.csv")["mismatch"][1:] < 1e-5).all()
    (iteration, differ) = re.search(
        r"stopped after iteration (\d): the engine does not .* differ by (\S+) ", output
    ).groups()
    assert (iteration, float(differ) > 1e-3) == ("1", True)


def start_both(out, *flags):
    """Launch as on two machines: rank 0 on the first, ranks 1 and 2 on the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"--nnodes 2 --master_addr 127.0.0.1 --master_port {free.getsockname()[1]}"
    return [start(out, n + 1, *flags, nodes=f"{meeting} --node_rank {n}") for n in (0, 1)]


def test_two_launchers_make_the_run_of_one_also_if_one_dies(models, tmp_path):
    """Bit for bit. Each rank writes its share of the optimizer into the folder that both
    see."""
    flags = "--backend hf+deepspeed --iterations 4 --model".split()
    flags += [models["frozenlake"], *SHORT]
    one = tmp_path / "one"
    status, output = finish(start(one, 3, *flags, "--out", str(one)), one)
    assert status == 0, output

    out = tmp_path / "two"
    first, second = start_both(out, *flags, "--out", str(out))
    wait_for_rows(first, out, 2)
    for pid in session(second):
        os.kill(pid, signal.SIGKILL)
    # They train or save when it dies.
    sentence = ends_in_one_sentence(first, out)
    assert re.search("DeepSpeed failed: RuntimeError: | was not written to .*/two: ", sentence)

    for launcher in start_both(out, "--resume", str(out)):
        status, output = finish(launcher, out)
        assert status == 0, output
    ours, expected = (read(folder, "metrics.csv") for folder in (out, one))
    for name in expected:
        if not name.endswith("_s"):
            np.testing.assert_array_equal(ours[name], expected[name], name)
    assert (ours["mismatch"][1:] < 1e-5).all()
    # The updates move log-probs by far more.
    assert (ours["replay_kl"][2:] > 1e-3).all()
