"""The embedded engine: cached, turn-by-turn log-probs are those of one full pass of the stock model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from envs import ENVS
from envs.base import Observation
from freshper.engine_hf import HFEngine, KVCache, Sampling, truncated
from freshper.rollout import Conversation, rollout

NAMES = {"text": "frozenlake", "vision": "frozenlake_vlm"}


def stock_logprobs(policy, episode, temperature):
    """The model's own forward pass over the whole conversation: its positions, masks, vision path and head."""
    tokens = torch.from_numpy(episode.tokens.astype(np.int64))[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if episode.images:
        inputs |= policy.image_processor([Image.fromarray(i) for i in episode.images], return_tensors="pt")
        inputs["mm_token_type_ids"] = (tokens == policy.image_token_id).int()
    with torch.no_grad():
        logits = policy.model(**inputs).logits[0].double() / temperature
    logits[:, policy.suppressed_ids] = -torch.inf  # what is never sampled has no probability
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return np.where(episode.action_mask, np.append(0.0, chosen), 0.0)


@pytest.fixture
def policy(request, text_policy, vision_policy):
    return {"text": text_policy, "vision": vision_policy}[request.param]


def play(policy, family, n=12, max_new_tokens=5, max_tokens=3000, **sampling):
    """Random weights sample any token, so replies have all lengths and hardly ever parse; slippery or not,
    episodes end early only by luck. Mixing in environments of fewer turns makes early finishers."""
    envs = [ENVS[NAMES[family]](style="full" if k % 4 == 0 else "terse") for k in range(n)]
    for k, env in enumerate(envs):
        env.max_turns = 1 + k % 5
    engine = HFEngine(policy, Sampling(**sampling), seed=3)
    return rollout(engine, policy, envs, list(range(n)), max_tokens, max_new_tokens)


@pytest.mark.parametrize(("policy", "family"), [("text", "text"), ("vision", "vision")], indirect=["policy"])
def test_cached_log_probs_equal_one_full_pass(policy, family):
    episodes = play(policy, family, temperature=0.7, top_k=0, top_p=1.0)
    lengths = {len(e.tokens) for e in episodes}
    replies = {int(np.diff(np.flatnonzero(np.diff(np.pad(e.action_mask, 1).astype(int))))[0]) for e in episodes}
    ends = [e.tokens[t] == policy.eos_id for e in episodes for t in e.turn_ends()]
    assert len(lengths) > 5  # ragged
    assert {len(e.turn_rewards) for e in episodes} == {1, 2, 3, 4, 5}  # early finishers
    assert max(replies) == 5  # replies cut by the limit
    assert not all(ends)
    for e in episodes:
        np.testing.assert_allclose(e.behavior_logprobs, stock_logprobs(policy, e, 0.7), atol=1e-4)


@pytest.mark.parametrize(("policy", "family"), [("text", "text"), ("vision", "vision")], indirect=["policy"])
def test_a_row_computes_what_it_would_alone(policy, family):
    """Forced replies: the logits of each row of a ragged batch equal those of the row in a batch of one."""
    together, alone = HFEngine(policy, Sampling(), 0), HFEngine(policy, Sampling(), 0)
    envs = [ENVS[NAMES[family]](style="full" if k == 1 else "terse") for k in range(3)]
    conversations = []
    for k, env in enumerate(envs):
        o = env.reset(seed=k)[0]
        conversations.append(Conversation(policy.first_prompt(o), list(o.images)))
    together._keep(conversations)
    logits = together._feed([np.array(c.tokens) for c in conversations], [c.images for c in conversations])
    for k, c in enumerate(conversations):
        alone.sync()
        alone._keep([c])
        torch.testing.assert_close(alone._feed([np.array(c.tokens)], [c.images])[0], logits[k], atol=1e-4, rtol=1e-4)


def test_the_cache_takes_chunks_of_any_length():
    cache, everything = KVCache(), torch.randn(2, 3, 1400, 4)
    for length in (50, 300, 1, 49, 1000):
        new = everything[:, :, cache.length : cache.length + length]
        keys, values = cache.update(new, -new, 0)
        cache.length += length
        assert torch.equal(keys, everything[:, :, : cache.length])
        assert torch.equal(values, -keys)


def test_eos_ends_a_reply_and_the_bridge_closes_what_was_not_sampled(text_policy):
    episodes = play(text_policy, "text", n=40, max_new_tokens=3)
    decode = text_policy.tokenizer.decode
    closed = cut = 0
    for e in episodes:
        for end in e.turn_ends()[:-1]:
            sampled_eos = e.tokens[end] == text_policy.eos_id
            closed, cut = closed + sampled_eos, cut + (not sampled_eos)
            following = decode(e.tokens[end + 1 : end + 4])
            assert following.startswith("\n<|im_start|>" if sampled_eos else "<|im_end|>\n")
            assert not e.action_mask[end + 1 : end + 4].any()  # template tokens are never trained on
    assert cut > 0
    assert closed > 0


def test_conversations_equal_the_chat_template(text_policy, vision_policy):
    """Prompt, replies and bridges, put together piece by piece, are what the template writes in one go."""
    for policy in (text_policy, vision_policy):
        image = np.zeros((56, 56, 3), dtype=np.uint8)
        images = (image,) if policy is vision_policy else ()
        turns = [Observation("first", images), Observation("", images), Observation("a <b> {c}", images)]
        tokens, messages = [], []
        for k, observation in enumerate(turns):
            tokens += policy.first_prompt(observation) if k == 0 else policy.bridge(observation, closed=True)
            content = [{"type": "image"}] * len(images) + [{"type": "text", "text": observation.text}]
            messages.append({"role": "user", "content": content if images else observation.text})
            if k < 2:
                tokens += [*policy.tokenizer.encode("<answer>Up</answer>"), policy.eos_id]
                messages.append({"role": "assistant", "content": "<answer>Up</answer>"})
        whole = policy.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert policy.tokenizer.decode(tokens).replace("<|image_pad|>" * 16, "<|image_pad|>") == whole


def test_no_placeholder_or_other_special_token_is_ever_sampled(vision_policy):
    with torch.no_grad():
        vision_policy.model.lm_head.weight[vision_policy.suppressed_ids] += 10.0
    try:
        episodes = play(vision_policy, "vision", n=8)
    finally:
        with torch.no_grad():
            vision_policy.model.lm_head.weight[vision_policy.suppressed_ids] -= 10.0
    sampled = np.concatenate([e.tokens[e.action_mask] for e in episodes])
    assert not set(sampled.tolist()) & set(vision_policy.suppressed_ids)


def test_a_conversation_that_would_grow_too_long_is_truncated(text_policy):
    episodes = play(text_policy, "text", n=8, max_tokens=450)
    assert any(e.info.get("truncated") for e in episodes)
    assert all(len(e.tokens) <= 450 for e in episodes)
    with pytest.raises(OSError, match="--max_tokens is 100, but must be at least "):
        play(text_policy, "text", n=2, max_tokens=100)


def test_the_same_seed_samples_the_same(text_policy):
    one, two = (play(text_policy, "text") for _ in range(2))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))


def test_sync_forgets_the_cache(text_policy):
    """After a change of the weights, log-probs must be those of the new weights for the whole conversation."""
    env = ENVS["frozenlake"]()
    engine = HFEngine(text_policy, Sampling(top_k=0, top_p=1.0), 0)
    conversation = Conversation(text_policy.first_prompt(env.reset(seed=0)[0]))
    with torch.no_grad():
        engine.generate([conversation], 2)
        text_policy.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        engine.sync()
        reply = engine.generate([conversation], 1)[0]
        tokens = torch.tensor([conversation.tokens])
        logits = text_policy.model(tokens).logits[0, -1] / 0.99
        logits[text_policy.suppressed_ids] = -torch.inf
        text_policy.model.model.layers[0].mlp.up_proj.weight.div_(1.5)
    assert reply.logprobs[0] == pytest.approx(logits.log_softmax(-1)[reply.tokens[0]].item(), abs=1e-4)


def test_sampling_follows_the_model(text_policy):
    """Frequencies of 20,000 first tokens against softmax(logits / T), truncated and renormalised."""
    from scipy import stats

    engine = HFEngine(text_policy, Sampling(temperature=0.8, top_k=20, top_p=0.9), 0)
    logits = torch.randn(1, 274, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, text_policy.suppressed_ids] = -torch.inf
    tokens, _ = engine._sample(logits.expand(20_000, -1))
    allowed = (logits[0].double() / 0.8).softmax(-1)
    order = allowed.argsort(descending=True)[:20]
    shares = allowed[order] / allowed[order].sum()
    kept = order[: int((shares.cumsum(0) - shares < 0.9).sum())]
    seen = np.bincount(tokens, minlength=274)
    p = (allowed[kept] / allowed[kept].sum()).numpy()
    assert seen[kept].sum() == 20_000
    assert stats.chisquare(seen[kept], p * 20_000).pvalue > 1e-4


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(0, 12), top_p=st.sampled_from([0.05, 0.5, 0.99, 1.0]))
def test_truncation_against_a_loop(seed, top_k, top_p):
    p = torch.rand(3, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    for row, found in zip(p.tolist(), truncated(p, top_k, top_p).tolist(), strict=True):
        ranked = sorted(range(10), key=lambda i: -row[i])[: top_k or None]
        total, mass, kept = sum(row[i] for i in ranked), 0.0, set()
        for i in ranked:
            if mass < top_p * total or top_p == 1.0:
                kept.add(i)
            mass += row[i]
        assert {i for i in range(10) if found[i] > 0} == kept


@pytest.mark.parametrize("sizes", [[(56, 56)], [(28, 70), (56, 56), (14, 14)]])
def test_positions_equal_the_stock_m_rope(vision_policy, sizes):
    tokens, images = [5, 6, 7], []
    for h, w in sizes:
        image = np.random.default_rng(h).integers(0, 255, (h, w, 3), dtype=np.uint8)
        rows, columns = vision_policy.grid(image)
        tokens += [vision_policy.image_token_id] * (rows * columns) + [8, 9]
        images.append(image)
    tokens = np.array(tokens)
    inputs = vision_policy.image_processor([Image.fromarray(i) for i in images], return_tensors="pt")
    stock, _ = vision_policy.model.model.get_rope_index(
        torch.from_numpy(tokens)[None],
        torch.from_numpy(tokens == vision_policy.image_token_id).int()[None],
        inputs["image_grid_thw"],
    )
    np.testing.assert_array_equal(vision_policy.positions(tokens, images), stock[:, 0])
    with pytest.raises(ValueError, match="placeholders"):
        vision_policy.positions(tokens, images[:-1])


def test_frozen_vision_reuses_features_and_changes_nothing(vision_policy):
    import copy

    from freshper.models import Policy

    frozen = Policy(
        copy.deepcopy(vision_policy.model), vision_policy.tokenizer, vision_policy.image_processor, freeze_vision=True
    )
    images = [np.random.default_rng(k % 3).integers(0, 255, (56, 56, 3), dtype=np.uint8) for k in range(6)]
    expected = vision_policy.image_features(images)
    torch.testing.assert_close(frozen.image_features(images[:2]), expected[:32])
    torch.testing.assert_close(frozen.image_features(images), expected)
    assert len(frozen._features) == 3
    assert not any(p.requires_grad for p in frozen.model.model.visual.parameters())
