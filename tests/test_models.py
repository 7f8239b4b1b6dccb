"""A policy: its chat template and special tokens, positions and features of images, and what it is
loaded from and saved to. The families of models are in test_families.py."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import copy_of, random_image, stock_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from envs import ENVS
from envs.base import Observation
from envs.frozenlake import FrozenLake
from freshper.models import Policy, load_policy
from freshper.tiny import SPECIAL, build_tokenizer

# -- chat templates and special tokens


def test_conversations_equal_the_chat_template(policy):
    """Prompt, replies and bridges, put together piece by piece, are what the template writes in one
    go."""
    images = (random_image(0),) if policy.image_processor else ()
    tokens = []
    messages = []
    for k, text in enumerate(("first", "", "a <b> {c}")):
        observation = Observation(text, images)
        tokens += policy.bridge(observation, closed=k == 2) if k else policy.user_turn(observation)
        content = [{"type": "image"}, {"type": "text", "text": text}] if images else text
        messages.append({"role": "user", "content": content})
        if k < 2:  # the first reply was cut, the second ended with eos
            tokens += [*policy.tokenizer.encode("<answer>Up</answer>"), *[policy.eos_id] * k]
            messages.append({"role": "assistant", "content": "<answer>Up</answer>"})
    whole = policy.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert policy.tokenizer.decode(tokens).replace("<|image_pad|>" * 16, "<|image_pad|>") == whole


def test_the_end_of_a_turn_is_the_template_s_whatever_the_tokenizer_s_eos(text_policy):
    tokenizer = build_tokenizer(())
    tokenizer.eos_token = "<|endoftext|>"
    policy = Policy(text_policy.model, tokenizer)
    assert tokenizer.decode(policy.eos_id) == "<|im_end|>"
    assert policy.eos_id not in policy.suppressed_ids
    assert tokenizer.eos_token_id in policy.suppressed_ids
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_", "<im_")
    with pytest.raises(ValueError, match="closes a reply with no special token"):
        Policy(text_policy.model, tokenizer)


# What templates put into the header of the assistant.
THINKING = {
    "Qwen3's": "\n<think>\n",
    "with an option": "{% if enable_thinking is not defined %}<think>{% endif %}",
    "in the first turn alone": "{% if messages|length == 1 %}<think>{% endif %}",
    "with another word": "<reasoning-mode>",
    "with first words": "<THINK>\nIs 1 < 2? Okay, ",
    "none, but a tag": "<assistant>\n",
    "a closed one": "\n<think>\n\n</think>\n",
}


@pytest.mark.parametrize("kind", THINKING)
def test_the_environment_reads_what_follows_a_thought_that_the_template_opened(kind, text_policy):
    tokenizer = build_tokenizer(ENVS["frozenlake"]().words)
    head, tail = tokenizer.chat_template.rsplit("assistant\n", 1)
    tokenizer.chat_template = f"{head}assistant{THINKING[kind]}{tail}"
    policy = Policy(text_policy.model, tokenizer)
    env = FrozenLake()
    env.reset(seed=0)

    closings = {"with another word": "</Reasoning-mode >", "with first words": "</THINK>"}
    thinks = kind not in ("none, but a tag", "a closed one")
    draft = "I try <answer>Left</answer>"
    for text, end, readable in (
        (f"{draft}{closings.get(kind, '</think>')}<answer>Up</answer>", [policy.eos_id], True),
        (draft, [], False),  # cut inside the thought
        (draft, [policy.eos_id], False),
    ):
        for first in (True, False):
            thought = thinks and (first or kind != "in the first turn alone")
            read = policy.read(tokenizer.encode(text) + end, first)
            assert read == "<think>" * thought + text + "…" * (not end)
            assert env.step(read)[-1]["valid"] is (readable or not thought)


def test_a_tokenizer_that_does_not_fit_is_refused(text_policy):
    for token in ("[THINK]", "<|reasoning|>", "<thought>", "<answer>"):
        tokenizer = build_tokenizer(())
        tokenizer.add_special_tokens({"additional_special_tokens": [token]})
        with pytest.raises(ValueError, match=re.escape(f"it needs {token}, a special token")):
            Policy(text_policy.model, tokenizer)
    tags = "[THINK]", "◁think▷", "<|begin_of_thought|>", "[CoT]", "＜think＞"
    for mark in (*tags, "Here are my reasoning steps:", "<|channel|>analysis<|message|>"):
        tokenizer = build_tokenizer(())
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", f"assistant{mark}")
        with pytest.raises(ValueError, match="marks a thought in a form other than <think>"):
            Policy(text_policy.model, tokenizer)
    with pytest.raises(ValueError, match="its tokenizer belongs to another model"):
        Policy(text_policy.model, build_tokenizer(tuple(f"word{k}" for k in range(20))))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", " a", "\ud800"]), max_size=6))
def test_no_text_of_an_environment_becomes_a_special_token(policy, pieces):
    """A lone surrogate, which JSON can hold, is read as "?"."""
    text = "".join(pieces)
    images = (random_image(0), random_image(1)) if policy.image_processor else ()
    special = policy.tokenizer.convert_tokens_to_ids(SPECIAL)
    for turn in (policy.user_turn, partial(policy.bridge, closed=True)):
        tokens, others = turn(Observation(text, images)), turn(Observation("x", images))
        written = [x for x in tokens if x in special]
        assert written == [x for x in others if x in special]
        expected = policy.tokenizer.decode(others).replace("x", text.replace("\ud800", "?"))
        assert policy.tokenizer.decode(tokens) == expected


# -- images


SIZES = [[(56, 56)], [(28, 70), (56, 56), (14, 14)], [(200, 90), (31, 45)]]


@pytest.mark.parametrize("sizes", SIZES)
def test_positions_equal_the_stock_m_rope(vision_policy, sizes):
    images = [random_image(0, height, width) for height, width in sizes]
    tokens = [5, 6, 7]
    for image in images:
        rows, columns = vision_policy.grid(image)
        tokens += [vision_policy.image_token_id] * (rows * columns) + [8, 9]
    inputs = stock_inputs(vision_policy, tokens, images)
    inputs = [inputs[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")]
    stock, _ = vision_policy.model.model.get_rope_index(*inputs)
    positions = vision_policy.positions(tokens, images, start=7)
    np.testing.assert_array_equal(positions, stock[:, 0] + 7)
    with pytest.raises(ValueError):
        vision_policy.positions(tokens, 2 * images)


def test_a_frozen_vision_tower_and_its_features_are_reused(vision_policy):
    frozen = copy_of(vision_policy, freeze_vision=True, features={})
    images = [random_image(k % 3) for k in range(6)]
    expected = vision_policy.image_features(images)
    torch.testing.assert_close(frozen.image_features(images[:2]), expected[:32])
    torch.testing.assert_close(frozen.image_features(images), expected)
    assert len(frozen.features) == 3
    assert not any(p.requires_grad for p in frozen.model.model.visual.parameters())

    for policy in (frozen, vision_policy):
        copied = policy.copy()
        assert copied.features is policy.features
        pairs = zip(policy.model.named_parameters(), copied.model.parameters(), strict=True)
        for (name, ours), its in pairs:
            assert torch.equal(ours, its)
            assert (ours is its) is ("visual" in name and policy is frozen)


# -- folders


def test_a_warning_is_shown_once_and_weights_that_do_not_fit_have_one_sentence(
    model_folder, tmp_path, caplog
):
    folder = shutil.copytree(model_folder["text"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    weights |= {"other": weights.pop("model.norm.weight"), "lm_head.weight": torch.ones(5, 5)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    misfits = r"\('lm_head.weight', .*\), model.norm.weight, other"
    with (
        caplog.at_level("WARNING", "transformers"),
        pytest.raises(ValueError, match=f"^its weights lack, or have no place for, {misfits}$"),
    ):
        load_policy(str(folder), "cpu", torch.float32)
    (record,) = caplog.records
    assert "attn_factor" in record.message


def test_a_saved_model_is_one_file(text_policy, tmp_path, monkeypatch):
    """However large it is: vLLM would read shards again, not what a sync wrote beside them."""
    save = transformers.PreTrainedModel.save_pretrained
    small = [10**5 if default == "50GB" else default for default in save.__defaults__]
    assert 10**5 in small
    monkeypatch.setattr(save, "__defaults__", tuple(small))
    text_policy.save(str(tmp_path))
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
