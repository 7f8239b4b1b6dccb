"""Questions from files: every ending gives the same rows, splits share none, and whatever is wrong is named."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.data import load_rows, read_hub, row_for

FIELDS = ("question", "answer")
ROWS = [{"question": f"What is {k} + 1?", "answer": f"#### {k + 1}", "note": None} for k in range(40)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def pairs(rows):
    return [(row["question"], row["answer"]) for row in rows]


@pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])
def test_a_single_file_is_divided_without_a_shared_row(tmp_path, ending):
    source = write(tmp_path / f"all.{ending}", ROWS + ROWS[:15])  # some rows twice
    train, validation = (load_rows(source, split, FIELDS) for split in ("train", "validation"))
    assert {*pairs(train), *pairs(validation)} == {*pairs(ROWS)}
    assert not {*pairs(train)} & {*pairs(validation)}
    assert len({*pairs(validation)}) == 4
    assert len(train) + len(validation) == 55
    assert load_rows(source, "train", FIELDS) is train  # one copy for 256 environments
    assert set(train[0]) == {*FIELDS, "where", "folder"}
    assert (train[0]["where"], train[0]["folder"]) == (f"{source}, row 2", str(tmp_path))


@pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_a_folder_has_its_own_splits(tmp_path, ending, held_out):
    write(tmp_path / f"train.{ending}", ROWS[:30])
    write(tmp_path / f"{held_out}.{ending}", ROWS[30:])
    assert pairs(load_rows(str(tmp_path), "train", FIELDS)) == pairs(ROWS[:30])
    assert pairs(load_rows(str(tmp_path), "validation", FIELDS)) == pairs(ROWS[30:])


def test_validation_goes_before_test_and_parts_are_joined(tmp_path):
    for k in range(2):
        write(tmp_path / f"train-0000{k}-of-00002.parquet", ROWS[10 * k : 10 * k + 10])
    write(tmp_path / "validation.jsonl", ROWS[20:30])
    write(tmp_path / "test.json", ROWS[30:])
    assert pairs(load_rows(str(tmp_path), "train", FIELDS)) == pairs(ROWS[:20])
    assert pairs(load_rows(str(tmp_path), "validation", FIELDS)) == pairs(ROWS[20:30])


def test_case_of_field_names_and_values_that_are_not_text(tmp_path):
    source = write(tmp_path / "aime.jsonl", [{"Problem": f"p{k}", "Answer": k} for k in range(4)])
    rows = load_rows(source, "train", ("problem", "answer"))
    assert [row["answer"] for row in rows] == [1, 2, 3]
    assert load_rows(source, "validation", ("problem", "answer"))[0]["answer"] == 0  # zero is not "empty"


def test_what_datasets_reads_is_the_same(tmp_path):
    """The branch for the hub, through the real library, on a folder in the hub's layout; pictures stay encoded."""
    folder = tmp_path / "owner" / "name"
    write(folder / "train.parquet", ROWS[:30])
    write(folder / "test.parquet", ROWS[30:])
    splits = read_hub(str(folder))
    assert [pairs([row for *_, row in splits[name]]) for name in ("train", "test")] == [
        pairs(ROWS[:30]),
        pairs(ROWS[30:]),
    ]
    assert splits["train"][4][0].endswith("train row 5")

    import datasets
    from PIL import Image

    picture = Image.new("RGB", (8, 8), (1, 2, 3))
    features = datasets.Features({"image": datasets.Image(), "problem": datasets.Value("string")})
    pictures = datasets.Dataset.from_list([{"image": picture, "problem": "area?"}], features=features)
    pictures.to_parquet(tmp_path / "pictures" / "train.parquet")
    ((*_, row),) = read_hub(str(tmp_path / "pictures"))["train"]
    assert row["image"]["bytes"].startswith(b"\x89PNG")


def broken(tmp_path):
    """(source, what the sentence must contain)"""
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "empty.jsonl").write_text("")
    (bad / "empty.json").write_text("[]")
    (bad / "nothing.json").write_text("")
    (bad / "object.json").write_text('{"question": "1"}')
    (bad / "notes.txt").write_text("hello")
    (bad / "line.jsonl").write_text(json.dumps(ROWS[0]) + "\n{broken\n")
    (bad / "list.jsonl").write_text(json.dumps(ROWS[0]) + "\n[1, 2]\n")
    (bad / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    (bad / "deep.json").write_text("[" * 100_000)
    (bad / "digits.jsonl").write_text('{"question": ' + "9" * 5000 + "}\n")
    (bad / "text.parquet").write_text("hello")
    write(bad / "blank.jsonl", [*ROWS[:3], {"question": " \n", "answer": "1"}])
    write(bad / "null.parquet", [*ROWS[:3], {"question": "1", "answer": None}])
    write(bad / "missing.json", [*ROWS[:3], {"question": "1", "solution": "1"}])
    write(bad / "one.jsonl", ROWS[:1] * 5)
    (tmp_path / "void").mkdir()
    write(tmp_path / "halves" / "validation.jsonl", ROWS[:5])
    write(tmp_path / "halves" / "test.jsonl", ROWS[:5])
    write(tmp_path / "odd" / "train.jsonl", ROWS[:5])
    write(tmp_path / "odd" / "test.jsonl", [{"question": "1"}])
    return [
        (bad / "empty.jsonl", "has no rows"), (bad / "empty.json", "has no rows"),
        (bad / "nothing.json", "has no rows"),
        (bad / "object.json", "must be a list of objects, but is a dict"),
        (bad / "notes.txt", "must end in one of .json, .jsonl, .parquet"),
        (bad / "line.jsonl", "line.jsonl, row 2 is not JSON"),
        (bad / "list.jsonl", "list.jsonl, row 2 is not an object with the fields question, answer"),
        (bad / "latin.jsonl", "cannot be read"), (bad / "deep.json", "is not JSON"),
        (bad / "digits.jsonl", "row 1 is not JSON"), (bad / "text.parquet", "is not parquet"),
        (bad / "blank.jsonl", "blank.jsonl, row 4: the field question is empty"),
        (bad / "null.parquet", "null.parquet, row 4: the field answer is empty"),
        (bad / "missing.json", "missing.json, row 4: the field answer is missing among question, solution"),
        (bad / "one.jsonl", "needs at least two different rows"),
        (bad / "nowhere.jsonl", "there is no such file or folder"), (bad / "no-folder", "there is no such file"),
        (tmp_path / "void", "must hold train.*"),
        (tmp_path / "halves", "with splits validation, test"),
        (tmp_path / "odd", "test.jsonl, row 1: the field answer is missing"),
    ]  # fmt: skip


def test_whatever_is_wrong_is_named_in_one_sentence(tmp_path):
    for source, sentence in broken(tmp_path):
        for split in ("train", "validation"):
            with pytest.raises(ValueError) as error:
                load_rows(str(source), split, FIELDS)
            assert sentence in str(error.value)
            assert source.name in str(error.value)
            assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="split is dev, but must be train or validation"):
        load_rows(str(tmp_path / "odd"), "dev", FIELDS)


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"--data is owner/name, but could not be loaded from the hub: .+"):
        load_rows("owner/name:main", "train", FIELDS)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 300), start=st.integers(0, 10**9))
def test_successive_seeds_go_through_all_rows(n, start):
    rows = [f"row {k}" for k in range(n)]
    assert sorted(row_for(rows, start + k) for k in range(n)) == sorted(rows)
