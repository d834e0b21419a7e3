"""Every byte is read once, by a rank that can, from the nearest tier."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from hetero_fw.checkpoint.assignment import Holder, assign_spans
from hetero_fw.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry
from hetero_fw.checkpoint.spans import MAX_SPAN_BYTES, MIN_SPAN_BYTES, find_spans

LOCAL, STORAGE = (0, 0), (1, 0)


def name(index: int) -> str:
    return f"shard-{index:05d}.bin"


def manifest_of(shards: list[list[int]]) -> Manifest:
    """One tensor for each chunk; `shards` has the lengths of the chunks of each file."""
    tensors = {}
    for index, lengths in enumerate(shards):
        begin = 0
        for length in lengths:
            chunk = ChunkEntry(
                offsets=(0,),
                sizes=(length,),
                file=name(index),
                byte_offset=begin,
                length=length,
                digest="",
            )
            tensors[f"t{len(tensors)}"] = TensorEntry(
                size=(length,), dtype="uint8", chunks=(chunk,)
            )
            begin += -(-length // 64) * 64
    return Manifest(
        step=1,
        attempt=0,
        plan_fingerprint="",
        world_size=len(shards),
        created_time_s=0.0,
        reason="",
        is_finite=True,
        files=(),
        tensors=tensors,
        state={},
    )


shard_lists = st.lists(
    st.lists(st.integers(1, 3 * MIN_SPAN_BYTES), max_size=12), min_size=1, max_size=5
)


@given(shards=shard_lists, num_readers=st.integers(1, 5), data=st.data())
def test_spans_hold_every_chunk_asked_for_once(
    shards: list[list[int]], num_readers: int, data: st.DataObject
) -> None:
    manifest = manifest_of(shards)
    every = sorted(manifest.tensors)
    names = data.draw(st.sets(st.sampled_from(every))) if every else set()
    spans = find_spans(manifest, names, num_readers=num_readers)
    keys = [chunk.key for span in spans for chunk in span.chunks]
    assert sorted(keys) == sorted((fqn, 0) for fqn in names)
    for span in spans:
        assert span.size <= MAX_SPAN_BYTES
        assert span.num_chunk_bytes > span.size - 64 * len(span.chunks)
        for chunk in span.chunks:
            assert chunk.entry.file == span.file
            assert span.begin + chunk.start == chunk.entry.byte_offset
            assert chunk.start % 64 == 0
            assert chunk.entry.byte_offset + chunk.entry.length <= span.end


@given(shards=shard_lists, world_size=st.integers(1, 5), data=st.data())
def test_every_span_is_read_by_one_rank_that_can(
    shards: list[list[int]], world_size: int, data: st.DataObject
) -> None:
    manifest = manifest_of(shards)
    spans = find_spans(manifest, manifest.tensors, num_readers=world_size)
    files = [name(index) for index in range(len(shards))]
    anyone = st.builds(
        Holder,
        rank=st.integers(0, world_size - 1),
        source=st.integers(0, 1),
        distance=st.sampled_from([LOCAL, STORAGE]),
    )
    holders = {file: data.draw(st.sets(anyone, max_size=6)) for file in files}
    chosen = assign_spans(spans, holders, files=files, world_size=world_size)
    assert len(chosen) == len(spans)
    for span, holder in zip(spans, chosen, strict=True):
        if not holders[span.file]:
            assert holder is None
        else:
            assert holder in holders[span.file]
            assert holder.distance == min(other.distance for other in holders[span.file])
    assert chosen == assign_spans(spans, holders, files=files, world_size=world_size)


def loads(
    shards: list[list[int]], world_size: int, holders: dict[str, set[Holder]] | None = None
) -> tuple[dict[int, int], dict[int, set[str]]]:
    """Bytes and files of each rank."""
    manifest = manifest_of(shards)
    spans = find_spans(manifest, manifest.tensors, num_readers=world_size)
    files = [name(index) for index in range(len(shards))]
    everywhere = {Holder(rank=rank, source=0, distance=STORAGE) for rank in range(world_size)}
    chosen = assign_spans(
        spans,
        holders or dict.fromkeys(files, everywhere),
        files=files,
        world_size=world_size,
    )
    num_bytes: dict[int, int] = defaultdict(int)
    names: dict[int, set[str]] = defaultdict(set)
    for span, holder in zip(spans, chosen, strict=True):
        assert holder is not None
        num_bytes[holder.rank] += span.size
        names[holder.rank].add(span.file)
    return num_bytes, names


SHARD = [2**20] * 16


def test_the_same_division_reads_its_own_shards() -> None:
    sizes, names = loads([SHARD, SHARD[:5], SHARD[:2]], 3)
    assert names == {0: {name(0)}, 1: {name(1)}, 2: {name(2)}}
    assert sizes == {0: 16 * 2**20, 1: 5 * 2**20, 2: 2 * 2**20}


def test_one_large_shard_is_read_by_all() -> None:
    sizes, _ = loads([SHARD], 4)
    assert sizes == dict.fromkeys(range(4), 4 * 2**20)


def test_ranks_read_the_shards_that_their_part_lies_in() -> None:
    sizes, names = loads([SHARD] * 4, 2)
    assert names == {0: {name(0), name(1)}, 1: {name(2), name(3)}}
    sizes, names = loads([SHARD] * 2, 4)
    assert names == {0: {name(0)}, 1: {name(0)}, 2: {name(1)}, 3: {name(1)}}
    assert set(sizes.values()) == {8 * 2**20}


def test_a_near_copy_is_taken_though_its_rank_has_more_to_do() -> None:
    far = {Holder(rank=rank, source=0, distance=STORAGE) for rank in range(2)}
    near = {Holder(rank=0, source=1, distance=LOCAL)}
    sizes, _ = loads([SHARD, SHARD], 2, {name(0): far | near, name(1): far | near})
    assert list(sizes) == [0]


def test_a_chunk_is_never_divided() -> None:
    (span,) = find_spans(manifest_of([[2 * MIN_SPAN_BYTES]]), ["t0"], num_readers=4)
    assert span.size == 2 * MIN_SPAN_BYTES
