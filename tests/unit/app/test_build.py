"""Configuration to module, optimizer and callbacks."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from omegaconf import DictConfig

from hetero_fw.app import compose_checked
from hetero_fw.app.build import (
    _own_optimizer,
    build_callbacks,
    build_loggers,
    build_module,
    build_train_data,
    build_val_data,
    check_kept,
    init_weights,
    interval_rule,
    make,
)
from hetero_fw.errors import ConfigError
from hetero_fw.policies import IntervalPolicy
from tests.unit.planning.examples import plan


class Noise:
    """Samples that the constructor draws, and its arguments too."""

    def __init__(self, **arguments: Any) -> None:
        self.samples = [float(np.random.rand()) + random.random() for _ in range(200)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> float:
        return self.samples[index]


class NoisyModule(pl.LightningModule):
    """Weights from numpy and random."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([np.random.rand(), random.random()]))


SMALL = ("model.module.model_dim=16", "model.module.num_layers=1", "data.sequence_length=8")


def config(*overrides: str) -> DictConfig:
    return compose_checked([*SMALL, *overrides])


def optimizers_of(cfg: DictConfig) -> Any:
    return build_module(cfg).configure_optimizers()


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(99)
    first = build_module(config())
    second = build_module(config())
    other = build_module(config("seed=1"))
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    pairs = zip(first.parameters(), other.parameters(), strict=True)
    assert not all(torch.equal(left, right) for left, right in pairs)


def test_what_constructors_draw_depends_on_the_seed_alone() -> None:
    target = f"model.module._target_={__name__}.NoisyModule"
    cfg = config(target, "data.num_workers=0", "trainer.val_interval_steps=1")
    cfg.data.train = cfg.data.val = {"_target_": f"{__name__}.Noise"}
    made = plan(global_batch_size=cfg.data.global_batch_size)

    def drawn() -> list[Any]:
        weight = build_module(cfg).weight
        np.random.rand(), random.random()
        train, val = build_train_data(cfg, made, 0, start_step=0), build_val_data(cfg, made, 0)
        assert val is not None
        return [weight.tolist(), train.dataset.dataset.samples, val.dataset.dataset.samples]  # type: ignore[attr-defined]

    first = drawn()
    assert drawn() == first
    cfg.seed += 1
    assert not any(one == other for one, other in zip(drawn(), first, strict=True))


def test_learning_rate_is_scaled_with_the_batch() -> None:
    overrides = ("data.global_batch_size=96", "optim.optimizer.lr=0.01")
    assert optimizers_of(config(*overrides)).param_groups[0]["lr"] == pytest.approx(0.01)
    scaled = optimizers_of(config(*overrides, "optim.base_batch_size=32"))
    assert scaled.param_groups[0]["lr"] == pytest.approx(0.03)


def test_scheduler_starts_from_the_scaled_rate_and_counts_steps() -> None:
    found = optimizers_of(
        config(
            "data.global_batch_size=64",
            "optim.optimizer.lr=0.01",
            "optim.base_batch_size=32",
            "optim.scheduler={_target_:torch.optim.lr_scheduler.StepLR,_partial_:true,step_size:2}",
        )
    )
    assert found["lr_scheduler"]["interval"] == "step"
    assert found["lr_scheduler"]["scheduler"].base_lrs == pytest.approx([0.02])


def test_optimizer_of_the_module_itself_is_left_alone() -> None:
    own = config("optim=module", "model.module._target_=tests.recovery.modules.OwnOptimizerGPT")
    assert isinstance(optimizers_of(own), torch.optim.SGD)
    two = config("optim=module", "model.module._target_=tests.recovery.modules.TwoOptimizersGPT")
    with pytest.raises(ConfigError, match="returns 2 optimizers"):
        optimizers_of(two)
    with pytest.raises(ConfigError, match="has no configure_optimizers"):
        build_module(config("optim=module"))


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["list", "tuple", "dicts", "with schedules"])
def test_one_optimizer_in_every_form_that_lightning_takes(number: int, form: str) -> None:
    optimizers = [torch.optim.SGD([torch.zeros(1)]) for _ in range(number)]
    returned: dict[str, Any] = {
        "list": optimizers,
        "tuple": tuple(optimizers),
        "dicts": [{"optimizer": optimizer} for optimizer in optimizers],
        "with schedules": (optimizers, []),
    }
    configure = _own_optimizer(config(), lambda: returned[form])
    if number == 1:
        assert configure() is returned[form]
    else:
        with pytest.raises(ConfigError, match=f"returns {number} optimizers"):
            configure()


def test_frozen_parameters_are_not_optimized() -> None:
    module = build_module(config())
    parameters = list(module.parameters())
    parameters[0].requires_grad = False
    (group,) = module.configure_optimizers().param_groups  # type: ignore[union-attr]
    assert len(group["params"]) == len(parameters) - 1


def test_module_of_another_kind_is_refused() -> None:
    cfg = config("model.module._target_=tests.recovery.modules.NoModule")
    with pytest.raises(ConfigError, match="must be a LightningModule"):
        build_module(cfg)


def test_callbacks_and_loggers() -> None:
    cfg = config("+callbacks.timer._target_=lightning.pytorch.callbacks.Timer", "logger=none")
    assert any(isinstance(callback, pl.callbacks.Timer) for callback in build_callbacks(cfg))
    assert build_loggers(cfg, rank=0) == []
    assert make(None, "nothing") is None


AVERAGES = (
    "+callbacks.averages._target_=lightning.pytorch.callbacks.EMAWeightAveraging",
    "+callbacks.averages._target_=tests.recovery.modules.OwnAverages",
)


@pytest.mark.parametrize("averages", AVERAGES)
def test_averages_that_a_checkpoint_would_lose_are_refused(averages: str) -> None:
    told = "puts averages in the place of a checkpoint's weights"
    with pytest.raises(ConfigError, match=told) as raised:
        build_callbacks(config(averages))
    assert str(raised.value).startswith("callbacks.averages")
    assert len(build_callbacks(config(averages, "ckpt=none", "callbacks.emergency_save=null"))) == 1


def test_interval_rule() -> None:
    rule = interval_rule(config("ckpt=fixed", "ckpt.interval_steps=7"))
    assert rule.policy is IntervalPolicy.FIXED
    assert rule.interval_steps == 7


def test_data_starts_where_training_does() -> None:
    cfg = config("trainer.max_steps=5", "data.max_bytes=20000")
    made = plan(global_batch_size=cfg.data.global_batch_size)
    whole = list(build_train_data(cfg, made, 1, start_step=0))
    rest = list(build_train_data(cfg, made, 1, start_step=3))
    assert (len(whole), len(rest)) == (5, 2)
    for left, right in zip(whole[3:], rest, strict=True):
        assert sum(item.num_samples for item in left) == made.shares[1]
        for mine, theirs in zip(left, right, strict=True):
            assert torch.equal(mine.batch["input_ids"], theirs.batch["input_ids"])


def test_validation_only_where_it_is_asked_for() -> None:
    made = plan(global_batch_size=56)
    assert build_val_data(config(), made, 0) is None
    cfg = config(
        "trainer.val_interval_steps=2", "trainer.limit_val_batches=1", "data.max_bytes=200000"
    )
    loader = build_val_data(cfg, made, 0)
    assert loader is not None
    assert len(list(loader)) >= 1


def test_a_fresh_run_can_start_from_a_file_of_weights(tmp_path: Path) -> None:
    given = build_module(config("seed=1"))
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    cfg = config(f"model.init_from={tmp_path}/weights.pt")
    module = build_module(cfg)
    init_weights(cfg, module)
    for left, right in zip(module.parameters(), given.parameters(), strict=True):
        assert torch.equal(left, right)


def test_weights_of_another_model_are_a_problem_of_the_configuration(tmp_path: Path) -> None:
    torch.save({"blocks.0.wight": torch.ones(1)}, tmp_path / "weights.pt")
    cfg = config(f"model.init_from={tmp_path}/weights.pt")
    with pytest.raises(ConfigError, match=r"model\.init_from: .* does not fit the module"):
        init_weights(cfg, build_module(cfg))


def test_without_a_file_the_weights_stay() -> None:
    cfg = config()
    module = build_module(cfg)
    init_weights(cfg, module)
    pairs = zip(module.parameters(), build_module(cfg).parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.module.num_heads=5", "num_heads=5"),
        ("model.module.dropout=7", "model.module (recipes.gpt.GPTModule): ValueError: dropout"),
        ("optim.optimizer.lr=-1", "optim.optimizer (torch.optim.AdamW): ValueError: Invalid"),
    ],
)
def test_what_a_constructor_refuses_is_a_configuration_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_module(config(override)).configure_optimizers()


def test_a_module_whose_state_no_checkpoint_holds_is_named() -> None:
    extra = "model.module._target_=tests.recovery.keeping.ExtraGPT"
    with pytest.raises(ConfigError) as caught:
        check_kept(config(extra), build_module(config(extra)))
    told = str(caught.value)
    assert "model.module (tests.recovery.keeping.ExtraGPT): _extra_state of the module" in told
    assert "is no tensor (dict); keep extra state in a buffer." in told
    unsaved = config(extra, "ckpt=none")
    assert check_kept(unsaved, build_module(unsaved)) == []
