import pytest

from dapo_components.generation.base import GenerationRequest, SamplingParams
from dapo_components.generation.request_state import Row, check_request
from dapo_components.generation.sampling import UniformStream


def request(**arguments):
    defaults = {"request_id": 4, "prompt_tokens": (1, 2, 3), "sampling": SamplingParams(max_tokens=4), "seed": 9}
    return GenerationRequest(**{**defaults, **arguments})


def test_a_row_counts_prefix_tokens():
    row = Row(request(prefix_tokens=(5, 6)))
    assert row.context == (1, 2, 3, 5, 6)
    assert (row.response_length, row.position, row.room) == (2, 4, 7)
    assert row.uniform == UniformStream(9)[2]
    assert row.append(7, -0.5, 3) is None
    assert (row.response_length, row.position) == (3, 5)
    assert row.uniform == UniformStream(9)[3]
    assert row.context == (1, 2, 3, 5, 6), "context changes when it is sent through the model again, not before"
    row.requeue()
    assert row.context == (1, 2, 3, 5, 6, 7)
    assert row.append(8, -0.25, 4) == "length"
    completion = row.completion("length")
    assert (completion.tokens, completion.log_probs, completion.versions) == ((7, 8), (-0.5, -0.25), (3, 4))


def test_stop_wins_over_length():
    row = Row(request(sampling=SamplingParams(max_tokens=1, stop_token_ids=(7,))))
    assert row.append(7, -0.5, 0) == "stop"
    assert row.done


def test_nan_ends_the_row_without_a_token():
    row = Row(request())
    row.append(1, -0.5, 2)
    assert row.append(0, float("nan"), 2) == "error"
    completion = row.completion("error")
    assert completion.tokens == (1,)
    assert completion.error == (
        "logits at response position 1 are NaN or infinite under policy version 2; the weights are probably broken"
    )


def test_room_stops_at_the_budget_and_at_64_tokens():
    assert Row(request()).room == 3 + 4
    assert Row(request(sampling=SamplingParams(max_tokens=1000))).room == 3 + 64


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt_tokens": ()}, "request 4: prompt_tokens must hold at least one token"),
        ({"prompt_tokens": (1, 13)}, "request 4: token ids must be in [0, 13), the model's vocabulary, got 13"),
        ({"prefix_tokens": (-1,)}, "request 4: token ids must be in [0, 13), the model's vocabulary, got -1"),
        ({"prefix_tokens": (1,) * 4}, "request 4: prefix_tokens must be shorter than max_tokens=4"),
        (
            {"prefix_tokens": (1, 2), "sampling": SamplingParams(max_tokens=4, stop_token_ids=(2,))},
            "request 4: prefix_tokens must not hold a stop token, got 2",
        ),
        ({"sampling": SamplingParams(max_tokens=8)}, "must fit in 10 positions (max_model_len), got 3 + 8 = 11"),
        ({"seed": -1}, "request 4: seed must be in [0, 2**64), got -1"),
    ],
)
def test_requests_that_cannot_be_answered(arguments, text):
    with pytest.raises(ValueError, match="must") as raised:
        check_request(request(**arguments), vocab_size=13, max_model_len=10)
    assert text in str(raised.value)


def test_a_request_that_just_fits():
    check_request(request(sampling=SamplingParams(max_tokens=7)), vocab_size=13, max_model_len=10)
    check_request(request(sampling=SamplingParams(max_tokens=700)), vocab_size=13, max_model_len=None)
