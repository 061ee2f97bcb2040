from __future__ import annotations

import json

import pytest

from dapo_components.data.prompts import Prompt, PromptDataset

ZERO, BOS = 9, 1  # ids of the test tokenizer: "0" is 9, "1" is 10, ...


def write_jsonl(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def source(tmp_path):
    rows = [{"problem": "12", "answer": "3"}, {"problem": "4567", "answer": 11}, {"problem": "89", "answer": 1.5}]
    return write_jsonl(tmp_path / "train.jsonl", rows)


def digits(text):
    return tuple(ZERO + int(digit) for digit in text)


def test_rows_become_prompts(tokenizer, source):
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=4)
    assert len(dataset) == 3
    assert dataset[1] == Prompt(1, "4567", digits("4567"), {"problem": "4567", "answer": "11"})
    assert [prompt.prompt_id for prompt in dataset] == [0, 1, 2]
    assert [prompt.columns["answer"] for prompt in dataset] == ["3", "11", "1.5"]
    assert dataset.num_dropped == {"malformed": 0, "overlong": 0}
    assert dataset.num_truncated == 0


def test_prompt_ids_are_positions(tokenizer, source):
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=3)
    assert [(prompt.prompt_id, prompt.text) for prompt in dataset] == [(0, "12"), (1, "89")]
    with pytest.raises(IndexError, match=r"prompt_id must be in \[0, 2\), got 2"):
        dataset[2]
    with pytest.raises(IndexError, match="got -1"):
        dataset[-1]


def test_a_longer_prompt_is_dropped_and_counted(tokenizer, source):
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=3)
    assert dataset.num_dropped == {"malformed": 0, "overlong": 1}


def test_a_longer_prompt_keeps_its_end_on_request(tokenizer, source):
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=3, on_overlong="truncate")
    assert dataset[1].tokens == digits("567")
    assert (dataset.num_truncated, dataset.num_dropped["overlong"]) == (1, 0)


def test_a_truncated_prompt_keeps_its_bos(bos_tokenizer, source):
    dataset = PromptDataset(bos_tokenizer, source=source, template="plain", max_prompt_length=3, on_overlong="truncate")
    assert [prompt.tokens for prompt in dataset] == [
        (BOS, *digits("12")), (BOS, *digits("67")), (BOS, *digits("89")),
    ]  # fmt: skip


def test_limit_keeps_the_first(tokenizer, source):
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=3, limit=2)
    assert [prompt.text for prompt in dataset] == ["12", "89"]  # the dropped one does not count


def test_the_template_is_applied_and_the_problem_stays_a_column(chat_tokenizer, source):
    dataset = PromptDataset(chat_tokenizer, source=source, template="boxed", max_prompt_length=200)
    assert dataset[0].text.startswith("<s><|user|>12\n\n")
    assert dataset[0].tokens[:2] == (BOS, 4)
    assert dataset[0].columns["problem"] == "12"


def test_columns_are_mapped_and_nested_ones_found(tokenizer, tmp_path):
    """The form of DAPO-Math-17k: a chat of one message, the answer nested."""
    row = {"prompt": [{"role": "user", "content": "12"}], "reward_model": {"ground_truth": "3"}, "source": "x"}
    dataset = PromptDataset(
        tokenizer,
        source=write_jsonl(tmp_path / "dapo.jsonl", [row]),
        columns={"problem": "prompt", "answer": "reward_model.ground_truth", "origin": "source"},
        template="as_given_answer_line",
        max_prompt_length=4,
    )
    assert dataset[0] == Prompt(0, "12", digits("12"), {"problem": "12", "answer": "3", "origin": "x"})


def test_parquet_and_saved_data_sets_give_the_same_prompts_as_jsonl(tokenizer, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    rows = [{"problem": "12", "answer": "3"}, {"problem": "45", "answer": "9"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    sources = [write_jsonl(tmp_path / "train.jsonl", rows), tmp_path / "train.parquet", tmp_path / "saved"]
    sets = [PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=4) for source in sources]
    assert [prompt.tokens for prompt in sets[0]] == [digits("12"), digits("45")]
    assert list(sets[0]) == list(sets[1]) == list(sets[2])
    assert len({dataset.fingerprint for dataset in sets}) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "1", "answr": "2"}, "expected a value for 'answer': no column 'answer'; did you mean 'answr'"),
        (
            {"question": "1", "answer": "2"},
            "expected a value for 'problem': no column 'problem'; available: answer, quest",
        ),
        (
            {"problem": 7, "answer": "2"},
            "expected text or a chat of one user message in column 'problem', found '7' .int",
        ),
        ({"problem": " ", "answer": "2"}, "expected a problem in column 'problem', found empty text"),
        ({"problem": "\ud800", "answer": "2"}, "expected valid Unicode in column 'problem'"),
        (
            {"problem": [{"role": "user", "content": "1"}] * 2, "answer": "2"},
            "expected text or a chat of one user mess",
        ),
        (
            {"problem": "1", "answer": None},
            "expected text or a finite number in column 'answer', found 'None' .NoneType",
        ),
        ({"problem": "1", "answer": True}, "expected text or a finite number in column 'answer', found 'True' .bool"),
        ({"problem": "1", "answer": float("nan")}, "expected text or a finite number in column 'answer', found 'nan'"),
        ({"problem": "1", "answer": ["2"]}, "expected text or a finite number in column 'answer'"),
        ({"problem": "1", "answer": ""}, "expected an answer in column 'answer', found empty text"),
        ("not json\n", "expected one JSON object a line"),
    ],
)
def test_a_malformed_row_is_named_with_file_line_expectation_and_finding(tokenizer, tmp_path, row, message):
    good = {"problem": "12", "answer": "3"}
    source = write_jsonl(tmp_path / "train.jsonl", [good, row, good])
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: {message}.*on_malformed to 'skip'"):
        PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=4)
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=4, on_malformed="skip")
    assert (len(dataset), dataset.num_dropped) == (2, {"malformed": 1, "overlong": 0})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"no prompt is left of .*\(0 malformed, 0 overlong\): it has no rows"),
        (
            [{"problem": "12345", "answer": "1"}],
            r"0 malformed, 1 overlong\); raise max_prompt_length=4 or set on_overlong",
        ),
        (
            [{"problem": "1"}],
            r"1 malformed, 0 overlong\); the first malformed row is .*train\.jsonl:1: expected a value",
        ),
    ],
)
def test_a_data_set_without_prompts_says_why(tokenizer, tmp_path, rows, message):
    source = write_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=4, on_malformed="skip")


def test_a_wrong_column_mapping_names_the_nearest_column(tokenizer, source):
    with pytest.raises(ValueError, match=r"train\.jsonl:1: .*no column 'problems'; did you mean 'problem'"):
        PromptDataset(tokenizer, source=source, columns={"problem": "problems"}, template="plain", max_prompt_length=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": {"prompt": "problem"}}, "columns must map 'problem' to a column"),
        (
            {"columns": {"problem": "problem", "truncated": "cut"}},
            "columns must not map 'truncated', which rewards receive from the collector",
        ),
        ({"max_prompt_length": 0}, "max_prompt_length must be >= 1, got 0"),
        ({"on_overlong": "keep"}, "on_overlong must be 'drop' or 'truncate', got 'keep'"),
        ({"on_malformed": "drop"}, "on_malformed must be 'raise' or 'skip', got 'drop'"),
        ({"limit": 0}, "limit must be >= 1 or null, got 0"),
        ({"template": "boxes"}, "did you mean 'boxed'"),
        ({"source": "/nowhere/x.jsonl"}, "source file '/nowhere/x.jsonl' does not exist"),
    ],
)
def test_arguments_are_checked(tokenizer, source, arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptDataset(tokenizer, **{"source": source, "max_prompt_length": 4, **arguments})


def test_the_fingerprint_changes_with_what_matters(tokenizer, bos_tokenizer, tmp_path):
    rows = [{"problem": "12", "answer": "3", "id": 1}, {"problem": "45", "answer": "9", "id": 2}]
    defaults = {"source": write_jsonl(tmp_path / "a.jsonl", rows), "template": "plain", "max_prompt_length": 40}

    def dataset(tokenizer=tokenizer, **changes):
        return PromptDataset(tokenizer, **{**defaults, **changes})

    first = dataset()
    assert len(first.fingerprint) == 64
    assert dataset(source=write_jsonl(tmp_path / "copy.jsonl", rows)).fingerprint == first.fingerprint
    assert dataset(max_prompt_length=50).fingerprint == first.fingerprint  # no prompt is affected
    others = {
        "order": dataset(source=write_jsonl(tmp_path / "b.jsonl", rows[::-1])),
        "answer": dataset(source=write_jsonl(tmp_path / "c.jsonl", [rows[0], rows[1] | {"answer": "8"}])),
        "number": dataset(limit=1),
        "columns": dataset(columns={"problem": "problem", "answer": "answer", "id": "id"}),
        "tokens": dataset(tokenizer=bos_tokenizer),
        "template": dataset(template="as_given_boxed"),
    }
    assert len({first.fingerprint, *(other.fingerprint for other in others.values())}) == 7
    changed = {name for name, value in others["tokens"].identity.items() if value != first.identity[name]}
    assert changed == {"tokens"}


def test_changing_a_prompts_columns_does_not_change_the_data_set(tokenizer, source):
    dataset = PromptDataset(tokenizer, source=source, template="plain", max_prompt_length=4)
    dataset[0].columns["answer"] = "changed"
    assert dataset[0].columns["answer"] == "3"
