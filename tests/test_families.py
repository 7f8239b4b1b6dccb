"""Models that are not ours, with random weights, against their own forward pass, and tokenizers
with merges against their file."""

import json

import numpy as np
import pytest
import torch
import transformers
from conftest import play, stock_logits, stock_logprobs, whitened
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from freshper.backends import make_trainer
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import FAMILIES, VISION_FAMILIES, Policy, load_policy
from freshper.tiny import CHAT_TEMPLATE, SPECIAL
from freshper.trainer import action_logprobs

# Spaces, newlines, digits, capitals, emoji, and an accent that is a character of its own
TEXT = "User has 4 fish,\n\n  and 12345 THINGS: cafe\u0301 🐟👩‍👧 — don't\r\n\tx  = 3.14 .\n"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES])
KINDS = {
    "GPT-2's": (BYTES, decoders.ByteLevel()),
    "SmolLM's": (DIGITS, decoders.ByteLevel()),
    "SentencePiece's": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
}


def with_merges(kind):
    """Train a tokenizer on this file."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = KINDS[kind]
    alphabet = BYTES.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    core.train([__file__], trainer)
    return core


TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=with_merges("GPT-2's"), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
)
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
        batch = collate(episodes)
        calls = []
        hook = decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # noqa: B023
        update = trainer.update(batch, whitened(batch))  # the warm-up begins with a rate of 0
        hook.remove()
        np.testing.assert_allclose(update.drift["log_ratio"], 0, atol=1e-4)
        assert update.stats["kl"] < 1e-8
        runs.append((len(calls), [parameter.grad for parameter in family.model.parameters()]))

    (once, gradients), (again, same) = runs
    assert again == 2 * once
    assert all(torch.equal(*pair) for pair in zip(gradients, same, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_the_tokenizer_is_the_one_of_the_folder(model, kind, tmp_path):
    """Ids and text, and those of a checkpoint, whatever class the folder names."""
    random_model(model, None).save(str(tmp_path))
    with_merges(kind).save(str(tmp_path / "tokenizer.json"))
    core = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = core.encode(TEXT).ids
    for name in ("LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "TokenizersBackend"):
        settings = {"tokenizer_class": name, "clean_up_tokenization_spaces": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        load_policy(str(tmp_path), "cpu", torch.float32).save(str(tmp_path / "checkpoint"))
        policy = load_policy(str(tmp_path / "checkpoint"), "cpu", torch.float32)
        assert policy.encode(TEXT) == ids
        assert policy.tokenizer.decode(ids) == core.decode(ids)
        assert policy.tokenizer.decode(policy.eos_id) == "<|im_end|>"
