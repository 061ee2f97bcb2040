from __future__ import annotations

import json

import pytest

from dapo_components.data.rows import Row, field_value, read_rows, shown

ROWS = [
    {"problem": "1+1", "answer": "2", "meta": {"level": 1}},
    {"problem": "2+2", "answer": "4", "meta": {"level": 2}},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_rows_carry_file_and_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]))  # an empty line, no final line end
    assert list(read_rows(path)) == [Row(f"{path}:1", ROWS[0]), Row(f"{path}:3", ROWS[1])]


def test_jsonl_with_a_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\r\n{"a": 2}\r\n')
    assert [row.fields for row in read_rows(path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{'a': 1}", "expected one JSON object a line (Expecting property name enclosed in double quotes), found "),
        (b"[1, 2]", "expected a JSON object, found '[1, 2]'"),
        (b"7", "expected a JSON object, found '7'"),
        (b'{"a": "\xff"}', "expected UTF-8 text, found the byte 0xff at byte 7"),
        (b"[" * 100_000, "expected one JSON object a line (nested too deeply), found "),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path, line, problem):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    good, bad = read_rows(path)
    assert good.problem is None
    assert bad.location == f"{path}:2"
    assert bad.problem is not None
    assert bad.problem.startswith(problem)
    assert len(bad.problem) < 250


def test_parquet_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert list(read_rows(path)) == [Row(f"{path}, row 1", ROWS[0]), Row(f"{path}, row 2", ROWS[1])]


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "train.parquet"
    path.write_text("problem,answer\n")
    with pytest.raises(ValueError, match=r"train.parquet' must be a Parquet file"):
        read_rows(path)


def test_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "one"))
    assert list(read_rows(tmp_path / "one")) == [
        Row(f"{tmp_path / 'one'}[train], row 1", ROWS[0]),
        Row(f"{tmp_path / 'one'}[train], row 2", ROWS[1]),
    ]


def test_a_saved_data_set_with_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[1:])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    assert [row.fields for row in read_rows(tmp_path / "two", split="test")] == ROWS[1:]
    with pytest.raises(ValueError, match="has no split 'tests'; did you mean 'test'"):
        read_rows(tmp_path / "two", split="tests")


def test_a_folder_of_data_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", ROWS)
    assert [row.fields for row in read_rows(tmp_path / "files")] == ROWS


def test_a_hub_name_that_cannot_be_had_gets_one_line():
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"cannot load the data set 'someone/no-such-data': [^\n]+$"):
        read_rows("someone/no-such-data")  # conftest keeps the suite offline


def test_a_missing_file_is_named_with_its_nearest_sibling(tmp_path):
    write_jsonl(tmp_path / "gsm8k_train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"gsm8k_tran.jsonl' does not exist; .*did you mean 'gsm8k_train.jsonl'"):
        read_rows(tmp_path / "gsm8k_tran.jsonl")


@pytest.mark.parametrize("source", ["/nowhere/at/all", "a/b/c", "gsm8k", ""])
def test_what_is_neither_file_nor_hub_name_is_refused_without_asking_the_hub(source):
    with pytest.raises(ValueError, match=r"must be an existing .jsonl or .parquet file or folder"):
        read_rows(source)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "train.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"train.csv' must end in .jsonl or .parquet"):
        read_rows(tmp_path / "train.csv")


def test_field_value_walks_nested_fields_and_prefers_a_key_with_a_dot():
    fields = {"a": {"b": 1}, "c.d": 2, "c": {"d": 3}}
    assert field_value(fields, "a.b") == 1
    assert field_value(fields, "c.d") == 2
    with pytest.raises(KeyError, match=r"no column 'a.bb'; did you mean 'b'"):
        field_value(fields, "a.bb")
    with pytest.raises(KeyError, match=r"no column 'a.b.c'; available: nothing"):
        field_value(fields, "a.b.c")


def test_shown_shortens():
    assert shown("ab") == "'ab'"
    assert shown("a" * 81) == repr("a" * 80 + "...")
    assert shown([1]) == "'[1]'"
