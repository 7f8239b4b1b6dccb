"""Models that are not ours, with random weights, against their own forward pass; what becomes of a
chat template, of special tokens, and of text that spells one."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import play, random_image, stock_logits, stock_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import ENVS
from envs.base import Observation
from envs.frozenlake import FrozenLake
from freshper.backends import make_trainer
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import FAMILIES, VISION_FAMILIES, Policy, load_policy
from freshper.rollout import Reply, rollout
from freshper.tiny import SPECIAL, build_tokenizer
from freshper.trainer import action_logprobs

TOKENIZER = build_tokenizer(ENVS["frozenlake"]().words)
BEYOND = 38  # rows of the output layer without a token
SIZES = {
    "vocab_size": len(TOKENIZER) + BEYOND,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.2,  # for large logits
    "attention_dropout": 0.5,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 7}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
# Settings in which models of a family differ.
OTHERS = {
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e4} | YARN},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def random_model(kind, vision_policy):
    """Return a policy of a family with random weights, and dropout of 0.5 in its settings."""
    torch.manual_seed(0)
    tokenizer, processor = TOKENIZER, None
    config = SIZES | OTHERS.get(kind, {})
    auto_class = transformers.AutoModelForCausalLM
    if kind in VISION_FAMILIES:
        tokenizer, processor = vision_policy.tokenizer, vision_policy.image_processor
        auto_class = transformers.AutoModelForImageTextToText
        stock = vision_policy.model.config
        config = stock.to_dict() | {"model_type": kind}
        config["text_config"] |= SIZES | {"num_key_value_heads": 4, "model_type": f"{kind}_text"}
        config["text_config"]["vocab_size"] = len(tokenizer) + BEYOND
        del config["text_config"]["layer_types"]
        if kind == "qwen2_vl":
            config["vision_config"] = VISION
    config.pop("model_type", None)
    model = auto_class.from_config(
        transformers.AutoConfig.for_model(kind, **config), attn_implementation="sdpa"
    )
    return Policy(model, tokenizer, processor)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, vision_policy, tmp_path_factory):
    """A policy of the family, saved and loaded again."""
    folder = tmp_path_factory.mktemp(request.param)
    made = random_model(request.param, vision_policy)
    made.save(str(folder))
    saved = json.loads((folder / "config.json").read_text())
    assert saved.get("text_config", saved)["attention_dropout"] == 0.5
    policy = load_policy(str(folder), "cpu", torch.float32, max_tokens=3000)
    assert policy.model.config.model_type == request.param
    pairs = zip(policy.model.parameters(), made.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    return policy


@torch.no_grad()
def test_engine_and_trainer_compute_what_the_model_s_own_pass_computes(family):
    """In turns with holes, and in a padded batch; also the entropies."""
    episodes = play(family, n=7, temperature=0.99, top_k=0, top_p=1.0)
    assert {len(e.turn_rewards) for e in episodes} == {1, 2, 3, 4, 5}  # early finishers
    assert len({len(e.tokens) for e in episodes}) > 4  # ragged
    batch = collate(episodes)
    trained, entropies = action_logprobs(family, batch, 0.99, entropy=True)
    for row, e in enumerate(episodes):
        for t in e.turn_ends()[:-1]:  # eos once, sampled or in the bridge
            assert (e.tokens[t : t + 2] == family.eos_id).sum() == 1
        n = len(e.tokens)
        expected = stock_logprobs(family, e)
        assert expected[e.action_mask].std() > 0.3  # logits that matter
        logits = stock_logits(family, e)[np.flatnonzero(e.action_mask) - 1]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        np.testing.assert_allclose(e.behavior_logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(trained[row, :n], expected, atol=1e-4)
        np.testing.assert_allclose(entropies[row, :n][e.action_mask], entropy, atol=1e-4)
        assert (trained[row, n:] == 0).all()

    # Rows of the output layer without a token are never sampled.
    assert batch.tokens.max() < len(family.tokenizer)
    logits = family.logits(torch.randn(2, family.model.config.get_text_config().hidden_size))
    assert logits.shape[1] == len(family.tokenizer) + BEYOND
    assert (logits[:, len(family.tokenizer) :] == -torch.inf).all()


def test_the_first_ratio_is_1_although_the_folder_says_dropout(family, monkeypatch):
    """Layers that are computed again in the backward pass give the same gradient."""
    decoder = family.model.model
    if family.image_processor:
        decoder = decoder.language_model
    episodes = play(family, n=4)
    family.model.gradient_checkpointing_disable()
    runs = []
    for most in (2**40, 0):
        monkeypatch.setattr("freshper.backends.ACTIVATIONS", most)
        trainer = make_trainer(family, parse_args(["--micro_batch_size=2"]))
        trainer.record_behavior_logprobs(episodes)
        calls = []
        hook = decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        update = trainer.update(episodes)  # the warm-up begins with a rate of 0
        hook.remove()
        np.testing.assert_allclose(update.drift["log_ratio"], 0, atol=1e-4)
        assert update.stats["kl"] < 1e-8
        runs.append((len(calls), [parameter.grad for parameter in family.model.parameters()]))

    (once, gradients), (again, same) = runs
    assert again == 2 * once
    assert all(torch.equal(*pair) for pair in zip(gradients, same, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in gradients)


# -- chat templates and special tokens


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


class Script:
    """An engine with one reply for all, which the limit cuts if it does not end with eos."""

    def __init__(self, tokens):
        self.tokens = tokens

    def generate(self, conversations, max_new_tokens):
        return [Reply(list(self.tokens), [0.0] * len(self.tokens)) for _ in conversations]


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
def test_the_environment_reads_what_follows_a_thought_that_the_template_opened(
    kind, text_policy, monkeypatch
):
    tokenizer = build_tokenizer(ENVS["frozenlake"]().words)
    head, tail = tokenizer.chat_template.rsplit("assistant\n", 1)
    tokenizer.chat_template = f"{head}assistant{THINKING[kind]}{tail}"
    policy = Policy(text_policy.model, tokenizer)
    seen = []
    step = FrozenLake.step
    monkeypatch.setattr(FrozenLake, "step", lambda env, text: seen.append(text) or step(env, text))

    closings = {"with another word": "</Reasoning-mode >", "with first words": "</THINK>"}
    close = closings.get(kind, "</think>")
    thinks = kind not in ("none, but a tag", "a closed one")
    opened = [thinks, thinks and kind != "in the first turn alone"]
    draft = "I try <answer>Left</answer>"
    for text, end, readable in (
        (f"{draft}{close}<answer>Up</answer>", [policy.eos_id], True),
        (draft, [], False),  # cut inside the thought
        (draft, [policy.eos_id], False),
    ):
        script = Script(tokenizer.encode(text) + end)
        (episode,) = rollout(script, policy, [FrozenLake(max_turns=2)], [0], 3000, 40)
        read = text + ("" if end else "…")
        assert seen[-2:] == [f"<think>{read}" if thought else read for thought in opened]
        assert episode.invalid == (0 if readable else sum(opened))


def test_a_tokenizer_that_does_not_fit_is_refused(text_policy):
    for token in ("[THINK]", "<|reasoning|>", "<thought>", "<answer>"):
        tokenizer = build_tokenizer(())
        tokenizer.add_special_tokens({"additional_special_tokens": [token]})
        with pytest.raises(ValueError, match=re.escape(f"it needs {token}, a special token")):
            Policy(text_policy.model, tokenizer)
    tags = "[THINK]", "◁think▷", "<|begin_of_thought|>", "[CoT]", "<ponder>", "＜think＞"
    for mark in (*tags, "Here are my reasoning steps:", "<|channel|>analysis<|message|>"):
        tokenizer = build_tokenizer(())
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", f"assistant{mark}")
        with pytest.raises(ValueError, match="marks a thought in a form other than <think>"):
            Policy(text_policy.model, tokenizer)
    with pytest.raises(ValueError, match="its tokenizer belongs to another model"):
        Policy(text_policy.model, build_tokenizer(tuple(f"word{k}" for k in range(20))))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*SPECIAL, "<|im_", "end|>", " a", "\ud800"]), max_size=6))
@pytest.mark.parametrize("task", ["frozenlake", "frozenlake_vlm"])
def test_no_text_of_an_environment_becomes_a_special_token(
    text_policy, vision_policy, task, pieces
):
    """A lone surrogate, which JSON can hold, is read as "?"."""
    text = "".join(pieces)
    policy = vision_policy if task == "frozenlake_vlm" else text_policy
    images = (random_image(0), random_image(1)) if policy.image_processor else ()
    special = policy.tokenizer.convert_tokens_to_ids(SPECIAL)
    for turn in (policy.user_turn, partial(policy.bridge, closed=True)):
        tokens, others = turn(Observation(text, images)), turn(Observation("x", images))
        written = [x for x in tokens if x in special]
        assert written == [x for x in others if x in special]
        expected = policy.tokenizer.decode(others).replace("x", text.replace("\ud800", "?"))
        assert policy.tokenizer.decode(tokens) == expected
