"""Questions from files: every ending gives the same rows, splits share none, bad input is named,
and rows that do not fit the model are refused."""

import json
import re
from dataclasses import replace

import datasets
import pytest
from conftest import write_rows

from envs import ENVS
from envs.base import UserError
from envs.data import as_text, asked, load_rows
from envs.question_answering import Question
from freshper.backends import check_rows
from freshper.config import Config

ROWS = []
for k in range(40):
    ROWS.append({"question": f"What is {k} + 1?", "answer": f"#### {k + 1}", "note": None})


def from_row(row):
    return Question(*(as_text(row.get(name), name) for name in ("question", "answer")))


def pairs(rows):
    return sorted(row[:2] for row in rows)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_single_file_is_divided_without_a_shared_row(tmp_path, ending):
    """A lone file, in a folder beside a file that is no split."""
    some_twice = ROWS + ROWS[:15]
    (tmp_path / "README.md").write_text("# Rows")
    write_rows(tmp_path / f"train.{ending}", some_twice)
    rows = load_rows(str(tmp_path), from_row)
    alone = load_rows(str(tmp_path / f"train.{ending}"), from_row)
    assert pairs(alone["held_out"]) == pairs(rows["held_out"])
    train = pairs(rows["train"])
    held_out = pairs(rows["held_out"])
    assert sorted(train + held_out) == pairs(map(from_row, some_twice))
    assert not {*train} & {*held_out}
    assert len({*held_out}) == 4


def test_csv(tmp_path):
    """As spreadsheets write it. A text that looks like a number or a date stays a text."""
    lines = "".join(f'"{k}, ""so""?",1990-01-0{k}\r\n' for k in range(9))
    (tmp_path / "a.csv").write_text(f"\ufeffQuestion,Answer\r\n{lines}", encoding="utf-8")
    rows = load_rows(str(tmp_path / "a.csv"), from_row)
    expected = [(f'{k}, "so"?', f"1990-01-0{k}") for k in range(9)]
    assert pairs(rows["train"] + rows["held_out"]) == expected


def test_of_two_columns_that_differ_in_case_the_exact_name_wins(tmp_path):
    rows = [{"Answer": "-", "question": f"{k}", "answer": k, "Question": "-"} for k in range(9)]
    splits = load_rows(write_rows(tmp_path / "a.jsonl", rows), from_row)
    assert pairs(splits["train"] + splits["held_out"]) == [(f"{k}", f"{k}") for k in range(9)]


def test_what_asks_the_same_stays_on_one_side(tmp_path):
    """Questions about one image, and one question with two answers and other spaces."""
    images = [[f"{k}?", "1", "", k % 20 + 1] for k in range(80)]
    texts = [[f"{k % 43}?{' ' * (k // 43)}", f"{k}"] for k in range(86)]
    for name, rows, n in (("images", images, 2), ("texts", texts, 5)):
        source = write_rows(tmp_path / f"{name}.jsonl", [{"question": row} for row in rows])
        splits = load_rows(source, lambda row: Question(*row["question"]))
        sides = {name: {asked(row) for row in part} for name, part in splits.items()}
        assert not sides["train"] & sides["held_out"]
        assert len(sides["held_out"]) == n


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_a_folder_has_its_own_splits_and_parts_are_joined(tmp_path, held_out):
    """Its name is no pattern, which another folder would match. A question of both splits is not
    trained on."""
    write_rows(tmp_path / "x1/train.jsonl", ROWS[30:])
    folder = tmp_path / "x[1]"
    for name in ("train.jsonl.bak", "trainer_state.jsonl", "train_old.jsonl"):
        write_rows(folder / name, ROWS)
    for k in range(2):
        write_rows(folder / f"train-0000{k}-of-00002.parquet", ROWS[10 * k : 10 * k + 10])
    if held_out == "validation":
        write_rows(folder / "test.parquet", [{"question": "not used"}])
    write_rows(folder / f"{held_out}.parquet", ROWS[15:30])
    rows = load_rows(str(folder), from_row)
    expected = [(row["question"], row["answer"]) for row in ROWS]
    assert pairs(rows["train"]) == sorted(expected[:15])
    assert pairs(rows["held_out"]) == sorted(expected[15:30])


FEW = "too few different rows to hold some out"
BAD = {  # file: content, a part of the sentence
    "empty.jsonl": ("", FEW),
    "text.parquet": ("hello", "cannot be read: ArrowInvalid"),
    "deep.jsonl": ("[" * 100_000, "cannot be read: RecursionError"),
    "null.jsonl": ("null\n" + json.dumps(ROWS[0]), "row 1 is None, but each value must"),
    "blank.jsonl": ([*ROWS[:3], ROWS[0] | {"question": " \n"}], "row 4: the field question is"),
    "odd/test.jsonl": (
        [{"question": "1"}],
        "held_out row 1: the field answer is None",
    ),
    "chat.jsonl": ([{"question": [{"role": "user"}]}], "question is [{'role': 'user'}], but"),
    "one.jsonl": (ROWS[:1] * 5, FEW),
    "commas.csv": (
        "question,answer\n" + "Tom has 3, gets 3. How many?,6\n" * 20,
        "row 1 is {",
    ),
    "twice.csv": ("question,answer,answer\n1,2,3", "two columns have the same name"),
    "rows.xlsx": ("PK", "a file must be .jsonl, .csv or .parquet"),
    "nowhere.jsonl": (None, "there is no such file or folder of files"),
    "deeper/sub/train.jsonl": (ROWS, FEW),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_sentence(name, tmp_path):
    content, sentence = BAD[name]
    write_rows(tmp_path / "odd/train.jsonl", ROWS)
    if isinstance(content, list):
        write_rows(tmp_path / name, content)
    elif content is not None:
        (tmp_path / name).write_text(content)
    source = str(tmp_path / name.partition("/")[0])
    with pytest.raises(UserError, match=rf"^.*{re.escape(source)}.*{re.escape(sentence)}.*$"):
        load_rows(source, from_row)


def test_a_hub_id_may_name_a_configuration(monkeypatch):
    asked = []
    hub = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: asked.append(words) or hub)
    load_rows("owner/own:main", from_row)
    assert asked == [("owner/own", "main")]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_longest_row_must_fit_the_model(split, tmp_path, text_policy):
    """The policy's own tokens of that prompt, and a reply, are the least."""
    for name in ("train", "test"):
        rows = [{"question": f"Number {k}, {name}?", "answer": f"#### {k}"} for k in range(12)]
        if name == split:
            rows[7]["question"] += " Well?" * 300
        write_rows(tmp_path / f"{name}.parquet", rows)
    env = ENVS["gsm8k"](style="full", data=str(tmp_path))
    (longest,) = (x for rows in env.rows.values() for x in rows if len(x.text) > 999)
    env.reset(seed=0)
    env.question = longest
    least = len(text_policy.user_turn(env.observe())) + 4

    config = Config(env="gsm8k", data="d", max_tokens=least, max_new_tokens=4)
    check_rows(text_policy, env, config)
    with pytest.raises(UserError, match=f"is {least - 1}, but must be at least {least} for the"):
        check_rows(text_policy, env, replace(config, max_tokens=least - 1))
