"""The ready-made comparisons of compare.py, one for each exhibit of the paper, and ours.

Paper: Table main_results, Fig. llm_main, vlm_main, tau_ablation, is_ablation, control; Table config_comparison. The
controls, decay forms, the search and the showcase are not in the paper.
"""

import dataclasses
from typing import Any

from freshper.config import Config
from freshper.presets import CONFIG_A, CONFIG_DEFAULT, defaults


def exhibits(preset: str, env: str) -> dict[str, list[str]]:
    """Ready-made comparisons: name -> arms. K and the number of iterations are those of the preset."""
    known: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)} | defaults(preset, env, "freshper")
    fresh = known["rollout_batch_size"]
    current = (
        f"--capacity {fresh} --batch_size {fresh} --replay_ratio {known['replay_ratio'] * known['batch_size'] // fresh}"
    )
    updates = known["replay_ratio"] + 1
    passes = 1 + known["replay_ratio"] * known["batch_size"] // fresh  # episodes trained on, per fresh one
    longer = f"--iterations {passes * known['iterations']} --eval_every {passes * known['eval_every']}"
    large = f"--rollout_batch_size {4 * fresh} --batch_size {4 * known['batch_size']} --iterations 25 --eval_every 5"
    minibatches = f"--capacity {fresh} --batch_size {fresh // 2} --replay_ratio 4"
    grid = [
        f"--lr {lr} --format_penalty {f}" for lr, f in ((5e-4, 0), (1e-3, 0), (5e-4, 0.15), (1e-3, 0.15), (2e-3, 0.15))
    ]
    # which of the grid each did best with (RESULTS.md); all but on_policy have as many updates as FreshPER or more
    best = {
        "freshper": grid[3],
        "per --is_correction False": grid[4],
        "per": grid[3],
        "per --alpha 0 --is_correction False": grid[2],
        "on_policy": grid[3],
        f"on_policy --ppo_epochs {updates}": grid[3],
        f"per --is_correction False --alpha 0 {minibatches}": grid[4],
        f"per --is_correction False {current}": grid[0],
    }
    matched = [  # the paper's three, and Standard PER's other half, no priorities, as many updates
        "freshper",
        "per",
        "per --is_correction False",
        "per --alpha 0 --is_correction False",
        f"on_policy --ppo_epochs {updates}",
        "on_policy",
    ]
    taus = (500, 1000, 1500) if preset == "paper" else (5, 20, 80, 320)
    return {
        # Table main_results, Fig. llm_main, vlm_main, control
        "main": ["on_policy", "per", "freshper"],
        # ours: main with the nearest controls
        "matched": matched,
        # Fig. tau_ablation: the paper's values, or from a quarter to sixteen times the tiny presets'
        "tau": [
            "on_policy",
            *(f"freshper --tau {tau}" for tau in taus),
            "freshper --decay none",
            "freshper --tau auto",
        ],
        # Fig. is_ablation, and the other half that the paper leaves out
        "is": ["on_policy", "freshper", "freshper --is_correction True", "per --is_correction False", "per"],
        # Table config_comparison, and Config A with the other's clip
        "config": [
            " ".join(["freshper", *(f"--{name} {value}" for name, value in config.items())])
            for config in (CONFIG_A, CONFIG_DEFAULT, CONFIG_A | {"advantage_clip": CONFIG_DEFAULT["advantage_clip"]})
        ],
        # ours: the matched ones, and as many episodes trained on; no buffer but the current batch, its successes
        # preferred or not; no base priority
        "controls": [
            *matched,
            f"on_policy {longer}",
            f"per --is_correction False {current}",
            f"per --is_correction False --alpha 0 {current}",
            "freshper --epsilon 1000",
        ],
        # a limit under which drawn episodes are as old on average; draws: every episode is drawn K B / B times or so
        "decay": [
            "freshper",
            "freshper --decay polynomial",
            f"freshper --decay limit --tau {2 * known['tau'] / known['alpha']:.0f}",
            "freshper --decay draws --tau 2",
            "freshper --decay none",
            "freshper --age_unit iteration",
        ],
        # ours: the same search for everyone, and what it found on seeds that it has not seen
        "search": [f"{arm} {setting}" for arm in best for setting in grid],
        "showcase": [f"{arm} {setting}" for arm, setting in best.items()],
        # what carries FreshPER there: each in turn changed to what the paper does or to nothing; four times the batch
        # with a quarter of the iterations (of `--iterations 100`)
        "factors": [
            f"freshper {best['freshper']}{change}"
            for change in (
                "",
                " --decay none",
                " --epsilon 1000",
                " --replay_advantage stored",
                " --replay_advantage recompute",
                f" --advantage_clip {CONFIG_A['advantage_clip']}",
                f" {large}",
            )
        ],
        "ratio": ["on_policy", *(f"freshper --replay_ratio {k}" for k in (1, 2, 4, 8))],
        "epsilon": [f"freshper --epsilon {epsilon}" for epsilon in (1e-6, 0.01, 0.1, 1.0)],
        "advantage": [f"freshper --replay_advantage {mode}" for mode in ("running", "recompute", "stored")],
    }
