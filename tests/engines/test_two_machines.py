"""The commands of docs/gpus.md for several machines, on two: one rank and vLLM on the first, two
ranks on the second.

The machines are namespaces of this one, joined by a virtual link. Each has its own network, host
name, processes, /etc/hosts and disk for runs. Its own name leads to 127.0.1.1, as Debian writes it,
hence GLOO_SOCKET_IFNAME. The oracle is the same run with three ranks on one machine: both have the
same numbers, also if a machine died on the way. A run that fails says so in one sentence, in time,
and leaves nothing running on either machine.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_train_for_real import SHORT, in_memory, wait_until

from envs import ENVS
from freshper.checkpoint import newest
from freshper.diagnostics import read
from freshper.tiny import build_policy

ROOT = Path(__file__).parents[2]
ADDRESSES = {"first": "10.77.0.1", "second": "10.77.0.2"}
RANKS = (1, 2)
# Joins the namespace in which we are root.
NSENTER = ("nsenter", "--user", "--preserve-credentials", "--target")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MEETING_POINT = "--nnodes 2 --master_addr first --master_port 29500".split()
# Updates take most of the time.
FLAGS = [*SHORT, *"--replay_ratio 10 --micro_batch_size 1 --iterations 4".split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, with heads that vLLM's CPU attention knows."""
    folder = str(tmp_path_factory.mktemp("model"))
    build_policy(ENVS["frozenlake"](), heads=2).save(folder)
    return folder


def boot(name, *users):
    """A process that holds a machine. All others on it end with this one."""
    namespaces = "--net --uts --pid --mount-proc --fork --kill-child".split()
    command = ["sh", "-ec", f"hostname {name}; ip link set lo up; echo up; exec cat"]
    holder = subprocess.Popen(
        [*users, "unshare", *namespaces, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    answer = holder.stdout.readline()
    if answer != "up\n":
        pytest.fail(f"this test needs namespaces of users and networks: {answer}", pytrace=False)
    holder.name = name
    holder.own = set()
    holder.own = processes(holder)
    return holder


def on(machine, *command):
    processes = f"--pid=/proc/{machine.pid}/ns/pid_for_children"
    namespaces = ["--net", "--uts", "--mount", processes, f"--wd={ROOT}"]
    return [*NSENTER, str(machine.pid), *namespaces, *command]


def sh(machine, script):
    subprocess.run(on(machine, "sh", "-ec", script), check=True)


@pytest.fixture
def machines(tmp_path):
    first = boot("first", "unshare", "--user", "--map-root-user")
    second = boot("second", *NSENTER, str(first.pid))
    both = [first, second]
    # Where the id of the second is known.
    link = f"ip link add name eth0 type veth peer name eth0 netns {second.pid}".split()
    subprocess.run([*NSENTER, str(first.pid), "--net", *link], check=True)
    # No process of the second has the id of one of the first.
    sh(second, "for k in $(seq 100); do /bin/true; done")
    (tmp_path / "disk").mkdir()
    for machine in both:
        hosts = tmp_path / f"{machine.name}.hosts"
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {machine.name}"]
        lines += [f"{address} {name}" for name, address in ADDRESSES.items()]
        hosts.write_text("\n".join(lines) + "\n")
        (tmp_path / machine.name).mkdir()
        sh(
            machine,
            f"""ip addr add {ADDRESSES[machine.name]}/24 dev eth0; ip link set eth0 up
            mount --bind {hosts} /etc/hosts
            mount --bind {tmp_path / machine.name} {tmp_path / "disk"}""",
        )
    yield both
    for machine in both:
        machine.kill()


def processes(machine):
    """Ids of all that runs on a machine, zombies aside, as this one sees them."""
    network = os.stat(f"/proc/{machine.pid}/ns/net").st_ino
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        # Some end meanwhile, and some belong to other users.
        with contextlib.suppress(OSError):
            if path.stat().st_ino == network:
                found.add(int(path.parts[2]))
    return found - machine.own


def kill(machine):
    for pid in processes(machine):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(machines, tmp_path, *flags, **variables):
    """The page's command on each machine. Their output goes to new logs."""
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    for node, machine in enumerate(machines):
        place = ["--node_rank", str(node), "--nproc_per_node", str(RANKS[node])]
        machine.log = tmp_path / f"{machine.name}.log"
        with open(machine.log, "w") as log:
            machine.torchrun = subprocess.Popen(
                on(machine, *TORCHRUN, *MEETING_POINT, *place, "train.py", *flags),
                env=os.environ | defaults | variables,
                stdout=log,
                stderr=log,
            )


def finish(machines, seconds=500):
    """Exit statuses, when no process is left on either machine."""
    for machine in machines:
        wait_until(lambda machine=machine: not processes(machine), seconds, machine.log)
    return [machine.torchrun.wait() for machine in machines]


def wait_for_an_update(machines, run):
    """Until the middle of the third iteration."""
    table = run / "metrics.csv"
    log = machines[0].log

    def trained():
        assert machines[0].torchrun.poll() is None, log.read_text()
        return table.exists() and table.read_text().count("\n") > 3

    wait_until(trained, 500, log)
    *_, before, last = read(run, "metrics.csv")["wall_s"]
    time.sleep((last - before) / 2)


def sentence(log):
    (found,) = re.findall(r"^(?:stopped|train\.py: error).*", log.read_text(), re.MULTILINE)
    return found


def same_numbers(run, expected, tolerance):
    ours, theirs = read(run, "metrics.csv"), read(expected, "metrics.csv")
    assert ours.keys() == theirs.keys()
    for name in ours:
        if not name.endswith("_s"):
            np.testing.assert_allclose(ours[name], theirs[name], tolerance, tolerance, err_msg=name)


@pytest.fixture(scope="module")
def on_one_machine(model, tmp_path_factory):
    """The folder of the oracle."""
    run = tmp_path_factory.mktemp("oracle") / "run"
    ranks = ["--standalone", "--nproc_per_node", str(sum(RANKS))]
    flags = [*"--backend vllm+deepspeed --zero_stage 3 --model".split(), model, *FLAGS]
    subprocess.run(
        [*TORCHRUN, *ranks, "train.py", *flags, "--out", str(run)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return run


def test_zero_3_with_a_machine_that_dies(machines, model, on_one_machine, tmp_path):
    """In the middle of an update. A copy of the checkpoint on the machine that comes back is enough
    to go on."""
    flags = [*"--backend vllm+deepspeed --zero_stage 3 --model".split(), model, *FLAGS]
    out = tmp_path / "disk/run"
    run = tmp_path / "first/run"
    left = in_memory()
    start(machines, tmp_path, *flags, "--out", str(out))
    wait_for_an_update(machines, run)
    kill(machines[1])
    assert finish(machines, seconds=60)[0] == 1
    assert re.search(
        r"`update` on 3 ranks of DeepSpeed failed: .*\[10\.77\.0\.2\]", sentence(machines[0].log)
    )
    assert in_memory() <= left
    assert newest(run).folder == run / "checkpoint"
    assert not list((tmp_path / "second").iterdir())

    shutil.copytree(run, tmp_path / "second/run")
    start(machines, tmp_path, "--resume", str(out))
    assert finish(machines) == [0, 0]
    assert "resuming from" in machines[0].log.read_text()
    same_numbers(run, on_one_machine, 0.0)


def test_zero_2(machines, model, on_one_machine, tmp_path):
    flags = [*"--backend vllm+deepspeed --zero_stage 2 --model".split(), model, *FLAGS]
    start(machines, tmp_path, *flags, "--out", str(tmp_path / "disk/run"))
    assert finish(machines) == [0, 0]
    same_numbers(tmp_path / "first/run", on_one_machine, 1e-4)


def test_a_link_that_drops(machines, model, tmp_path):
    """No process dies, and no machine hears of the other. With the embedded engine, because the
    limit is also that of vLLM's start."""
    flags = [*"--backend hf+deepspeed --zero_stage 1 --model".split(), model, *FLAGS]
    out = tmp_path / "disk/run"
    run = tmp_path / "first/run"
    start(machines, tmp_path, *flags, "--out", str(out), FRESHPER_TIMEOUT="20")
    wait_for_an_update(machines, run)
    sh(machines[0], "ip link set eth0 down")
    statuses = finish(machines, seconds=60)
    assert statuses == [1, 1]
    assert re.search(
        r"`update` on 3 ranks of DeepSpeed took longer than FRESHPER_TIMEOUT, 20 s",
        sentence(machines[0].log),
    )

    sh(machines[0], "ip link set eth0 up")
    shutil.copytree(run, tmp_path / "second/run")
    start(machines, tmp_path, "--resume", str(out))
    assert finish(machines) == [0, 0]
    assert read(run, "metrics.csv")["iteration"].tolist() == [0, 1, 2, 3, 4]


def test_a_name_that_leads_nowhere(machines, model, tmp_path):
    """Without GLOO_SOCKET_IFNAME, gloo gives the other machine the address 127.0.1.1."""
    flags = [*"--backend hf+deepspeed --model".split(), model, *FLAGS]
    out = tmp_path / "disk/run"
    start(
        machines, tmp_path, *flags, "--out", str(out), FRESHPER_TIMEOUT="10", GLOO_SOCKET_IFNAME=""
    )
    assert 0 not in finish(machines, seconds=200)
    for machine in machines:
        assert "the meeting of all ranks (GLOO_SOCKET_IFNAME" in machine.log.read_text()
