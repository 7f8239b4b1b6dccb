"""Read what docs/explore.html shows from a run: every fourth episode of its buffer.

    python docs/render_tour.py                            trains the tour's runs
    python docs/build.py --run out/tour/with-decay-60

The page is its own template. Only its data are replaced. `drift` is the KL divergence of the policy
that acted from the one of the checkpoint, k3, in nats a turn.
"""

import json
import re
from pathlib import Path

import torch

import compare
from freshper import checkpoint
from freshper.episode import collate
from freshper.models import load_policy
from freshper.reinforce import policy_loss
from freshper.trainer import action_logprobs

PAGE = Path(__file__).parent / "explore.html"
DATA = re.compile(r'(<script id="data" type="application/json">\n).*?(\n</script>)', re.DOTALL)
EVERY = 4


def columns(run: Path) -> dict[str, str | list]:
    """Return the data of the page. Raises ValueError if the run has no checkpoint with episodes."""
    saved = checkpoint.newest(run)
    if saved is None:
        raise ValueError(f"--run is {run}, but must be the folder of a run with a checkpoint")
    state = torch.load(saved.folder / "state.pt", weights_only=True)
    episodes = checkpoint.unpack_episodes(state["buffer"]["episodes"])[::EVERY]
    if not episodes:
        raise ValueError(f"--run is {run}, but its buffer is empty: it must be a run with replay")

    config = compare.config_of(run)
    done = json.loads((saved.folder / "run.json").read_text())["iteration"]
    policy = load_policy(str(saved.folder), "cpu", torch.float32)
    batch = collate(episodes)
    with torch.no_grad():
        logprobs = action_logprobs(policy, batch, config.temperature)[0]
        _, sums = policy_loss(logprobs, batch.behavior_logprobs, batch.rewards, batch.action_mask)

    ages, rewards, seeds, drifts = [], [], [], []
    for episode, kl in zip(episodes, sums["kl"].tolist(), strict=True):
        drift = kl / len(episode.turn_rewards)
        ages.append(state["trainer"]["step"] - episode.step)
        rewards.append(round(episode.reward, 4))
        seeds.append(episode.seed)
        drifts.append(float(f"{drift:.3g}"))

    run_name = f"{config.env}, seed {config.seed}, after {done} iterations"
    source = f"{len(ages)} episodes, one in {EVERY} of a real run's buffer ({run_name})."
    return {"run": source, "age": ages, "reward": rewards, "seed": seeds, "drift": drifts}


def write(run: Path) -> None:
    """Put the data of a run into docs/explore.html, a line for each column."""
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in columns(run).items()]
    data = "{" + ",\n".join(rows) + "}"
    page = PAGE.read_text(encoding="utf-8")
    page = DATA.sub(lambda found: found[1] + data + found[2], page)
    PAGE.write_text(page, encoding="utf-8")
