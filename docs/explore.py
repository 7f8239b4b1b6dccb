"""Put a run's buffer into docs/explore.html: every fourth episode.

    python -m docs.explore out/tour/with-decay-60         of the tour (docs/tour.py)

The page is its own template. Only its data are replaced. `drift` is the KL divergence of the policy
that acted from the one of the checkpoint, k3, in nats a turn.
"""

import argparse
import json
import re
from pathlib import Path

import torch

from freshper.checkpoint import unpack_episodes
from freshper.episode import collate
from freshper.models import load_policy
from freshper.reinforce import kl_k3
from freshper.trainer import action_logprobs

PAGE = Path(__file__).parent / "explore.html"
DATA = re.compile(r'(<script id="data" type="application/json">\n).*?(\n</script>)', re.DOTALL)
EVERY = 4


def columns(run: Path) -> dict[str, str | list]:
    """Return the data of the page."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    state = torch.load(run / "checkpoint/state.pt", weights_only=True)
    episodes = unpack_episodes(state["buffer"]["episodes"])[::EVERY]
    policy = load_policy(str(run / "checkpoint"), "cpu", torch.float32)
    batch = collate(episodes)
    with torch.no_grad():
        logprobs = action_logprobs(policy, batch, config["temperature"])[0]
    kl = kl_k3(batch.behavior_logprobs, logprobs).where(batch.action_mask, 0.0).sum(1)
    turns = torch.tensor([len(episode.turn_rewards) for episode in episodes])

    name = f"{config['env']}, seed {config['seed']}, after {config['iterations']} iterations"
    return {
        "run": f"{len(episodes)} episodes, one in {EVERY} of a real run's buffer ({name}).",
        "age": [state["trainer"]["step"] - episode.step for episode in episodes],
        "reward": [round(episode.reward, 4) for episode in episodes],
        "seed": [episode.seed for episode in episodes],
        "drift": [float(f"{drift:.3g}") for drift in (kl / turns).tolist()],
    }


def write(data: dict[str, str | list]) -> None:
    """Put the data into the page, a line for each column. They cannot end its script."""
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in data.items()]
    text = ("{" + ",\n".join(rows) + "}").replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(DATA.sub(lambda found: found[1] + text + found[2], page), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put a run's buffer into docs/explore.html.")
    parser.add_argument("run", type=Path, help="the folder of a run with replay")
    write(columns(parser.parse_args().run))
