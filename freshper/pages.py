"""Draw a run: success against episodes, as in Fig. 3 of the paper, and a page of held-out episodes.

No other part of a run depends on this. The text of the page comes from a model or a data set, so
the template escapes all of it.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.figure
import numpy as np

from freshper import diagnostics
from freshper.episode import Episode, compressed
from freshper.models import Policy

PAGE = """<!doctype html><meta charset=utf-8><style>
body {font: 15px sans-serif; max-width: 70em; margin: auto}
td {width: 50%; vertical-align: top}
img {width: 128px; image-rendering: pixelated}
pre, ruby {white-space: pre-wrap}
ruby {background: #fff3d6; padding: 0 3px}
</style><title>{{ title }}</title><h1>{{ title }}</h1>
Held-out episodes. Right: the sampled tokens, each below its log-prob.
{% for episode in episodes %}
<h2>seed {{ episode.seed }}: {{ "success" if episode.success else "no success" }},
return {{ "%g" % episode.reward }}</h2><table>
{% for turn in turns_of(episode, policy) %}
<tr><td>
{% for image in turn.images %}
<img src="data:image/png;base64,{{ b64encode(image).decode() }}">
{% endfor %}
<pre>{{ policy.tokenizer.decode(turn.prompt, skip_special_tokens=True).strip() }}</pre><td>
{% for token, logprob in turn.reply %}
<ruby>{{ policy.tokenizer.decode([token]) }}<rt>{{ "%.2f" % logprob }}</rt></ruby>
{%- endfor %}
<p>reward {{ "%g" % episode.turn_rewards[loop.index0] }}
{% endfor %}
</table>
{% endfor %}
"""


def write_pages(
    folder: Path,
    title: str,
    baselines: dict[str, float],
    episodes: list[Episode],
    policy: Policy,
) -> None:
    """Draw curve.png and diagnostics.png from the tables of a run, and write episodes.html."""
    metrics = diagnostics.read(folder, "metrics.csv")
    training = {"label": "training, each iteration", "alpha": 0.4}
    held_out = {"label": "held-out seeds", "marker": "o"}
    lines = [
        (metrics["episodes"], metrics["train_success"], training),
        (metrics["episodes"], metrics["eval_success"], held_out),
    ]
    plot(folder / "curve.png", title, "success", lines, baselines)

    if (folder / "replay.csv").exists():
        rows = diagnostics.read(folder)
        diagnostics.plot(folder, diagnostics.by_age(rows))
    if episodes:
        page = episodes_page(episodes, policy, title)
        (folder / "episodes.html").write_text(page, encoding="utf-8")


def plot(
    path: Path, title: str, ylabel: str, lines: list[tuple], baselines: dict[str, float]
) -> None:
    """Draw lines against episodes, and the baselines across. The legend is below.

    A line has x [n], y [n], NaN if not measured, and a style for `Axes.plot`."""
    figure = matplotlib.figure.Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="episodes", ylabel=ylabel, title=title)

    for episodes, values, style in lines:
        measured = ~np.isnan(values)
        axes.plot(episodes[measured], values[measured], **style)
    for name, value in baselines.items():
        style = "--" if name == "optimal" else ":"
        axes.axhline(value, color="black", linestyle=style, label=f"{name} policy: {value:.3f}")

    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)


def episodes_page(episodes: list[Episode], policy: Policy, title: str) -> str:
    """Return a static page of the first eight episodes, turn by turn.

    It shows what the policy read and, beside it, the sampled reply with the engine's log-prob above
    each token."""
    template = jinja2.Template(PAGE, autoescape=True, trim_blocks=True)
    return template.render(
        title=title,
        episodes=episodes[:8],
        turns_of=turns_of,
        policy=policy,
        b64encode=base64.b64encode,
    )


def turns_of(episode: Episode, policy: Policy) -> Iterator[dict[str, Any]]:
    """Yield the turns of an episode: images (PNG) and tokens that the policy read, and its reply as
    pairs of a token and its log-prob."""
    images = iter(episode.images)
    start = 0
    for end in episode.turn_ends() + 1:
        tokens = episode.tokens[start:end]
        sampled = episode.action_mask[start:end]
        logprobs = episode.behavior_logprobs[start:end]
        start = end

        # An image stands where its placeholders begin.
        is_image = tokens == policy.image_token_id
        begins = is_image & np.diff(is_image, prepend=False)
        yield {
            "images": [compressed(next(images)).png for _ in range(begins.sum())],
            "prompt": tokens[~sampled],
            "reply": zip(tokens[sampled], logprobs[sampled]),
        }
