"""Which samples an optimizer step uses: a pure function of the seed and the step.

All training data form one endless stream: epoch after epoch, each a new permutation of the
dataset. Optimizer step i (the first is 1) consumes the stream positions [(i-1)*B, i*B) for a global
batch of B samples, across the border of epochs and whatever the cluster. Nothing has to be stored
in a checkpoint: a run that continues at step i asks for step i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_fw.data.mixing import GOLDEN_GAMMA, SeedUse, UInt64Array, derive_seed, mix_array
from hetero_fw.errors import ConfigError

Int64Array = npt.NDArray[np.int64]

_NUM_ROUNDS = 6


class MicroBatchRequest(NamedTuple):
    """The samples of one micro-batch of one rank.

    Attributes:
        positions: where in the stream the samples lie; they seed random augmentation.
        indices: the same samples as indices into the dataset.
        num_samples: how many of them count: all, or 0 for padding, which names one sample.
    """

    positions: tuple[int, ...]
    indices: tuple[int, ...]
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class StepIndexedSampler:
    """The order of the training data.

    Each epoch holds every sample exactly once. The permutation is computed where it is asked for
    and never stored, so that neither the length of the dataset nor the step costs time or memory.

    Attributes:
        num_samples: length of the dataset; may be smaller than a batch.
        global_batch_size: samples in one optimizer step, over all ranks.
        shuffle: False keeps the order of the dataset in every epoch.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError("data.train: the dataset is empty; it needs at least one sample.")
        if self.global_batch_size < 1:
            raise ConfigError(
                f"data.global_batch_size={self.global_batch_size}: must be 1 or more."
            )

    def indices(self, positions: Int64Array) -> Int64Array:
        """Dataset indices of the samples at these positions of the stream."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        if not self.shuffle:
            return offsets
        base_key = np.uint64(derive_seed(self.seed, SeedUse.SHUFFLE))
        keys = mix_array(base_key + epochs.astype(np.uint64) * np.uint64(GOLDEN_GAMMA))
        return permute(offsets.astype(np.uint64), keys, self.num_samples).astype(np.int64)

    def step_indices(self, step: int) -> Int64Array:
        """Dataset indices of the whole global batch of `step`, in order."""
        first = (step - 1) * self.global_batch_size
        return self.indices(np.arange(first, first + self.global_batch_size))


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank takes of every global batch: a contiguous slice, cut into micro-batches.

    Attributes:
        shares: samples of each rank, in rank order; they sum to the global batch size.
        microbatches: sizes of this rank's micro-batches; they sum to its share.
    """

    shares: tuple[int, ...]
    rank: int
    microbatches: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.microbatches) != self.shares[self.rank] or min(self.microbatches) < 0:
            raise ValueError(
                f"micro-batches {self.microbatches} of rank {self.rank} must be 0 or more and "
                f"sum to its share of {self.shares[self.rank]} samples"
            )

    @property
    def global_batch_size(self) -> int:
        return sum(self.shares)

    def requests(self, sampler: StepIndexedSampler, step: int) -> list[MicroBatchRequest]:
        """This rank's micro-batches of `step`, as many as the plan has."""
        first = (step - 1) * sampler.global_batch_size
        start = first + sum(self.shares[: self.rank])
        # A micro-batch without samples repeats one, so that it has the form of the others; a rank
        # without a share still finds one inside the global batch.
        last = first + sampler.global_batch_size - 1
        spans = []
        for size in self.microbatches:
            spans.append((min(start, last), max(size, 1), size))
            start += size
        positions = np.concatenate([np.arange(begin, begin + n) for begin, n, _ in spans])
        return _cut(positions, sampler.indices(positions), [(n, size) for _, n, size in spans])


def _cut(
    positions: Int64Array, indices: Int64Array, sizes: list[tuple[int, int]]
) -> list[MicroBatchRequest]:
    requests = []
    begin = 0
    for length, num_samples in sizes:
        end = begin + length
        requests.append(
            MicroBatchRequest(
                positions=tuple(positions[begin:end].tolist()),
                indices=tuple(indices[begin:end].tolist()),
                num_samples=num_samples,
            )
        )
        begin = end
    return requests


def permute(offsets: UInt64Array, keys: UInt64Array, size: int) -> UInt64Array:
    """Where a keyed permutation of range(size) sends each offset, without building the permutation.

    A Feistel network permutes the next power of two; an element that lands outside is sent on until
    it lands inside ("cycle walking", Black and Rogaway, CT-RSA 2002), under two tries on average.
    """
    num_bits = max(2, (size - 1).bit_length())
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64(2 ** (num_bits // 2) - 1)
    high_mask = np.uint64(2 ** (num_bits - num_bits // 2) - 1)
    result = offsets.copy()
    pending = np.arange(len(offsets))
    while len(pending):
        values, round_keys = result[pending], keys[pending]
        high, low = values >> low_bits, values & low_mask
        for round_index in range(_NUM_ROUNDS):
            round_keys = round_keys + np.uint64(GOLDEN_GAMMA)
            if round_index % 2:
                low = low ^ (mix_array(high ^ round_keys) & low_mask)
            else:
                high = high ^ (mix_array(low ^ round_keys) & high_mask)
        values = (high << low_bits) | low
        result[pending] = values
        pending = pending[values >= np.uint64(size)]
    return result
