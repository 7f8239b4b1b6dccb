"""Shared set-up: one torch thread, tiny policies with random weights, episodes of random tokens."""

import copy
import dataclasses
import json
import os
import runpy
import signal
from pathlib import Path

# For this process, and for those that tests start.
SHIM = Path(__file__).parent / "engines/torchvision_shim"
runpy.run_path(str(SHIM / "sitecustomize.py"))
os.environ["OMP_NUM_THREADS"] = "1"
# nohup, and a shell's background, would make every run deaf to signals.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH")]))

import hypothesis
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch.utils import _pytree

from envs import ENVS
from freshper.checkpoint import find_saved
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import Episode
from freshper.reinforce import ReturnNormalizer
from freshper.rollout import rollout
from freshper.tiny import build_policy

# The same examples on every machine.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def text_policy():
    return build_policy(ENVS["frozenlake"]())


@pytest.fixture(scope="session")
def vision_policy():
    return build_policy(ENVS["frozenlake_vlm"]())


@pytest.fixture(scope="module", params=["text_policy", "vision_policy"])
def policy(request):
    return request.getfixturevalue(request.param)


def copy_of(policy, **changes):
    return dataclasses.replace(policy, model=copy.deepcopy(policy.model), **changes)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, text_policy, vision_policy):
    """Folders of both families, as `--model` wants them."""
    folders = {}
    for family, policy in (("text", text_policy), ("vision", vision_policy)):
        folders[family] = str(tmp_path_factory.mktemp(family))
        policy.save(folders[family])
    return folders


def read(folder, name="replay.csv"):
    """Return the columns of a run's table, float64 [rows], NaN where it is empty."""
    table = pandas.read_csv(Path(folder, name), dtype=float)
    return {column: values.to_numpy() for column, values in table.items()}


def make_episode(rng, turns=3, prompt=0, vocabulary=200, **fields):
    """Return an episode of random tokens: turns of 1 to 5 action tokens between bridges of 1 to
    6."""
    mask = [False] * (prompt or int(rng.integers(2, 8)))
    for turn in range(turns):
        mask += [True] * int(rng.integers(1, 6))
        if turn < turns - 1:
            mask += [False] * int(rng.integers(1, 7))
    mask = np.array(mask)

    turn_rewards = rng.normal(size=turns).astype(np.float32)
    return Episode(
        tokens=rng.choice(vocabulary, len(mask)).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(len(mask)), 0.0).astype(np.float32),
        reward=float(turn_rewards.sum()),
        turn_rewards=turn_rewards,
        **fields,
    )


def random_image(seed, height=56, width=56):
    """Return an image of random pixels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 255, (height, width, 3), dtype=np.uint8)


def speakable_episodes(policy, n):
    """Return n episodes of 1, 3, 5 or 7 turns of tokens that the policy can sample, with an image
    if it takes any."""
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(len(policy.tokenizer)), policy.suppressed_ids)
    episodes = []
    for k in range(n):
        e = make_episode(rng, turns=1 + 2 * (k % 4), prompt=20, vocabulary=ids, seed=k)
        if policy.image_processor:
            e.images = [random_image(k % 3)]
            e.tokens[:16] = policy.image_token_id
        episodes.append(e)
    return episodes


def whitened(batch, kl_reward_coef=0.0):
    """Return the advantages of a batch against itself, [B, T]."""
    normalizer = ReturnNormalizer(False, kl_reward_coef)
    normalizer.observe(batch)
    return normalizer.advantages(batch)


def stock_inputs(policy, tokens, images):
    tokens = torch.tensor(tokens, dtype=torch.long)[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if images:
        inputs |= policy.image_processor([Image.fromarray(i) for i in images], return_tensors="pt")
        inputs["mm_token_type_ids"] = (tokens == policy.image_token_id).int()
    return inputs


def stock_logits(policy, episode):
    """The model's own forward pass over one whole conversation, [T, V]. What is never sampled has
    no probability."""
    inputs = stock_inputs(policy, episode.tokens, episode.images)
    logits = policy.model(**inputs).logits[0] / 0.99
    return logits.index_fill(1, torch.tensor(policy.suppressed_ids), -torch.inf)


def stock_logprobs(policy, episode):
    """log pi of the action tokens, [T], 0 elsewhere."""
    logprobs = stock_logits(policy, episode).log_softmax(-1)[:-1]  # [T - 1, V]
    tokens = torch.from_numpy(episode.tokens[1:]).long()
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    mask = torch.from_numpy(episode.action_mask)
    return torch.where(mask, torch.cat([torch.zeros(1), chosen]), 0.0)


def play(policy, n=12, max_tokens=3000, **sampling):
    """Play episodes of 1 to 5 turns, with long and short prompts in one batch. Random weights
    sample any token."""
    make_env = ENVS["frozenlake_vlm" if policy.image_processor else "frozenlake"]
    styles = ("full", "terse", "terse", "terse")
    envs = [make_env(style=styles[k % 4], max_turns=1 + k % 5) for k in range(n)]
    engine = HFEngine(policy, Sampling(**sampling), seed=3)
    return rollout(engine, envs, list(range(n)), max_tokens, 5)


def write_rows(path, rows):
    """Write rows of data in the format of the file's ending. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


QUESTION = "who got the first nobel prize in physics"


@pytest.fixture
def questions(tmp_path):
    """Twenty questions with Search-R1's fields."""
    rows = []
    for k in range(20):
        question = f"{QUESTION} {k}?"
        rows.append({"id": k, "question": question, "golden_answers": ["Wilhelm Conrad Röntgen"]})
    return write_rows(tmp_path / "train.jsonl", rows)


def done(out):
    """Completed iterations at the checkpoint that --resume would load, 0 without one."""
    saved = find_saved(str(out))
    if not saved:
        return 0
    state = torch.load(saved.folder / "state.pt", weights_only=True)
    return len(state["metrics"]["rows"]) - 1


def contents(out):
    """Return what must be equal: metrics.csv without seconds, replay.csv, the state without the
    rows of metrics.csv, tensors as type and values, and the weights."""
    table = pandas.read_csv(out / "metrics.csv", dtype=str, keep_default_na=False)
    state = torch.load(out / "checkpoint/state.pt", weights_only=True) | {"metrics": None}
    state["optimizer"] = torch.load(out / "checkpoint/optimizer-0.pt", weights_only=True)
    return (
        table.filter(regex="(?<!_s)$").to_dict("records"),
        (out / "replay.csv").read_text(),
        _pytree.tree_map_only(torch.Tensor, lambda x: (x.dtype, x.tolist()), state),
        (out / "checkpoint/model.safetensors").read_bytes(),
    )
