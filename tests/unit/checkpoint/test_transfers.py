"""What ranks need of each other travels whole, once, in windows that are not too large."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hetero_fw.checkpoint.transfers import Need, Part, plan_windows, split_box

LIMIT_BYTES = 1024

boxes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


def elements(start: tuple[int, ...], lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, a + n) for a, n in zip(start, lengths, strict=True))))


@given(lengths=boxes, limit=st.integers(1, 200))
def test_pieces_of_a_box_are_the_box(lengths: tuple[int, ...], limit: int) -> None:
    pieces = list(split_box(lengths, limit))
    found = [element for start, part in pieces for element in elements(start, part)]
    assert found == elements((0,) * len(lengths), lengths)
    assert all(math.prod(part) <= limit for _, part in pieces)


@given(data=st.data(), world_size=st.integers(2, 4))
def test_every_need_is_met_once_and_no_window_is_too_large(
    data: st.DataObject, world_size: int
) -> None:
    needs = [
        data.draw(
            st.lists(
                st.builds(
                    Need,
                    owner=st.sampled_from([r for r in range(world_size) if r != rank]),
                    chunk=st.integers(0, 9),
                    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
                    offsets=st.just(()),
                    lengths=boxes,
                ),
                max_size=5,
            )
        )
        for rank in range(world_size)
    ]
    windows = plan_windows(needs, LIMIT_BYTES)
    assert all(windows)
    for window, rank in itertools.product(windows, range(world_size)):
        for side in ("source", "target"):
            taken = [part.room_bytes for part in window if getattr(part, side) == rank]
            assert sum(taken) <= LIMIT_BYTES
    parts = [part for window in windows for part in window]
    for target, wanted in enumerate(needs):
        for number, need in enumerate(wanted):
            mine = [part for part in parts if (part.target, part.need) == (target, number)]
            assert {part.source for part in mine} == {need.owner}
            assert sum(part.num_bytes for part in mine) == math.prod(need.lengths) * need.itemsize
    assert len(parts) == len({(part.target, part.need, part.start) for part in parts})


def test_no_need_is_no_window() -> None:
    assert plan_windows([[], []], LIMIT_BYTES) == []


def test_chunks_travel_in_order_so_that_their_memory_is_soon_free() -> None:
    def need(chunk: int) -> Need:
        return Need(owner=0, chunk=chunk, itemsize=1, offsets=(0,), lengths=(100,))

    needs = [[], [need(2), need(0)], [need(1), need(2)]]
    parts: list[Part] = [part for window in plan_windows(needs, LIMIT_BYTES) for part in window]
    assert [needs[part.target][part.need].chunk for part in parts] == [0, 1, 2, 2]
