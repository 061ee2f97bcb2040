"""Sections that recipes share: what they pass on, and what they refuse together."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from dapo_components.collectors import DynamicSamplingCollector
from dapo_components.training.config import ConfigError, parse_config
from dapo_components.training.config_sections import DynamicSamplingConfig, EvaluationConfig, KLConfig


def test_the_fields_are_those_of_the_collector_and_its_defaults():
    passed = DynamicSamplingConfig().collector_arguments()
    parameters = inspect.signature(DynamicSamplingCollector).parameters
    assert passed == {name: parameters[name].default for name in passed}
    assert len(passed) == 5


@pytest.mark.parametrize("correction", [None, {}])
def test_waiting_groups_need_a_corrected_loss(correction):
    loss: dict[str, Any] = {"rollout_correction": correction}
    with pytest.raises(ValueError, match=r"dynamic_sampling\.max_staleness=2 trains on responses of an older policy"):
        DynamicSamplingConfig(max_staleness=2).check_correction(loss)
    DynamicSamplingConfig(max_staleness=0).check_correction(loss)
    DynamicSamplingConfig(max_staleness=2, enabled=False).check_correction(loss)
    DynamicSamplingConfig(max_staleness=2).check_correction({"rollout_correction": {"level": "token"}})


@pytest.mark.parametrize(
    ("coef", "placement", "in_reward", "in_loss"),
    [
        (0.0, "loss", False, False),
        (0.1, "loss", False, True),
        (0.1, "reward", True, False),
        (0.0, "reward", False, False),
    ],
)
def test_the_kl_goes_to_one_place(coef, placement, in_reward, in_loss):
    section = KLConfig(coef=coef, placement=placement, estimator="k2")
    assert section.in_reward is in_reward
    assert section.loss_arguments({}) == ({"kl_coef": coef, "kl_estimator": "k2"} if in_loss else {})


def test_each_place_has_the_estimator_whose_gradient_is_right_there():
    assert KLConfig(coef=0.1).loss_arguments({"kl_coef": 0.0}) == {"kl_coef": 0.1, "kl_estimator": "k3"}
    assert KLConfig(coef=0.1, placement="reward").reward_arguments() == {"coef": 0.1, "estimator": "k1"}
    chosen = KLConfig(coef=0.1, placement="reward", estimator="abs")
    assert chosen.reward_arguments() == {"coef": 0.1, "estimator": "abs"}


def test_a_coefficient_that_would_load_no_reference_is_refused():
    with pytest.raises(ValueError, match=r"loss\.kl_coef=0\.2 must be written as kl\.coef"):
        KLConfig().loss_arguments({"kl_coef": 0.2})


def test_sections_are_checked_like_any_config():
    with pytest.raises(ConfigError, match="missing config key 'dataset'"):
        parse_config({}, EvaluationConfig)
    with pytest.raises(ConfigError, match=r"'pass_at\[1\]' must be int, got '4'"):
        parse_config({"dataset": {}, "pass_at": [1, "4"]}, EvaluationConfig)
    with pytest.raises(ConfigError, match="'on_exhausted' must be one of raise, smaller_batch, keep_uninformative"):
        parse_config({"on_exhausted": "loop"}, DynamicSamplingConfig)
