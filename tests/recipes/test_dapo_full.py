"""The recipe in one process: what it computes, step by step, and what it leaves behind."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file

from dapo_components.reporting import read_rollouts
from dapo_components.training.config import ConfigError
from dapo_components.training.guards import RunStopped
from tests.recipes.recipe_runs import (
    ROOT,
    config_values,
    make,
    make_inputs,
    metrics,
    run,
    summary,
    without_times,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*set_vital.*:UserWarning",  # torchtune's own
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def weights(output_dir, step):
    (path,) = (output_dir / "checkpoints" / f"step_{step:06d}" / "model").glob("*.safetensors")
    return load_file(path)


def equal_weights(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def learned(inputs, tmp_path_factory):
    """One longer run, looked at by several tests."""
    output_dir = tmp_path_factory.mktemp("learned") / "run"
    run(
        config_values(
            inputs,
            output_dir,
            num_steps=8,
            prompts_per_step=8,
            responses_per_update=16,
            epochs_per_rollout=1,
            soft_overlong={
                "_component_": "dapo_components.rewards.SoftOverlongPunishment",
                "max_length": 8,
                "buffer_length": 2,
                "penalty": 0.5,
            },
            metric_logger={
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(output_dir / "logs"),
            },
        )
    )
    return output_dir


def test_it_learns(learned):
    facts = summary(learned)
    assert facts["accuracy_before"] < 0.3
    assert facts["accuracy_after"] > 0.8
    assert facts["num_steps"] == 8
    assert facts["num_updates"] == 16
    assert facts["stop_reason"] == "finished"
    assert facts["seed"] == 0
    assert facts["seconds"] > 0


def test_first_update_of_every_rollout_has_ratio_one_and_later_ones_do_not(learned):
    rows = metrics(learned)
    assert [row["step"] for row in rows] == list(range(1, 17))
    first, second = rows[0::2], rows[1::2]
    assert max(row["log_ratio_max"] for row in first) <= 1e-5
    assert min(row["log_ratio_max"] for row in second) > 1e-3


def test_sampler_and_trainer_agree_on_every_step(learned):
    # A minibatch of groups that waited since the step before holds no token of the current policy: nothing to compare.
    rows = [row for row in metrics(learned) if "sampling/log_prob_diff_max" in row]
    assert len(rows) >= 8
    assert all(0 <= row["sampling/log_prob_diff_mean"] <= row["sampling/log_prob_diff_max"] <= 1e-4 for row in rows)


def test_every_metric_is_documented_and_finite(learned):
    documented = set(re.findall(r"`([\w/@]+)`", (ROOT / "docs" / "recipes" / "dapo.md").read_text()))
    for row in metrics(learned):
        assert {name for name in row if not re.fullmatch(r"rewards/\w+/\w+", name)} <= documented
        assert row.get("rewards/one/ok", 32.0) % 4 == 0
        assert all(value is not None and math.isfinite(value) for value in row.values())


def test_metrics_equal_a_recomputation_from_the_rollout_log(learned):
    rollouts = list(read_rollouts(learned / "rollouts_rank0.jsonl"))
    rows = {row["rollout_step"]: row for row in metrics(learned)}
    assert sum("sampling/accuracy" in row for row in rows.values()) >= 4  # a step may live on waiting groups alone
    for step, row in rows.items():
        drawn = [rollout for rollout in rollouts if rollout["step"] == step]
        if not drawn:
            continue
        assert row["sampling/accuracy"] == pytest.approx(sum(r["accuracy"] for r in drawn) / len(drawn))
        assert row["sampling/launched"] == len(drawn) / 4
        assert row["sampling/kept_share"] == pytest.approx(sum(r["kept"] for r in drawn) / len(drawn))


def test_the_torchtune_logger_gets_the_same_numbers(learned):
    (log,) = (learned / "logs").glob("*.txt")
    first = log.read_text().splitlines()[1]
    assert f"reward:{metrics(learned)[0]['reward']}" in first


def test_resuming_gives_the_run_that_was_never_stopped(inputs, tmp_path):
    run(config_values(inputs, tmp_path / "whole", num_steps=4))
    run(config_values(inputs, tmp_path / "parts", num_steps=2))
    run(config_values(inputs, tmp_path / "parts", num_steps=4, resume=True))
    assert equal_weights(weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4))
    assert without_times(metrics(tmp_path / "whole")) == without_times(metrics(tmp_path / "parts"))
    whole = [list(read_rollouts(tmp_path / name / "rollouts_rank0.jsonl")) for name in ("whole", "parts")]
    assert whole[0] == whole[1]


def test_a_new_learning_rate_counts_on_resume_and_warm_up_goes_on_where_it_was(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run", num_steps=2, warmup_steps=4)
    run(values)
    run(
        {
            **values,
            "num_steps": 4,
            "resume": True,
            "optimizer": {**values["optimizer"], "lr": 1e-3, "weight_decay": 0.5},
        }
    )
    assert [row["lr"] for row in metrics(tmp_path / "run")] == pytest.approx([3e-3 / 4, 6e-3 / 4, 3e-3 / 4, 1e-3])
    recipe = make(
        {**values, "num_steps": 4, "resume": True, "optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-3}}
    )
    with pytest.raises(ConfigError, match="the checkpoint holds the state of AdamW, the config names SGD"):
        recipe.setup()


def test_the_reference_of_the_kl_is_the_initial_model_after_a_resume_too(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run", num_steps=2, kl={"coef": 0.1})
    initial = run(values).reference.state_dict()
    resumed = make({**values, "num_steps": 3, "resume": True})
    resumed.setup()
    assert equal_weights(initial, resumed.reference.state_dict())
    assert not equal_weights(initial, resumed.model.state_dict())


def test_a_checkpoint_of_more_processes_is_refused(inputs, tmp_path):
    recipe = run(config_values(inputs, tmp_path / "run", num_steps=1))
    state = torch.load(recipe.checkpoints.latest() / "state.pt", weights_only=True)
    state["collectors"] *= 2
    with pytest.raises(ConfigError, match="written by 2 processes, this run has 1; resume with the same"):
        recipe._load_state(state)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_steps": 0}, "'num_steps' must be >= 1, got 0"),
        ({"max_grad_norm": -1.0}, "'max_grad_norm' must be > 0 and finite, got -1.0"),
        ({"max_grad_norm": float("inf")}, "'max_grad_norm' must be > 0 and finite, got inf"),
        ({"warmup_steps": -5}, "'warmup_steps' must be >= 0, got -5"),
        ({"kl": {"coef": float("inf")}}, "kl.coef must be >= 0 and finite, got inf"),
        ({"max_response_length": 100}, r"= 108 tokens exceed the 64 of the model or generator"),
        (
            {"evaluation": {"dataset": {}, "num_samples": 4, "pass_at": [8]}},
            r"pass_at must hold numbers in \[1, .*got 8",
        ),
    ],
)
def test_numbers_out_of_range_are_refused_before_the_folder_is_taken(inputs, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        make(config_values(inputs, tmp_path / "run", **overrides)).setup()
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_reward_that_fails_in_the_evaluation_stops_the_run_in_good_order(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run")
    values["reward"] = {**values["reward"], "rewards": {"broken": "tests.recipes.recipe_runs:raises"}}
    with pytest.raises(RunStopped, match=r"rank 0: reward 'broken' raised ZeroDivisionError"):
        run(values)
    assert summary(tmp_path / "run")["stop_reason"] == "reward failed"


def test_another_seed_is_another_run(inputs, tmp_path):
    run(config_values(inputs, tmp_path / "a", num_steps=1))
    run(config_values(inputs, tmp_path / "b", num_steps=1, seed=1))
    assert not equal_weights(weights(tmp_path / "a", 1), weights(tmp_path / "b", 1))


def test_a_folder_with_a_run_is_refused_and_a_failed_start_does_not_claim_it(inputs, tmp_path):
    broken = config_values(inputs, tmp_path / "run")
    broken["dataset"] = {**broken["dataset"], "source": str(tmp_path / "nowhere.jsonl")}
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        make(broken).setup()
    run(config_values(inputs, tmp_path / "run", num_steps=1))
    with pytest.raises(ConfigError, match="already holds a run; add resume=true"):
        make(config_values(inputs, tmp_path / "run")).setup()


def test_a_checkpoint_of_another_shape_is_refused_by_name(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run")
    values["model"] = {**values["model"], "num_layers": 3}
    with pytest.raises(ConfigError, match=r"missing layers\.2\.attn"):
        make(values).setup()


def test_waiting_groups_need_a_correction(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run", loss={"_component_": "dapo_components.losses.DAPOLoss"})
    with pytest.raises(ValueError, match=r"max_staleness=1 trains on responses of an older policy.*rollout_correction"):
        make(values)


def test_no_informative_group_stops_the_run_with_counts_and_a_checkpoint(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run", dynamic_sampling={"max_gen_batches": 2})
    values["reward"] = {**values["reward"], "rewards": {"none": "tests.recipes.recipe_runs:never_right"}}
    with pytest.raises(
        RunStopped, match=r"0 of 4 groups after 2 generation batches \(\d+ groups launched.*accuracy all 0"
    ):
        run(values)
    facts = summary(tmp_path / "run")
    assert facts["stop_reason"] == "exhausted"
    assert (tmp_path / "run" / "checkpoints" / "step_000000" / "model" / "config.json").exists()


def test_a_group_whose_rewards_differ_by_length_only_is_dropped(inputs, tmp_path):
    """Nobody is right, but the length penalty would tell the responses apart: the filter must not see it."""
    values = config_values(
        inputs,
        tmp_path / "run",
        dynamic_sampling={"max_gen_batches": 1},
        soft_overlong={
            "_component_": "dapo_components.rewards.SoftOverlongPunishment",
            "max_length": 8,
            "buffer_length": 8,
        },
    )
    values["reward"] = {**values["reward"], "rewards": {"none": "tests.recipes.recipe_runs:never_right"}}
    with pytest.raises(RunStopped, match="0 of 4 groups"):
        run(values)
    lengths = {row["response_length"] for row in read_rollouts(tmp_path / "run" / "rollouts_rank0.jsonl")}
    assert len(lengths) > 1


def test_without_dynamic_sampling_every_group_is_trained_on(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run", num_steps=1, dynamic_sampling={"enabled": False})
    run(values)
    (row,) = metrics(tmp_path / "run")
    assert row["sampling/launched"] == row["sampling/used"] == 4
    assert row["sampling/filtered"] == 0


def test_kl_in_the_loss_is_zero_before_the_first_update_and_changes_the_run_after_it(inputs, tmp_path):
    recipe = run(config_values(inputs, tmp_path / "kl", num_steps=3, kl={"coef": 0.1}))
    assert recipe.loss.settings["kl_coef"] == 0.1
    assert recipe.loss.settings["kl_estimator"] == "k3"
    rows = metrics(tmp_path / "kl")
    assert rows[0]["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert rows[2]["kl_loss"] > 1e-5
    run(config_values(inputs, tmp_path / "plain", num_steps=3))
    assert equal_weights(weights(tmp_path / "kl", 3), weights(tmp_path / "plain", 3)) is False


def test_kl_in_the_reward_is_subtracted_from_it_and_not_added_to_the_loss(inputs, tmp_path):
    recipe = make(config_values(inputs, tmp_path / "run", kl={"coef": 0.5, "placement": "reward"}))
    recipe.setup()
    batch = recipe.snapshot_log_probs(recipe.collect())
    assert (batch["old_log_prob"] - batch["ref_log_prob"]).abs().max() < 1e-5
    batch["ref_log_prob"] = batch["old_log_prob"] - 0.1  # k1 is 0.1 nats a token
    before = batch["reward"].clone()
    shaped = recipe.shape_reward(batch)["reward"]
    torch.testing.assert_close(shaped, before - 0.5 * 0.1 * batch["response_length"])
    assert recipe.loss.settings["kl_coef"] == 0.0


def test_a_kl_coefficient_of_the_loss_itself_is_refused(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run")
    values["loss"] = {**values["loss"], "kl_coef": 0.04}
    with pytest.raises(ValueError, match=r"loss.kl_coef=0.04 must be written as kl.coef"):
        make(values).setup()


def test_overlong_filter_takes_truncated_responses_out_of_the_loss(inputs, tmp_path):
    """Most responses of a random model run into a limit of 16 tokens, some stop by chance."""
    plain = config_values(
        inputs, tmp_path / "plain", num_steps=1, prompts_per_step=8, group_size=8, max_response_length=16
    )
    run(plain)
    run({**plain, "output_dir": str(tmp_path / "filtered"), "overlong_filter": True})
    before, after = metrics(tmp_path / "plain")[0], metrics(tmp_path / "filtered")[0]
    assert 1 > before["completions/clipped_ratio"] == after["completions/clipped_ratio"] > 0.5
    assert before["reward"] == after["reward"]


def test_overlong_filter_leaves_the_tokens_of_truncated_responses_out(inputs, tmp_path):
    values = config_values(
        inputs, tmp_path / "run", prompts_per_step=8, group_size=8, max_response_length=16, overlong_filter=True
    )
    recipe = make(values)
    recipe.setup()
    batch = recipe.overlong_filter(recipe.collect())
    assert 0 < batch["truncated"].sum() < batch["truncated"].numel()
    torch.testing.assert_close(batch["loss_mask"].sum(-1), batch["response_length"] * ~batch["truncated"])


def test_broken_weights_stop_the_run_without_replacing_the_last_good_checkpoint(inputs, tmp_path):
    recipe = make(config_values(inputs, tmp_path / "run", num_steps=4, save_every=1, keep_checkpoints=1))
    recipe.setup()
    log_step = recipe.log_step

    def break_weights(*arguments):
        log_step(*arguments)
        if recipe.step == 2:
            next(recipe.model.parameters()).data.fill_(float("nan"))

    recipe.log_step = break_weights
    recipe.cfg.save_every = 10**6
    recipe.save_checkpoint()
    with pytest.raises(RunStopped, match="responses failed in the engine"):
        recipe.train()
    recipe.cleanup()
    assert summary(tmp_path / "run")["stop_reason"] == "generation failed"
    assert [path.name for path in recipe.checkpoints.list()] == ["step_000000"]


def test_a_reward_that_raises_stops_the_run_with_a_checkpoint(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run")
    values["reward"] = {**values["reward"], "rewards": {"broken": "tests.recipes.recipe_runs:raises"}}
    values["evaluation"] = None
    with pytest.raises(RunStopped, match=r"reward 'broken' raised ZeroDivisionError"):
        run(values)
    assert summary(tmp_path / "run")["stop_reason"] == "reward failed"
    assert summary(tmp_path / "run")["accuracy_after"] is None
    assert (tmp_path / "run" / "checkpoints" / "step_000000").exists()


def test_dry_run_describes_and_loads_nothing(inputs, tmp_path):
    values = config_values(inputs, tmp_path / "run", prompts_per_step=8, responses_per_update=16)
    values["checkpointer"] = {**values["checkpointer"], "checkpoint_dir": "nowhere"}
    text = make(values).describe()
    assert "optimizer steps per rollout            2" in text
    assert "GiB" in text
    assert not (tmp_path / "run").exists()


def test_stored_config_names_what_changed_on_resume(inputs, tmp_path, capsys):
    run(config_values(inputs, tmp_path / "run", num_steps=1))
    make(config_values(inputs, tmp_path / "run", num_steps=1, resume=True, max_grad_norm=0.5)).setup()
    assert "changed since this run was started: max_grad_norm: 1.0 -> 0.5" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["max_grad_norm"] == 0.5
