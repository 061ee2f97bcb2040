from __future__ import annotations

import threading
import time

import pytest

from dapo_components.rewards import check_answer, extract_answer, verify_answer
from dapo_components.rewards.answer_tokens import MAX_ANSWER_LENGTH


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"So $\boxed{9}$.", "9"),
        (r"<think>\boxed{12}? No.</think> It is \boxed{15}.", "15"),
        ("<think>maybe 40</think><answer> 42 </answer>", "42"),
        (r"<answer>so \boxed{42}</answer> or \boxed{3}", "42"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer></answer>", None),
        ("Answer: 41\nNo.\nAnswer: 42", "42"),
        ("**Answer:** $42$.", "42"),
        ("**Answer**: 42", "42"),
        (r"Answer: \(x+1\)", "x+1"),
        ("Final Answer: The final answer is $24$. I hope it is correct.", "24"),
        ("The answer is: 42", "42"),
        ("The answer is B.", "B"),
        ("Answer: The largest $n$ is 34.", "34"),
        ("the answer is 7, hmm\n#### 12", "12"),  # the last mark counts
        ("#### Conclusion\nThe answer is 42.", "42"),
        ("#### -3", "-3"),
        ("Answer: .5", ".5"),
        ("Answer: $x$ and $y$", "$x$ and $y$"),
        (r"Answer: 5\,", r"5\,"),
        ("It is 42.", None),
        ("", None),
        ("Answer:", None),
        (r"\boxed{}", None),
        (r"\boxed{4", None),
    ],
)
def test_extract_answer(response, expected):
    assert extract_answer(response) == expected


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        (r"$\boxed{033}$", "33"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        ("Answer: 7,425,000", "7425000"),
        ("18", "Janet sells 9 eggs.\n#### 18"),  # a gold that is a worked solution
        ("42", r"\boxed{42}"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{\,7\,}", "7"),
        ("5.", "5"),
        ("**73**", "73"),
        (r"3\sqrt{13}", r"3 \sqrt 13"),
        ("9^{9^{9^{9}}}", "9^{9^{9^{9}}}"),  # the same text; nothing is computed
        ("y=2x+3", "y = 2x + 3"),
    ],
)
def test_right_answers(prediction, gold):
    check = verify_answer(prediction, gold)
    assert (check.correct, check.status) == (True, "ok")


@pytest.mark.parametrize(
    ("prediction", "gold", "status"),
    [
        (r"\boxed{41}", "42", "ok"),
        (r"\boxed{1,2,3,4,5,6,7,8,9,10}", "5", "ok"),
        (r"\boxed{5 \text{ or } 6}", "5", "ok"),
        (r"\boxed{A, B, C, D}", "A", "ok"),
        (r"\boxed{\pm 5}", "5", "ok"),
        (r"\boxed{x}", "5", "ok"),
        (r"\boxed{\text{unknown}}", "7", "ok"),
        (r"\boxed{True}", "1", "ok"),
        ("None", "0", "ok"),
        (r"\boxed{0 = 0}", "5", "unparsed_pred"),
        (r"\boxed{2+3}", "5", "unparsed_pred"),  # the work is left to the grader
        (r"\boxed{5!}", "5", "unparsed_pred"),
        (r"\boxed{\text{not } 5}", "5", "unparsed_pred"),
        (r"\boxed{5}", r"\sqrt{25}", "unparsed_gold"),
        (r"\boxed{x+1}", "1+x", "unparsed_gold"),
        (r"\boxed{}", "7", "no_answer"),
        (r"\boxed{$}", "7", "no_answer"),
        (r"so \boxed{7", "7", "no_answer"),
        ("", "7", "no_answer"),
        (" \n ", "7", "no_answer"),
        ("5", "$$", "unparsed_gold"),
        (r"\boxed{" + "1" * 2001 + "}", "1", "too_costly"),
    ],
)
def test_wrong_answers_and_why(prediction, gold, status):
    check = verify_answer(prediction, gold)
    assert (check.correct, check.status) == (False, status)


def test_a_verdict_holds_what_was_found_and_what_decided():
    check = verify_answer(r"\boxed{1/2}", "0.5")
    assert (check.extracted, check.rule) == ("1/2", "value")
    assert 0 < check.seconds < 1
    assert verify_answer("x", "x").rule == "identical"
    assert verify_answer("-07", "-7").rule == "integer"
    assert verify_answer("7.0", "7").rule == "value"
    assert verify_answer("x+1", "1+x").rule == "none"


def test_very_long_answers_are_compared_as_they_stand():
    long = "7" * (MAX_ANSWER_LENGTH + 1)
    assert check_answer(long, long).correct
    assert not check_answer(long, long[:-1] + "8").correct


def test_no_stage_begins_after_the_time_limit():
    check = check_answer("5.0", "5", timeout_s=0.01, start=time.perf_counter() - 1.0)
    assert (check.correct, check.status) == (False, "timeout")


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [("5", "5", True), ("+5", " 05 ", True), ("-5", "5", False), ("0", "-0", True), ("1" * 301, "1" * 301, True)],
)
def test_integers(prediction, gold, expected):
    assert verify_answer(prediction, gold).correct is expected


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_the_time_limit_is_positive(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be > 0"):
        verify_answer("1", "1", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("prediction", "gold", "name"), [(5, "5", "prediction"), ("5", 5, "gold"), (None, "5", "pred")]
)
def test_what_is_no_text_is_the_callers_mistake(prediction, gold, name):
    with pytest.raises(TypeError, match=f"{name}.* must be text, got"):
        verify_answer(prediction, gold)


HOSTILE = [
    r"\boxed{__import__('os').system('touch canary')}",
    r"\boxed{eval(\"open('canary','w')\")}",
    r"\boxed{().__class__.__bases__[0].__subclasses__()}",
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{10^{10^{10}}}",
    r"\boxed{1e999999999}",
    r"\boxed{1e-999999999}",
    r"\boxed{(10^{9})!}",
    r"\boxed{\frac{1}{0}}",
    r"\boxed{nan}",
    r"\boxed{\infty}",
    r"\boxed{" + "(" * 900 + ")" * 900 + "}",
    r"\boxed{" + "{" * 900 + "1" + "}" * 900 + "}",
    r"\boxed{" + r"\frac{1}{1+" * 150 + "1" + "}" * 150 + "}",
    r"\boxed{" + r"\text{" * 300 + "5" + "}" * 300 + "}",
    r"\boxed{" + "1," * 950 + "1}",
    r"\boxed{" + "x=" * 900 + "6}",
    r"\boxed{" + "A" * 1990 + "+1=5}",
    r"\boxed{" + r"\pm" * 600 + "}",
    r"\boxed{" + "(1,2)," * 300 + "}",
    r"\boxed{" + "1" * 100_000 + "}",
    r"\boxed{6" + " " * 100_000 + "}",
    r"\boxed{" * 50_000,
    "<answer>" * 50_000,
    "answer is" + "\n" * 200_000,
    "answer is" + " " * 200_000 + "\n",
    "answer is " * 30_000,
    "####" + " " * 200_000 + "\n" * 100_000,
    "$" * 100_000,
    "\x00\x00",
    "\ud800",
    "\u202e5\u202c6",
    "\u0665\u0666",
    "\\",
    "{",
    "}",
    "^",
    "_",
    "\\frac",
    "%s%s%n",
    "{0.__class__}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_wrong_fast_and_harmless(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    check = verify_answer(text, "5")
    swapped = verify_answer("5", text)
    # A second is far more than the milliseconds it takes; quadratic work on these takes minutes.
    assert time.process_time() - start < 2.0
    assert not check.correct
    assert not swapped.correct
    assert list(tmp_path.iterdir()) == []


def test_any_thread_will_do():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(verify_answer(r"\boxed{5}", "5")))
    thread.start()
    thread.join()
    assert verdicts[0].correct
