"""What a run shows: the learning curve, and a page of games with pictures, replies, rewards and log-probs.

Paper: Fig. llm_main and vlm_main are such curves; the page is ours.
"""

import base64
import html
import io
from pathlib import Path

import matplotlib.figure
import numpy as np
from PIL import Image

from freshper.episode import Episode
from freshper.models import Policy


def plot(metrics: dict[str, np.ndarray], baselines: dict[str, float], title: str, path: Path) -> None:
    """Success against episodes: each iteration's own, their moving average, and held-out evaluations."""
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    x, y, held_out = (metrics[name] for name in ("episodes", "train_success", "eval_success"))
    window = max(1, min(len(y), 256 * len(y) // int(x[-1])))
    axes.plot(x, y, ".", color="tab:red", alpha=0.2, markersize=3)
    smooth = np.convolve(y, np.ones(window) / window, mode="valid")
    axes.plot(x[window - 1 :], smooth, color="tab:red", label=f"train, mean of {window} iterations")
    evaluated = ~np.isnan(held_out)
    if evaluated.any():
        axes.plot(x[evaluated], held_out[evaluated], "o-", color="tab:blue", label="held-out seeds")
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
