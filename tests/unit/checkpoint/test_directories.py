from __future__ import annotations

from pathlib import Path

import pytest

from hetero_fw.checkpoint import checkpoint_path, remove_stale_temporaries
from hetero_fw.checkpoint.directories import marked_path, parse_name, publish

PREFIX = "hetero_ckpt"


def directory(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_names_are_those_of_the_contract(tmp_path: Path) -> None:
    assert checkpoint_path(tmp_path, PREFIX, 500).name == "hetero_ckpt-step-00000500"
    temporary = marked_path(checkpoint_path(tmp_path, PREFIX, 500), "tmp", 3, "ab12")
    assert temporary.name == "hetero_ckpt-step-00000500.tmp-3-ab12"


def test_names_parse_back() -> None:
    published = parse_name("hetero_ckpt-step-00000500", PREFIX)
    assert published is not None
    assert (published.step, published.mark) == (500, "")
    temporary = parse_name("hetero_ckpt-step-123456789.tmp-3-ab12", PREFIX)
    assert temporary is not None
    assert (temporary.step, temporary.mark, temporary.attempt) == (123456789, "tmp", 3)


@pytest.mark.parametrize(
    "name",
    [
        "other-step-00000500",
        "hetero_ckpt-step-500",
        "hetero_ckpt-step-00000500.bak",
        "hetero_ckpt-step-00000500x",
        "x-hetero_ckpt-step-00000500",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert parse_name(name, PREFIX) is None


def test_publish_replaces_a_rejected_predecessor(tmp_path: Path) -> None:
    final = directory(checkpoint_path(tmp_path, PREFIX, 5), "old")
    temporary = directory(marked_path(final, "tmp", 1, "a"), "new")
    publish(temporary, final, attempt=1, token="a")
    assert (final / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [final]


def test_stale_directories_go_and_others_stay(tmp_path: Path) -> None:
    final = directory(checkpoint_path(tmp_path, PREFIX, 5), "kept")
    stale = [
        directory(marked_path(final, "tmp", 1, "a"), ""),
        directory(marked_path(final, "retired", 2, "b"), ""),
        directory(marked_path(final, "replaced", 2, "c"), ""),
    ]
    later = directory(marked_path(final, "tmp", 3, "d"), "")
    foreign = directory(tmp_path / "hetero_ckpt-step-00000005.mine", "")
    assert set(remove_stale_temporaries(tmp_path, PREFIX, attempt=2)) == set(stale)
    assert set(tmp_path.iterdir()) == {final, later, foreign}


def test_a_predecessor_comes_back_if_its_successor_was_not_published(tmp_path: Path) -> None:
    final = checkpoint_path(tmp_path, PREFIX, 5)
    directory(marked_path(final, "replaced", 1, "a"), "old")
    remove_stale_temporaries(tmp_path, PREFIX, attempt=2)
    assert (final / "file").read_text() == "old"


def test_nothing_to_remove_where_there_is_nothing(tmp_path: Path) -> None:
    assert remove_stale_temporaries(tmp_path / "absent", PREFIX, attempt=2) == ()
