"""One rank of a trainer, for tests/test_trainer_deepspeed.py: log-probs, three updates, weights, on given episodes.

    torchrun --nproc_per_node 2 tests/rank_of_a_trainer.py OUT [flags of train.py]

Rank 0 writes OUT, a torch file. With `--trainer torch` and one process the same script gives the oracle's numbers.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from conftest import make_episode

import freshper.trainer
from freshper.backends import join, make_trainer
from freshper.config import parse_args
from freshper.episode import collate
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


def main(out, flags):
    config = parse_args(flags)
    freshper.trainer.LOGITS_AT_ONCE = 1000  # three tokens of the tiny vocabulary: a text batch is cut into chunks
    rank = join(config)
    torch.set_num_threads(1)
    policy = build_policy(config.make_env())
    policy.model.to(getattr(torch, config.dtype))
    policy.freeze_vision = config.freeze_vision
    policy.__post_init__()
    trainer = make_trainer(policy, config)
    if rank:
        trainer.serve()
        return
    episodes = episodes_for(policy, config.batch_size, image=config.env == "frozenlake_vlm")
    found = {"mismatch": trainer.record_behavior_logprobs(episodes)["mismatch"]}
    found["before"] = trainer.logprobs(collate(episodes))
    moments = torch.tensor([[0.1, 0.9]] * len(episodes)).T[..., None]
    weights = np.linspace(0.2, 1.0, len(episodes))
    found["stats"] = [
        trainer.update(episodes),
        trainer.update(episodes, weights, moments),
        trainer.update(episodes[:3], weights[:3]),
    ]
    found["after"] = trainer.logprobs(collate(episodes))
    found["weights"] = {name: weight.float().clone() for name, weight in trainer.weights()}
    trainer.close()
    found["closed"] = {name: weight.detach().float() for name, weight in policy.model.named_parameters()}
    found["lr"] = trainer.optimizer.param_groups[0]["lr"]
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
