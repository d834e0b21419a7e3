from __future__ import annotations

from pathlib import Path

import pytest

from hetero_fw.checkpoint import checkpoint_path
from hetero_fw.checkpoint.directories import publish, retire, step_of

PREFIX = "hetero_ckpt"


def directory(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    return path


def test_names_are_those_of_the_contract(tmp_path: Path) -> None:
    assert checkpoint_path(tmp_path, PREFIX, 500).name == "hetero_ckpt-step-00000500"


def test_names_parse_back() -> None:
    assert step_of("hetero_ckpt-step-00000500", PREFIX) == 500
    assert step_of("hetero_ckpt-step-123456789", PREFIX) == 123456789


@pytest.mark.parametrize(
    "name",
    [
        "other-step-00000500",
        "hetero_ckpt-step-500",
        "hetero_ckpt-step-00000500.bak",
        "hetero_ckpt-step-00000500.replaced-ab12",
        "hetero_ckpt-step-00000500x",
        "x-hetero_ckpt-step-00000500",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert step_of(name, PREFIX) is None


def test_publish_replaces_a_rejected_predecessor(tmp_path: Path) -> None:
    final = directory(checkpoint_path(tmp_path, PREFIX, 5), "old")
    temporary = directory(tmp_path / "staging" / "new", "new")
    retired = tmp_path / "retired"
    retired.mkdir()
    publish(temporary, final, retired=retired, token="a")
    assert (final / "file").read_text() == "new"
    assert list(retired.iterdir()) == []


def test_publish_without_its_directories_changes_nothing(tmp_path: Path) -> None:
    final = directory(checkpoint_path(tmp_path, PREFIX, 5), "old")
    temporary = directory(tmp_path / "staging" / "new", "new")
    with pytest.raises(FileNotFoundError):
        publish(temporary, final, retired=tmp_path / "gone", token="a")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "gone" / "new", final, retired=tmp_path / "staging", token="a")
    assert (final / "file").read_text() == "old"


def test_retire_deletes_only_where_it_can_move(tmp_path: Path) -> None:
    path = directory(checkpoint_path(tmp_path, PREFIX, 5), "old")
    with pytest.raises(FileNotFoundError):
        retire(path, into=tmp_path / "gone", token="a")
    assert (path / "file").read_text() == "old"
    (tmp_path / "retired").mkdir()
    retire(path, into=tmp_path / "retired", token="a")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["retired"]
