"""The group `ckpt` reaches the policy, with priors for the cluster or for its groups."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from hetero_fw.app import validate
from hetero_fw.app.build import interval_rule
from hetero_fw.app.validate import require_valid
from hetero_fw.policies import IntervalPolicy


def config_of(prior_mtbf_s: Any) -> DictConfig:
    groups = {"a100": {"device": "a100-80gb"}, "spot": {"device": "v100-16gb"}}
    return OmegaConf.create(
        {
            "hardware": {"name": "mix", "groups": groups},
            "model": {"module": {"_target_": "recipes.gpt.GPTModule"}},
            "data": {
                "train": {"_target_": "hetero_fw.data.ByteTextDataset"},
                "global_batch_size": 4,
            },
            "trainer": {"max_steps": 3},
            "ckpt": {"policy": "adaptive", "prior_mtbf_s": prior_mtbf_s},
        }
    )


def test_prior_of_the_cluster() -> None:
    rule = interval_rule(require_valid(config_of(600)))
    assert rule.policy is IntervalPolicy.ADAPTIVE
    assert rule.prior_mtbf_s == 600


def test_priors_of_groups() -> None:
    rule = interval_rule(require_valid(config_of({"spot": 2e5})))
    assert rule.prior_mtbf_s == {"spot": 2e5}


def test_a_group_that_is_not_there_is_named() -> None:
    (problem,) = validate(config_of({"sport": 2e5}))
    assert "ckpt.prior_mtbf_s.sport" in str(problem)
    assert "Did you mean 'spot'?" in str(problem)
