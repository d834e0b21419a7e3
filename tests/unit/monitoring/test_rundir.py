from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.monitoring import RunDirectory, create_run_directory


def test_an_unnamed_run_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    first = create_run_directory(tmp_path / "a" / "b", None)
    second = create_run_directory(tmp_path / "a" / "b", None)
    assert first.path.parent == tmp_path / "a" / "b"
    assert first.path != second.path
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{6}", first.name)
    assert list(first.path.iterdir()) == []


def test_a_named_run_is_reused_with_its_files(tmp_path: Path) -> None:
    first = create_run_directory(tmp_path, "exp-1")
    first.events_path.write_text("kept\n")
    again = create_run_directory(str(tmp_path), "exp-1")
    assert again == first
    assert again.events_path.read_text() == "kept\n"
    assert [entry.name for entry in again.path.iterdir()] == ["events.jsonl"]


def test_names_are_those_of_the_contract() -> None:
    run = RunDirectory(Path("r"))
    assert run.status_path == Path("r/status.json")
    assert run.metrics_path == Path("r/metrics.csv")
    assert run.plan_path == Path("r/plan.json")
    assert run.plan_text_path == Path("r/plan.txt")
    assert run.attempt_plan_path(3) == Path("r/attempts/3/plan.json")
    assert run.checkpoints_path == Path("r/checkpoints")
    assert run.summary_path == Path("r/summary.json")
    assert run.report_path == Path("r/report.html")
    assert run.hydra_path == Path("r/.hydra")


def test_attempt_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.attempt_numbers() == []
    for attempt in (10, 2, 0):
        run.attempt_path(attempt).mkdir(parents=True)
    (run.attempts_path / "notes").mkdir()
    assert run.attempt_numbers() == [0, 2, 10]


@pytest.mark.parametrize("name", ["", "  ", ".", "..", "a/b", "/abs", "nul\0", "x" * 201])
def test_a_run_name_must_be_one_directory_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run_name="):
        create_run_directory(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_name", [None, "exp"])
@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_file_in_the_way_of_the_root(tmp_path: Path, root: str, run_name: str | None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"paths\.root: .*file.*in the way") as caught:
        create_run_directory(tmp_path / root, run_name)
    assert str(tmp_path / root) in str(caught.value)


def test_a_file_in_the_way_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "exp").write_text("")
    with pytest.raises(ConfigError, match=r"paths\.root: .*exp cannot be written: a file"):
        create_run_directory(tmp_path, "exp")


@pytest.mark.skipif(os.geteuid() == 0, reason="root ignores permission bits")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"paths\.root: .*Permission denied"):
        create_run_directory(tmp_path, None)


@pytest.mark.parametrize("run_name", [None, "exp"])
def test_a_read_only_file_system(tmp_path: Path, run_name: str | None) -> None:
    root = tmp_path / "mounted"
    (root / "exp").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(root)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        with pytest.raises(ConfigError, match=r"paths\.root: .*Read-only file system"):
            create_run_directory(root, run_name)
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_a_full_file_system_leaves_no_directory_behind(tmp_path: Path) -> None:
    root = tmp_path / "full"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(root)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    try:
        (root / "filler").write_bytes(b"x" * 4096)
        with pytest.raises(ConfigError, match=r"paths\.root: .*No space left"):
            create_run_directory(root, "exp")
        assert [entry.name for entry in root.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_a_locked_run_names_its_holder(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path, "exp")
    with run.lock(), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        run.lock()
    with run.lock() as lock:
        assert lock.is_exclusive
        lock.release()
        with run.lock():
            pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path, "exp")
    script = (
        "import sys; from pathlib import Path; from hetero_fw.monitoring import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(run.lock_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
            run.lock()
        holder.kill()
        holder.wait(10)
        run.lock().release()
