"""Engine, model and trainer against transformers' own full pass, generation, logits processors and
rope index."""

import copy
import dataclasses
import gc

import numpy as np
import pytest
import torch
from conftest import (
    make_episode,
    play,
    random_image,
    speakable_episodes,
    stock_inputs,
    stock_logits,
    stock_logprobs,
)
from scipy import stats
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from envs.base import EVAL_SEEDS, Observation
from envs.frozenlake import FrozenLake
from freshper.config import Config
from freshper.engine_hf import HFEngine, KVCache, Sampling, top_k_top_p
from freshper.engine_vllm import gpus_of_vllm, options_of_vllm, variables_of_vllm
from freshper.episode import collate
from freshper.errors import NonFiniteError
from freshper.reinforce import ReturnNorm, policy_loss
from freshper.rollout import Conversation, rollout, training_seeds
from freshper.trainer import TorchTrainer


@pytest.fixture(params=["text", "vision"])
def policy(request, text_policy, vision_policy):
    return {"text": text_policy, "vision": vision_policy}[request.param]


def copy_of(policy, **changes):
    return dataclasses.replace(policy, model=copy.deepcopy(policy.model), **changes)


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

        e = make_episode(rng)
        e.tokens = np.array([*conversation.tokens, *reply.tokens], dtype=np.int32)
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
    rollout(engine, text_policy, [Lake(max_turns=2)], [0], 3000, 5)
    assert held == [True, True]
    assert not is_cached()


def test_a_conversation_that_would_grow_too_long_is_truncated(text_policy):
    longest = max(len(e.tokens) for e in play(text_policy, n=8))
    episodes = play(text_policy, n=8, max_tokens=longest - 1)
    assert any(e.truncated for e in episodes)
    assert all(len(e.tokens) < longest for e in episodes)


def test_training_seeds_do_not_repeat():
    def of_run(seed):
        config = Config(seed=seed, rollout_batch_size=6)
        return [x for i in range(100) for x in training_seeds(config, i)]

    seeds = {*of_run(42)}
    assert len(seeds) == 600
    assert max(seeds) < EVAL_SEEDS
    for seed in (43, 942, 1042, 2**31):  # 42 and 942 had the same instances
        assert seeds.isdisjoint(of_run(seed))


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


def test_frozen_vision_reuses_features_and_changes_nothing(vision_policy):
    frozen = copy_of(vision_policy, freeze_vision=True, features={})
    images = [random_image(k % 3) for k in range(6)]
    expected = vision_policy.image_features(images)
    torch.testing.assert_close(frozen.image_features(images[:2]), expected[:32])
    torch.testing.assert_close(frozen.image_features(images), expected)
    assert len(frozen.features) == 3
    assert not any(p.requires_grad for p in frozen.model.model.visual.parameters())


def trainer_for(policy, **changes):
    settings = {"advantage_clip": 20.0, "micro_batch_size": 4, "lr": 1e-3} | changes
    return TorchTrainer(copy_of(policy), Config(**settings), total_updates=14)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


TERMS = {"advantage_clip": 0.2, "entropy_coef": 0.01, "kl_loss_coef": 0.05, "kl_reward_coef": 0.1}


# All logits in one piece, and two tokens at a time.
@pytest.mark.parametrize("at_once", [2**27, 700])
@pytest.mark.parametrize("terms", [{}, TERMS])
def test_the_gradient_is_that_of_the_stock_pass_whatever_the_micro_batches(
    text_policy, monkeypatch, terms, at_once
):
    """Reference: one unpadded episode after the other through transformers' own forward pass."""
    monkeypatch.setattr("freshper.trainer.MAX_GRAD_NORM", 1e9)
    monkeypatch.setattr("freshper.trainer.LOGITS_AT_ONCE", at_once)
    episodes = speakable_episodes(text_policy, 8)
    weights = np.linspace(0.2, 1.0, 8)
    reference = trainer_for(text_policy, **terms)
    noise = np.random.default_rng(0)
    reference.record_behavior_logprobs(episodes)
    for e in episodes:  # off-policy, and away from pi_ref
        for values in (e.behavior_logprobs, e.ref_logprobs) if terms else (e.behavior_logprobs,):
            values += (noise.normal(0, 0.2, len(e.tokens)) * e.action_mask).astype(np.float32)

    clip = reference.config.advantage_clip
    norm = ReturnNorm("recompute", reference.config.kl_reward_coef)
    batch = collate(episodes)
    logprobs = []
    entropies = []
    for e in episodes:
        logprobs.append(stock_logprobs(reference.policy, e))
        logits = stock_logits(reference.policy, e)
        entropies.append(torch.distributions.Categorical(logits=logits).entropy().roll(1))
    loss, _ = policy_loss(
        pad_sequence(logprobs, batch_first=True),
        batch.behavior_logprobs,
        norm.advantages(batch).clamp(-clip, clip),
        batch.action_mask,
        torch.from_numpy(weights).float(),
        entropies=pad_sequence(entropies, batch_first=True),
        entropy_coef=terms.get("entropy_coef", 0.0),
        ref_logprobs=batch.ref_logprobs,
        kl_coef=terms.get("kl_loss_coef", 0.0),
        scale=int(batch.action_mask.sum()) / 8,
    )
    loss.backward()
    expected = gradient(reference.policy.model)
    assert expected.abs().max() > 1e-3

    for size in (1, 3, 8):
        trainer = trainer_for(text_policy, micro_batch_size=size, **terms)
        assert all(len(rows) <= size for rows, _ in trainer.shard(batch))
        stats = trainer.update(episodes, weights=weights).stats
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        torch.testing.assert_close(gradient(trainer.policy.model), expected, rtol=1e-3, atol=1e-5)
        assert 0.0 < stats["clip_fraction"] < 1.0


def test_updates_follow_the_schedule_and_move_log_probs_with_the_advantage(text_policy):
    """Ten warm-up steps to --lr, then a cosine to 0 (appendix F). log rho of the drift is the whole
    trajectory's."""
    trainer = trainer_for(text_policy, kl_loss_coef=1e-9)
    episodes = speakable_episodes(text_policy, 8)
    trainer.record_behavior_logprobs(episodes)
    for k in range(14):
        trainer.update(episodes)
        expected = k / 10 if k < 10 else 0.5 * (1 + np.cos(np.pi * (k - 10) / 4))
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * expected)
    assert trainer.step == 14
    batch = collate(episodes)
    advantages = ReturnNorm("recompute", 0.0).advantages(batch)
    change = trainer.logprobs(batch) - batch.behavior_logprobs
    assert (change * advantages).sum() > 1.0
    drift = trainer.update(episodes).drift
    np.testing.assert_allclose(drift["log_ratio"], change.sum(-1), atol=1e-3)

    trainer.record_behavior_logprobs(episodes)
    with torch.no_grad():  # pi_ref is still the initial policy
        initial = stock_logprobs(text_policy, episodes[0])
    np.testing.assert_allclose(episodes[0].ref_logprobs, initial, atol=1e-4)


def test_a_step_clips_the_gradient_and_decays_no_weight(text_policy):
    trainer = trainer_for(text_policy)
    trainer.step = 10  # the whole rate
    episodes = speakable_episodes(text_policy, 8)
    before = [p.clone() for p in trainer.policy.model.parameters()]
    trainer.update(episodes, torch.zeros(collate(episodes).tokens.shape))
    assert all(map(torch.equal, before, trainer.policy.model.parameters()))
    stats = trainer.update(episodes, torch.full(collate(episodes).tokens.shape, 20.0)).stats
    assert stats["grad_norm"] > 1.0
    assert gradient(trainer.policy.model).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_what_the_engine_sampled_otherwise_is_logged(text_policy):
    """An engine that is off by known amounts."""
    trainer = trainer_for(text_policy)
    episodes = speakable_episodes(text_policy, 5)
    batch = collate(episodes)
    right = trainer.logprobs(batch)
    off = 0.7 * torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    for e, row in zip(episodes, right - off * batch.action_mask, strict=True):
        e.behavior_logprobs = row[: len(e.tokens)].numpy()
    stats = trainer.record_behavior_logprobs(episodes)

    of_actions = off[batch.action_mask].numpy()
    assert stats["mismatch"] == pytest.approx(np.abs(of_actions).mean(), rel=1e-4)
    for e, row in zip(episodes, right.numpy(), strict=True):
        np.testing.assert_array_equal(e.behavior_logprobs, row[: len(e.tokens)])


def test_numbers_that_are_not_finite_name_an_episode_and_touch_no_weight(text_policy):
    trainer = trainer_for(text_policy)
    episodes = speakable_episodes(text_policy, 4)
    trainer.record_behavior_logprobs(episodes)
    episodes[2].tokens[0] = 250  # in no other episode: it cannot be sampled
    with torch.no_grad():
        trainer.policy.model.model.embed_tokens.weight[250] = torch.nan
    before = [p.clone() for p in trainer.policy.model.parameters()]
    for call in (trainer.record_behavior_logprobs, trainer.update):
        with pytest.raises(NonFiniteError, match=r"not finite.* episode seeds? \[?2\b"):
            call(episodes)
    assert trainer.step == 0
    for p, old in zip(trainer.policy.model.parameters(), before, strict=True):
        assert torch.equal(p.nan_to_num(), old.nan_to_num())


def test_a_conversation_that_has_not_grown_gets_a_new_reply(text_policy):
    """The cache of the first call cannot be used: the reply of that call is in it."""
    conversation = Conversation([5, 6, 7])
    engine = HFEngine(text_policy, Sampling(top_k=1), 0)
    first, again = [engine.generate([conversation], 4)[0] for _ in range(2)]
    assert first.tokens == again.tokens
    assert first.logprobs == again.logprobs


@pytest.mark.parametrize(
    "installed, visible, ranks, left",
    [
        (1, None, 1, []),  # vLLM shares it
        (3, None, 1, ["1", "2"]),
        (4, "", 2, ["2", "3"]),
        (4, "3,0,2", 2, ["2"]),
        (8, "GPU-a,GPU-b", 1, ["GPU-b"]),
    ],
)
def test_vllm_has_the_gpus_that_the_ranks_leave(installed, visible, ranks, left, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "MASTER_PORT", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: installed)
    monkeypatch.setattr(Config, "device", "cuda")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert gpus_of_vllm("cuda") == left

    variables = variables_of_vllm("cuda", left)
    assert variables.get("CUDA_VISIBLE_DEVICES") == (",".join(left) or visible)
    # torchrun's variables would make vLLM's processes ranks of the trainer.
    assert "LOCAL_WORLD_SIZE" not in variables

    options = options_of_vllm(Config(engine_memory=0.4), FrozenLake(), left)
    assert options.get("tensor_parallel_size", 1) == max(1, len(left))
    assert options.get("gpu_memory_utilization") == (None if left else 0.4)


def test_ranks_that_leave_vllm_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="must leave a GPU for vLLM, but 4,5 are all"):
        gpus_of_vllm("cuda")
