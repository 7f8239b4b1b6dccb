"""What the pages promise: links resolve, commands parse, symbols exist, patches apply and run."""

import copy
import fnmatch
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_episode

from compare import EXHIBITS
from freshper.config import Config
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.run import COLUMNS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("e*/README.md")])
# Commands with one of these words are not parsed. The last four are names of forks, run below.
PLACEHOLDERS = set("--help --resume NAME digits ppo group_advantage surprise auto".split())
SHORT = """--iterations 1 --rollout_batch_size 8 --batch_size 8 --eval_every 1
--eval_episodes 4""".split()


def without_blocks(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            # as GitHub makes them
            anchors = [re.sub(r"[^\w\- ]", "", heading).lower() for heading in headings]
            assert anchor in [name.replace(" ", "-") for name in anchors], link


def commands(page):
    """Yield the words of a page's shell commands, from blocks and from single lines of code."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`]+)`", without_blocks(text).replace("\n", " "))
    for command in re.split(r"&&|\|\||\n", "\n".join(lines)):
        if re.search(r"\bpython3? |\btorchrun |\bdeepspeed ", command):
            yield shlex.split(command, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_and_their_flags_parse(page):
    for words in commands(page):
        name = next((word for word in words if word.endswith(".py")), None)
        if name is None:
            if "-m" in words:
                assert importlib.util.find_spec(words[words.index("-m") + 1]), words
            continue

        assert (ROOT / name).is_file(), words
        flags = words[words.index(name) + 1 :]
        if name == "train.py" and not PLACEHOLDERS & set(flags):
            parse_args(flags)


def test_runs_md_explains_every_column_and_no_other():
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    names = re.findall("`(.+?)`", " ".join(cells))
    for name in names:
        assert fnmatch.filter(COLUMNS, name), name
    for column in COLUMNS:
        assert any(fnmatch.fnmatch(column, name) for name in names), column


def test_an_installed_copy_works_in_another_folder(tmp_path):
    """With the files that setuptools packs, in a folder that has no checkout."""
    source = tmp_path / "source"
    words = ["git", "checkout-index", "--all", f"--prefix={source}/"]
    subprocess.run(words, cwd=ROOT, check=True)
    install = "-m pip install -q --no-deps --target".split()
    subprocess.run([sys.executable, *install, tmp_path / "to", source], check=True)
    shutil.rmtree(source)
    use = """if True:
        from freshper import backends, episode, flags, reinforce, rollout
        config = flags.parse_args([])
        envs = backends.make_envs(config)
        with backends.backends(config, None, envs[0]) as (trainer, engine):
            episodes = rollout.rollout(engine, envs, [1, 2, 3, 4], 512, 8)
            trainer.record_behavior_logprobs(episodes)
            batch = episode.collate(episodes)
            norm = reinforce.ReturnNormalizer(True, 0.0)
            norm.observe(batch)
            print(trainer.update(batch, norm.advantages(batch)))"""
    subprocess.run([sys.executable, "-c", use], cwd=tmp_path / "to", check=True)


def test_uv_finds_versions_of_all_extras_and_runs(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "lock"], cwd=tmp_path, check=True)
    words = "run --active --no-sync train.py --env frozenlake_vlm".split()
    here = os.environ | {"VIRTUAL_ENV": sys.prefix}
    subprocess.run([*uv, *words, *SHORT, "--out", tmp_path / "run"], cwd=ROOT, env=here, check=True)


def test_paper_to_code_has_every_label_in_order_with_its_number():
    """The build of the reading edition (test_reading.py) looks up the symbols."""
    table = (ROOT / "docs/paper_to_code.md").read_text(encoding="utf-8")
    # rows of label, kind, number, title
    paper = json.loads((ROOT / "tests/data/paper_labels.json").read_text())
    numbers = {label: number or "¶" for label, _, number, _ in paper}
    labels = re.findall(r"`([a-z]+:[\w:]+)`", table)
    assert [x for x in labels if "par:" not in x] == [x for x in numbers if "par:" not in x]
    for place, label in re.findall(r"^\| (.+?) `(\w+:[\w:]+)` \|", table, re.MULTILINE):
        assert place.strip("()").split()[-1] == numbers[label]
    assert set(re.findall(r"--exhibit (\w+)", table)) == set(EXHIBITS)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Return, by the name of a patch, a copy of the code with it, in which the command of
    examples/README.md has run an iteration."""
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    commands = dict(re.findall(r"git apply examples/(\w+)\.patch\npython (\w+\.py .*)", page))
    assert set(commands) == {path.stem for path in ROOT.glob("examples/*.patch")}
    trees = {}
    runs = []
    for name, command in commands.items():
        trees[name] = tree = tmp_path_factory.mktemp(name)
        for folder in ("freshper", "envs"):
            shutil.copytree(ROOT / folder, tree / folder)
        for file in ROOT.glob("*.py"):
            shutil.copy(file, tree)
        subprocess.run(["git", "apply", ROOT / f"examples/{name}.patch"], cwd=tree, check=True)
        words = [sys.executable, *shlex.split(command), *SHORT, "--out", "run"]
        if "compare.py" in words:
            words += ["--seeds", "1"]
        runs.append(subprocess.Popen(words, cwd=tree))
    # They run side by side.
    assert {process.wait(600) for process in runs} == {0}
    return trees


def test_ppo_s_advantages_and_priorities_against_values_computed_one_by_one(forks, text_policy):
    policy = copy.deepcopy(text_policy)
    config = Config(lr=3e-3, epsilon=0.1, micro_batch_size=3, dtype="float32", advantage_clip=20.0)
    ppo = runpy.run_path(str(forks["ppo"] / "freshper/ppo.py"))
    trainer = ppo["PPOTrainer"](policy, config, 100)
    rng = np.random.default_rng(1)
    words = range(263, 273)  # which can be sampled
    episodes = [make_episode(rng, turns=n, vocabulary=words) for n in (3, 1, 4, 2, 3)]
    trainer.record_behavior_logprobs(episodes)
    batch = collate(episodes)
    for _ in range(10):
        trainer.update(batch, torch.zeros(batch.tokens.shape))
    priorities = trainer.base_priorities(episodes)
    advantages, _ = trainer.token_advantages(collate(episodes))

    for row, e in enumerate(episodes):
        starts = [t for t in np.flatnonzero(e.action_mask) if not e.action_mask[t - 1]]
        with torch.no_grad():
            hidden = trainer.critic.batch_hidden(collate([e]))[0]
            v = [trainer.critic.model.lm_head(hidden[t - 1]).item() for t in starts] + [0.0]
        assert max(map(abs, v)) > 0.01  # the critic has moved
        delta = e.turn_rewards + np.diff(v)
        assert priorities[row] == pytest.approx(np.abs(delta).mean() + 0.1, abs=1e-4)

        # GAE, as its sum over later turns
        ages = np.arange(len(starts))
        a = [(0.95 ** ages[: len(ages) - t]) @ delta[t:] for t in ages]
        turn = np.searchsorted(starts, np.arange(len(e.tokens)), side="right") - 1
        expected = np.where(e.action_mask, np.array(a)[turn], 0.0)
        np.testing.assert_allclose(advantages[row, : len(expected)], expected, atol=1e-4)
