from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hetero_fw.data import (
    ByteTextDataset,
    MicroBatch,
    RankPart,
    StepIndexedSampler,
    build_train_loader,
    build_val_loader,
)
from hetero_fw.data.random_state import RandomState
from hetero_fw.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SINGLE = RankPart(shares=(6,), rank=0, microbatches=(4, 2))


class Numbers(Dataset[dict[str, Any]]):
    """Sample i is i, with three random numbers to stand for augmentation."""

    def __init__(self, num_samples: int = 10) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64)}


class Plain(Dataset[int]):
    def __init__(self, num_samples: int = 10) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Bulk(Plain):
    """Counts its calls, to see which way the samples were loaded."""

    def __init__(self, num_samples: int = 10) -> None:
        super().__init__(num_samples)
        self.num_bulk_calls = 0
        self.num_single_calls = 0

    def __getitem__(self, index: int) -> int:
        self.num_single_calls += 1
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        self.num_bulk_calls += 1
        return list(indices)


class Short(Bulk):
    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [0]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def noisy_collate(samples: list[int]) -> tuple[torch.Tensor, float]:
    return torch.tensor(samples), random.random()


def flat(loader: DataLoader[list[MicroBatch]]) -> list[tuple[int, int, list[float]]]:
    """(step, index, noise) of every sample that counts."""
    return [
        (step, int(index), noise.tolist())
        for step, microbatches in enumerate(loader)
        for microbatch in microbatches
        if microbatch.num_samples
        for index, noise in zip(microbatch.batch["index"], microbatch.batch["noise"], strict=True)
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_workers_gives_the_same(num_workers: int) -> None:
    alone = build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=5)
    shared = build_train_loader(
        Numbers(), seed=1, part=SINGLE, max_steps=5, num_workers=num_workers
    )
    assert flat(shared) == flat(alone)


@pytest.mark.parametrize(
    "plan",
    [[(3, 3), (0, 0)], [(2, 1), (1, 1), (1, 0)], [(2,), (2,), (1,), (1,)]],
    ids=["an idle rank", "three uneven ranks", "two and two"],
)
def test_any_split_gives_the_same(plan: list[tuple[int, ...]]) -> None:
    shares = tuple(map(sum, plan))
    parts = [
        flat(
            build_train_loader(
                Numbers(),
                seed=1,
                part=RankPart(shares=shares, rank=rank, microbatches=microbatches),
                max_steps=7,
            )
        )
        for rank, microbatches in enumerate(plan)
    ]
    # Sorting by step is stable: within a step the ranks stay in order.
    union = sorted((sample for part in parts for sample in part), key=lambda sample: sample[0])
    assert union == flat(build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=7))


def test_order_is_the_samplers() -> None:
    loader = build_train_loader(Numbers(), seed=5, part=SINGLE, max_steps=4)
    sampler = StepIndexedSampler(num_samples=10, global_batch_size=6, seed=5)
    steps = range(1, 5)
    assert [index for _, index, _ in flat(loader)] == [
        index for step in steps for index in sampler.step_indices(step).tolist()
    ]


def test_resume_is_the_tail() -> None:
    whole = flat(build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=9))
    tail = build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=9, start_step=6)
    assert len(tail) == 3
    assert [(step + 6, index, noise) for step, index, noise in flat(tail)] == whole[6 * 6 :]
    assert not list(build_train_loader(Plain(), seed=1, part=SINGLE, max_steps=9, start_step=9))


def test_augmentation_differs_between_epochs_and_seeds() -> None:
    first = flat(build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=10))
    other = flat(build_train_loader(Numbers(), seed=2, part=SINGLE, max_steps=10))
    noises = {tuple(noise) for _, _, noise in first + other}
    assert len(noises) == 2 * 60


def test_a_sample_twice_in_a_step_is_augmented_twice() -> None:
    [[microbatch]] = build_train_loader(
        Numbers(1), seed=1, part=RankPart(shares=(3,), rank=0, microbatches=(3,)), max_steps=1
    )
    assert len({tuple(noise) for noise in microbatch.batch["noise"].tolist()}) == 3


@pytest.mark.parametrize("dataset", [Numbers(), Subset(Numbers(), range(10)), Bulk()])
def test_loading_leaves_the_models_random_numbers_alone(dataset: Dataset[Any]) -> None:
    before = RandomState.capture()
    list(build_train_loader(dataset, seed=1, part=SINGLE, max_steps=2))  # type: ignore[arg-type]
    assert RandomState.capture().equals(before)
    for draw in (lambda: torch.rand(1), np.random.rand, random.random):
        draw()
        assert not RandomState.capture().equals(before)
        before.restore()


def test_bulk_loading_is_used() -> None:
    dataset = Bulk()
    steps = list(build_train_loader(dataset, seed=1, part=SINGLE, max_steps=3))
    assert (dataset.num_bulk_calls, dataset.num_single_calls) == (3, 0)
    alone = list(build_train_loader(Plain(), seed=1, part=SINGLE, max_steps=3))
    assert [[m.batch.tolist() for m in step] for step in steps] == [
        [m.batch.tolist() for m in step] for step in alone
    ]


def test_bulk_loading_that_draws_is_seeded_by_sample() -> None:
    subset = Subset(Numbers(), range(10))
    assert hasattr(subset, "__getitems__")
    assert flat(build_train_loader(subset, seed=1, part=SINGLE, max_steps=5)) == flat(
        build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=5)
    )


def test_bulk_loading_must_return_every_sample() -> None:
    with pytest.raises(ValueError, match="returned 1 samples for 6 indices"):
        list(build_train_loader(Short(), seed=1, part=SINGLE, max_steps=1))


def test_collate_function_is_seeded() -> None:
    runs = [
        [
            (microbatch.batch[0].tolist(), microbatch.batch[1])
            for step in build_train_loader(
                Plain(),
                seed=1,
                part=SINGLE,
                max_steps=3,
                num_workers=num_workers,
                collate_fn=noisy_collate,
            )
            for microbatch in step
        ]
        for num_workers in (0, 2)
    ]
    assert runs[0] == runs[1]
    assert len({noise for _, noise in runs[0]}) == 6


def test_padding_repeats_a_sample() -> None:
    part = RankPart(shares=(2, 1), rank=1, microbatches=(1, 0))
    [[full, padding]] = build_train_loader(Plain(), seed=1, part=part, max_steps=1)
    assert (full.num_samples, len(full.batch)) == (1, 1)
    assert (padding.num_samples, len(padding.batch)) == (0, 1)


def test_microbatches_survive_the_move_to_a_device() -> None:
    [step] = build_train_loader(Numbers(), seed=1, part=SINGLE, max_steps=1)
    moved = apply_to_collection(step, torch.Tensor, lambda tensor: tensor.to("meta"))
    assert [type(microbatch) for microbatch in moved] == [MicroBatch, MicroBatch]
    assert [microbatch.num_samples for microbatch in moved] == [4, 2]
    assert moved[0].batch["noise"].is_meta


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_samples=st.integers(1, 60), batch_size=st.integers(1, 9))
def test_validation_is_exact(data: st.DataObject, num_samples: int, batch_size: int) -> None:
    world_size = data.draw(st.integers(1, min(num_samples, 5)))
    ranks = [
        list(
            build_val_loader(
                Bulk(num_samples), rank=rank, world_size=world_size, batch_size=batch_size
            )
        )
        for rank in range(world_size)
    ]
    microbatches = [microbatch for batches in ranks for microbatch in batches]
    assert [index for m in microbatches for index in m.batch.tolist()] == list(range(num_samples))
    assert len({len(batches) for batches in ranks}) == 1
    for microbatch in microbatches:
        assert 1 <= microbatch.num_samples <= max(batch_size, 2)
        assert microbatch.num_samples == len(microbatch.batch)


def test_validation_augments_alike_every_time_and_on_any_rank() -> None:
    def noise(world_size: int, num_workers: int = 0) -> list[list[float]]:
        loaders = [
            build_val_loader(
                Numbers(),
                rank=rank,
                world_size=world_size,
                batch_size=3,
                num_workers=num_workers,
            )
            for rank in range(world_size)
        ]
        rows = [m.batch["noise"].tolist() for loader in loaders for m in loader]
        return [row for batch in rows for row in batch]

    assert noise(1) == noise(1) == noise(2) == noise(1, num_workers=2)


def test_validation_workers_serve_every_validation() -> None:
    loader = build_val_loader(Plain(), rank=0, world_size=1, batch_size=4, num_workers=1)
    rounds = [[m.batch.tolist() for m in loader] for _ in range(2)]
    assert rounds[0] == rounds[1] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_validation_takes_part_of_the_data() -> None:
    loaders = [
        build_val_loader(Plain(), rank=rank, world_size=2, batch_size=4, max_samples=5)
        for rank in range(2)
    ]
    assert [[m.batch.tolist() for m in loader] for loader in loaders] == [[[0, 1]], [[2, 3, 4]]]


def test_refuses_datasets_it_cannot_address() -> None:
    with pytest.raises(ConfigError, match=r"data\.train: Endless has no length"):
        build_train_loader(Endless(), seed=1, part=SINGLE, max_steps=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.train: the dataset is empty"):
        build_train_loader(Numbers(0), seed=1, part=SINGLE, max_steps=1)
    with pytest.raises(ConfigError, match=r"data\.val: 3 samples for 4 ranks"):
        build_val_loader(Numbers(3), rank=0, world_size=4, batch_size=1)


def test_text_through_the_loader(tmp_path: Any) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)))
    dataset = ByteTextDataset(paths=str(path), sequence_length=8)
    [[first, _]] = build_train_loader(dataset, seed=1, part=SINGLE, max_steps=1)
    assert first.batch["input_ids"].shape == (4, 8)
    assert torch.equal(first.batch["input_ids"] + 1, first.batch["labels"])
