"""The 1797 handwritten digits that come with scikit-learn, 8 x 8 pixels each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from hetero_fw.errors import ConfigError

Sample = tuple[torch.Tensor, torch.Tensor]

_MAX_PIXEL = 16.0


class DigitsDataset(Dataset[Sample]):
    """Samples (pixels float32 (64,) from 0 to 1, label int64 ()).

    Args:
        split: the part for training or the one for validation; a seeded draw, without overlap.
        val_fraction: share of the digits that is kept for validation.
        seed: which digits those are.

    Raises:
        ConfigError: scikit-learn is not installed, or an argument is out of range.
    """

    def __init__(
        self, *, split: Literal["train", "val"] = "train", val_fraction: float = 0.2, seed: int = 0
    ) -> None:
        if split not in ("train", "val"):
            raise ConfigError(f"data: split={split!r} of DigitsDataset must be 'train' or 'val'.")
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data: val_fraction={val_fraction} must lie between 0 and 1.")
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigError(
                "data=digits reads its images from scikit-learn, which is not installed; "
                "run `pip install scikit-learn`."
            ) from error
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        num_val = round(val_fraction * len(labels))
        chosen = order[:num_val] if split == "val" else order[num_val:]
        self._pixels = torch.from_numpy((pixels[chosen] / _MAX_PIXEL).astype(np.float32))
        self._labels = torch.from_numpy(labels[chosen].astype(np.int64))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return self._pixels[index], self._labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Many samples at once."""
        chosen = torch.as_tensor(indices)
        return list(zip(self._pixels[chosen], self._labels[chosen], strict=True))
