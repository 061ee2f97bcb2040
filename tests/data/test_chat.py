from __future__ import annotations

import pytest

from dapo_components.data.chat import PROMPT_TEMPLATES, PromptTemplate, get_template

ONE, PLUS, BOS, EOS, USER, ASSISTANT, SYSTEM = 10, 81, 1, 2, 4, 5, 6

SUM = PromptTemplate(name="sum", format="{problem}=", extract=str.strip, answer_ends="response")


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_plain_text_gets_the_tokenizers_own_bos_once(tokenizer, bos_tokenizer):
    template = get_template("plain")
    assert template.encode(tokenizer, "1+1") == ("1+1", ids_of(tokenizer, "1+1"))
    assert template.encode(bos_tokenizer, "1+1")[1] == [BOS, *ids_of(bos_tokenizer, "1+1")]
    assert ids_of(tokenizer, "1") == [ONE]


def test_a_bos_in_the_format_is_not_doubled(bos_tokenizer):
    template = PromptTemplate(name="own", format="<s>{problem}", extract=str.strip)
    assert template.encode(bos_tokenizer, "1")[1] == [BOS, ONE]


def test_an_appended_eos_is_dropped(bos_eos_tokenizer):
    assert bos_eos_tokenizer("1")["input_ids"] == [BOS, ONE, EOS]
    assert get_template("plain").encode(bos_eos_tokenizer, "1")[1] == [BOS, ONE]


def test_chat_template_is_encoded_with_one_bos(chat_tokenizer):
    text, ids = get_template("as_given_boxed").encode(chat_tokenizer, "1")
    assert text == "<s><|user|>1<|assistant|>"
    assert ids == [BOS, USER, ONE, ASSISTANT]
    # The same text through the tokenizer as it stands has two, and ends.
    assert chat_tokenizer(text)["input_ids"] == [BOS, BOS, USER, ONE, ASSISTANT, EOS]


def test_system_message_comes_first(chat_tokenizer):
    template = PromptTemplate(name="own", format="{problem}", extract=str.strip, chat=True, system="1")
    assert template.encode(chat_tokenizer, "1")[1] == [BOS, SYSTEM, ONE, USER, ONE, ASSISTANT]


def test_chat_template_is_left_out_where_not_asked_for_or_not_there(tokenizer, chat_tokenizer):
    assert SUM.encode(chat_tokenizer, "1")[0] == "1="
    text, _ = get_template("boxed").encode(tokenizer, "1+1")
    assert text.startswith("1+1\n\n")
    assert r"\boxed{}" in text


def test_braces_of_the_format_and_of_the_problem_stand_for_themselves():
    assert get_template("boxed").request("a {problem} \\frac{1}{2}").startswith("a {problem} \\frac{1}{2}\n\n")


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("boxed", r"so \boxed{42}."),
        ("answer_line", "so\nAnswer: 42"),
        ("gsm8k", "so\n#### 42"),
        ("plain", "42"),
        ("as_given_boxed", r"\boxed{42}"),
        ("as_given_answer_line", "Answer: 42"),
    ],
)
def test_each_template_reads_the_answer_it_asks_for(name, response):
    assert PROMPT_TEMPLATES[name].read_answer(response) == "42"
    assert PROMPT_TEMPLATES[name].read_answer("") is None


def test_the_list_of_templates_is_the_one_tested():
    assert sorted(PROMPT_TEMPLATES) == [
        "answer_line", "as_given_answer_line", "as_given_boxed", "boxed", "gsm8k", "plain",
    ]  # fmt: skip
    assert all(name == template.name for name, template in PROMPT_TEMPLATES.items())


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("boxed", r"\boxed{12}", "12"),  # the brace says that it is whole
        ("boxed", r"\boxed{12", None),
        ("answer_line", "Answer: 12", None),  # 1234 may have been meant
        ("answer_line", "Answer: 12\nTo check", "12"),
        ("answer_line", "Answer: 12\nAnswer: 1", "12"),
        ("gsm8k", "#### 12", None),
        ("gsm8k", "#### 12\n", "12"),
        ("plain", "12", None),
    ],
)
def test_an_answer_that_the_length_limit_may_have_cut_is_not_read(name, response, expected):
    assert get_template(name).read_answer(response, truncated=True) == expected


def test_get_template_accepts_a_template_and_an_import_path():
    assert get_template(SUM) is SUM
    assert get_template("tests.data.test_chat:SUM").name == "sum"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("boxd", "got 'boxd'; did you mean 'boxed'"),
        ("math:pi", "'math:pi' must name a PromptTemplate, got a float"),
        (3, "must name a prompt template, got 3"),
    ],
)
def test_get_template_explains(template, message):
    with pytest.raises(ValueError, match=message):
        get_template(template)


@pytest.mark.parametrize("format_", ["no slot", "{problem} and {problem}"])
def test_the_format_holds_the_problem_once(format_):
    with pytest.raises(ValueError, match=r"format must hold \{problem\} exactly once"):
        PromptTemplate(name="x", format=format_, extract=str.strip)


def test_answer_ends_is_checked():
    with pytest.raises(ValueError, match="answer_ends must be 'mark', 'line' or 'response', got 'brace'"):
        PromptTemplate(name="x", format="{problem}", extract=str.strip, answer_ends="brace")  # pyright: ignore
