"""What the pages promise: links resolve, commands parse, symbols exist, patches apply and run."""

import copy
import dataclasses
import importlib.util
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import make_episode

import freshper.trainer
from compare import exhibits
from freshper.checkpoint import unpack_episodes
from freshper.config import Config
from freshper.diagnostics import read
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.reinforce import training_batch

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "RESULTS.md",
    ROOT / "examples/README.md",
    *sorted(ROOT.glob("docs/*.md")),
]
TABLE = (ROOT / "docs/paper_to_code.md").read_text(encoding="utf-8")
# commands with one of these words are not parsed; the last three are run below
PLACEHOLDERS = set("--help --resume NAME animals digits ppo group_advantage surprise".split())
SHORT = """--iterations 1 --rollout_batch_size 8 --batch_size 8 --eval_every 1
--eval_episodes 4""".split()


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def without_blocks(text):
    """Return the text of a page without its blocks of code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve_and_files_and_flags_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link

    if page.name in ("README.md", "differences.md"):
        names = r"`((?:freshper|envs|docs|tests|examples)/[\w/.]+|--\w[^`\n]*)`"
        for name in re.findall(names, without_blocks(text)):
            assert exists(name), name


def commands(page):
    """Yield the words of a page's shell commands, from blocks and from single lines of code."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`]+)`", without_blocks(text).replace("\n", " "))

    for line in lines:
        for command in re.split(r"&&|\|\|", line):
            if re.search(r"\bpython3? |\btorchrun |\bdeepspeed ", command):
                yield shlex.split(command, comments=True)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if not p.name.startswith("log")], ids=lambda page: page.name
)
def test_commands_exist_and_their_flags_parse(page):
    for words in commands(page):
        name = next((w for w in words if w.endswith(".py")), None)
        if name is None:
            if "-m" in words:
                assert importlib.util.find_spec(words[words.index("-m") + 1]), words
            continue

        assert (ROOT / name).is_file(), words
        flags = words[words.index(name) + 1 :]
        if name == "train.py" and not PLACEHOLDERS & set(flags):
            parse_args(flags)
        if name == "compare.py":
            values = {"--exhibit": "main", "--arm": "freshper"} | dict(pairwise(flags))
            assert values["--exhibit"] in exhibits("tiny", "frozenlake"), words
            if not PLACEHOLDERS & set(values["--arm"].split()):
                parse_args(["--method", *values["--arm"].split()])


def exists(name):
    """Return whether `package.module.symbol`, `path`, `--flag` or `--exhibit name` exists."""
    if exhibit := re.fullmatch(r"--exhibit (\w+)", name):
        return exhibit[1] in exhibits("tiny", "frozenlake")
    if flag := re.match(r"--(\w+)", name):
        return flag[1] in Config.__dataclass_fields__
    if "/" in name:
        return (ROOT / name).exists()
    # it raises AttributeError or ImportError if there is no such symbol
    return pkgutil.resolve_name(name) is not None


def test_paper_to_code_has_every_label_in_order_and_names_what_exists():
    # rows of label, kind, number, title
    paper = json.loads((ROOT / "tests/data/paper_labels.json").read_text())
    places = {label: (number or "¶", title) for label, _, number, title in paper}
    labels = re.findall(r"`([a-z]+:[\w:]+)`", TABLE)
    expected = [label for label in places if not label.startswith("par:")]
    assert [label for label in labels if not label.startswith("par:")] == expected

    rows = re.findall(r"^\| (.+) `(\w+:[\w:]+)` \| (.+) \| (.+) \|$", TABLE, re.MULTILINE)
    for place, label, says, code in rows:
        number, title = places[label]
        assert place.strip("()").split()[-1] == number
        assert says.startswith(title)
        assert code.startswith(("not code, because ", "`")), label
        for name in re.findall(r"`([^`]+)`", code) + re.findall(r"`(--\w[^`]*)`", says):
            assert exists(name), (label, name)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """For each patch, return a copy of the code with it, in which the command of examples/README.md
    has run an iteration."""
    page = (ROOT / "examples/README.md").read_text()
    commands = dict(re.findall(r"git apply examples/(\w+)\.patch\npython (\w+\.py .*)", page))
    assert set(commands) == {path.stem for path in ROOT.glob("examples/*.patch")}
    runs = {}
    for name, command in commands.items():
        tree = tmp_path_factory.mktemp(name)
        for folder in ("freshper", "envs"):
            shutil.copytree(ROOT / folder, tree / folder)
        for file in ROOT.glob("*.py"):
            shutil.copy(file, tree)
        subprocess.run(["git", "apply", ROOT / f"examples/{name}.patch"], cwd=tree, check=True)

        words = [sys.executable, *shlex.split(command), *SHORT, "--out", "run"]
        if "compare.py" in words:
            words += ["--seeds", "1"]
        runs[tree] = subprocess.Popen(words, cwd=tree, env=os.environ | {"OMP_NUM_THREADS": "1"})
    # they run side by side
    assert {process.wait(300) for process in runs.values()} == {0}
    return {tree.name.rstrip("0123456789"): tree for tree in runs}


def test_a_new_priority_is_an_arm(forks):
    """Its base priorities, from what the tokens of the stored episodes were sampled with."""
    (path,) = forks["surprise"].glob("run/freshper-base_priority-surprise-*/checkpoint/state.pt")
    buffer = torch.load(path, weights_only=True)["buffer"]
    episodes = unpack_episodes(buffer["episodes"])
    for k, episode in enumerate(episodes):
        sampled = [x for t, x in enumerate(episode.behavior_logprobs) if episode.action_mask[t]]
        assert buffer["base_priorities"][k] == pytest.approx(0.1 - np.mean(sampled), rel=1e-5)


@pytest.mark.parametrize("name", ["ppo", "group_advantage"])
def test_a_fork_runs_under_its_own_name(forks, name):
    config = json.loads((forks[name] / "run/config.json").read_text())
    state = torch.load(forks[name] / "run/checkpoint/state.pt", weights_only=True)
    priorities = state["buffer"]["base_priorities"].numpy()[:8]
    returns = np.array([episode.reward for episode in unpack_episodes(state["buffer"]["episodes"])])
    assert config["method"] == name
    if name == "group_advantage":
        # one group of eight
        expected = np.abs(returns - returns.mean()) + config["epsilon"]
        np.testing.assert_allclose(priorities, expected, rtol=1e-6)
    else:
        assert set(state["trainer"]) >= {"critic", "critic_optimizer"}
        assert not np.allclose(priorities, np.abs(returns) + config["epsilon"])


def test_in_a_fork_the_other_methods_stay_as_they_are(forks, tmp_path):
    trees = {"main": ROOT, "ppo": forks["ppo"], "group_advantage": forks["group_advantage"]}
    tables = {}
    for name, tree in trees.items():
        words = [sys.executable, "train.py", "--env=frozenlake", *SHORT, "--out", tmp_path / name]
        subprocess.run(words, cwd=tree, check=True)
        tables[name] = read(tmp_path / name, "metrics.csv")

    for column, values in tables.pop("main").items():
        if not column.endswith("_s"):
            for table in tables.values():
                np.testing.assert_array_equal(table[column], values, column)

    words = [sys.executable, "train.py", "--resume", tmp_path / "main", "--iterations=2"]
    subprocess.run(words, cwd=forks["group_advantage"], check=True)


@pytest.mark.parametrize("name", ["ppo", "group_advantage"])
def test_a_fork_refuses_a_base_priority_beside_its_own(forks, name, tmp_path):
    flags = f"--env=frozenlake --method={name} --base_priority=reward".split()
    words = [sys.executable, "train.py", *flags, "--out", tmp_path / "run"]
    process = subprocess.run(words, cwd=forks[name], capture_output=True, text=True)
    because = f"--base_priority is reward, but has no effect with --method {name}"
    assert process.returncode == 2 and because in process.stderr


def test_with_the_buffer_s_maximum_a_fork_trains_less_on_what_is_drawn_often(forks, tmp_path):
    """At epsilon 1e-6 a success is drawn thousands of times as often as a failure."""
    flags = "--env frozenlake --method per --epsilon 1e-6".split()
    words = [sys.executable, "train.py", *flags, *SHORT, "--out", str(tmp_path / "run")]
    subprocess.run(words, cwd=ROOT, check=True)
    plain = read(tmp_path / "run", "metrics.csv")
    patched = read(forks["buffer_maximum"] / "run", "metrics.csv")
    assert patched["replay_grad_norm"][1] < 0.5 * plain["replay_grad_norm"][1]


def test_ppo_s_advantages_and_priorities_against_values_computed_one_by_one(
    forks, text_policy, monkeypatch
):
    policy = copy.deepcopy(text_policy)
    config = Config(lr=3e-3, epsilon=0.1, micro_batch_size=3, dtype="float32", advantage_clip=20.0)
    ppo = runpy.run_path(str(forks["ppo"] / "freshper/ppo.py"))
    trainer = ppo["PPOTrainer"](policy, config, 100)
    rng = np.random.default_rng(1)
    words = range(263, 273)  # which can be sampled
    episodes = [make_episode(rng, turns=n, vocabulary=words) for n in (3, 1, 4, 2, 3)]
    trainer.record_behavior_logprobs(episodes)
    for _ in range(10):
        trainer.update(episodes)
    priorities = trainer.base_priorities(episodes)
    resumed = ppo["PPOTrainer"](copy.deepcopy(text_policy), dataclasses.replace(config, lr=1e-4), 9)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.critic_optimizer.param_groups[0]["lr"] == 1e-4

    trained = []
    wrapped = Mock(side_effect=lambda *args: trained.append(training_batch(*args)) or trained[0])
    monkeypatch.setattr(freshper.trainer, "training_batch", wrapped)
    monkeypatch.setattr(trainer, "_fit", lambda *_: None)
    trainer.update(episodes)

    for row, e in enumerate(episodes):
        starts = [t for t in np.flatnonzero(e.action_mask) if not e.action_mask[t - 1]]
        with torch.no_grad():
            hidden = trainer.critic.batch_hidden(collate([e]))[0]
            v = [trainer.critic.model.lm_head(hidden[t - 1]).item() for t in starts] + [0.0]
        assert max(map(abs, v)) > 0.01  # the critic has moved
        r = e.turn_rewards.tolist()
        delta = [r[t] + v[t + 1] - v[t] for t in range(len(starts))]
        assert priorities[row] == pytest.approx(np.mean(np.abs(delta)) + 0.1, abs=1e-4)

        # GAE, as its double sum
        a = np.zeros(len(starts))
        for t in range(len(starts)):
            for k in range(t, len(starts)):
                a[t] += 0.95 ** (k - t) * delta[k]
        turn = np.searchsorted(starts, np.arange(len(e.tokens)), side="right") - 1
        expected = np.where(e.action_mask, a[turn], 0.0)
        np.testing.assert_allclose(trained[0].advantages[row, : len(expected)], expected, atol=1e-4)
