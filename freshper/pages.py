"""Draw a run: success against episodes, as in Fig. 3 of the paper, and a page of held-out episodes.

No other part of a run depends on this. The text of the page comes from a model or a data set, so
the template escapes all of it.
"""

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.figure
import numpy as np

from freshper import diagnostics
from freshper.episode import Episode, compressed
from freshper.models import Policy

PAGE = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1"><style>
body {font: 16px/1.4 system-ui, sans-serif; max-width: 60em; margin: auto; padding: 0 1em}
table {border-collapse: collapse; width: 100%}
td {border-top: 1px solid #ccc; padding: .6em; vertical-align: top}
td:first-child {width: 40%}
img {width: 128px; image-rendering: pixelated}
pre {white-space: pre-wrap; margin: 0}
ruby {white-space: pre-wrap; background: #fff3d6; padding: 0 3px; line-height: 2.2}
.won {color: #0072b2}
.lost {color: #d55e00}
</style><title>{{ title }}</title><h1>{{ title }}</h1>
<p>Held-out episodes, one row per turn. Left: what the policy read. Right: the tokens that it
sampled. Above each token stands its log-prob, which is 0 for a token that was certain.
{% if "frozenlake" in title and "preset tiny" in title %}
<p>The fifth row is no part of the lake. It shows the four cells beside the player: left, below,
right and above (dark or #: outside the lake). The shaded edges in an image mark its rows and
columns.
{% endif %}
{% for episode in episodes %}
<h2 class={{ "won" if episode.success else "lost" }}>seed {{ episode.seed }}:
{{ "success" if episode.success else "no success" }}, return {{ "%g" % episode.reward }}</h2><table>
{% for turn in turns_of(episode, policy) %}
<tr><td>
{% for image in turn.images %}
<img src="data:image/png;base64,{{ b64encode(image).decode() }}">
{% endfor %}
<pre>{{ turn.prompt }}</pre><td>
{% for token, logprob in turn.reply %}
<ruby>{{ policy.tokenizer.decode([token]) }}<rt>{{ "{:z.2f}".format(logprob) }}</rt></ruby>
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
    plain_title = title.replace("$", r"\$")  # the name of a file is no mathematics
    axes.set(xlabel="episodes", ylabel=ylabel, title=plain_title)

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
    """Yield the turns of an episode: images (PNG) and text that the policy read, and its reply as
    pairs of a token and its log-prob."""
    decode = partial(policy.tokenizer.decode, skip_special_tokens=True)
    images = iter(episode.images)
    start = 0
    for end in episode.turn_ends() + 1:
        tokens = episode.tokens[start:end]
        sampled = episode.action_mask[start:end]
        logprobs = episode.behavior_logprobs[start:end]

        # An image stands where its placeholders begin.
        is_image = tokens == policy.image_token_id
        begins = is_image & np.diff(is_image, prepend=False)
        shown = [compressed(next(images)).png for _ in range(begins.sum())]

        # The chat template puts the names of the roles around the text.
        roles = policy.template(len(shown), first=start == 0)
        before, after = map(decode, map(policy.tokenizer.encode, roles))
        prompt = decode(tokens[~sampled]).removeprefix(before).removesuffix(after)
        start = end
        yield {
            "images": shown,
            "prompt": prompt,
            "reply": zip(tokens[sampled], logprobs[sampled]),
        }
