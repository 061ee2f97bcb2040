import pytest

from dapo_components.generation.base import Completion, SamplingParams


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"top_k": 0}, "top_k must be -1 (off) or >= 1, got 0"),
    ],
)
def test_sampling_out_of_range_says_argument_rule_and_value(arguments, text):
    with pytest.raises(ValueError, match="must be") as raised:
        SamplingParams(**{"max_tokens": 4, **arguments})
    assert str(raised.value) == text


@pytest.mark.parametrize(("arguments", "expected"), [({}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True)])
def test_only_cut_distributions_renormalise(arguments, expected):
    assert SamplingParams(max_tokens=1, **arguments).renormalises is expected


def test_completion_needs_a_log_prob_and_a_version_for_each_token():
    with pytest.raises(ValueError, match="request 3: 2 tokens need as many log_probs and versions, got 1 and 2"):
        Completion(request_id=3, tokens=(1, 2), log_probs=(-1.0,), versions=(0, 0), finish_reason="stop")
