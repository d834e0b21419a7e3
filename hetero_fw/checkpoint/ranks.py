"""The ranks that read one checkpoint together, and how they come to the same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from hetero_fw.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """A gloo group, or one rank alone; all ranks call each method, in the same order.

    Values travel between live ranks of one job by the means torch uses itself; no file holds one.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T | None, source: int) -> T:
        """The value of rank `source`; what the others pass is ignored."""
        box: list[Any] = [value]
        if self.group is not None:
            dist.broadcast_object_list(box, group=self.group, group_src=source)
        result: T = box[0]
        return result

    def gather_results(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank: what all of them got; raises on all if it fails on one.

        Raises:
            CheckpointError: what went wrong, on whichever rank.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  # the other ranks must hear of it
            failure = error
        own = None if failure is None else str(failure) or repr(failure)
        gathered: list[tuple[str | None, Any]] = self.gather((own, result))
        problems = list(dict.fromkeys(text for text, _ in gathered if text is not None))
        if problems:
            raise CheckpointError("; ".join(problems)) from failure
        return [value for _, value in gathered]

    def succeed_together(self, work: Callable[[], T]) -> T:
        """As `gather_results`, for results that stay on their rank."""
        own: list[T] = []
        self.gather_results(lambda: own.append(work()))
        return own[0]
