"""The tiny models: a tokenizer for any text, Qwen's classes and template, and weights that play at random."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

from envs import ENVS
from envs.frozenlake import ACTIONS, FrozenLake
from freshper import tiny
from freshper.models import load_policy
from freshper.tiny import SPECIAL, build_policy, build_tokenizer, describe, shape_key, tiny_model
from freshper.warm_start import transcripts, warm_start

tokenizer = build_tokenizer(FrozenLake.words)
# how well the shipped models read: what a policy cannot read it cannot learn to act on
CAPTIONS = {"frozenlake": 0.85, "frozenlake_vlm": 0.97}
SHIPPED_TASKS = [path.name.rsplit("-", 1)[0] for path in tiny.SHIPPED.iterdir()]


@given(st.text(max_size=200))
def test_any_text_can_be_encoded_and_comes_back(text):
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_tokens_that_matter_are_one_id_each():
    reply = "<answer>Right</answer><|im_end|>"
    assert [tokenizer.decode([i]) for i in tokenizer.encode(reply)] == ["<answer>", "Right", "</answer>", "<|im_end|>"]
    assert all(len(tokenizer.encode(token)) == 1 for token in SPECIAL)
    assert tokenizer.eos_token == "<|im_end|>"


def test_classes_and_sizes_are_what_the_module_says(text_policy, vision_policy):
    assert type(text_policy.model) is Qwen2ForCausalLM
    assert type(vision_policy.model) is Qwen2_5_VLForConditionalGeneration
    for policy in (text_policy, vision_policy):
        assert 100_000 <= sum(p.numel() for p in policy.model.parameters()) <= 200_000


def test_save_and_load_give_the_same_policy(vision_policy, tmp_path):
    vision_policy.save(str(tmp_path / "model"))
    loaded = load_policy(str(tmp_path / "model"), "cpu", torch.float32)
    picture = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    torch.testing.assert_close(loaded.image_features([picture]), vision_policy.image_features([picture]))
    for (name, p), q in zip(loaded.model.state_dict().items(), vision_policy.model.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    assert loaded.tokenizer.encode("<answer>Up</answer>") == vision_policy.tokenizer.encode("<answer>Up</answer>")


def test_transcripts_are_random_play(text_policy, vision_policy):
    """Replies are spread evenly over the actions, whatever the state; captions describe the last picture."""
    for policy, name in ((text_policy, "frozenlake"), (vision_policy, "frozenlake_vlm")):
        games = transcripts(policy, [ENVS[name]() for _ in range(200)], list(range(200)))
        text = "".join(policy.tokenizer.decode(g.tokens) for g in games)
        counts = np.array([text.count(f"<answer>{action}</answer>") for action in ACTIONS])
        assert (np.abs(counts / counts.sum() - 0.25) < 0.05).all()
        assert np.mean([g.info["success"] for g in games]) < 0.35


def test_the_key_covers_code_and_settings_but_not_comments(monkeypatch):
    before = shape_key("frozenlake")
    assert before != shape_key("frozenlake_vlm")
    source = inspect.getsource
    for old, new, changes in (
        ("the paper", "a paper", False),
        ("FROZEN_PROBABILITY = 0.8", "FROZEN_PROBABILITY = 0.7", True),
    ):
        monkeypatch.setattr(inspect, "getsource", lambda m, old=old, new=new: source(m).replace(old, new))
        assert (shape_key("frozenlake") != before) is changes


def test_the_shipped_weights_belong_to_this_code():
    """Fails when the code that shapes them has changed: run `python -m freshper.tiny --ship` and commit."""
    for name in SHIPPED_TASKS:
        assert tiny_model(name).is_relative_to(tiny.SHIPPED)


@pytest.mark.parametrize("name", SHIPPED_TASKS)
def test_the_shipped_weights_play_like_the_random_player(name):
    played = describe(tiny_model(name), name)
    assert played["invalid"] < 0.005
    if name in CAPTIONS:
        assert played["caption"] > CAPTIONS[name]


@pytest.mark.parametrize("name", ["frozenlake", "frozenlake_vlm"])
def test_a_rebuild_is_as_good(name, tmp_path):
    """A quarter of the warm start from other weights learns the form and (vision) most of the picture."""
    policy = build_policy(ENVS[name](), seed=1)
    schedule = tuple((max(1, batches // 4), turns) for batches, turns in ENVS[name]().warm_start)
    warm_start(policy, ENVS[name], schedule)
    policy.save(str(tmp_path / "model"))
    played = describe(tmp_path / "model", name, episodes=300)
    assert played["invalid"] < 0.2
