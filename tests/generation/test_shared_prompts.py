import pytest
import torch

from dapo_components.generation.model_runner import ModelRunner
from dapo_components.generation.shared_prompts import SharedPrompts
from tests.helpers import plain_logits, tiny_torchtune

LONG, SHORT, PAIR, TRIPLE = (5, 9, 2, 6, 5, 3, 5), (3,), (8, 9), (1, 4, 1)


@pytest.fixture
def passes(monkeypatch):
    """Lengths of the prompts in each forward pass."""
    seen = []
    original = ModelRunner.run_prompts

    def run(self, prompts):
        seen.append([len(prompt) for prompt in prompts])
        return original(self, prompts)

    monkeypatch.setattr(ModelRunner, "run_prompts", run)
    return seen


def test_each_prompt_runs_once_and_stays_while_somebody_waits(passes):
    prompts = SharedPrompts(ModelRunner(tiny_torchtune()), token_budget=100)
    prompts.expect([PAIR, PAIR, SHORT])
    prompts.run([PAIR, SHORT])
    prompts.forget([PAIR, SHORT])
    prompts.run([PAIR])
    assert passes == [[1, 2]]
    assert prompts.num_tokens == 3
    assert len(prompts) == 1
    prompts.forget([PAIR])
    assert len(prompts) == 0


def test_logits_and_keys_are_those_of_the_prompt():
    model = tiny_torchtune()
    prompts = SharedPrompts(ModelRunner(model), token_budget=100)
    prompts.expect([LONG, PAIR])
    prompts.run([LONG, PAIR])
    for context in (LONG, PAIR):
        prompt = prompts[context]
        torch.testing.assert_close(prompt.logits, plain_logits(model, context)[-1], rtol=1e-5, atol=1e-5)
        assert prompt.batch.keys[0].shape[2] == len(LONG)
    assert prompts[LONG].batch is prompts[PAIR].batch
    assert {prompts[LONG].index, prompts[PAIR].index} == {0, 1}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, [[1], [2], [3], [7]]),  # every prompt is longer or alone
        (4, [[1, 2], [3], [7]]),  # two rows of two
        (9, [[1, 2, 3], [7]]),  # three rows of three
        (28, [[1, 2, 3, 7]]),
    ],
)
def test_budget_counts_padding(passes, budget, expected):
    prompts = SharedPrompts(ModelRunner(tiny_torchtune()), token_budget=budget)
    prompts.run([LONG, SHORT, TRIPLE, PAIR])
    assert passes == expected
    assert prompts.num_tokens == 13


def test_new_weights_drop_results_but_not_requests(passes):
    prompts = SharedPrompts(ModelRunner(tiny_torchtune()), token_budget=100)
    prompts.expect([PAIR, PAIR])
    prompts.run([PAIR])
    prompts.invalidate()
    assert len(prompts) == 0
    prompts.run([PAIR])
    prompts.forget([PAIR])
    assert len(prompts) == 1
    assert passes == [[2], [2]]
    prompts.clear()
    assert len(prompts) == 0
