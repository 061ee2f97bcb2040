import math

import pytest
import torch

from dapo_components.generation.base import SamplingParams
from dapo_components.generation.sampling import UniformStream, restrict_logits, sample_tokens

PLAIN = SamplingParams(max_tokens=1)


def draw(probs, uniform, params=PLAIN):
    tokens, log_probs = sample_tokens(torch.tensor([probs]).log(), [uniform], [params])
    return int(tokens), float(log_probs)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7499, 1), (0.7501, 2), (0.9999, 2)]
)
def test_token_is_the_first_whose_cumulative_probability_exceeds_u(uniform, token):
    assert draw([0.5, 0.25, 0.25], uniform)[0] == token


@pytest.mark.parametrize("uniform", [0.0, 1e-30, 0.25, 0.5, 0.75, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    token, log_prob = draw([0.0, 0.5, 0.0, 0.5, 0.0], uniform)
    assert token in (1, 3)
    assert log_prob == pytest.approx(math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("hot", [0, 255, 256, 511, 512, 700])
@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-53])
def test_a_certain_token_is_drawn_wherever_it_is_in_the_vocabulary(hot, uniform):
    logits = torch.full((2, 701), -torch.inf)
    logits[:, hot] = 3.0
    tokens, log_probs = sample_tokens(logits, [uniform] * 2, [PLAIN] * 2)
    assert tokens.tolist() == [hot, hot]
    assert log_probs.tolist() == [0.0, 0.0]


def test_temperature_divides_logits_and_log_prob_is_after_it():
    # p = (0.8, 0.2): at temperature 2, square roots: 0.8944 and 0.4472, normalised 2/3 and 1/3.
    params = SamplingParams(max_tokens=1, temperature=2.0)
    assert draw([0.8, 0.2], 0.66, params) == (0, pytest.approx(math.log(2 / 3), abs=1e-6))
    assert draw([0.8, 0.2], 0.67, params) == (1, pytest.approx(math.log(1 / 3), abs=1e-6))


def test_each_row_has_its_own_parameters():
    logits = torch.tensor([[0.8, 0.2]] * 3).log()
    params = [PLAIN, SamplingParams(max_tokens=1, temperature=2.0), SamplingParams(max_tokens=1, top_k=1)]
    tokens, log_probs = sample_tokens(logits, [0.7, 0.7, 0.999], params)
    assert tokens.tolist() == [0, 1, 0]
    torch.testing.assert_close(log_probs, torch.tensor([0.8, 1 / 3, 1.0]).log())


def test_top_k_and_top_p_renormalise_the_log_prob():
    # top_p=0.8 keeps 0.5 and 0.3 (0.5 alone is not enough); 0.3 of 0.8 is 0.375.
    assert draw([0.2, 0.3, 0.5], 0.1, SamplingParams(max_tokens=1, top_p=0.8)) == (
        1,
        pytest.approx(math.log(0.375), abs=1e-6),
    )
    assert draw([0.2, 0.3, 0.5], 0.99, SamplingParams(max_tokens=1, top_k=2)) == (
        2,
        pytest.approx(math.log(0.625), abs=1e-6),
    )


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2]),
        ({"top_p": 0.4}, [2]),
        ({"top_p": 0.5}, [2]),  # exactly enough
        ({"top_p": 0.51}, [1, 2]),
        ({"top_k": 2, "top_p": 0.6}, [2]),  # 0.5 is 0.625 of what top_k leaves
        ({}, [0, 1, 2]),
    ],
)
def test_restrict_logits_keeps(arguments, kept):
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log()
    result = restrict_logits(logits, **arguments)
    assert result.isfinite().nonzero()[:, 1].tolist() == kept
    assert torch.equal(result[result.isfinite()], logits[result.isfinite()])


@pytest.mark.parametrize("broken", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_logits_without_a_distribution_give_nan_in_their_row_only(broken):
    tokens, log_probs = sample_tokens(torch.tensor([broken, [0.0, 0.0]]), [0.5, 0.25], [PLAIN] * 2)
    assert log_probs[0].isnan()
    assert tokens[1] == 0
    assert float(log_probs[1]) == pytest.approx(math.log(0.5))


def test_frequencies_match_probabilities(generator):
    logits = torch.randn(600, generator=generator) * 1.5
    count = 30_000
    uniforms = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
    tokens, _ = sample_tokens(logits.expand(count, -1), uniforms, [PLAIN] * count)
    expected = logits.double().softmax(-1) * count
    observed = torch.bincount(tokens, minlength=600).double()
    pooled = expected >= 5
    gap = (observed - expected)[pooled]
    rest = (observed - expected)[~pooled].sum() ** 2 / expected[~pooled].sum()
    statistic = float((gap**2 / expected[pooled]).sum() + rest)
    degrees = int(pooled.sum())
    # Mean and standard deviation of chi-square are k and sqrt(2 k): four deviations.
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)


def test_log_prob_is_accurate_over_a_large_vocabulary(generator):
    logits = torch.randn(4, 50_000, generator=generator) * 5
    tokens, log_probs = sample_tokens(logits, [0.1, 0.4, 0.6, 0.95], [PLAIN] * 4)
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (log_probs - expected).abs().max() < 5e-6


def test_stream_position_has_one_number_whatever_was_asked_before():
    forward, jump = UniformStream(11), UniformStream(11)
    late = jump[200]
    numbers = [forward[position] for position in range(201)]
    assert numbers[200] == late
    assert [jump[position] for position in range(201)] == numbers
    assert len(set(numbers)) == 201
    assert all(0 <= number < 1 for number in numbers)


def test_seeds_that_differ_in_high_bits_only_are_different_streams():
    assert UniformStream(5)[0] != UniformStream(5 + 2**32)[0]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\)"):
        UniformStream(seed)
