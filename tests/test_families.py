"""Models that are not ours, with random weights: each is computed as its own forward pass does it,
or is refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import transformers
from conftest import make_episode

from envs import ENVS
from freshper.backends import check, engine_logits, load
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import Policy, embed_patches
from freshper.tiny import CHAT_TEMPLATE, build_tokenizer
from freshper.trainer import action_logprobs

TOKENIZER = build_tokenizer(ENVS["frozenlake"]().words)
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.2,  # for large logits
}
WINDOW = {"sliding_window": 32}  # tokens that attention looks back
# Class, its own settings, and whether it has a window, which the embedded engine does not know.
FAMILIES = {
    "Llama": ("Llama", {}, False),
    "Qwen2": ("Qwen2", {}, False),
    "Qwen2 with a window": (
        "Qwen2",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        True,
    ),
    "Qwen3": ("Qwen3", {}, False),
    "Mistral": ("Mistral", {"sliding_window": None}, False),
    "Mistral with a window": ("Mistral", WINDOW, True),
    "Gemma 2": ("Gemma2", WINDOW | {"final_logit_softcapping": 2.0}, True),
    "Gemma 3": ("Gemma3", WINDOW, True),
    "Phi 3": ("Phi3", {"sliding_window": None}, False),
    "Granite": (
        "Granite",
        {"logits_scaling": 2.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
        False,
    ),
    "Cohere": ("Cohere", {"logit_scale": 0.25}, False),
}


@torch.no_grad()
@pytest.mark.parametrize("length", [24, 128])  # in the window, and beyond
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_right_or_refused(family, length):
    name, changes, window = FAMILIES[family]
    torch.manual_seed(0)
    config_class = getattr(
        transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    )
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class._from_config(config_class(**SIZES | changes), attn_implementation="sdpa")
    policy = Policy(model.eval(), TOKENIZER)
    config = parse_args(["--max_tokens", str(length), "--backend", "hf+torch"]).config

    episode = make_episode(np.random.default_rng(0), turns=1)
    episode.tokens = np.arange(length, dtype=np.int32) * 77 % 200
    episode.action_mask = np.arange(length) > 0
    episode.behavior_logprobs = np.zeros(length, dtype=np.float32)
    tokens = torch.from_numpy(episode.tokens).long()
    expected = model(input_ids=tokens[None]).logits[0]
    expected[:, policy.suppressed_ids] = -torch.inf
    chosen = (expected[:-1] / 0.7).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert chosen.std() > 0.3  # logits that matter
    trained, _ = action_logprobs(policy, collate([episode]), temperature=0.7)
    np.testing.assert_allclose(trained[0, 1:], chosen, atol=1e-4)

    logits = engine_logits(policy, tokens.tolist())
    if window and length == 128:
        assert (logits - expected[-1]).nan_to_num().abs().max() > 0.1
        reason = f"the embedded engine computes other logits than a {name}ForCausalLM"
        with pytest.raises(ValueError, match=reason):
            check(policy, config)
        config = dataclasses.replace(config, backend="vllm+torch")
    else:
        np.testing.assert_allclose(logits, expected[-1], atol=1e-4)
    check(policy, config)


def test_a_family_of_another_build_is_refused_in_one_sentence(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=len(TOKENIZER), n_positions=512, n_embd=64, n_layer=1, n_head=4
    )
    Policy(transformers.GPT2LMHeadModel(config), TOKENIZER).save(str(tmp_path))
    config = parse_args(
        ["--model", str(tmp_path), "--max_tokens", "500", "--backend", "hf+torch"]
    ).config
    reason = "a chat model that can be computed: 'GPT2LMHeadModel' object has no"
    with pytest.raises(ValueError, match=reason):
        load(config)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "loaded: division by zero"),
        ("{{ raise_exception('no system prompt') }}", "loaded: no system prompt"),
        (
            "{% if messages | length == 1 %}{{ [] + 1 }}{% endif %}" + CHAT_TEMPLATE,
            "computed: can only concatenate list",
        ),
    ],
)
def test_a_chat_template_that_raises_is_refused(template, reason, text_policy, tmp_path):
    text_policy.save(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"a chat model that can be {re.escape(reason)}"):
        load(parse_args(["--model", str(tmp_path), "--backend", "hf+torch"]).config)


def test_a_model_with_invalid_generation_settings_can_be_saved(text_policy, tmp_path):
    """transformers loads them with a warning, and does not save them."""
    text_policy.save(str(tmp_path / "model"))
    path = tmp_path / "model/generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.5}))
    flags = ["--backend", "hf+torch", "--model"]
    policy = load(parse_args([*flags, str(tmp_path / "model")]).config).policy
    policy.save(str(tmp_path / "saved"))
    saved = load(parse_args([*flags, str(tmp_path / "saved")]).config).policy
    assert saved.suppressed_ids == policy.suppressed_ids == text_policy.suppressed_ids
    assert saved.model.generation_config.temperature == 0.99


def test_the_end_of_a_turn_is_the_template_s_whatever_the_tokenizer_s_eos(text_policy):
    tokenizer = build_tokenizer(())
    tokenizer.eos_token = "<|endoftext|>"
    policy = Policy(text_policy.model, tokenizer)
    assert tokenizer.decode(policy.eos_id) == "<|im_end|>"
    assert policy.eos_id not in policy.suppressed_ids
    assert tokenizer.eos_token_id in policy.suppressed_ids
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_", "<im_")
    reason = "closes a reply with no special token, so no reply could end"
    with pytest.raises(ValueError, match=reason):
        Policy(text_policy.model, tokenizer)


def test_patches_are_embedded_as_by_the_convolution():
    size = (2, 7, 7)
    convolution = torch.nn.Conv3d(3, 32, size, stride=size, bias=False).double()
    patches = torch.rand(5, 3, *size).double()
    expected = convolution(patches).flatten(1)
    assert torch.allclose(embed_patches(convolution, patches), expected, rtol=0, atol=1e-12)
