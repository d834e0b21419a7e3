"""What a save is, before a byte of it is copied: who writes what, and under which name."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup

from hetero_fw.checkpoint.commit import SaveSpec
from hetero_fw.checkpoint.directories import checkpoint_name
from hetero_fw.checkpoint.hashing import HashAlgorithm
from hetero_fw.checkpoint.manifest import Metric
from hetero_fw.checkpoint.save_handle import SaveHandle
from hetero_fw.checkpoint.save_job import SaveJob
from hetero_fw.checkpoint.save_point import OnPoint
from hetero_fw.checkpoint.shard_layout import (
    SaveLayout,
    Structure,
    agree_on_layout,
    structure_of,
)


@dataclass(frozen=True, kw_only=True)
class SaveContent:
    """What one save is to hold.

    Attributes:
        step: optimizer steps completed.
        tensors: the same names, sizes and dtypes on all ranks.
        state: JSON values; rank 0's count.
        reason: why it is made, for the manifest and the events.
        metric: how good the weights are, for retention; rank 0's counts.
        may_be_infinite: names of buffers among them. They may hold infinities, such as masks, and
            each rank may have others: rank 0's are saved.
        is_unchanged: whether all tensors that are not copied at once are still as they were; asked
            in another thread when they are copied. If not, the save has failed.
        error: why this rank has nothing to save, None if it has.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    reason: str
    metric: Metric | None = None
    may_be_infinite: Collection[str] = ()
    is_unchanged: Callable[[], bool] = lambda: True
    error: str | None = None


class SavePlanner:
    """Makes the jobs of one rank's saves; all ranks make the same ones.

    Args:
        prefix: first part of every checkpoint's name.
        attempt: number of the attempt.
        process_group: used where tensors differ in names, sizes or dtypes from the save before.
        plan_fingerprint: stored in the manifest.
        hash: what files and chunks are hashed with.
        on_point: called at every point that a save passes.
    """

    def __init__(
        self,
        *,
        prefix: str,
        attempt: int,
        rank: int,
        world_size: int,
        process_group: ProcessGroup | None,
        plan_fingerprint: str,
        hash: HashAlgorithm,
        on_point: OnPoint,
    ) -> None:
        self._prefix = prefix
        self._attempt = attempt
        self._rank = rank
        self._world_size = world_size
        self._process_group = process_group
        self._plan_fingerprint = plan_fingerprint
        self._hash = hash
        self._on_point = on_point
        self._agreed: tuple[Structure, SaveLayout] | None = None
        self._sequence = 0

    def layout_of(
        self, tensors: Mapping[str, torch.Tensor], buffers: Collection[str]
    ) -> SaveLayout:
        """Who writes what of `tensors`. Collective if the last ones were others.

        Args:
            tensors: by name.
            buffers: names of those that are rank 0's.

        Raises:
            CheckpointError: some rank cannot save them; on all ranks.
        """
        structure = structure_of(tensors)
        if self._agreed is None or self._agreed[0] != structure:
            layout = agree_on_layout(
                tensors,
                rank=self._rank,
                world_size=self._world_size,
                process_group=self._process_group,
                from_one_rank=buffers,
            )
            self._agreed = (structure, layout)
        return self._agreed[1]

    def is_planned(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether `layout_of` would ask no other rank."""
        return self._agreed is not None and self._agreed[0] == structure_of(tensors)

    def next_token(self, layout: SaveLayout) -> str:
        """A name for the next save, unlike any other's; called for each by all ranks."""
        self._sequence += 1
        return f"{layout.token}{self._sequence:04x}"

    def job(
        self,
        content: SaveContent,
        handle: SaveHandle,
        layout: SaveLayout,
        *,
        token: str,
        started_at_s: float,
        setup_s: float = 0.0,
    ) -> SaveJob:
        """The save of `content`; with an error in it if its state is no JSON."""
        spec = SaveSpec(
            name=checkpoint_name(self._prefix, content.step),
            token=token,
            step=content.step,
            attempt=self._attempt,
            plan_fingerprint=self._plan_fingerprint,
            world_size=self._world_size,
            reason=content.reason,
            hash=self._hash,
            metric=content.metric,
            on_point=self._on_point,
        )
        job = SaveJob(
            handle=handle,
            sequence=self._sequence,
            spec=spec,
            layout=layout,
            may_be_infinite=frozenset(content.may_be_infinite),
            is_unchanged=content.is_unchanged,
            started_at_s=started_at_s,
            setup_s=setup_s,
        )
        job.error = content.error
        if self._rank == 0 and job.error is None:
            try:
                spec.state.update(json.loads(json.dumps(content.state)))
            except (TypeError, ValueError, RecursionError) as error:
                job.error = f"the state is no JSON: {error}"
        return job
