"""The embedded engine against transformers' own generation, full pass and logits processors."""

import gc

import numpy as np
import pytest
import torch
from conftest import copy_of, make_episode, play, stock_inputs, stock_logprobs
from scipy import stats
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from envs.frozenlake import FrozenLake
from freshper.engine_hf import HFEngine, KVCache, Sampling, top_k_top_p
from freshper.rollout import Conversation, rollout


def replies(episode):
    """(start, end) of each reply."""
    edges = np.flatnonzero(np.diff(np.pad(episode.action_mask.astype(int), 1)))
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_greedy_replies_are_those_of_generate(policy):
    """Every reply of every turn, although ours come from one cache for ragged rows and all
    turns."""
    for e in play(policy, n=4, top_k=1):
        for start, end in replies(e):
            shown = np.count_nonzero(np.diff(e.tokens[:start] == policy.image_token_id)) // 2
            stock = policy.model.generate(
                **stock_inputs(policy, e.tokens[:start], e.images[:shown]),
                max_new_tokens=5,
                do_sample=False,
                suppress_tokens=policy.suppressed_ids,
                eos_token_id=policy.eos_id,
            )
            np.testing.assert_array_equal(stock[0, start:], e.tokens[start:end])


def test_sampling_follows_temperature_top_k_and_top_p(text_policy):
    """Frequencies of 20,000 tokens against transformers' logits processors, and log-probs before
    truncation."""
    engine = HFEngine(text_policy, Sampling(temperature=0.8, top_k=20, top_p=0.9), 0)
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, len(text_policy.tokenizer), generator=generator)
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    p = LogitsProcessorList(warpers)(None, logits.double())[0].softmax(-1).numpy()
    assert 5 < (p > 0).sum() < 20

    tokens, logprobs = engine.sample(logits.expand(20_000, -1))
    seen = np.bincount(tokens, minlength=logits.shape[1])
    assert not seen[p == 0].any()
    assert stats.chisquare(seen[p > 0], 20_000 * p[p > 0]).pvalue > 1e-4
    np.testing.assert_allclose(logprobs, (logits[0] / 0.8).log_softmax(-1)[tokens], rtol=1e-6)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 12, 500])
def test_truncation_keeps_what_transformers_keeps(top_k, top_p):
    generator = torch.Generator().manual_seed(top_k)
    p = torch.rand(100, 40, generator=generator, dtype=torch.float64) ** 4
    p /= p.sum(-1, keepdim=True)
    scores = TopKLogitsWarper(top_k)(None, p.log()) if top_k else p.log()
    kept = TopPLogitsWarper(top_p)(None, scores) > -torch.inf
    assert torch.equal(top_k_top_p(p, top_k, top_p), torch.where(kept, p, 0.0))


def test_a_long_observation_and_new_weights(text_policy):
    """A chunk longer than the cache's buffers are when they double. After a sync no key of older
    weights is left."""
    policy = copy_of(text_policy)
    rng = np.random.default_rng(0)
    engine = HFEngine(policy, Sampling(top_k=0, top_p=1.0), 0)
    conversation = Conversation([5, 6, 7])
    for longer in (2, 1000, 30):
        conversation.tokens += engine.generate([conversation], 2)[0].tokens
        conversation.tokens += rng.integers(0, 200, longer).tolist()
        reply = engine.generate([conversation], 1)[0]
        conversation.tokens += reply.tokens

        e = make_episode(rng)
        e.tokens = np.array(conversation.tokens, dtype=np.int32)
        e.action_mask = np.arange(len(e.tokens)) == len(e.tokens) - 1
        with torch.no_grad():
            expected = stock_logprobs(policy, e)[-1].item()
            policy.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        assert reply.logprobs[0] == pytest.approx(expected, abs=1e-4)
        engine.sync(None)


def test_the_cache_ends_with_its_conversations(text_policy):
    def is_cached():
        return any(type(x) is KVCache and x.layers for x in gc.get_objects())

    class Lake(FrozenLake):
        def step(self, reply):
            held.append(is_cached())
            return super().step(reply)

    held = []
    engine = HFEngine(text_policy, Sampling(), 0)
    rollout(engine, [Lake(max_turns=2)], [0], 3000, 5)
    assert held == [True, True]
    assert not is_cached()


def test_a_conversation_that_has_not_grown_gets_a_new_reply(text_policy):
    """The cache of the first call cannot be used: the reply of that call is in it."""
    conversation = Conversation([5, 6, 7])
    engine = HFEngine(text_policy, Sampling(top_k=1), 0)
    first, again = [engine.generate([conversation], 4)[0] for _ in range(2)]
    assert first.tokens == again.tokens
    assert first.logprobs == again.logprobs


def test_random_numbers_go_on_from_a_saved_state(text_policy):
    engine, other = (HFEngine(text_policy, Sampling(), seed) for seed in (0, 1))
    logits = torch.zeros(20, 250)
    engine.sample(logits)
    other.load_state_dict(engine.state_dict())
    assert engine.sample(logits) == other.sample(logits)
