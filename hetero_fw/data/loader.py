"""Loaders: for each step the micro-batches of this rank, equal at any number of workers.

Random augmentation is a pure function too: before each sample is loaded, the generators of torch,
numpy and random are seeded by the run's seed and the sample's position in the stream, and they are
put back afterwards, so that loading leaves no trace in the model's own random numbers. A
`collate_fn` that draws is seeded by the first sample of its micro-batch: the same for any number of
workers, but not for another split of the batch. Draw in the dataset where that matters.

Workers come from a fork server, never from forking the rank: a rank runs gloo's threads, whose
locks a fork would copy in any state, may hold a CUDA context, and its sockets would stay open in
the workers after its death, so that the other ranks would not notice it. The price is one import of
torch for each rank, once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from itertools import pairwise
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetero_fw.data.microbatch import CollateFn, MapDataset, MicroBatch, MicroBatchSource
from hetero_fw.data.mixing import SeedUse
from hetero_fw.data.parent_watch import end_workers_at_exit, leave_with_parent
from hetero_fw.data.sampler import MicroBatchRequest, RankPart, StepIndexedSampler
from hetero_fw.errors import ConfigError

_WORKER_IMPORTS = ["torch", "hetero_fw.data.microbatch"]


def build_train_loader(
    dataset: MapDataset,
    *,
    seed: int,
    part: RankPart,
    max_steps: int,
    start_step: int = 0,
    num_workers: int = 0,
    collate_fn: CollateFn | None = None,
    pin_memory: bool = False,
) -> DataLoader[list[MicroBatch]]:
    """A loader that yields one `list[MicroBatch]` for each optimizer step of this rank.

    Args:
        dataset: map-style dataset; under `num_workers > 0` it must be picklable.
        seed: the run's seed.
        part: this rank's part of the global batch.
        max_steps: optimizer steps of the whole run.
        start_step: optimizer steps that are done; the first batch belongs to step start_step + 1.
        num_workers: loader processes; any number delivers the same data.
        collate_fn: makes a batch of a list of samples; None for torch's default.
        pin_memory: copy batches to page-locked memory, for CUDA devices.

    Raises:
        ConfigError: the dataset has no length or is empty.
    """
    sampler = StepIndexedSampler(
        num_samples=_length(dataset, "data.train"),
        global_batch_size=part.global_batch_size,
        seed=seed,
    )
    return _build_loader(
        MicroBatchSource(dataset, seed=seed, collate_fn=collate_fn),
        _TrainRequests(sampler=sampler, part=part, start_step=start_step, max_steps=max_steps),
        collate_fn=_whole_step,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )


def build_val_loader(
    dataset: MapDataset,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    seed: int = 0,
    max_samples: int | None = None,
    num_workers: int = 0,
    collate_fn: CollateFn | None = None,
) -> DataLoader[MicroBatch]:
    """A loader that yields one `MicroBatch` for each validation batch of this rank.

    Every sample is in one batch of one rank, in the dataset's order, so that metrics are exact. All
    ranks have the same number of batches and no batch is empty or padded, so that sharded models,
    whose forward pass is collective, stay in step and each rank has a metric to reduce.

    Args:
        dataset: map-style dataset; under `num_workers > 0` it must be picklable.
        rank: this rank, of `world_size`.
        world_size: number of ranks that validate together.
        batch_size: most samples in one batch of one rank; 1 becomes 2 where ranks do not divide.
        seed: the run's seed.
        max_samples: use only the first so many samples, over all ranks; None for all.
        num_workers: loader processes, kept from one validation to the next.
        collate_fn: makes a batch of a list of samples; None for torch's default.

    Raises:
        ConfigError: the dataset has no length or fewer samples than there are ranks.
    """
    num_samples = _length(dataset, "data.val")
    if max_samples is not None:
        num_samples = min(num_samples, max_samples)
    if num_samples < world_size:
        raise ConfigError(
            f"data.val: {num_samples} samples for {world_size} ranks; validation needs at least "
            "one sample for each rank. Use more validation data, fewer ranks or data.val=null."
        )
    source = MicroBatchSource(
        dataset,
        seed=seed,
        collate_fn=collate_fn,
        sample_use=SeedUse.VAL_SAMPLE,
        collate_use=SeedUse.VAL_COLLATE,
    )
    requests = val_requests(num_samples, rank=rank, world_size=world_size, batch_size=batch_size)
    return _build_loader(
        source,
        [[request] for request in requests],
        collate_fn=_only_one,
        num_workers=num_workers,
    )


def val_requests(
    num_samples: int, *, rank: int, world_size: int, batch_size: int
) -> list[MicroBatchRequest]:
    """The validation batches of one rank: an even, contiguous part of range(num_samples)."""
    begin = rank * num_samples // world_size
    size = (rank + 1) * num_samples // world_size - begin
    smallest, largest = num_samples // world_size, -(-num_samples // world_size)
    # The second bound only matters for batches of one: the smallest part must fill them all.
    num_batches = min(-(-largest // batch_size), smallest)
    borders = [begin + index * size // num_batches for index in range(num_batches + 1)]
    # Positions are indices here: a sample is augmented alike in every validation.
    return [
        MicroBatchRequest(samples, samples, len(samples))
        for samples in (tuple(range(*border)) for border in pairwise(borders))
    ]


class _TrainRequests:
    """The batch sampler of the training loader: this rank's micro-batches, step after step."""

    def __init__(
        self, *, sampler: StepIndexedSampler, part: RankPart, start_step: int, max_steps: int
    ) -> None:
        self._sampler = sampler
        self._part = part
        self._steps = range(start_step + 1, max_steps + 1)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[MicroBatchRequest]]:
        return (self._part.requests(self._sampler, step) for step in self._steps)


def _build_loader(
    source: MicroBatchSource,
    requests: Any,
    *,
    collate_fn: Callable[[list[MicroBatch]], Any],
    num_workers: int,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    if num_workers:
        end_workers_at_exit()
    return DataLoader(
        source,
        batch_sampler=requests,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context=_worker_context() if num_workers else None,
        worker_init_fn=leave_with_parent if num_workers else None,
        persistent_workers=num_workers > 0,
        # DataLoader draws a seed for its workers; not from the generator the model draws from.
        generator=torch.Generator(),
    )


def _worker_context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server instead of once by each worker; no effect if it runs already.
    context.set_forkserver_preload(_WORKER_IMPORTS)
    return context


def _whole_step(microbatches: list[MicroBatch]) -> list[MicroBatch]:
    return microbatches


def _only_one(microbatches: list[MicroBatch]) -> MicroBatch:
    return microbatches[0]


def _length(dataset: MapDataset, key: str) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"{key}: {type(dataset).__name__} has no length; a map-style dataset with "
            "__len__ and __getitem__ is needed, so that any step's samples can be found."
        ) from None
