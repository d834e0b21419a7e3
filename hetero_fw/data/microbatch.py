"""Micro-batches: what a loader delivers, and how one is made from the user's dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset, default_collate

from hetero_fw.data.mixing import SeedUse, derive_seed
from hetero_fw.data.random_state import RandomState, seed_generators
from hetero_fw.data.sampler import MicroBatchRequest

CollateFn = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A map-style dataset. It may offer `__getitems__(indices)` to load many samples at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MicroBatch(NamedTuple):
    """A collated batch and how many of its samples count.

    A tuple, because Lightning (moving to a device) and torch (pinning memory) both look into those.
    The count comes first: Lightning takes the first size it meets for the batch size.

    Attributes:
        num_samples: all samples of the batch; 0 marks padding, whose one sample has weight 0.
        batch: what `collate_fn` returned.
    """

    num_samples: int
    batch: Any


class MicroBatchSource(Dataset[MicroBatch]):
    """The user's dataset, addressed by micro-batch requests; lives in the loader's workers.

    Args:
        dataset: map-style dataset.
        seed: the run's seed.
        collate_fn: makes a batch of a list of samples; None for torch's default.
        sample_use, collate_use: which seeds random augmentation and collation get.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        seed: int,
        collate_fn: CollateFn | None = None,
        sample_use: SeedUse = SeedUse.TRAIN_SAMPLE,
        collate_use: SeedUse = SeedUse.TRAIN_COLLATE,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self.sample_use = sample_use
        self.collate_use = collate_use
        self._bulk_loading_draws = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: MicroBatchRequest) -> MicroBatch:
        return self.__getitems__([request])[0]

    def __getitems__(self, requests: Sequence[MicroBatchRequest]) -> list[MicroBatch]:
        """Load every requested micro-batch; the random generators stay as they were."""
        before = RandomState.capture()
        samples = self._load_in_bulk(requests, before)
        draws_nothing = samples is not None and self.collate_fn is None
        if samples is None:
            samples = self._load_one_by_one(requests)
        batches = []
        begin = 0
        for request in requests:
            end = begin + len(request.indices)
            batch = self._collate(samples[begin:end], request.positions[0])
            batches.append(MicroBatch(num_samples=request.num_samples, batch=batch))
            begin = end
        if not draws_nothing:
            before.restore()
        return batches

    def _load_in_bulk(
        self, requests: Sequence[MicroBatchRequest], before: RandomState
    ) -> list[Any] | None:
        """All samples by the dataset's `__getitems__`; None if it has none or draws at random.

        What it draws could not be seeded for each sample, so such a call does not count: torch's
        own `Subset` around an augmenting dataset is one.
        """
        load_many = getattr(self.dataset, "__getitems__", None)
        if load_many is None or self._bulk_loading_draws:
            return None
        indices = [index for request in requests for index in request.indices]
        samples = list(load_many(indices))
        if len(samples) != len(indices):
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(samples)} samples "
                f"for {len(indices)} indices; it must return one for each"
            )
        if RandomState.capture().equals(before):
            return samples
        self._bulk_loading_draws = True
        return None

    def _load_one_by_one(self, requests: Sequence[MicroBatchRequest]) -> list[Any]:
        samples = []
        for request in requests:
            for position, index in zip(request.positions, request.indices, strict=True):
                seed_generators(derive_seed(self.seed, self.sample_use, position))
                samples.append(self.dataset[index])
        return samples

    def _collate(self, samples: list[Any], first_position: int) -> Any:
        if self.collate_fn is None:
            return default_collate(samples)
        seed_generators(derive_seed(self.seed, self.collate_use, first_position))
        return self.collate_fn(samples)
