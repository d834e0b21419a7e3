from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_fw.checkpoint import HashAlgorithm, NodeFindings, examine_node_copies, find_node_copies
from tests.unit.checkpoint.examples import PREFIX
from tests.unit.checkpoint.node_directories import copy_of, damage, shard, write_copies

# Each part on two of three nodes.
HOLDERS = {"a": (0, 1), "b": (1, 2), "c": (2, 0)}


def examined(root: Path, *, reads_bytes: bool = True) -> list[NodeFindings]:
    found = find_node_copies(root, PREFIX)
    return [examine_node_copies(copies, reads_bytes=reads_bytes) for copies in found]


def test_all_nodes_together_hold_every_file(tmp_path: Path) -> None:
    for step in (5, 10):
        write_copies(tmp_path, step, HOLDERS)
    found = find_node_copies(tmp_path, PREFIX)
    assert [copies.step for copies in found] == [10, 5]
    assert list(found[0].directories) == ["a", "b", "c"]
    assert examined(tmp_path) == [NodeFindings(missing=(), num_copies=2, problems=())] * 2
    shutil.rmtree(tmp_path / "b")
    assert examined(tmp_path) == [NodeFindings(missing=(), num_copies=1, problems=())] * 2
    shutil.rmtree(tmp_path / "c")
    assert {findings.missing for findings in examined(tmp_path)} == {(shard(2),)}


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_a_damaged_copy_is_told_and_the_other_one_counts(
    tmp_path: Path, algorithm: HashAlgorithm
) -> None:
    write_copies(tmp_path, 5, HOLDERS, algorithm=algorithm)
    assert examined(tmp_path) == [NodeFindings(missing=(), num_copies=2, problems=())]
    damage(copy_of(tmp_path, "a", 5) / shard(1))
    (findings,) = examined(tmp_path)
    assert (findings.missing, findings.num_copies) == ((), 1)
    assert len(findings.problems) == 1
    assert str(copy_of(tmp_path, "a", 5) / shard(1)) in findings.problems[0]
    assert examined(tmp_path, reads_bytes=False)[0].problems == ()
    damage(copy_of(tmp_path, "b", 5) / shard(1))
    assert examined(tmp_path)[0].missing == (shard(1),)


def test_sizes_are_compared_without_reading(tmp_path: Path) -> None:
    write_copies(tmp_path, 5, HOLDERS)
    (copy_of(tmp_path, "a", 5) / shard(0)).write_bytes(b"short")
    (findings,) = examined(tmp_path, reads_bytes=False)
    assert findings.num_copies == 1
    assert "has 5 bytes, 300 were written" in findings.problems[0]


def test_files_beside_a_damaged_manifest_count(tmp_path: Path) -> None:
    write_copies(tmp_path, 5, {"a": (0,), "b": (1,)})
    (copy_of(tmp_path, "b", 5) / "manifest.json").write_text("{}")
    (findings,) = examined(tmp_path)
    assert (findings.missing, findings.num_copies) == ((), 1)
    assert "manifest.json" in findings.problems[0]
    (copy_of(tmp_path, "a", 5) / "manifest.json").unlink()
    (copies,) = find_node_copies(tmp_path, PREFIX)
    assert copies.manifest is None
    assert len(copies.problems) == 2


def test_files_of_two_attempts_are_not_mixed(tmp_path: Path) -> None:
    write_copies(tmp_path, 5, {"a": (0,), "b": (1,)}, attempt=1)
    shutil.rmtree(tmp_path / "b")
    write_copies(tmp_path / "new", 5, {"a": (0,), "b": (1,)}, attempt=2)
    (tmp_path / "new" / "b").rename(tmp_path / "b")
    shutil.rmtree(tmp_path / "new")
    found = find_node_copies(tmp_path, PREFIX)
    assert [copies.manifest.attempt for copies in found if copies.manifest] == [2, 1]
    assert [list(copies.directories) for copies in found] == [["b"], ["a"]]
    assert [findings.missing for findings in examined(tmp_path)] == [(shard(0),), (shard(1),)]


@pytest.mark.parametrize("name", [".", "absent"])
def test_nothing_is_no_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "a" / ".staging-1").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert find_node_copies(tmp_path / name, PREFIX) == []
