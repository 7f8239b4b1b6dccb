"""One rank of a trainer, for test_trainer_deepspeed.py: log-probs, updates, weights, on given episodes.

    torchrun --nproc_per_node 2 tests/engines/rank_of_a_trainer.py OUT BEFORE FIRST LAST [flags of train.py]

Updates FIRST to LAST - 1, after those of the run that wrote the folder BEFORE ("-": from the start). Rank 0 writes
the folder OUT. With `--trainer torch` and one process the same script gives the oracle's numbers.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from conftest import make_episode

import freshper.trainer
from freshper.backends import join, make_trainer
from freshper.config import parse_args
from freshper.episode import collate
from freshper.models import load_policy
from freshper.tiny import build_policy


def episodes_for(policy, n, image):
    """Random episodes of very different lengths; those with a picture have its placeholders in the prompt."""
    rng = np.random.default_rng(0)
    speakable = np.setdiff1d(np.arange(len(policy.tokenizer)), policy.suppressed_ids)
    episodes = []
    for k in range(n):
        e = make_episode(rng, turns=1 + 2 * (k % 4), seed=k, vocabulary=len(policy.tokenizer))
        e.tokens = rng.choice(speakable, len(e.tokens)).astype(np.int32)
        if image:
            picture = np.random.default_rng(k % 3).integers(0, 255, (56, 56, 3), dtype=np.uint8)
            e.images = [picture]
            front = np.full(16, policy.image_token_id, dtype=np.int32)
            e.tokens = np.concatenate([front, e.tokens])
            e.action_mask = np.concatenate([np.zeros(16, dtype=bool), e.action_mask])
            e.behavior_logprobs = np.concatenate([np.zeros(16, dtype=np.float32), e.behavior_logprobs])
        episodes.append(e)
    return episodes


def main(out, before, first, last, *flags):
    config = parse_args(flags)
    freshper.trainer.LOGITS_AT_ONCE = 1000  # three tokens of the tiny vocabulary: a text batch is cut into chunks
    rank = join(config)
    torch.set_num_threads(1)
    if before == "-":
        policy = build_policy(config.make_env())
        policy.model.to(getattr(torch, config.dtype))
        policy.freeze_vision = config.freeze_vision
        policy.__post_init__()
    else:
        policy = load_policy(before, "cpu", getattr(torch, config.dtype), config.freeze_vision)
    trainer = make_trainer(policy, config)
    if rank:
        sys.exit(trainer.serve())
    episodes = episodes_for(policy, config.batch_size, image=config.env == "frozenlake_vlm")
    if before == "-":
        found = trainer.record_behavior_logprobs(episodes)
    else:
        trainer.load_state_dict(torch.load(f"{before}/state.pt", weights_only=False))
        found = torch.load(f"{before}/found.pt", weights_only=False)
        for episode, recorded, info in zip(episodes, found["behavior"], found["infos"], strict=True):
            episode.behavior_logprobs, episode.info = recorded, info
    found["before"] = trainer.logprobs(collate(episodes))
    moments = torch.tensor([[0.1, 0.9]] * len(episodes)).T[..., None]
    weights = np.linspace(0.2, 1.0, len(episodes))
    arguments = [(episodes,), (episodes, weights, moments), (episodes[:3], weights[:3])]
    found["updates"] = [trainer.update(*arguments[k % 3]) for k in range(int(first), int(last))]
    found["after"] = trainer.logprobs(collate(episodes))
    kept = list(trainer.weights())  # all at once, as vLLM's sender keeps them until a buffer is full
    found["weights"] = {name: weight.float().clone() for name, weight in kept}
    found["behavior"], found["infos"] = [e.behavior_logprobs for e in episodes], [e.info for e in episodes]
    found["lr"] = trainer.optimizer.param_groups[0]["lr"]
    trainer.whole_policy().save(out)
    torch.save(trainer.state_dict(), f"{out}/state.pt")
    torch.save(found, f"{out}/found.pt")
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
