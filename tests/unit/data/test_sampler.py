from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.data import MicroBatchRequest, RankPart, StepIndexedSampler
from hetero_fw.data.mixing import SeedUse, derive_seed, mix, mix_array
from hetero_fw.errors import ConfigError

SEEDS = st.integers(min_value=-(2**31), max_value=2**63)


def stream(sampler: StepIndexedSampler, num_steps: int) -> list[int]:
    return [int(i) for step in range(1, num_steps + 1) for i in sampler.step_indices(step)]


@settings(max_examples=50, deadline=None)
@given(num_samples=st.integers(1, 300), batch=st.integers(1, 70), seed=SEEDS, shuffle=st.booleans())
def test_each_sample_once_per_epoch(num_samples: int, batch: int, seed: int, shuffle: bool) -> None:
    sampler = StepIndexedSampler(
        num_samples=num_samples, global_batch_size=batch, seed=seed, shuffle=shuffle
    )
    indices = stream(sampler, num_steps=-(-3 * num_samples // batch))
    for epoch in range(3):
        part = indices[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples))
        if not shuffle:
            assert part == list(range(num_samples))


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_samples=st.integers(1, 100), step=st.integers(1, 10**9), seed=SEEDS)
def test_any_split_of_ranks_is_the_global_batch(
    data: st.DataObject, num_samples: int, step: int, seed: int
) -> None:
    num_microbatches = data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 7), min_size=num_microbatches, max_size=num_microbatches)
    plan = data.draw(st.lists(row, min_size=1, max_size=4).filter(lambda p: sum(map(sum, p)) > 0))
    shares = tuple(sum(microbatches) for microbatches in plan)
    sampler = StepIndexedSampler(num_samples=num_samples, global_batch_size=sum(shares), seed=seed)
    union: list[int] = []
    for rank, microbatches in enumerate(plan):
        part = RankPart(shares=shares, rank=rank, microbatches=tuple(microbatches))
        requests = part.requests(sampler, step)
        assert [request.num_samples for request in requests] == microbatches
        for request in requests:
            assert len(request.indices) == len(request.positions) == max(request.num_samples, 1)
            assert all(0 <= index < num_samples for index in request.indices)
            first = (step - 1) * sampler.global_batch_size
            assert all(first <= p < first + sampler.global_batch_size for p in request.positions)
            if request.num_samples:
                union += request.indices
    assert union == sampler.step_indices(step).tolist()


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    sampler = StepIndexedSampler(num_samples=1000, global_batch_size=16, seed=7)
    again = StepIndexedSampler(num_samples=1000, global_batch_size=16, seed=7)
    in_order = [sampler.step_indices(step).tolist() for step in range(1, 200)]
    backwards = [again.step_indices(step).tolist() for step in range(199, 0, -1)]
    assert in_order == backwards[::-1]


def test_the_stream_is_the_same_for_any_batch_size() -> None:
    small = StepIndexedSampler(num_samples=77, global_batch_size=4, seed=3)
    large = StepIndexedSampler(num_samples=77, global_batch_size=100, seed=3)
    assert stream(small, 50) == stream(large, 2)


def test_order_is_fixed_for_ever() -> None:
    """Another order would change the training of every run that is continued."""
    sampler = StepIndexedSampler(num_samples=10, global_batch_size=10, seed=1234)
    assert sampler.step_indices(1).tolist() == [9, 8, 4, 2, 3, 1, 7, 5, 0, 6]
    assert sampler.step_indices(2).tolist() == [0, 3, 4, 5, 6, 2, 8, 9, 7, 1]


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {
        tuple(StepIndexedSampler(num_samples=50, global_batch_size=50, seed=s).step_indices(e))
        for s in range(5)
        for e in range(1, 6)
    }
    assert len(orders) == 25


def test_shuffle_looks_uniform() -> None:
    """Chi-square of where each sample lands, over 4000 epochs of 20 samples."""
    size, num_epochs = 20, 4000
    sampler = StepIndexedSampler(num_samples=size, global_batch_size=size, seed=0)
    orders = sampler.indices(np.arange(size * num_epochs)).reshape(num_epochs, size)
    expected = num_epochs / size
    counts = np.stack([np.bincount(column, minlength=size) for column in orders.T])
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5
    neighbours = sum(b - a == 1 for order in orders.tolist() for a, b in pairwise(order))
    assert abs(neighbours / num_epochs - (size - 1) / size) < 0.1


def test_a_huge_dataset_costs_nothing() -> None:
    sampler = StepIndexedSampler(num_samples=10**12, global_batch_size=64, seed=1)
    indices = sampler.step_indices(10**9)
    assert len(set(indices.tolist())) == 64
    assert indices.min() >= 0
    assert indices.max() < 10**12


def test_padding_names_a_sample_of_the_step() -> None:
    sampler = StepIndexedSampler(num_samples=8, global_batch_size=4, seed=1, shuffle=False)
    part = RankPart(shares=(4, 0), rank=1, microbatches=(0, 0))
    assert part.requests(sampler, 2) == [MicroBatchRequest((7,), (7,), 0)] * 2


def test_refuses_what_cannot_be_sampled() -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        StepIndexedSampler(num_samples=0, global_batch_size=4, seed=1)
    with pytest.raises(ConfigError, match=r"data\.global_batch_size=0"):
        StepIndexedSampler(num_samples=3, global_batch_size=0, seed=1)
    with pytest.raises(ValueError, match="sum to its share of 3"):
        RankPart(shares=(3, 1), rank=0, microbatches=(2, 2))


def test_mixing() -> None:
    values = [0, 1, 2, 2**64 - 1, 0x123456789]
    mixed = mix_array(np.array(values, dtype=np.uint64))
    assert mixed.tolist() == [mix(value) for value in values]
    seeds = {derive_seed(s, use, p) for s in range(9) for use in SeedUse for p in range(99)}
    assert len(seeds) == 9 * len(SeedUse) * 99
