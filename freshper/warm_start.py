"""The warm start of the tiny models: it plays the part of pre-training.

Ours; the paper starts from Qwen2.5 instruct models (appendix D). Supervised learning on transcripts of a uniformly
random player, never on good play. It teaches the form of a reply, what a move does and what an observation shows,
and leaves the success of a random player, which freshper/tiny.py checks.

A transcript is a game, and then a last user turn with the final observation and its caption:

    <user> the state <assistant> <answer>Up</answer> <user> ... <user> the last state ? X b3 G b2 O b3 c3 a4

Text models learn every token of it, picture models the replies and captions: a placeholder of a picture has
nothing to predict, and a caption is what makes the vision tower look. The caption stands in a user turn: as an
assistant turn it would be a second thing to say, into which RL, pushing down failures, drives the policy.
"""

from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm
from transformers import get_scheduler

from envs.base import WARM_START_SEEDS, Observation, TextEnv
from freshper.episode import Batch, Episode, collate
from freshper.models import Policy
from freshper.rollout import RandomEngine, rollout

BATCH = 64


def transcripts(policy: Policy, players: list[TextEnv], seeds: list[int]) -> list[Episode]:
    """A game of the uniformly random player in each environment, then one more user turn: the final observation and
    what it shows. The action mask of the result covers replies and captions."""
    engine = RandomEngine(policy, players, seeds[0])
    games = rollout(engine, policy, players, seeds, max_tokens=4096, max_new_tokens=8)
    for game, player in zip(games, players, strict=True):
        caption = policy.tokenizer.encode(player.caption(), add_special_tokens=False)
        final = player.observe()
        turn = policy.bridge(Observation(f"{final.text}?{player.caption()}", final.images), closed=True)
        start = len(turn) - policy.closing_tokens - len(caption)
        told = [start <= k < start + len(caption) for k in range(len(turn))]
        game.tokens = np.concatenate([game.tokens, turn]).astype(np.int32)
        game.action_mask = np.concatenate([game.action_mask, told])
        game.behavior_logprobs = np.zeros(len(game.tokens), dtype=np.float32)
        game.turn_rewards = np.append(game.turn_rewards, 0.0).astype(np.float32)
        game.images = [*game.images, *final.images]
    return games


def supervised_step(policy: Policy, games: list[Episode]) -> float:
    """Accumulate the gradient of the mean cross-entropy, and return it: over every token of text games (the
    observations teach what a move does), over replies and captions of picture games (whose placeholders have
    nothing to predict)."""

    def targets(batch: Batch) -> torch.Tensor:
        if policy.image_processor:
            return batch.action_mask[:, 1:]
        return torch.arange(1, batch.tokens.shape[1]) < torch.tensor(batch.lengths)[:, None]

    batch = collate(games)
    total, n = 0.0, targets(batch).sum()
    for _, part in batch.micro_batches(16):
        mask = targets(part)
        logits = policy.model.lm_head(policy.batch_hidden(part)[:, :-1][mask])
        loss = torch.nn.functional.cross_entropy(logits, part.tokens[:, 1:][mask], reduction="sum") / n
        loss.backward()
        total += loss.item()
    return total


def warm_start(
    policy: Policy, make_env: Callable[[], TextEnv], schedule: tuple[tuple[int, int], ...], lr: float = 3e-3
) -> None:
    """Supervised learning on fresh games of the random player. `schedule`: (batches, turns of their games)."""
    players = [make_env() for _ in range(BATCH)]
    total = sum(batches for batches, _ in schedule)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, weight_decay=0.0)
    rate = get_scheduler("cosine", optimizer, total // 20, total)
    policy.model.train()
    with tqdm(total=total, desc="warm start (once)", unit="batch") as progress:
        for batches, turns in schedule:
            for player in players:
                player.max_turns = turns
            for _ in range(batches):
                seeds = [WARM_START_SEEDS + int(progress.n) * BATCH + k for k in range(BATCH)]
                optimizer.zero_grad()
                loss = supervised_step(policy, transcripts(policy, players, seeds))
                torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
                optimizer.step()
                rate.step()
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
                progress.update()
