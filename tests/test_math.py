"""GSM8K and AIME: an exact scorer that cannot be gamed, generated problems that an oracle solves, data from files."""

import json
import math
import re
import time
from fractions import Fraction

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from envs import ENVS
from envs.answers import final_answer, read_number
from envs.attempts import RIGHT, WRONG
from envs.base import EVAL_SEEDS, FORMAT_PENALTY
from freshper.config import Config, parse_args
from freshper.tiny import build_policy, build_tokenizer

TASKS = ["gsm8k", "aime"]


def tagged(text):
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("style", ["full", "terse"])
def test_gymnasium_accepts_it(name, style, monkeypatch):
    env, rng = ENVS[name](style=style), np.random.default_rng(0)
    monkeypatch.setattr(env.action_space, "sample", lambda *a, **k: env.random_reply(rng))
    check_env(env, skip_render_check=True)


# -- the scorer ------------------------------------------------------------------------------------------------

ACCEPTED = [
    ("72", "72"), ("  72 ", "72"), ("72.", "72"), ("072", "72"), ("+72", "72"), ("72.0", "72"), ("-5", "-5"),
    ("−5", "-5"), ("1,250", "1250"), ("$1,250.50", "1250.5"), ("\\$18", "18"), ("$18$", "18"), ("€18", "18"),
    ("18 dollars", "18"), ("18 dollars per hour", "18"), ("5 km/h", "5"), ("12cm", "12"), ("12 cm^2", "12"),
    ("12 \\text{ cm}^{2}", "12"), ("145°", "145"), ("60^\\circ", "60"), ("60%", "60"), ("60\\%", "60"),
    ("3/4", "0.75"), ("3/4 cup", "0.75"), ("6/8", "3/4"), ("\\frac{3}{4}", "3/4"), ("-\\dfrac{1}{2}", "-0.5"),
    (".5", "1/2"), ("0.1", "1/10"), ("1{,}000", "1000"), ("-$5", "-5"), ("\\boxed{72}", "72"),
]  # fmt: skip
REJECTED = [
    "", " ", ".", "e", "E", "-", "/", "%", "$", "nan", "NaN", "inf", "-inf", "Infinity", "1e999", "7e1", "0x48", "1_0",
    "72 or 73", "71, 72, 73", "71 72", "72;73", "[72]", "6*7", "6 x 7", "36+36", "2^6",
    "144/2", "72/1", "0/9", "1.5/2", "144/2/1", "72/0", "72/1/1",
    "8!", "sqrt(5184)", "\\sqrt{5184}", "seventy-two", "7 2", "1,25", "12,50", "1,2500", "1.2.3", "72 hundred", "72k",
    "72 dozen", "72 and a half", "72 million", "1 1/2", "not 72", "~72x73", "<b>72</b>", "٧٢", "７２", "7２", "²", "⑦",
    "72²x", "72\x00", "\ud800", "9" * 61, "72" + " " * 61 + "x", "x = 72", "72 = 72", "0 apples 72",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), ACCEPTED)
def test_numbers_are_read_exactly(text, value):
    for reply in (tagged(text), f"I think {tagged(text)} is it", f"<think>9 {tagged('8')}</think>{tagged(text)}"):
        assert read_number(final_answer(reply, last_number=False)) == Fraction(value)
    if "boxed" not in text:
        boxed = f"so it is $\\boxed{{{text}}}$"
        assert read_number(final_answer(boxed, last_number=False)) == Fraction(value)


@pytest.mark.parametrize("text", REJECTED)
def test_what_is_not_one_number_is_no_answer(text):
    for reply in (tagged(text), f"\\boxed{{{text}}}"):
        answer = final_answer(reply, last_number=True)
        assert answer is None or read_number(answer) is None


PLACES = {  # full style, gold 72
    "So it is 72": True, "36 + 36 = 72 apples.": True,
    "The answer is **72**.": True, "First 3.\nThen $72.\n\nDone": True,
    "72": True, "<think>70, 71</think>\nThe answer is 72": True, "\\boxed{70}, no": False,
    "70 71 72": False, "70, 71, 72": False, "70,71,72": False, "36*2": False, "6*12 = 6*12": False, "72 or 73": False,
    "<think>72</think>": False, "<think>72": False, "72</think>": False, "<think>72</think><think>72</think>": False,
    "<think><answer>72</answer></think>": False, "<answer>72</answer><answer>72</answer>": False,
    "<answer>72</answer><answer>73</answer>": False, "<answer><answer>72</answer></answer>": False, "<answer>72": False,
    "72</answer>": False, "</answer>72<answer>": False, "\\boxed{72}\\boxed{73}": False, "\\boxed{72": False,
    "\\boxed 72": False, "\\boxed{72}{": True, "\\boxed{\\boxed{72}}": False, "<answer>\\boxed{72}</answer>": True,
    "<answer>70</answer> 72": False, "<answer>70</answer> \\boxed{72}": False, "72, and then nothing\n1": False,
    "٧٢": False, "７２": False, "7２": False, "72e": False, "1e999": False, "": False, "72 = x": False,
}  # fmt: skip


@pytest.mark.parametrize("reply", PLACES)
def test_where_an_answer_may_stand(reply, tmp_path):
    rows = [{"question": f"q{k}", "answer": "I think. #### 72"} for k in range(3)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    env = ENVS["gsm8k"](style="full", data=str(tmp_path / "d.json"))
    env.reset(seed=0)
    assert (env.step(reply)[1] == 1.0) is PLACES[reply]
    without = ENVS["gsm8k"](data=str(tmp_path / "d.json"))  # terse: no last number
    without.reset(seed=0)
    assert (without.step(reply)[1] == 1.0) is (PLACES[reply] and ("answer>" in reply or "boxed" in reply))


@pytest.mark.parametrize("text", ["1000", "-1", "72.5", "72%x", "1/2", "0.5"])
def test_aime_answers_are_integers_from_000_to_999(text):
    env = ENVS["aime"]()
    assert env.read(text) is None
    assert env.read("007") == env.read("7") == 7
    assert env.read("999") == 999
    assert env.read("000") == 0


HUGE = ["9" * 100_000, "1," * 50_000, "<answer>" * 12_000, "<think>" * 14_000, "\\boxed{" * 14_000, "{" * 100_000]
HUGE += [tagged("9" * 99_980), tagged(" " * 99_980), tagged("1 a" * 33_000), "1 " * 50_000, "1\n2 3" * 20_000]
HUGE += ["=" * 100_000, tagged("1/" * 40_000), "\\boxed{" + "{}" * 49_000 + "}", "٧" * 100_000, "<answer>1" * 11_000]


@pytest.mark.parametrize("name", [*TASKS, "geoqa"])
@pytest.mark.parametrize("style", ["full", "terse"])
def test_huge_replies_are_quick_and_earn_nothing(name, style):
    env = ENVS[name](style=style)
    for reply in HUGE:
        env.reset(seed=0)
        began = time.perf_counter()
        observation, reward, *_, info = env.step(reply)
        assert time.perf_counter() - began < 0.5
        assert (reward, info["valid"]) == (-FORMAT_PENALTY, False)
        assert env.observation_space.contains(observation)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80) | st.text("0123456789.,/$%-+= eE\\{}", max_size=20))
def test_arbitrary_text_is_read_as_nothing_or_as_its_own_digits(text):
    """Whatever is accepted holds one number, written out: its digits and nothing else's."""
    value = read_number(text)
    if value is not None:
        written = re.findall("[0-9]+", text)
        digits = "".join(written)
        assert digits.isascii()
        if "/" not in text and "frac" not in text:
            assert int(digits) in (abs(value) * 10**k for k in range(len(digits) + 1))
    for name in TASKS:
        env = ENVS[name](style="full")
        env.reset(seed=1)
        for reply in (text, tagged(text), f"<think>{text}", text * 50):
            observation, reward, *_, info = env.step(reply)
            assert reward in (-FORMAT_PENALTY, 0.0, 1.0)
            assert info["valid"] or reward == -FORMAT_PENALTY
            assert env.observation_space.contains(observation)


# -- attempts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TASKS, "geoqa"])
@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("right_at", [1, 2, 3, None])
def test_three_attempts_and_reward_whenever_it_is_right(name, style, right_at):
    env = ENVS[name](style=style)
    env.reset(seed=5)
    wrong = next(a for a in env.answers if env.read(a) != env.read(env.question.gold))
    for turn in (1, 2, 3):
        reply = env.optimal_reply() if turn == right_at else tagged(wrong)
        observation, reward, terminated, truncated, info = env.step(reply)
        assert (reward, terminated, info["success"]) == ((1.0, True, True) if turn == right_at else (0.0, False, False))
        assert info["metrics"] == {"first_success": float(right_at == turn == 1)}
        assert ("Wrong" in observation.text) == (turn != right_at)
        if terminated:
            return
        assert truncated == (turn == 3)


@pytest.mark.parametrize("name", [*TASKS, "geoqa"])
def test_an_unreadable_reply_costs_an_attempt_and_leaves_the_question(name):
    env = ENVS[name]()
    before = env.reset(seed=5)[0]
    for turn in (1, 2, 3):
        after, reward, terminated, truncated, info = env.step("I do not know")
        assert (reward, terminated, truncated, info["valid"]) == (-FORMAT_PENALTY, False, turn == 3, False)
        assert after.text == before.text
        assert all((a == b).all() for a, b in zip(after.images, before.images, strict=True))
    env = ENVS[name](style="full")
    env.reset(seed=5)
    env.step(env.optimal_reply().replace("answer", "search"))
    assert env.step(env.optimal_reply())[4]["metrics"] == {"first_success": 0.0}


@pytest.mark.parametrize("name", [*TASKS, "geoqa"])
def test_exact_baselines_are_what_players_get(name):
    env, rng, n = ENVS[name](), np.random.default_rng(0), 2000
    p = 1 - (1 - 1 / len(env.generated_answers)) ** 3
    wins = 0
    for seed in range(n):
        assert env.baselines(seed) == {"random": pytest.approx(p), "optimal": 1.0}
        env.reset(seed=seed)
        wins += any(env.step(env.random_reply(rng))[4]["success"] for _ in range(3))
    assert abs(wins / n - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert 0 < p < 0.5


# -- generated problems ----------------------------------------------------------------------------------------


def solve_gsm8k(text):
    """An oracle that only reads: each clause changes the number of things."""
    clauses, question = text.split(". How many")
    _, has, first, *rest = clauses.split(" ")
    assert has == "has"
    if rest[:2] == ["groups", "of"]:
        assert question == f" {rest[3]}?"
        return int(first) * int(rest[2])
    assert question == f" {rest[0]}?"
    total = int(first)
    for verb, number in re.findall(r" and (gets|loses) (\d)", clauses):
        total += int(number) if verb == "gets" else -int(number)
    return total


def solve_aime(text):
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if "remainder" in text:
        while numbers[0] >= numbers[1]:
            numbers[0] -= numbers[1]
        return numbers[0]
    if "divisor of" in text:
        return max(d for d in range(1, 100) if all(n % d == 0 for n in numbers))
    assert "how many divisors" in text
    return len([d for d in range(1, 100) if numbers[0] % d == 0])


@pytest.mark.parametrize(("name", "solve"), [("gsm8k", solve_gsm8k), ("aime", solve_aime)])
def test_generated_problems_have_the_answer_that_an_oracle_finds(name, solve):
    env, full = ENVS[name](), ENVS[name](style="full")
    counts = dict.fromkeys(env.generated_answers, 0)
    texts = set()
    for seed in range(1500):
        text = env.reset(seed=seed)[0].text
        assert int(env.question.gold) == solve(text)
        assert text in full.reset(seed=seed)[0].text  # the same question, with rules around it
        assert re.findall(r"\d+", env.caption()) == re.findall(r"\d+", text)  # what is told is what is asked
        counts[env.question.gold] += 1
        texts.add(text)
        assert ENVS[name]().reset(seed=seed)[0].text == text or seed > 50
    share = 1 / len(counts)
    assert all(abs(c / 1500 - share) < 4 * math.sqrt(share * (1 - share) / 1500) for c in counts.values())
    assert len(texts) > 200


@pytest.mark.parametrize("name", [*TASKS, "geoqa"])
def test_the_tiny_tokenizer_has_a_token_for_everything_said(name):
    env = ENVS[name]()
    tokenizer = build_tokenizer(env.words)
    known = {*env.words, "<answer>", "</answer>", ".", "?", "1", "2", "3", "4", "5"}  # single bytes are tokens anyway
    for seed in range(300):
        text = env.reset(seed=seed)[0].text
        for said in (text, env.caption(), WRONG + text, RIGHT + text):
            ids = tokenizer.encode(said, add_special_tokens=False)
            assert {tokenizer.decode([i]) for i in ids} <= known
        reply = tokenizer.encode(env.optimal_reply(), add_special_tokens=False)
        assert len(reply) == 3
        assert min(reply) >= 256  # bytes are never sampled


def test_full_prompts_say_what_a_pretrained_model_needs():
    for name, words in (("gsm8k", ("3 attempts", "<answer>")), ("aime", ("3 attempts", "000 to 999", "<answer>"))):
        env = ENVS[name](style="full", max_turns=0)
        first = env.reset(seed=0)[0].text
        assert all(word in first for word in words)
        later = env.step("nothing")[0].text
        assert "No answer could be read" in later
        assert "attempts left: 2" in later
        wrong = env.step(tagged("999"))[0].text
        assert "Wrong" in wrong
        assert "attempts left: 1" in wrong
        assert env.step(tagged("999"))[0].text == "Wrong."
        env.reset(seed=0)
        assert env.step(env.optimal_reply())[0].text == "Right."


# -- data ------------------------------------------------------------------------------------------------------

GSM = [{"question": f"What is {k} + 1000?", "answer": f"We add.\n#### {k + 1000:,}"} for k in range(50)]
AIME_ROWS = [{"Problem": f"Find {k} + 1.", "Answer": k + 1} for k in range(50)]


def write(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", GSM), ("aime", AIME_ROWS)])
def test_questions_from_a_file(name, rows, tmp_path):
    source = write(tmp_path, rows)
    envs = [ENVS[name](style="full", data=source) for _ in range(256)]
    env = envs[0]

    def seen(start):
        found = {}
        for seed in range(start, start + 60):
            text = env.reset(seed=seed)[0].text
            found[env.question.text] = env.question.gold
            assert env.question.text in text
            assert env.step(env.optimal_reply())[1] == 1.0
        return found

    training, validation = seen(42_000_000), seen(EVAL_SEEDS)
    assert (len(training), len(validation)) == (45, 5)
    assert not set(training) & set(validation)
    for question, gold in (training | validation).items():
        a, b = map(int, re.findall(r"\d+", question))
        assert int(gold.replace(",", "")) == a + b
    for other in envs[1:]:
        other.reset(seed=42_000_000)
    assert len({id(e.question) for e in envs[1:]}) == 1  # one copy for all
    p = 1 / 45  # the random player knows the answers of the training split, as far as they go
    assert env.baselines(42_000_000)["random"] == pytest.approx(1 - (1 - p) ** 3)
    assert env.baselines(EVAL_SEEDS)["random"] == 0.0


BAD = {
    ("gsm8k", '{"question": "q", "answer": "72"}'): "row 3: the field answer must end in #### and a number",
    ("gsm8k", '{"question": "q", "answer": "#### many"}'): "row 3: the field answer must end in #### and a number",
    ("gsm8k", '{"question": 5, "answer": "#### 72"}'): "row 3: the question must be text",
    ("gsm8k", json.dumps({"question": "q" * 10_001, "answer": "#### 72"})): "text of at most 10000 characters",
    (
        "aime",
        '{"problem": "p", "answer": "1000"}',
    ): "row 3: the field answer is '1000', but must be an integer from 000",
    ("aime", '{"problem": "p", "answer": 0.5}'): "row 3: the field answer is '0.5', but must be an integer from 000",
    ("aime", '{"problem": "p", "solution": "5"}'): "row 3: the field answer is missing among problem, solution",
    ("aime", '{"problem": "p", "answer": '): "row 3 is not JSON",
}


@pytest.mark.parametrize(("name", "line"), BAD)
def test_bad_data_ends_train_with_one_sentence(name, line, tmp_path, monkeypatch, capsys):
    rows = {"gsm8k": GSM, "aime": AIME_ROWS}[name][:2]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + line + "\n")
    monkeypatch.chdir(tmp_path)
    assert train.main(["--env", name, "--data", str(path)]) == 2
    sentence = capsys.readouterr().err.strip()
    assert BAD[name, line] in sentence
    assert str(path) in sentence
    assert len(sentence.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]
    assert train.main(["--env", name, "--data", "nowhere.jsonl"]) == 2
    assert "--data is nowhere.jsonl, but there is no such file" in capsys.readouterr().err


def test_train_learns_from_a_file(tmp_path):
    """The real train.py on questions from a file, to the end; the titles name the file."""
    source = write(tmp_path, GSM)
    build_policy(ENVS["gsm8k"]()).save(str(tmp_path / "model"))
    flags = ["--iterations", "2", "--rollout_batch_size", "4", "--batch_size", "4", "--eval_episodes", "4"]
    flags += ["--data", source, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    assert train.main(["--env", "gsm8k", *flags, "--format_penalty", "0.15"]) == 0
    page = (tmp_path / "run" / "episodes.html").read_text()
    assert f"gsm8k ({source})" in page
    assert len(re.findall(r"What is \d+ \+ 1000\?", page)) == 4 * 3
    assert "eval_first_success" in (tmp_path / "run" / "metrics.csv").read_text()


# -- settings --------------------------------------------------------------------------------------------------


def test_presets_hold_the_paper_s_values():
    """Tables env_details, training_config; section 4.1 (tau of AIME)."""
    common = {"max_tokens": 4096, "iterations": 400, "advantage_clip": 0.2, "kl_loss_coef": 0.0, "entropy_coef": 0.0}
    expected = {
        "gsm8k": {"model": "Qwen/Qwen2.5-0.5B-Instruct", "tau": 500.0, "micro_batch_size": 4},
        "aime": {"model": "Qwen/Qwen2.5-7B-Instruct", "tau": 1000.0, "micro_batch_size": 2},
    }
    for name, values in expected.items():
        config = parse_args(["--preset", "paper", "--env", name])
        for key, value in (common | values).items():
            assert getattr(config, key) == value, (name, key)
        assert config.data
        assert ENVS[name].max_turns == 3


def test_titles_say_whose_questions():
    assert Config(env="gsm8k").task() == "gsm8k (generated questions)"
    assert Config(env="aime", data="AI-MO/aimo-validation-aime").task() == "aime (AI-MO/aimo-validation-aime)"
    assert Config(env="frozenlake").task() == "frozenlake (not slippery)"
