"""Questions from files: every ending gives the same rows, splits share none, and bad input is named."""

import json
import re
from pathlib import Path

import pytest
from conftest import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import EVAL_SEEDS
from envs.data import load_rows, row_for

FIELDS = ("question", "answer")
ROWS = [{"question": f"What is {k} + 1?", "answer": f"#### {k + 1}", "note": None} for k in range(40)]
ENDINGS = pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])


def pairs(rows):
    return sorted((row["question"], row["answer"]) for row in rows)


@ENDINGS
@pytest.mark.parametrize("folder", [".", "json"])  # a relative path; the name of one of `datasets`' own builders
def test_a_single_file_is_divided_without_a_shared_row(tmp_path, monkeypatch, ending, folder):
    monkeypatch.chdir(tmp_path)
    load_rows.cache_clear()
    rows = load_rows(write_rows(Path(folder) / f"all.{ending}", ROWS + ROWS[:15]), FIELDS, dict)  # some rows twice
    train, held_out = map(pairs, rows.values())
    assert sorted(train + held_out) == pairs(ROWS + ROWS[:15])
    assert not {*train} & {*held_out}
    assert len({*held_out}) == 4
    assert set(rows["train"][0]) == {*FIELDS}


@ENDINGS
@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_a_folder_has_its_own_splits_and_parts_are_joined(tmp_path, ending, held_out):
    for k in range(2):
        write_rows(tmp_path / f"train-0000{k}-of-00002.{ending}", ROWS[10 * k : 10 * k + 10])
    write_rows(tmp_path / f"{held_out}.{ending}", ROWS[20:30])
    if held_out == "validation":
        write_rows(tmp_path / f"test.{ending}", ROWS[30:])  # left alone
    found = load_rows(str(tmp_path), FIELDS, dict)
    assert [pairs(rows) for rows in found.values()] == [pairs(ROWS[:20]), pairs(ROWS[20:30])]


def test_case_of_names_zero_and_line_separators(tmp_path):
    source = write_rows(tmp_path / "aime.jsonl", [{"Problem": f"a\u2028{k}", "Answer": k} for k in range(3)])
    train, held_out = load_rows(source, ("problem", "answer"), lambda row: (row["problem"], row["answer"])).values()
    assert (sorted(train), held_out) == ([("a\u20281", 1), ("a\u20282", 2)], [("a\u20280", 0)])  # zero is not "empty"


BAD = {  # file: (content, a part of the sentence)
    "empty.jsonl": ("", "cannot read it"),
    "notes.txt": ("hello", "row 1: the field question is missing or empty, the row has text"),
    "line.jsonl": (json.dumps(ROWS[0]) + "\n{broken\n", "row 1"),
    "text.parquet": ("hello", "Parquet"),
    "blank.jsonl": ([*ROWS[:3], {"question": " \n", "answer": "1"}], "row 4: the field question is missing or empty"),
    "null.parquet": ([*ROWS[:3], {"question": "1", "answer": None}], "row 4: the field answer is missing or empty"),
    "missing.json": ([{"question": "1", "solution": "1"}], "field answer is missing or empty, the row has question"),
    "one.jsonl": (ROWS[:1] * 5, "too few different rows to train and to hold out: 5 in train"),
    "nowhere.jsonl": (None, "there is no such file or folder"),
    "mixed/train.json": (ROWS, "same data file format"),
    "halves/validation.jsonl": (ROWS[:5], "to train and to hold out: 5 in validation, 5 in test"),
    "odd/train.jsonl": (ROWS[:5], "test row 1: the field answer is missing or empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_sentence(name, tmp_path, capfd):
    content, sentence = BAD[name]
    if isinstance(content, list):
        write_rows(tmp_path / name, content)
    elif content is not None:
        (tmp_path / name).write_text(content)
    write_rows(tmp_path / "mixed" / "test.parquet", ROWS[:5])
    write_rows(tmp_path / "halves" / "test.jsonl", ROWS[:5])
    write_rows(tmp_path / "odd" / "test.jsonl", [{"question": "1"}])
    source = str(tmp_path / name.partition("/")[0])
    with pytest.raises(ValueError, match=rf"^.*{re.escape(source)}.*{re.escape(sentence)}.*$"):
        load_rows(source, FIELDS, dict)
    assert capfd.readouterr().err == ""  # `datasets` does not tell it a second time


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"--data is owner/name:main, but `datasets` cannot read it.*: .+"):
        load_rows("owner/name:main", FIELDS, dict)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 300), start=st.integers(0, 10**8))
def test_successive_seeds_go_through_all_rows_of_their_split(n, start):
    rows = {split: [f"{split} {k}" for k in range(n)] for split in ("train", "held_out")}
    for split, first in (("train", start), ("held_out", EVAL_SEEDS + start)):
        assert sorted(row_for(rows, first + k) for k in range(n)) == sorted(rows[split])
