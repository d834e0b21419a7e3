"""Which bytes of which tensors each rank writes, agreed once and reused for every save.

PyTorch's planner decides which rank writes which chunk (DTensor shards stay where they are,
replicated tensors are spread over the ranks); this module places the chunks in a file.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from hetero_fw.checkpoint.manifest import DTYPES
from hetero_fw.errors import CheckpointError

# Every chunk starts at a multiple of this, so that it can be viewed as any dtype.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One chunk of one tensor and its place in the shard file."""

    item: WriteItem
    fqn: str
    dtype: torch.dtype
    tensor_size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    byte_offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The shard file of one rank."""

    file_name: str
    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True, kw_only=True)
class SaveLayout:
    """What one rank knows about every save of one structure.

    Attributes:
        own: the shard this rank writes.
        shards: the shards of all ranks, in rank order; rank 0 only, empty elsewhere.
        token: random, the same on all ranks; part of the names of temporary directories.
    """

    planner: DefaultSavePlanner
    own: ShardLayout
    shards: tuple[ShardLayout, ...]
    token: str


Structure = tuple[tuple[Any, ...], ...]


def structure_of(tensors: Mapping[str, object]) -> Structure:
    """Key under which a layout may be reused: names, sizes, dtypes and placements.

    Takes anything: what cannot be saved is refused by all ranks together, when they agree.
    """
    facts = ("dtype", "shape", "placements")
    return tuple(
        (fqn, type(value), *(getattr(value, fact, None) for fact in facts))
        for fqn, value in tensors.items()
    )


def agree_on_layout(
    tensors: Mapping[str, torch.Tensor],
    *,
    rank: int,
    world_size: int,
    process_group: dist.ProcessGroup | None,
    from_one_rank: Collection[str] = (),
) -> SaveLayout:
    """Plan who writes what. Collective on `process_group` unless `world_size` is 1.

    Args:
        tensors: what is on all ranks is spread over them.
        from_one_rank: names of those that are rank 0's instead, as far as it has them whole.

    Raises:
        CheckpointError: some rank cannot save its tensors; raised on all ranks.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    proposal: SavePlan | str
    try:
        proposal = _propose(planner, tensors, is_coordinator=rank == 0)
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        proposal = f"rank {rank}: {error}"
    if world_size == 1:
        verdict = _merge(planner, [proposal], from_one_rank)[0]
        return _finish(planner, verdict, rank)
    proposals: list[Any] | None = [None] * world_size if rank == 0 else None
    # Plans travel between live ranks of one job by the means torch uses itself; files never
    # hold a pickle.
    dist.gather_object(proposal, proposals, group=process_group, group_dst=0)
    verdicts = _merge(planner, proposals, from_one_rank) if proposals is not None else None
    received: list[Any] = [None]
    dist.scatter_object_list(received, verdicts, group=process_group, group_src=0)
    return _finish(planner, received[0], rank)


def check_dtypes(tensors: Mapping[str, object]) -> None:
    """Look at what decides whether `tensors` can ever be saved.

    Raises:
        CheckpointError: the format does not hold some of their dtypes; names those.
    """
    unknown = [
        f"{fqn} ({tensor.dtype})"
        for fqn, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in DTYPES.values()
    ]
    if unknown:
        raise CheckpointError(f"dtypes that the format does not hold: {', '.join(unknown)}")


@dataclass(frozen=True)
class _Verdict:
    plan: SavePlan
    all_plans: tuple[SavePlan, ...]
    token: str


def _propose(
    planner: DefaultSavePlanner, tensors: Mapping[str, object], *, is_coordinator: bool
) -> SavePlan:
    unfit = [fqn for fqn, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]
    if unfit:
        raise CheckpointError(f"not tensors: {', '.join(unfit)}; pass them as `state`.")
    check_dtypes(tensors)
    partial = [
        fqn
        for fqn, tensor in tensors.items()
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)
    ]
    if partial:
        raise CheckpointError(f"partial sums that were not reduced: {', '.join(partial)}")
    planner.set_up_planner(dict(tensors), is_coordinator=is_coordinator)
    return planner.create_local_plan()


def _merge(
    planner: DefaultSavePlanner, proposals: Sequence[SavePlan | str], from_one_rank: Collection[str]
) -> list[Any]:
    """One verdict per rank, or the same error text for every rank."""
    errors = [proposal for proposal in proposals if isinstance(proposal, str)]
    plans = [proposal for proposal in proposals if isinstance(proposal, SavePlan)]
    if not errors:
        try:
            plans, _ = planner.create_global_plan(_without_others(plans, from_one_rank))
        except Exception as error:  # noqa: BLE001  # the other ranks wait for an answer
            errors = [f"the ranks' tensors do not fit together: {error}"]
    if errors:
        return ["; ".join(errors)] * len(proposals)
    token = secrets.token_hex(4)
    return [
        _Verdict(plan, tuple(plans) if rank == 0 else (), token) for rank, plan in enumerate(plans)
    ]


def _without_others(plans: list[SavePlan], from_one_rank: Collection[str]) -> list[SavePlan]:
    """Leave to rank 0 what each rank has for itself: from several it would not fit together."""
    first, *others = plans
    whole = {
        item.index.fqn
        for item in first.items
        if item.tensor_data is not None and item.tensor_data.chunk.sizes == item.tensor_data.size
    }
    left = whole & frozenset(from_one_rank)
    return [
        first,
        *(
            replace(plan, items=[item for item in plan.items if item.index.fqn not in left])
            for plan in others
        ),
    ]


def _finish(planner: DefaultSavePlanner, verdict: _Verdict | str, rank: int) -> SaveLayout:
    if isinstance(verdict, str):
        raise CheckpointError(verdict)
    return SaveLayout(
        planner=planner,
        own=place_chunks(rank, planner.finish_plan(verdict.plan).items),
        shards=tuple(place_chunks(r, plan.items) for r, plan in enumerate(verdict.all_plans)),
        token=verdict.token,
    )


def shard_file_name(rank: int) -> str:
    """Name of the file that `rank` writes."""
    return f"shard-{rank:05d}.bin"


def place_chunks(rank: int, items: Sequence[WriteItem]) -> ShardLayout:
    """Lay the chunks of one rank one after another; a pure function of its plan."""
    slots: list[Slot] = []
    end = 0
    for item in items:
        data = item.tensor_data
        assert data is not None
        length = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        if length == 0:
            continue
        slot = Slot(
            item=item,
            fqn=item.index.fqn,
            dtype=data.properties.dtype,
            tensor_size=tuple(data.size),
            offsets=tuple(data.chunk.offsets),
            sizes=tuple(data.chunk.sizes),
            byte_offset=-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
            length=length,
        )
        slots.append(slot)
        end = slot.byte_offset + length
    return ShardLayout(file_name=shard_file_name(rank), slots=tuple(slots), size=end)
