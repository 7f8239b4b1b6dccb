"""What a run leaves behind and what its user sees: progress bar, metrics.csv, curve.png, episodes.html, checkpoint.

    out/config.json     every setting            out/curve.png       success against episodes, with baselines
    out/metrics.csv     one row an iteration     out/episodes.html   a few episodes, turn by turn
    out/checkpoint/     the policy, for `load_policy` and `from_pretrained`

Rows are written as they come; the rest when the run ends, also when it is interrupted or fails.

Columns of metrics.csv: `step` optimizer steps; `episodes` collected so far; `train_*` of this iteration's
episodes, `eval_*` on held-out seeds (empty where not evaluated), the environment's own `metrics` among them;
`invalid` share of unreadable replies;
`mismatch` mean |engine - trainer log-prob|; `sync_error` its maximum over a fixed probe, with vLLM, where proven;
`grad_norm`, `clip_fraction` (ratios cut by the PPO clip), `kl`
(k3 of pi_mu against pi_theta) of the on-policy update; `replay_*` means over the K replay updates, where
`replay_age` is in optimizer steps, `replay_success` the share of successes drawn and
`replay_nonzero_advantages` the share of their action tokens that carry any gradient; `mean_age` over the buffer.
"""

import base64
import csv
import dataclasses
import html
import io
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import matplotlib.figure
import numpy as np
from PIL import Image
from tqdm import tqdm

from envs.base import EVAL_SEEDS
from freshper.buffer import Replay, ReplayBuffer
from freshper.config import Config
from freshper.episode import Episode
from freshper.models import Policy
from freshper.rollout import summarize
from freshper.trainer import TorchTrainer

COLUMNS = """
iteration step episodes wall_s train_success train_reward eval_success eval_reward turns invalid mismatch sync_error
loss grad_norm clip_fraction kl nonzero_advantages replay_loss replay_grad_norm replay_clip_fraction replay_kl
replay_nonzero_advantages replay_success replay_age buffer_size mean_age lr
""".split()


def baselines(config: Config) -> dict[str, float]:
    """Mean success of the random player on the held-out seeds and, where the environment knows it, the optimal."""
    env = config.make_env()
    known = [env.baselines(EVAL_SEEDS + k) for k in range(config.eval_episodes)]
    return {name: float(np.mean([b[name] for b in known])) for name in known[0]}


class Report:
    """A context manager around the run: everything is on disk when it closes."""

    def __init__(self, config: Config, policy: Policy):
        self.config, self.policy, self.folder = config, policy, config.folder()
        self.iteration = 0
        self.values: dict[str, list[float]] = defaultdict(list)
        self.rows: list[dict[str, float]] = []
        self.baselines: dict[str, float] = {}
        self.episodes: list[Episode] = []

    def __enter__(self) -> "Report":
        self.folder.mkdir(parents=True)
        (self.folder / "config.json").write_text(json.dumps(dataclasses.asdict(self.config), indent=1) + "\n")
        self.file = (self.folder / "metrics.csv").open("w", newline="")
        self.metrics = self.config.make_env().metrics
        own = [f"{phase}_{name}" for phase in ("train", "eval") for name in self.metrics]
        self.writer = csv.DictWriter(self.file, COLUMNS + own, restval="")
        self.writer.writeheader()
        self.baselines = baselines(self.config)
        parameters = sum(p.numel() for p in self.policy.model.parameters())
        self.say(f"{self.title()}: {type(self.policy.model).__name__}, {parameters:,} parameters")
        players = ", ".join(f"{name} {value:.3f}" for name, value in self.baselines.items())
        how = "exactly" if self.config.make_env().has_exact_baselines() else "one game each"
        self.say(f"players on the {self.config.eval_episodes} held-out seeds, {how}: success {players}")
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if self.rows:
            plot(self.rows, self.baselines, self.title(), self.folder / "curve.png")
            page = episodes_page(self.episodes, self.policy, self.title())
            (self.folder / "episodes.html").write_text(page, encoding="utf-8")
            if all(p.numel() for p in self.policy.model.parameters()):
                self.policy.save(str(self.folder / "checkpoint"))
            else:
                self.say("no checkpoint: the weights lie in pieces on ranks that are gone")
        self.say(f"written to {self.folder}/: {', '.join(sorted(p.name for p in self.folder.iterdir()))}")

    def progress(self) -> Iterator[int]:
        """Iteration numbers, with a progress bar."""
        self.bar = tqdm(range(self.config.iterations), unit="it", dynamic_ncols=True)
        for iteration in self.bar:
            self.iteration = iteration
            self.values.clear()
            yield iteration

    def add(self, stats: dict[str, float]) -> None:
        """Numbers of this iteration; several of a name are averaged."""
        for name, value in stats.items():
            self.values[name].append(value)

    def add_replay(self, stats: dict[str, float], replay: Replay) -> None:
        """Numbers of one replay update."""
        drawn = {"success": np.mean([e.info["success"] for e in replay.episodes]), "age": replay.ages.mean()}
        self.add({f"replay_{name}": float(value) for name, value in (stats | drawn).items()})

    def evaluation_due(self) -> bool:
        done = self.iteration + 1
        return done % self.config.eval_every == 0 or done == self.config.iterations

    def evaluated(self, episodes: list[Episode]) -> None:
        """Take note of games on held-out seeds."""
        summary = summarize(episodes, self.metrics)
        self.add({f"eval_{name}": summary[name] for name in ("success", "reward", *self.metrics)})

    def end_iteration(self, trainer: TorchTrainer, episodes: list[Episode], buffer: ReplayBuffer) -> None:
        """Write the row of this iteration and move the bar."""
        self.episodes = episodes
        fresh = summarize(episodes, self.metrics)
        row = {name: round(float(np.mean(values)), 6) for name, values in self.values.items()}
        row |= {
            "iteration": self.iteration,
            "step": trainer.step,
            "episodes": (self.iteration + 1) * len(episodes),
            "wall_s": round(time.perf_counter() - self.began, 2),
            "train_success": round(fresh["success"], 4),
            "train_reward": round(fresh["reward"], 4),
            "turns": round(fresh["turns"], 3),
            "invalid": round(fresh["invalid"], 4),
            **{f"train_{name}": round(fresh[name], 4) for name in self.metrics},
            "buffer_size": len(buffer),
            "mean_age": round(float(buffer.ages().mean()), 2),
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        self.writer.writerow(row)
        self.file.flush()
        self.rows.append(row)
        recent = [r["train_success"] for r in self.rows[-10:]]
        evaluations = [r["eval_success"] for r in self.rows if "eval_success" in r]
        self.bar.set_postfix_str(
            f"success {np.mean(recent):.2f} held-out {evaluations[-1] if evaluations else float('nan'):.2f} "
            f"reward {row['train_reward']:.2f} buffer {len(buffer)} age {row['mean_age']:.0f}"
        )

    def title(self) -> str:
        c = self.config
        return f"{c.task()}, {c.method}, preset {c.preset}, seed {c.seed}"

    @staticmethod
    def say(line: str) -> None:
        tqdm.write(line)


def plot(rows: list[dict[str, float]], baselines: dict[str, float], title: str, path: Path) -> None:
    """Success against episodes: each iteration's own, their moving average, and held-out evaluations."""
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    x, y = (np.array([r[name] for r in rows]) for name in ("episodes", "train_success"))
    window = max(1, min(len(y), 256 * len(y) // int(x[-1])))
    axes.plot(x, y, ".", color="tab:red", alpha=0.2, markersize=3)
    smooth = np.convolve(y, np.ones(window) / window, mode="valid")
    axes.plot(x[window - 1 :], smooth, color="tab:red", label=f"train, mean of {window} iterations")
    held_out = [(r["episodes"], r["eval_success"]) for r in rows if "eval_success" in r]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:blue", label="held-out seeds")
    for name, style in (("optimal", "--"), ("random", ":")):
        if name in baselines:
            axes.axhline(baselines[name], color="black", linestyle=style, label=f"{name} player: {baselines[name]:.3f}")
    axes.set(xlabel="episodes", ylabel="success", title=title, ylim=(-0.02, 1.05))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


STYLE = """body{font:15px/1.4 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
pre{background:#f4f4f4;padding:.5em;white-space:pre-wrap;margin:.3em 0}
img{image-rendering:pixelated;width:160px;vertical-align:top;margin:.2em}
.reply{background:#fff3d6} small{color:#666}"""


def episodes_page(episodes: list[Episode], policy: Policy, title: str, n: int = 8) -> str:
    """A static page: successes and failures, turn by turn, with pictures, replies, rewards and log-probs.
    Whatever the model or the environment wrote is escaped."""
    ordered = sorted(episodes, key=lambda e: not e.info["success"])
    chosen = ordered[: n // 2] + ordered[n // 2 :][-(n - n // 2) :]
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1>")
    for e in chosen:
        outcome = "success" if e.info["success"] else "no success"
        parts.append(f"<h2>seed {e.seed}: {outcome}, return {e.reward:g}, {len(e.turn_rewards)} turns</h2>")
        images = iter(e.images)
        start = 0
        for turn, end in enumerate(e.turn_ends()):
            first = start + int(e.action_mask[start:].argmax())  # the first token of this reply
            shown = e.tokens[start:first]
            n_images = len(np.flatnonzero(np.diff(shown == policy.image_token_id, prepend=False))[::2])
            parts += [f'<img src="{data_url(next(images))}">' for _ in range(n_images)]
            text = policy.tokenizer.decode(shown[shown != policy.image_token_id])
            parts.append(f"<pre>{html.escape(text)}</pre>")
            reply = policy.tokenizer.decode(e.tokens[first : end + 1])
            logprobs = " ".join(f"{x:.2f}" for x in e.behavior_logprobs[first : end + 1])
            parts.append(f'<pre class="reply">{html.escape(reply)}</pre>')
            parts.append(f"<small>turn {turn + 1}, reward {e.turn_rewards[turn]:g}, log-probs {logprobs}</small>")
            start = end + 1
    return "\n".join(parts) + "\n"


def data_url(image: np.ndarray) -> str:
    """A picture, uint8 [H, W, 3], as an inline PNG."""
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
