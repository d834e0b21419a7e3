"""Byte-level language modelling on text files: no tokenizer, no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hetero_fw.data.paths import check_paths
from hetero_fw.errors import ConfigError

Sample = dict[str, torch.Tensor]

STDLIB_MAX_BYTES = 8_000_000
# Training and validation alternate in runs of windows: long enough that few validation windows
# touch the training text, short enough that both see all of it.
_MAX_BLOCK_WINDOWS = 64
_MIN_BLOCKS = 200


class ByteTextDataset(Dataset[Sample]):
    """Windows of text as samples `{"input_ids": int64 (L,), "labels": int64 (L,)}`.

    Window k of a text covers its bytes [k*L, (k+1)*L); labels are the inputs one byte later. All
    files are joined in the order of their paths. The text lies in memory once, as bytes.

    Args:
        paths: see `check_paths`; None for the source text of the Python standard library.
        sequence_length: L, bytes in one sample.
        split: the part for training or the one for validation; they share no window.
        val_fraction: share of the windows that is kept for validation; None for none.
        max_bytes: read no more than this; None for all of the user's files and for the first 8 MB
            of the standard library.

    Raises:
        ConfigError: nothing matches, a file cannot be read, or the text is shorter than a sample.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        paths: str | Sequence[str] | None = None,
        split: Literal["train", "val"] = "train",
        val_fraction: float | None = 0.1,
        max_bytes: int | None = None,
    ) -> None:
        val_fraction = val_fraction or 0.0
        _check_arguments(sequence_length, split, val_fraction, max_bytes)
        self.sequence_length = sequence_length
        if max_bytes is None and paths is None:
            max_bytes = STDLIB_MAX_BYTES
        self._text = read_bytes(check_paths(paths), max_bytes)
        num_windows = max(len(self._text) - 1, 0) // sequence_length
        train, val = split_windows(num_windows, val_fraction)
        self._windows = train if split == "train" else val
        if not len(self._windows):
            needed = (1 if split == "train" else 2) * sequence_length + 1
            raise ConfigError(
                f"data.paths: {len(self._text)} bytes of text make no sample for data.{split}, "
                f"which needs {needed} or more at data.sequence_length={sequence_length}. Name "
                "more text, raise data.max_bytes or lower data.sequence_length."
            )

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Many samples at once, cut from the text in one operation."""
        starts = self._windows[np.asarray(indices)] * self.sequence_length
        offsets = np.arange(self.sequence_length + 1)
        rows = torch.from_numpy(self._text[starts[:, None] + offsets].astype(np.int64))
        return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def read_bytes(files: Sequence[Path], max_bytes: int | None) -> npt.NDArray[np.uint8]:
    """The first `max_bytes` bytes of the files, joined.

    Raises:
        ConfigError: a file cannot be read.
    """
    text = bytearray()
    for path in files:
        missing = -1 if max_bytes is None else max_bytes - len(text)
        if missing == 0:
            break
        try:
            with path.open("rb") as file:
                text += file.read(missing)
        except OSError as error:
            raise ConfigError(
                f"data.paths: cannot read {path}: {error.strerror}. Make it readable or name "
                "other files."
            ) from error
    return np.frombuffer(text, dtype=np.uint8)


def split_windows(
    num_windows: int, val_fraction: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Windows for training and for validation: blocks at even distances are kept for validation.

    If both are asked for and there are two windows or more, each gets one at least.
    """
    windows = np.arange(num_windows)
    block_size = min(max(num_windows // _MIN_BLOCKS, 1), _MAX_BLOCK_WINDOWS)
    num_blocks = -(-num_windows // block_size)
    if val_fraction == 0 or num_blocks < 2:
        return windows, windows[:0]
    num_val = min(max(round(val_fraction * num_blocks), 1), num_blocks - 1)
    val_blocks = (2 * np.arange(num_val) + 1) * num_blocks // (2 * num_val)
    is_val = np.isin(windows // block_size, val_blocks)
    return windows[~is_val], windows[is_val]


def _check_arguments(
    sequence_length: int, split: str, val_fraction: float, max_bytes: int | None
) -> None:
    problems = []
    if sequence_length < 1:
        problems.append(f"data.sequence_length={sequence_length}: must be 1 or more.")
    if split not in ("train", "val"):
        problems.append(f"data: split={split!r} of ByteTextDataset must be 'train' or 'val'.")
    if not 0 <= val_fraction < 1:
        problems.append(f"data.val_fraction={val_fraction}: must be 0 or more and below 1.")
    elif split == "val" and val_fraction == 0:
        problems.append("data.val_fraction=0: leaves nothing for data.val; set data.val=null.")
    if max_bytes is not None and max_bytes < 1:
        problems.append(f"data.max_bytes={max_bytes}: must be 1 or more, or null for no limit.")
    ConfigError.collect(problems)
