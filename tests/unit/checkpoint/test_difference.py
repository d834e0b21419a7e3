from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_fw.checkpoint import Likeness, checkpoint_path, compare_checkpoints
from hetero_fw.checkpoint.manifest import DTYPES
from hetero_fw.errors import CheckpointError
from tests.unit.checkpoint.examples import PREFIX, WAIT_S, make_saver


def commit(root: Path, step: int, tensors: dict[str, torch.Tensor]) -> Path:
    saver = make_saver(root)
    handle = saver.save(step, tensors, {}, reason="test", may_be_infinite=tensors.keys())
    assert handle.wait(WAIT_S)
    return checkpoint_path(root, PREFIX, step)


def test_every_tensor_is_compared_by_name(tmp_path: Path) -> None:
    shared = {"mask": torch.tensor([0.0, float("-inf")]), "flags": torch.ones(3) > 0}
    a = commit(
        tmp_path, 1, {**shared, "x": torch.zeros(2, 2), "y": torch.ones(2), "z": torch.ones(1)}
    )
    b = commit(
        tmp_path,
        2,
        {
            **shared,
            "x": torch.tensor([[0.0, -3.5], [1.0, 0.0]]),
            "y": torch.ones(2, dtype=torch.float64),
            "zz": torch.ones(1),
        },
    )
    found = {item.fqn: item for item in compare_checkpoints(a, b)}
    assert list(found) == ["flags", "mask", "x", "y", "z", "zz"]
    assert found["mask"].likeness is found["flags"].likeness is Likeness.EQUAL
    assert found["x"].likeness is Likeness.DIFFERENT
    assert found["x"].max_abs_difference == 3.5
    assert found["y"].likeness is Likeness.OTHER_SHAPE
    assert found["y"].detail == "float32 [2] and float64 [2]"
    assert found["z"].likeness is Likeness.ONLY_IN_A
    assert found["zz"].likeness is Likeness.ONLY_IN_B


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_kind_of_number_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    a = commit(tmp_path, 1, {"x": torch.tensor([0, 1, 1]).to(dtype)})
    b = commit(tmp_path, 2, {"x": torch.tensor([0, 1, 0]).to(dtype)})
    (found,) = compare_checkpoints(a, b)
    assert found.max_abs_difference == 1.0


def test_equal_infinities_beside_a_difference(tmp_path: Path) -> None:
    a = commit(tmp_path, 1, {"x": torch.tensor([float("inf"), 1.0])})
    b = commit(tmp_path, 2, {"x": torch.tensor([float("inf"), 1.5])})
    (found,) = compare_checkpoints(a, b)
    assert found.max_abs_difference == 0.5


def test_a_damaged_one_is_named(tmp_path: Path) -> None:
    a, b = (commit(tmp_path, step, {"x": torch.full((9,), step)}) for step in (1, 2))
    (b / "shard-00000.bin").write_bytes(bytes(72))
    with pytest.raises(CheckpointError, match=r"step-00000002/shard-00000\.bin"):
        list(compare_checkpoints(a, b))
