"""What the paper claims (numbers) and what we asked (letters), one function each.

The first paragraph of a docstring stands in tables.md, the rest is the rule and what was changed in
it. A claim returns how it is answered, and its effects. A call of `family` is a family of effects
that are corrected together. README.md says what yes, no and undecided mean.
"""

from functools import partial
from itertools import product

import numpy as np
import pandas
from runs import MAIN, NAMES, PAIR, SEEDS, TASKS, effect, values
from scipy.stats import spearmanr
from stats import judge, judge_above, judge_equal

TEXT = ["frozenlake"]
CLIFF = ["cliffwalking"]
GSM8K = ["gsm8k"]
SOKOBAN = ["sokoban_simple"]
SMOLLM2 = ["small"]
CONFIRMED = range(601, 606)
SMOLLM2_RIVALS = ("on_policy @ 0.5", "epochs @ 1", "per @ 0.5", "uniform @ 0.5")
EPISODES = ("on_policy - freshper", "epochs - freshper")
# Appendix E's, each at its best rate: clip 0.2 and 20 without KL and entropy terms, 20 with both
CONFIG_A = "freshper --advantage_clip 0.2 --kl_loss_coef 0"
CLIP_20 = "freshper --kl_loss_coef 0"
DEFAULT = "freshper --kl_loss_coef 0.05 --kl_reward_coef 0.1 --entropy_coef 0.01 @ 1"


# -- effects


def family(tasks, *formulas, column="final", by=judge, shown=NAMES, seeds=SEEDS):
    """Return a table of the effects of all formulas on all tasks, judged together, and not all
    shown."""
    cells = [*product(formulas, tasks)]
    effects = [effect([task], formula, column, seeds) for formula, task in cells]
    parts = pandas.DataFrame(effects)
    parts["answer"] = by(parts)
    parts["name"] = [f"{NAMES[task]} {formula}" for formula, task in cells]
    return parts[[task in shown for _, task in cells]]


# Effects that are not judged
shown_only = partial(family, by=lambda parts: "")


def times(success, tasks, *formulas, seeds=SEEDS):
    """Return the ratios of episodes until a success. An arm that never has it counts with all its
    episodes. Yes: significantly above 1, no: significantly below."""
    by = partial(judge, smallest=0)
    parts = family(tasks, *formulas, column=f"log until {success}", by=by, seeds=seeds)
    parts.update(np.exp(parts[["estimate", "low", "high"]]))
    return parts


def reached(success):
    """Return the tasks on which each run of FreshPER has this success, and none begins with it."""
    reach = f"reach {success}"
    return [task for task in TASKS if (values([task], "freshper", reach) == 1).all()]


# -- how a claim is answered


def count(parts):
    """Answer a question: yes, or "yes 2, no 1" if answers differ."""
    counts = parts["answer"].value_counts()
    if len(counts) == 1:
        return counts.index[0]
    kinds = [kind for kind in ("yes", "undecided", "no") if kind in counts]
    return ", ".join(f"{kind} {counts[kind]}" for kind in kinds)


def alike(parts):
    """Answer as all effects do. Mixed: their answers differ."""
    answers = parts["answer"].unique()
    return answers[0] if len(answers) == 1 else "mixed"


def most(parts):
    """Answer as more than half of the effects do, otherwise mixed."""
    shares = parts["answer"].value_counts(normalize=True)
    return shares.idxmax() if shares.max() > 0.5 else "mixed"


def unlike(parts):
    """Answer a claim that effects differ."""
    return "yes" if alike(parts) == "mixed" else "no"


def contrary(parts):
    """Answer a claim that there is no effect."""
    return alike(parts.replace({"yes": "no", "no": "yes"}))


def untested(parts):
    """Answer that the claim's condition does not hold here. What was measured is shown."""
    return "not tested"


def graded(name, numbers, no, yes):
    """Answer by the first of a few numbers: no below one bound, yes from the other on."""
    answer = "no" if numbers[0] < no else "yes" if numbers[0] >= yes else "undecided"
    parts = pandas.DataFrame([numbers], columns=["estimate", "low", "high"])
    return lambda parts: answer, parts.assign(name=name, answer="")


# -- claims of the paper


def rivals(column):
    """Return FreshPER minus both rivals on the seven tasks of Table 1, corrected over nine, a rival
    at a time."""
    for arm in ("on_policy", "per"):
        yield family(TASKS, f"freshper - {arm}", column=column, shown=MAIN)


def claim_1():
    """1: FreshPER "consistently outperforms both on-policy baselines and standard PER" (5).

    The seven tasks of Table 1, corrected over nine, a rival at a time. By the first rule no (nine
    tasks); undecided until 2026-11-26."""
    return alike, *rivals("final")


def claim_1_peak():
    """1, peak: FreshPER "achieves the best peak performance on all seven tasks" (4.2).

    As 1, of the highest evaluation after training began. Until 2026-11-28 one no made it no: one
    fact had two symbols."""
    return alike, *rivals("peak")


def claim_2():
    """2: Standard PER "underperforms the on-policy baseline on most tasks" (4.3).

    The seven tasks. Ours is mended: epsilon 0.1, and the drawn batch's maximum in IS weights."""
    return most, family(MAIN, "on_policy - per")


def claim_3():
    """3: Standard PER "fails catastrophically" on NQ Search (4.3): is more than 0.2 below
    on-policy training.

    The interval lies above 0.2. With Sokoban Simple (mixed) until 2026-11-28."""
    return alike, family(["nq_search"], "on_policy - per", by=judge_above(0.2))


def claim_3_sokoban():
    """3, Sokoban: Standard PER "fails catastrophically" on Sokoban Simple (4.3).

    Not tested: on-policy training has 0.31, the random policy 0.20, so nothing can fall by 0.2."""
    return untested, shown_only(SOKOBAN, "on_policy - per")


def claim_4():
    """4: age decay helps on most tasks: minus `no decay`.

    The seven tasks, corrected over nine."""
    return most, family(TASKS, "freshper - no_decay", shown=MAIN)


def claim_4_is():
    """4, IS: the same minus Standard PER, which adds IS weights."""
    return most, family(TASKS, "freshper - per", shown=MAIN)


def claim_4_on_policy():
    """4, on-policy: replay without age decay is above on-policy training on most tasks. If so, age
    decay is not "essential for applying PER to LLM RL" (4.3).

    Added on 2026-11-27."""
    return most, family(TASKS, "no_decay - on_policy", shown=MAIN)


def claim_5():
    """5: "tau is task-dependent" (4.3): tau 20 is above 1.25 on one task and not on the
    other.

    Until 2026-11-28: tau 20 is above `no decay`, and 80 equals it (mixed)."""
    return unlike, family(PAIR, "freshper - freshper --tau 1.25")


def claim_5_long():
    """5, long: on Sokoban Simple a very long tau is "identical to Standard PER" (B.1).

    Tau 450 equals `no decay` at the same rate. A run has 600 steps, so it is not as long as the
    paper's. Added on 2026-11-28, before its runs; until then not tested."""
    arms = "freshper --tau 450 - no_decay @ 0.5"
    return alike, family(SOKOBAN, arms, by=judge_equal)


def claim_5_sokoban():
    """5, Sokoban: on Sokoban Simple another tau is best than on text FrozenLake (20) and NQ Search
    (5).

    The highest mean of tau 5, 20, 80 and 450. Added on 2026-11-28, before its runs."""
    rivals = [f"freshper --tau {tau}" for tau in (5, 80, 450)]
    means = [values(SOKOBAN, arm).mean() for arm in (*rivals, "freshper")]
    answer = "no" if np.argmax(means) in (0, 3) else "yes"
    return lambda parts: answer, shown_only(SOKOBAN, *(f"freshper - {arm}" for arm in rivals))


def claim_6():
    """6: on FrozenLake in text "all tau values outperform Baseline" (Fig. 5): tau 5, 20 and 80."""
    taus = ("freshper --tau 5 - on_policy", "freshper - on_policy", "freshper --tau 80 - on_policy")
    return alike, family(TEXT, *taus)


def claim_7():
    """7: KL is "heuristically" approximated by c times age (3.3): median R² of 45 runs [quartiles].

    FreshPER, KL(mu, theta), ages weighted by draws, without the oldest bin. At least 0.9: yes;
    below 0.7: no. By the first rule no."""
    r2 = np.quantile(values(TASKS, "freshper", "r2"), (0.5, 0.25, 0.75))
    return graded("R²", r2, no=0.7, yes=0.9)


def claim_8():
    """8: c is "determined by the learning rate and the typical gradient magnitude" (3.3): at a
    quarter of the rate more than an eighth of it is left, and less than half.

    Intervals of c - 2 c' and of 8 c' - c lie above 0; KL(mu, theta). By the first rule (1/c) not
    yes."""
    arms = "freshper - freshper @ 0.125"
    bounds = (f"{arms} (1, -2)", f"{arms} (-1, 8)")
    return alike, family(PAIR, *bounds, column="c", by=judge_above(0))


def claim_9():
    """9: the faster the policy evolves, "the more aggressively tau should be set" (4.3; tau = 1/c,
    3.3): at a quarter of the rate tau 80 is above tau 20, and more so than at the full rate.

    The first half was added on 2026-11-26: from undecided to mixed."""
    slow = "freshper --tau 80 @ 0.125 - freshper @ 0.125"
    more = f"{slow} - freshper --tau 80 - freshper (1, -1, -1, 1)"
    return alike, family(PAIR, slow), family(PAIR, more)


def claim_9_rates():
    """9, rates: tau 20 is above tau 80 at the full rate; tau 5 is above tau 20 at a quarter.

    Added on 2026-11-27."""
    full = "freshper - freshper --tau 80"
    return count, family(PAIR, full, "freshper --tau 5 @ 0.125 - freshper @ 0.125")


def claim_10():
    """10: IS correction "does not substantially improve peak performance" (Fig. 7)."""
    return contrary, family(TEXT, "freshper --beta 0.4 - freshper", column="peak")


def claim_11():
    """11: without IS correction "all other methods degrade in late training" (B.2), with it
    FreshPER does so less.

    At a constant rate. Without, the interval of the loss lies above 0.03. Minus the loss with."""
    loss = partial(family, TEXT, column="late")
    without = loss("freshper +constant", by=judge_above(0.03))
    return alike, without, loss("freshper +constant - freshper --beta 0.4 +constant")


def claim_12():
    """12: "on-policy training peaks early and then degrades (e.g., Sokoban Simple, GeoQA)" (4.3).

    The late loss has an interval above 0.03."""
    tasks = ["sokoban_simple", "geoqa"]
    return alike, family(tasks, "on_policy", column="late", by=judge_above(0.03))


def claim_12_freshper():
    """12, FreshPER: FreshPER "consistently sustains its peak performance through the end" (4.3): no
    late loss above 0.03 on any of nine tasks.

    Added on 2026-11-28."""
    return contrary, family(TASKS, "freshper", column="late", by=judge_above(0.03))


def configs():
    """Return the effects of the clip of 0.2, and of no KL and entropy terms, corrected together
    (third campaign, rule 2)."""
    return family(TEXT, f"{CONFIG_A} - {CLIP_20}", f"{CLIP_20} - {DEFAULT}")


def claim_13():
    """13: an advantage clip of 0.2 "was essential for stable off-policy learning" (E).

    Until 2026-11-28 with KL terms, at 20's rate: no."""
    return alike, configs()[:1]


def claim_13_diverged():
    """13, clip 20: with it "replay-augmented training frequently diverged" (E): in more than half
    of the runs.

    Until 2026-11-28 with our KL terms and without the dual clip: no."""
    return alike, family(TEXT, CLIP_20, DEFAULT, column="diverged", by=judge_above(0.5))


def claim_14():
    """14: KL regularization "should be disabled" (E), and the entropy term.

    Until 2026-11-28 at one rate, without the latter: mixed. Undecided until 2026-11-26, no by the
    first rule."""
    return alike, configs()[1:]


def claim_15():
    """15: an entropy bonus "was counterproductive with replay" (E)."""
    return alike, family(TEXT, "freshper - freshper --entropy_coef 0.01")


def claim_16():
    """16: exponential "against polynomial decay" (3.3; no claim)."""
    return alike, family(TEXT, "freshper - freshper --decay polynomial")


def claim_17():
    """17: is abs(A) as good a base priority as abs(r)?

    Until 2026-11-28 as a claim of the paper, which says that it can be any signal of PER (3.4)."""
    return count, family(TEXT, "freshper --base_priority advantage - freshper", by=judge_equal)


def claim_18():
    """18: evicting "the lowest effective priority" (A.1) is as good as the oldest (Table 5)."""
    arms = "freshper --capacity 640 --eviction lowest_priority - freshper --capacity 640"
    return alike, family(TEXT, arms, by=judge_equal)


def claim_19():
    """19: CliffWalking: "All three methods converge to the optimal score" (B.3): success above 0.9.

    By most of the three."""
    return most, family(CLIFF, "on_policy", "per", "freshper", by=judge_above(0.9))


def claim_19_rates():
    """19, rates: the same, on-policy training at a quarter and half of its rate."""
    return alike, family(CLIFF, "on_policy @ 0.25", "on_policy @ 0.5", by=judge_above(0.9))


def claim_19_gain():
    """19, gain: "When the task is simple enough for on-policy training to solve quickly, replay
    provides no benefit" (B.3).

    Not tested: on-policy training solves CliffWalking in one run of five. No until 2026-11-28."""
    return untested, shown_only(CLIFF, "freshper - on_policy")


def claim_20():
    """20: when "the model is already near-saturated, replay provides little additional
    benefit" (4.3)."""
    return contrary, family(GSM8K, "freshper --model good - on_policy --model good")


def claim_20_tenth():
    """20, tenth: the same at a tenth of the rate."""
    arms = "freshper --model good @ 0.05 - on_policy --model good @ 0.1"
    return contrary, family(GSM8K, arms)


def claim_21():
    """21: "the harder the task [...] the more valuable" replay (4.3): rank correlation of failure
    and FreshPER's gain.

    Nine tasks, success of on-policy training. At least 0.68: yes; below 0: no."""
    level = values(TASKS, "on_policy", "normalised").mean(1)
    gain = (values(TASKS, "freshper") - values(TASKS, "on_policy")).mean(1)
    rank = spearmanr(-level, gain).statistic
    return graded("rank correlation", (rank, np.nan, np.nan), no=0, yes=0.68)


def claim_22():
    """22: FreshPER "transfers to multimodal settings" (4.3): it beats on-policy training from
    images.

    Corrected over nine tasks."""
    return alike, family(TASKS, "freshper - on_policy", shown=["frozenlake_vlm", "geoqa"])


# -- our questions


def claim_a():
    """a: is it more than updates? Minus `as many updates`.

    By the first rule no on CliffWalking."""
    return count, family(TASKS, "freshper - epochs")


def claim_a_rate():
    """a, rate: the same at twice its rate.

    It was tuned by two seeds. Added on 2026-11-28."""
    return count, family(PAIR, "freshper - epochs @ 0.5")


def claim_a_updates():
    """a, updates: minus `on-policy` after equally many updates, at constant rates.

    The only pair in which no rate falls. Added on 2026-11-28."""
    formula = "freshper +constant - on_policy +constant"
    return count, family(TEXT, formula, column="after 360 updates")


def claim_b():
    """b: does FreshPER beat `uniform up to an age`?"""
    return count, family(TASKS, "freshper - uniform")


def claim_c():
    """c: is it freshness? Minus shuffled ages."""
    return count, family(PAIR, "freshper - freshper +shuffled")


def claim_c_none():
    """c, none: do shuffled ages equal `no decay` at the same rate?"""
    return count, family(PAIR, "freshper +shuffled - no_decay @ 0.5", by=judge_equal)


def claim_d():
    """d: does drift itself beat age? The oracle minus FreshPER.

    A task at a time."""
    text = family(TEXT, "freshper --capacity 1280 +oracle - freshper")
    return count, text, family(["nq_search"], "freshper --capacity 2560 +oracle - freshper")


def claim_e():
    """e: is tau 15, where automatic tau stood, equal to tau 20?"""
    return count, family(PAIR, "freshper --tau auto - freshper", by=judge_equal)


def claim_f():
    """f: more replay: 2 updates minus 1; 4 minus 2."""
    arms = ("freshper - freshper --replay_ratio 1", "freshper --replay_ratio 4 - freshper")
    return count, family(TEXT, *arms)


def claim_g():
    """g: epsilon 1e-6: IS weights relative to the batch's maximum minus the buffer's."""
    return count, family(TEXT, "per --epsilon 1e-6 - per --epsilon 1e-6 +buffer_maximum")


def claim_h():
    """h, 0.5: episodes until a success of 0.5: `on-policy` and `as many updates`, over FreshPER."""
    return count, times(0.5, reached(0.5), *EPISODES)


def claim_h_middle():
    """h, 0.6: the same until 0.6.

    Not on NQ Search, where 0.6 lies on a plateau (2026-11-26)."""
    tasks = [task for task in reached(0.6) if task != "nq_search"]
    return count, times(0.6, tasks, *EPISODES)


def claim_h_high():
    """h, 0.9: the same until 0.9."""
    return count, times(0.9, reached(0.9), *EPISODES)


def smollm2(**rule):
    """Return FreshPER minus its four rivals, judged together."""
    formulas = [f"freshper - {rival}" for rival in SMOLLM2_RIVALS]
    return family(SMOLLM2, *formulas, seeds=CONFIRMED, **rule)


def claim_i():
    """i: SmolLM2 on GSM8K (stand-in), seeds 601 to 605: mean over the curve, FreshPER minus rivals.

    Rule 1 of the third campaign, written before these runs. The runs of 2026-11-23, by which it was
    found: minus on-policy training 0.098 [0.051, 0.145], as many updates -0.008 [-0.052, 0.036]."""
    return count, smollm2(column="curve")


def claim_i_equal():
    """i, equal: the same: the interval lies within 0.03 of 0."""
    return count, smollm2(column="curve", by=judge_equal)


def claim_i_half():
    """i, 0.5: the same: episodes until a success of 0.5, rival / FreshPER."""
    ratios = [f"{rival} - freshper" for rival in SMOLLM2_RIVALS]
    return count, times(0.5, SMOLLM2, *ratios, seeds=CONFIRMED)


def claim_i_final():
    """i, final: the same: final success."""
    return count, smollm2()


def claim_tau():
    """tau: success has a maximum: the best tau is above tau 1.25 and 450.

    A task at a time."""
    text = family(TEXT, "freshper - freshper --tau 1.25", "freshper - freshper --tau 450")
    arms = ("freshper --tau 5 - freshper --tau 1.25", "freshper --tau 5 - freshper --tau 450")
    return count, text, family(["nq_search"], *arms)


CLAIMS = [claim for name, claim in globals().items() if name.startswith("claim_")]
