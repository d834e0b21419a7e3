"""The schema's rules on plain values."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pytest

from hetero_fw.app.check import all_paths, check_section, shown
from hetero_fw.app.plain import UNREADABLE
from hetero_fw.app.schema import Ckpt, Config, Emulation, Hardware, Optim, Parallel, keys_of


def problems(values: dict[str, Any], section: type) -> list[str]:
    return [str(problem) for problem in check_section(values, section, "s")]


@pytest.mark.parametrize("value", ["auto", "uniform", [1, 2], [0]])
def test_alternatives_fit(value: Any) -> None:
    assert problems({"batch_split": value}, Parallel) == []


@pytest.mark.parametrize("value", ["by_speed", [1, "a"], [-1], 4, None, True, {"a": 1}])
def test_alternatives_do_not_fit(value: Any) -> None:
    (text,) = problems({"batch_split": value}, Parallel)
    assert text.startswith("s.batch_split")
    assert "auto, uniform or a list" in text


def test_a_whole_number_is_a_number_but_true_is_none() -> None:
    assert problems({"headroom": 2}, Emulation) == []
    assert len(problems({"headroom": True}, Emulation)) == 1
    assert len(problems({"zero_stage": True}, Parallel)) == 1
    assert len(problems({"keep_latest_k": 3.0}, Ckpt)) == 1


def test_bounds_are_named() -> None:
    (text,) = problems({"headroom": 0.5}, Emulation)
    assert "s.headroom=0.5: must be a number >= 1 " in text
    (text,) = problems({"prior_mtbf_s": 0}, Ckpt)
    assert "a number > 0" in text


def test_entries_named_by_the_user_are_checked_inside() -> None:
    values = {"name": "x", "groups": {"g": {"device": "l4", "num_nodes": -1, "typo": 1}}}
    texts = problems(values, Hardware)
    assert [text.split(": ")[0] for text in texts] == [
        "s.groups.g.num_nodes=-1",
        "s.groups.g.typo",
    ]


def test_required_keys_are_missed() -> None:
    assert problems({"groups": {"g": {}}}, Hardware) == [
        "s.groups.g.device: missing (device type by its catalog name).",
        "s.name: missing (name of the cluster).",
    ]


def test_targets_are_looked_at_at_any_depth() -> None:
    inner = {"_target_": "torch.nn.Lin"}
    component = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": [inner, {"a": inner}]}
    assert problems({"optimizer": component}, Optim) == []  # torch.nn makes its names on import
    component["lr"] = [{"_target_": "torch.optim.Lin"}]
    (text,) = problems({"optimizer": component}, Optim)
    assert text.startswith("s.optimizer.lr[0]._target_=torch.optim.Lin: torch.optim has no 'Lin'")


def test_arguments_are_known_without_importing() -> None:
    component = {"_target_": "torch.optim.AdamW", "_partial_": True, "wieght_decay": 0.1}
    (text,) = problems({"optimizer": component}, Optim)
    assert "torch.optim.AdamW takes no such argument. Did you mean 'weight_decay'?" in text


def test_what_could_not_be_read_is_passed_over() -> None:
    assert problems({"optimizer": UNREADABLE, "base_batch_size": UNREADABLE}, Optim) == []
    assert problems({"batch_split": [UNREADABLE, 1]}, Parallel) == []


def test_every_key_has_a_line_of_help() -> None:
    assert len(all_paths()) > 70
    sections = [Config, *(k.type for k in keys_of(Config).values() if is_dataclass(k.type))]
    for section in sections:
        for key in keys_of(section).values():
            assert 0 < len(key.rule.help) <= 60, key.name


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), ([1, None], "[1,null]"), ("a", "a"), (1.5, "1.5")],
)
def test_values_are_shown_as_they_are_typed(value: Any, text: str) -> None:
    assert shown(value) == text
