"""The tiny models: a tokenizer for any text, Qwen's classes and template, and weights that play at random."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

from envs import ENVS
from freshper import tiny
from freshper.models import load_policy
from freshper.tiny import SPECIAL, build_policy, build_tokenizer, describe, shape_key, tiny_model
from freshper.warm_start import transcripts, warm_start

tokenizer = build_tokenizer()


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
        counts = np.array([text.count(f"<answer>{action}</answer>") for action in tiny.ACTIONS])
        assert (np.abs(counts / counts.sum() - 0.25) < 0.05).all()
        assert np.mean([g.info["success"] for g in games]) < 0.35


def test_the_key_covers_code_and_settings_but_not_comments(monkeypatch):
    before = shape_key("text")
    assert before != shape_key("vision")
    monkeypatch.setitem(tiny.WARM_STARTS["text"], "lr", 1e-9)
    assert shape_key("text") != before


def test_the_shipped_weights_belong_to_this_code():
    """Fails when the code that shapes them has changed: run `python -m freshper.tiny --ship` and commit."""
    for family in tiny.WARM_STARTS:
        assert tiny_model(family).is_relative_to(tiny.SHIPPED)


@pytest.mark.parametrize("family", ["text", "vision"])
def test_the_shipped_weights_play_like_the_random_player(family):
    played = describe(tiny_model(family), family)
    assert played["invalid"] < 0.005
    if family == "vision":
        assert played["caption"] > 0.97


@pytest.mark.parametrize("family", ["text", "vision"])
def test_a_rebuild_is_as_good(family, monkeypatch, tmp_path):
    """A quarter of the warm start from other weights learns the form and (vision) most of the picture."""
    policy = build_policy(family, seed=1)
    settings = tiny.WARM_STARTS[family]
    schedule = [(max(1, batches // 4), turns) for batches, turns in settings["schedule"]]
    warm_start(policy, ENVS[settings["env"]], schedule, settings["lr"])
    policy.save(str(tmp_path / "model"))
    played = describe(tmp_path / "model", family, episodes=300)
    assert played["invalid"] < 0.2
