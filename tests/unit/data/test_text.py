from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.data import ByteTextDataset
from hetero_fw.data.text import read_bytes, split_windows
from hetero_fw.errors import ConfigError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    return tmp_path


def windows(dataset: ByteTextDataset) -> set[int]:
    """The windows of the corpus that are in the dataset: its bytes are their own positions."""
    starts = [int(dataset[index]["input_ids"][0]) for index in range(len(dataset))]
    assert all(start % dataset.sequence_length == 0 for start in starts)
    return {start // dataset.sequence_length for start in starts}


def test_samples_are_windows_with_the_next_byte_as_label(corpus: Path) -> None:
    dataset = ByteTextDataset(paths=str(corpus), sequence_length=16, val_fraction=0.0)
    assert len(dataset) == 12
    for index in range(len(dataset)):
        sample = dataset[index]
        assert sample["input_ids"].tolist() == list(range(16 * index, 16 * index + 16))
        assert sample["labels"].tolist() == list(range(16 * index + 1, 16 * index + 17))
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64


def test_bulk_loading_equals_single(corpus: Path) -> None:
    dataset = ByteTextDataset(paths=str(corpus), sequence_length=7)
    for index, sample in zip([5, 0, 3], dataset.__getitems__([5, 0, 3]), strict=True):
        assert all(torch.equal(sample[key], dataset[index][key]) for key in sample)


def test_splits_share_nothing_and_cover_everything(corpus: Path) -> None:
    train, val = (
        windows(ByteTextDataset(paths=str(corpus), sequence_length=4, split=split))
        for split in ("train", "val")
    )
    assert train.isdisjoint(val)
    assert train | val == set(range(49))
    assert len(val) == 5


@settings(max_examples=50, deadline=None)
@given(num_windows=st.integers(0, 5000), val_fraction=st.floats(0, 0.999))
def test_split_rule(num_windows: int, val_fraction: float) -> None:
    train, val = split_windows(num_windows, val_fraction)
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(num_windows))
    if num_windows > 1 and val_fraction > 0:
        assert len(train) > 0
        assert len(val) > 0
        assert abs(len(val) - val_fraction * num_windows) <= max(1, 0.02 * num_windows)


def test_max_bytes_cuts_inside_a_file(corpus: Path) -> None:
    dataset = ByteTextDataset(
        paths=str(corpus), sequence_length=10, val_fraction=0.0, max_bytes=131
    )
    assert len(dataset) == 13
    assert int(dataset[12]["labels"][-1]) == 130


def test_own_text_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" * 8_100_001)
    dataset = ByteTextDataset(paths=str(path), sequence_length=100, val_fraction=0.0)
    assert len(dataset) == 81_000


def test_standard_library_is_the_same_every_time() -> None:
    dataset = ByteTextDataset(sequence_length=64)
    again = ByteTextDataset(sequence_length=64)
    assert len(dataset) > 10_000
    assert torch.equal(dataset[777]["input_ids"], again[777]["input_ids"])
    assert b"def " in bytes(torch.cat([dataset[k]["input_ids"] for k in range(500)]).tolist())


def test_short_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"0123456789")
    with pytest.raises(ConfigError, match=r"data\.paths: 10 bytes .* data\.train.* 11 or more"):
        ByteTextDataset(paths=str(path), sequence_length=10)
    assert len(ByteTextDataset(paths=str(path), sequence_length=9)) == 1
    with pytest.raises(ConfigError, match=r"data\.paths: 10 bytes .* data\.val.* 11 or more"):
        ByteTextDataset(paths=str(path), sequence_length=5, split="val")
    assert len(ByteTextDataset(paths=str(path), sequence_length=4, split="val")) == 1


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.paths: cannot read .*Is a directory"):
        read_bytes([tmp_path], None)
    with pytest.raises(ConfigError, match="matches no file"):
        ByteTextDataset(paths=str(tmp_path / "missing"), sequence_length=4)


def test_all_wrong_arguments_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        ByteTextDataset(sequence_length=0, split="test", val_fraction=1.5, max_bytes=0)  # type: ignore[arg-type]
    assert len(error.value.problems) == 4
    for nothing in (0.0, None):
        with pytest.raises(ConfigError, match=r"data\.val_fraction=0"):
            ByteTextDataset(sequence_length=4, split="val", val_fraction=nothing)
