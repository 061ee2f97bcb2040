import pytest
import torch
from tensordict import TensorDict

from dapo_components.rewards import ReferenceKLPenalty


def make_batch(log_prob, ref_log_prob, mask, reward):
    return TensorDict(
        {"old_log_prob": log_prob, "ref_log_prob": ref_log_prob, "response_mask": mask, "reward": reward},
        batch_size=[1, 2],
    )


def test_sums_the_kl_of_the_response_tokens_only():
    log_prob = torch.tensor([[[-1.0, -2.0, float("nan")], [-0.5, float("inf"), 0.0]]])
    ref = torch.tensor([[[-1.5, -4.0, 0.0], [-0.25, 0.0, float("nan")]]])
    mask = torch.tensor([[[True, True, False], [True, False, False]]])
    batch = ReferenceKLPenalty(coef=0.1)(make_batch(log_prob, ref, mask, torch.tensor([[1.0, -1.0]])))
    # k1 sums: 0.5 + 2.0 = 2.5 and -0.25
    torch.testing.assert_close(batch["reward"], torch.tensor([[0.75, -0.975]]))


def test_estimator_is_passed_on():
    log_prob, ref = torch.tensor([[[-1.0], [-1.0]]]), torch.tensor([[[-3.0], [-1.0]]])
    batch = ReferenceKLPenalty(coef=1.0, estimator="k2")(
        make_batch(log_prob, ref, torch.ones(1, 2, 1, dtype=torch.bool), torch.zeros(1, 2))
    )
    torch.testing.assert_close(batch["reward"], torch.tensor([[-2.0, 0.0]]))


@pytest.mark.parametrize(("arguments", "text"), [({"coef": -1.0}, "coef"), ({"coef": 1.0, "estimator": "k4"}, "k4")])
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        ReferenceKLPenalty(**arguments)
