from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_fw.planning.shares import SpeedGroup, balanced_shares, split_microbatches

GROUPS = st.lists(
    st.builds(
        SpeedGroup,
        num_ranks=st.integers(1, 3),
        sample_s=st.floats(0.01, 10.0),
        max_samples=st.integers(1, 12),
    ),
    min_size=1,
    max_size=3,
)


def finish_s(shares: Sequence[Sequence[int]], groups: Sequence[SpeedGroup]) -> float:
    return max(max(s) * group.sample_s for s, group in zip(shares, groups, strict=True))


def capacity(groups: Sequence[SpeedGroup]) -> int:
    return sum(group.num_ranks * group.max_samples for group in groups)


@given(groups=GROUPS, num_samples=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_shares_sum_to_the_batch_and_respect_caps(
    groups: list[SpeedGroup], num_samples: int
) -> None:
    shares = balanced_shares(num_samples, groups)
    num_ranks = sum(group.num_ranks for group in groups)
    if num_ranks > num_samples or capacity(groups) < num_samples:
        assert shares is None
        return
    assert shares is not None
    assert sum(map(sum, shares)) == num_samples
    for members, group in zip(shares, groups, strict=True):
        assert len(members) == group.num_ranks
        assert 1 <= min(members) <= max(members) <= min(min(members) + 1, group.max_samples)


@given(groups=GROUPS, num_samples=st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_no_other_split_finishes_earlier(groups: list[SpeedGroup], num_samples: int) -> None:
    ranks = [group for group in groups for _ in range(group.num_ranks)][:4]
    each = [SpeedGroup(num_ranks=1, sample_s=r.sample_s, max_samples=r.max_samples) for r in ranks]
    shares = balanced_shares(num_samples, each)
    options = [
        [(share,) for share in split]
        for split in itertools.product(*(range(1, r.max_samples + 1) for r in each))
        if sum(split) == num_samples
    ]
    if shares is None:
        assert not options
    else:
        best_s = min(finish_s(option, each) for option in options)
        assert finish_s(shares, each) <= best_s * (1 + 1e-9)


def test_a_large_batch_is_split_at_once() -> None:
    groups = [
        SpeedGroup(num_ranks=256, sample_s=1.0, max_samples=10**9),
        SpeedGroup(num_ranks=256, sample_s=2.5, max_samples=10**9),
    ]
    shares = balanced_shares(10**8, groups)
    assert shares is not None
    assert sum(map(sum, shares)) == 10**8
    assert max(shares[0]) / min(shares[1]) < 2.501


def test_identical_ranks_get_equal_shares() -> None:
    group = SpeedGroup(num_ranks=4, sample_s=0.3, max_samples=100)
    assert balanced_shares(10, [group]) == ((3, 3, 2, 2),)


def test_a_cap_moves_samples_to_slower_ranks() -> None:
    fast = SpeedGroup(num_ranks=1, sample_s=1.0, max_samples=3)
    slow = SpeedGroup(num_ranks=1, sample_s=10.0, max_samples=100)
    assert balanced_shares(8, [fast, slow]) == ((3,), (5,))


@given(num_samples=st.integers(0, 100), count=st.integers(1, 20))
def test_microbatches_are_as_equal_as_possible(num_samples: int, count: int) -> None:
    sizes = split_microbatches(num_samples, count)
    assert (len(sizes), sum(sizes)) == (count, num_samples)
    assert max(sizes) - min(sizes) <= 1
    assert (0 in sizes) == (num_samples < count)
