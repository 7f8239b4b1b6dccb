"""Questions from files: every ending gives the same rows, splits share none, bad input is named,
and rows that do not fit the model are left out."""

import gzip
import io
import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
from conftest import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import train
from envs.base import EVAL_SEEDS
from envs.data import divide, field_of, load_rows, text_of
from envs.gsm8k import GSM8K
from envs.question_answering import Question

ROWS = []
for k in range(40):
    ROWS.append({"question": f"What is {k} + 1?", "answer": f"#### {k + 1}", "note": None})
ENDINGS = pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])


def from_row(row):
    return {name: text_of(row, name) for name in ("question", "answer")}


def pairs(rows):
    return sorted((row["question"], row["answer"]) for row in rows)


@ENDINGS
@pytest.mark.parametrize("folder", [".", "json"])  # `datasets` has a builder named json
def test_a_single_file_is_divided_without_a_shared_row(tmp_path, monkeypatch, ending, folder):
    monkeypatch.chdir(tmp_path)
    some_twice = ROWS + ROWS[:15]
    rows = load_rows(write_rows(Path(folder) / f"all.{ending}", some_twice), from_row)
    train = pairs(rows["train"])
    held_out = pairs(rows["held_out"])
    assert sorted(train + held_out) == pairs(some_twice)
    assert not {*train} & {*held_out}
    assert len({*held_out}) == 4


def test_questions_about_one_image_stay_on_one_side():
    rows = [Question(f"{k}?", "1", image=bytes([k % 20])) for k in range(80)]
    sides = {name: {row.image for row in part} for name, part in divide(rows).items()}
    assert not sides["train"] & sides["held_out"]
    assert len(sides["held_out"]) == 2


def test_a_question_with_two_answers_stays_on_one_side():
    rows = [Question(f"{k % 43}? {'' if k < 43 else chr(10)}", f"{k}") for k in range(86)]
    sides = {name: {row.text.strip() for row in part} for name, part in divide(rows).items()}
    assert not sides["train"] & sides["held_out"]
    assert len(sides["held_out"]) == 5


@ENDINGS
@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_a_folder_has_its_own_splits_and_parts_are_joined(tmp_path, ending, held_out):
    for k in range(2):
        write_rows(tmp_path / f"train-0000{k}-of-00002.{ending}", ROWS[10 * k : 10 * k + 10])
    write_rows(tmp_path / f"{held_out}.{ending}", ROWS[20:30])
    if held_out == "validation":
        write_rows(tmp_path / f"test.{ending}", ROWS[30:])  # not used
    rows = load_rows(str(tmp_path), from_row)
    assert pairs(rows["train"]) == pairs(ROWS[:20])
    assert pairs(rows["held_out"]) == pairs(ROWS[20:30])


def test_a_question_of_both_splits_is_not_trained_on(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS[:20])
    write_rows(tmp_path / "test.jsonl", ROWS[15:30])
    rows = load_rows(str(tmp_path), from_row)
    assert pairs(rows["train"]) == pairs(ROWS[:15])
    assert pairs(rows["held_out"]) == pairs(ROWS[15:30])


def test_a_column_of_several_types_keeps_its_values(tmp_path):
    answers = (["a", "é"], "ö"), (["a", {"b": 1}], [2])
    for k, several in enumerate(answers):
        rows = [{"question": f"{k}?", "answer": several[k % 2]} for k in range(20)]
        read = load_rows(write_rows(tmp_path / f"{k}.jsonl", rows), dict)["train"]
        assert {str(row["answer"]) for row in read} == {str(answer) for answer in several}


def test_names_are_no_patterns(tmp_path):
    """Files and folders side by side, whose names match each other as patterns of a shell."""
    names = ("x[1]", "x1", "x*", "x?", "[!x]1", "{x,y}1", "y1")
    for name in names:
        for split, n in (("train", 20), ("test", 5)):
            rows = [{"question": f"{name} {k}", "answer": split} for k in range(n)]
            write_rows(tmp_path / name / f"{split}.jsonl", rows)
            write_rows(tmp_path / name / f"{split}.{name}.json", rows[:1])
        write_rows(tmp_path / f"{name}.jsonl", rows)
    for name in names:
        shown = {}
        for source in (tmp_path / f"{name}.jsonl", tmp_path / name / "test.jsonl"):
            shown[source] = load_rows(str(source), from_row)
            assert [*map(len, shown[source].values())] == [4, 1]
        shown[name] = load_rows(str(tmp_path / name), from_row)
        assert [*map(len, shown[name].values())] == [21, 6]
        texts = {
            row["question"] for rows in shown.values() for part in rows.values() for row in part
        }
        assert texts == {f"{name} {k}" for k in range(20)}


def test_rows_are_read_again_when_a_file_or_the_working_directory_changes(tmp_path, monkeypatch):
    sources = {"a.jsonl": "a.jsonl", "folder": "folder/train.jsonl"}
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        for n in (20, 30):
            for source, file in sources.items():
                rows = [row | {"question": place} for row in ROWS[:n]]
                write_rows(Path(file), rows)
                read = load_rows(source, from_row)
                assert sum(map(len, read.values())) == n
                assert read["train"][0]["question"] == place
                assert load_rows(source, from_row) is read


def test_a_split_that_is_not_used_is_not_read(tmp_path):
    write_rows(tmp_path / "train.jsonl", ROWS[:30])
    write_rows(tmp_path / "validation.jsonl", ROWS[30:])
    write_rows(tmp_path / "test.jsonl", [row | {"answer": ""} for row in ROWS])
    (tmp_path / "broken.json").symlink_to("nowhere")
    assert len(load_rows(str(tmp_path), from_row)["held_out"]) == 10


def test_case_of_names_zero_and_line_separators(tmp_path):
    written = [{"Problem": f"a\u2028{k}", "Answer": k} for k in range(3)]
    source = write_rows(tmp_path / "aime.jsonl", written)
    rows = load_rows(source, lambda row: {name: field_of(row, name) for name in row})
    read = sorted(rows["held_out"] + rows["train"], key=lambda row: row["answer"])
    assert read == [{"problem": f"a\u2028{k}", "answer": k} for k in range(3)]
    assert [row["answer"] for row in rows["held_out"]] == [0]  # zero is not empty


EMPTY = "row 4: the field {} is missing or empty"
BAD = {  # file: content, a part of the sentence
    "empty.jsonl": ("", "cannot read it"),
    "notes.txt": ("hello", "row 1: the field question is missing or empty, the row has text"),
    "line.jsonl": (json.dumps(ROWS[0]) + "\n{broken\n", "row 1"),
    "text.parquet": ("hello", "Parquet"),
    "broken.zip": ("hello", "BadZipFile"),
    "images/train.tar": ("hello", "ReadError"),
    "cut.jsonl.gz": (gzip.compress(b"hello" * 99)[:-9], "EOFError"),
    "blank.jsonl": ([*ROWS[:3], {"question": " \n", "answer": "1"}], EMPTY.format("question")),
    "dates.jsonl": (
        [{"question": f"When was {k}?", "answer": f"1990-01-0{k}"} for k in range(1, 6)],
        "row 1: the field answer is datetime.datetime(1990, 1, 1, 0, 0), but must be a text or a",
    ),
    "null.jsonl": ("null\n" + json.dumps(ROWS[0]), "but begins with null"),
    "null.json": ("\n\ufeff [null]", "but begins with null"),
    "null.jsonl.gz": (gzip.compress(b"null\n"), "but begins with null"),
    "nulls/train.jsonl": ("null", "but begins with null"),
    "yaml/README.md": ("---\nconfigs: [\n---\n", "cannot read it"),
    "infos/dataset_infos.json": ("[1]", "cannot read it"),
    "x.h5": ("hello", "cannot read it"),
    "chat.jsonl": (
        [{"question": [{"role": "user", "content": "1?"}], "answer": "1"}],
        "row 1: the field question is [{'role': 'user', 'content': '1?'}], but must be a text",
    ),
    "null.parquet": ([*ROWS[:3], {"question": "1", "answer": None}], EMPTY.format("answer")),
    "missing.json": (
        [{"question": "1", "a": "1"}],
        "answer is missing or empty, the row has quest",
    ),
    "one.jsonl": (ROWS[:1] * 5, "too few different rows to train and to hold out: [0, 5]"),
    "nowhere.jsonl": (None, "there is no such file or folder"),
    "mixed/train.json": (ROWS, "same data file format"),
    "halves/validation.jsonl": (ROWS[:5], "to train and to hold out: [0, 5]"),
    "odd/train.jsonl": (ROWS[:5], "held_out row 1: the field answer is missing or empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_sentence(name, tmp_path, capfd):
    content, sentence = BAD[name]
    if isinstance(content, list):
        write_rows(tmp_path / name, content)
    elif content is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    write_rows(tmp_path / "mixed" / "test.parquet", ROWS[:5])
    write_rows(tmp_path / "halves" / "test.jsonl", ROWS[:5])
    write_rows(tmp_path / "odd" / "test.jsonl", [{"question": "1"}])
    source = str(tmp_path / name.partition("/")[0])
    write_rows(tmp_path / "infos" / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=rf"^.*{re.escape(source)}.*{re.escape(sentence)}.*$"):
        load_rows(source, from_row)
    assert capfd.readouterr().err == ""  # `datasets` does not tell it a second time


def test_a_hub_id_may_name_a_configuration(monkeypatch):
    asked = []
    hub = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: asked.append(words) or hub)
    load_rows("owner/own:main", from_row)
    assert asked == [("owner/own", "main")]


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    sentence = r"--data is owner/name:main, but `datasets` cannot read it.*: .+"
    with pytest.raises(ValueError, match=sentence):
        load_rows("owner/name:main", from_row)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 300), start=st.integers(0, 10**8))
def test_successive_seeds_go_through_all_rows_of_their_split(n, start):
    env = GSM8K()
    for split, first in (("train", start), ("held_out", EVAL_SEEDS + start)):
        env.rows = {split: list(range(n))}
        asked = []
        for k in range(n):
            env.start(first + k)
            asked.append(env.question)
        assert sorted(asked) == env.rows[split]


def picture(size, k):
    stream = io.BytesIO()
    Image.new("RGB", size, (k, k, k)).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def long_question(k):
    length = 600 if k % 4 == 1 else 1
    return {"question": f"Number {k}? " + "Well? " * length, "answer": f"#### {k}"}


def narrow_image(k):
    size = (30, 20) if k % 4 != 1 else (601, 2)
    return {
        "image": picture(size, k),
        "problem": f"Number {k}?",
        "solution": f"<answer>{k}</answer>",
    }


@pytest.mark.parametrize(("env", "row"), [("gsm8k", long_question), ("geoqa", narrow_image)])
def test_rows_that_do_not_fit_the_model_are_left_out(
    env, row, model_folder, tmp_path, monkeypatch, capsys
):
    """The batches of this run ask for every row twice. Both splits have rows that do not fit."""
    for split, first in (("train", 0), ("test", 12)):
        rows = [row(k) for k in range(first, first + 12)]
        write_rows(tmp_path / f"data/{split}.parquet", rows)
    kind = "vision" if env == "geoqa" else "text"
    model = shutil.copytree(model_folder[kind], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"freshper_tiny": False}))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
    flags = f"""--env {env} --preset small --model {model} --data {tmp_path}/data --method on_policy
    --iterations 1 --rollout_batch_size 24 --eval_episodes 24 --max_tokens 2000 --max_new_tokens 4
    --dtype float32""".split()

    assert train.main([*flags, "--out", str(tmp_path / "run")]) == 0
    counts = "data: 9 rows for training, 9 held out, 6 left out: too long for"
    assert counts in capsys.readouterr().out
    page = (tmp_path / "run/episodes.html").read_text()
    shown = [int(k) for k in re.findall(r"Number (\d+)\?", page)]
    assert len(shown) == len(set(shown)) == 8  # of held-out rows
    assert all(k % 4 != 1 for k in shown)

    assert train.main([*flags, "--max_tokens", "100", "--out", str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "--max_tokens is 100, but must" in line and "train row of" in line
    assert not (tmp_path / "none").exists()
