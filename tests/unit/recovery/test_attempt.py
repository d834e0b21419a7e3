"""Files by which ranks and the supervisor know of each other, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from hetero_fw.errors import ConfigError
from hetero_fw.policies import FailureKind
from hetero_fw.recovery import AttemptFiles, NodeRanks, RankEnd, write_failure
from hetero_fw.recovery.failure import classify_exception, one_line


def test_rank_is_known_once_it_announces_itself(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path / "ranks")
    assert files.pid(3) is None
    files.announce(3)
    assert files.pid(3) == os.getpid()
    assert files.pid(2) is None


def test_half_written_pid_is_not_a_pid(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path)
    files.pid_path(0).write_text("123")
    assert files.pid(0) is None
    files.pid_path(0).write_text("")
    assert files.pid(0) is None


@pytest.mark.parametrize("end", list(RankEnd))
def test_end(tmp_path: Path, end: RankEnd) -> None:
    files = AttemptFiles(tmp_path)
    assert files.end(0) is None
    files.finish(0, end)
    assert files.end(0) is end


def test_node_ranks() -> None:
    assert list(NodeRanks(node="v100-0", first_rank=2, num_ranks=3).ranks) == [2, 3, 4]


def test_failures_are_read_earliest_first(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path / "ranks")
    assert files.failures() == []
    for rank, time_s in ((0, 30.0), (1, 10.0), (2, 20.0)):
        error = ValueError(f"from rank {rank}")
        write_failure(files.folder, error, rank=rank, node="a100-0", time_s=time_s)
    assert [failure.rank for failure in files.failures()] == [1, 2, 0]
    first = files.failures()[0]
    assert first.kind is FailureKind.EXCEPTION
    assert first.detail == "ValueError: from rank 1"
    assert "from rank 1" in first.trace


def test_torn_and_temporary_failures_are_passed_over(tmp_path: Path) -> None:
    write_failure(tmp_path, ValueError("whole"), rank=0, node="a", time_s=1.0)
    whole = (tmp_path / "failure-0.json").read_text()
    (tmp_path / "failure-1.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "failure-2.json").write_text("")
    (tmp_path / "failure-3.json").write_text("[]")
    (tmp_path / "failure-4.json").write_text(json.dumps({"kind": "unheard of"}))
    (tmp_path / "failure-5.tmp").write_text(whole)
    assert [failure.rank for failure in AttemptFiles(tmp_path).failures()] == [0]


def test_trace_holds_the_cause(tmp_path: Path) -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error
    except RuntimeError as error:
        write_failure(tmp_path, error, rank=0, node="a", time_s=1.0)
    (failure,) = AttemptFiles(tmp_path).failures()
    assert failure.trace.index("first") < failure.trace.index("second")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("data.paths: nothing."), FailureKind.CONFIGURATION),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("Connection closed by peer"), FailureKind.EXCEPTION),
        (SystemExit(0), FailureKind.EXCEPTION),
    ],
    ids=repr,
)
def test_classification(error: BaseException, kind: FailureKind) -> None:
    assert classify_exception(error) is kind


def test_a_traceback_inside_an_error_stays_where_traces_go(tmp_path: Path) -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample {index} is broken")

    loader = DataLoader(Broken(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ValueError, match="Original Traceback") as caught:
        next(iter(loader))
    write_failure(tmp_path, caught.value, rank=0, node="a", time_s=1.0)
    (failure,) = AttemptFiles(tmp_path).failures()
    assert failure.detail == (
        "ValueError: Caught ValueError in DataLoader worker process 0. "
        "ValueError: sample 0 is broken"
    )
    assert "in __getitem__" in failure.trace


def test_an_error_of_several_lines_is_told_in_one() -> None:
    assert one_line("RuntimeError: CUDA error\n\n  For debugging, see there.\n") == (
        "RuntimeError: CUDA error For debugging, see there."
    )
