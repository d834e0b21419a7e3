from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from hetero_fw.checkpoint import checkpoint_path, load_checkpoint
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import PREFIX, fill, weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fill(tmp_path, [7])
    return checkpoint_path(tmp_path, PREFIX, 7)


def test_some_of_the_tensors_can_be_loaded(path: Path) -> None:
    count = {"model.count": torch.tensor(0)}
    load_checkpoint(path, count)
    assert count["model.count"].item() == 7


def test_missing_names_are_all_named(path: Path) -> None:
    wanted = {**weights(0), "model.other": torch.zeros(1), "model.third": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"no tensors named model\.other, model\.third"):
        load_checkpoint(path, wanted)


def test_sizes_that_differ_are_named_with_both(path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"model\.weight is \[1000, 3\], expected \[3, 1000\]"
    ):
        load_checkpoint(path, {"model.weight": torch.zeros(3, 1000)})


def test_floating_point_values_are_converted_and_others_are_not(path: Path) -> None:
    tensors = {"optim.weight.exp_avg": torch.zeros(1000, 3)}
    load_checkpoint(path, tensors)
    assert tensors["optim.weight.exp_avg"].unique().tolist() == [-7.0]
    with pytest.raises(CheckpointError, match=r"model\.count is int64"):
        load_checkpoint(path, {"model.count": torch.tensor(0.0)})


def test_a_tensor_that_is_not_contiguous_can_be_filled(path: Path) -> None:
    storage = torch.zeros(3, 1000)
    load_checkpoint(path, {"model.weight": storage.t()})
    assert storage.unique().tolist() == [7.0]


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(tmp_path / "absent", weights(0))


def test_nothing_is_unpickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("reading a checkpoint must not execute code")

    for module, name in [(pickle, "load"), (pickle, "loads"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    load_checkpoint(path, weights(0))
