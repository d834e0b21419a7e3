"""What the user asks of the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_fw.errors import ConfigError, did_you_mean
from hetero_fw.hardware import Precision
from hetero_fw.planning.plan import PlanKind

AUTO = "auto"
UNIFORM = "uniform"


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The `parallel` group of the configuration; `auto` leaves a choice to the planner.

    Attributes:
        global_batch_size: samples in one optimizer step.
        kind: `fsdp` uses all devices, `single` the best one, `auto` whatever is fastest.
        batch_split: `auto` (by speed), `uniform`, or the samples of each rank in rank order.
        num_microbatches: micro-batches of each rank.
        max_microbatch_size: most samples in one micro-batch, None for what memory allows.
        zero_stage: 2, 3 or auto.
        precision: a `Precision` value or auto.
        memory_margin: share of each device's memory that is left free, in [0, 1).

    Raises:
        ConfigError: lists every problem, each with its config key.
    """

    global_batch_size: int
    kind: str = AUTO
    batch_split: str | Sequence[int] = AUTO
    num_microbatches: int | str = AUTO
    max_microbatch_size: int | None = None
    zero_stage: int | str = AUTO
    precision: str = AUTO
    memory_margin: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.batch_split, str):
            object.__setattr__(self, "batch_split", tuple(self.batch_split))
        ConfigError.collect(self._problems())

    @property
    def given_shares(self) -> tuple[int, ...] | None:
        """The shares the user listed, None if the planner splits the batch."""
        return None if isinstance(self.batch_split, str) else tuple(self.batch_split)

    @property
    def fixed_num_microbatches(self) -> int | None:
        return self.num_microbatches if isinstance(self.num_microbatches, int) else None

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """Stages that may be used, best first."""
        return (self.zero_stage,) if isinstance(self.zero_stage, int) else (2, 3)

    def _problems(self) -> Iterator[str]:
        batch = self.global_batch_size
        yield from _count_problems("data.global_batch_size", batch)
        yield from _choice_problems("parallel.kind", self.kind, (AUTO, *PlanKind))
        yield from _choice_problems("parallel.precision", self.precision, (AUTO, *Precision))
        if self.zero_stage not in (AUTO, 2, 3):
            yield f"parallel.zero_stage={self.zero_stage} is not known. Choose from: auto, 2, 3."
        if self.num_microbatches != AUTO:
            yield from _count_problems("parallel.num_microbatches", self.num_microbatches)
            if isinstance(self.num_microbatches, int) and self.num_microbatches > batch:
                yield (
                    f"parallel.num_microbatches={self.num_microbatches} must be at most "
                    f"data.global_batch_size={batch}."
                )
        if self.max_microbatch_size is not None:
            yield from _count_problems("parallel.max_microbatch_size", self.max_microbatch_size)
        if not 0 <= self.memory_margin < 1:
            yield f"parallel.memory_margin={self.memory_margin} must be at least 0 and below 1."
        yield from self._split_problems()

    def _split_problems(self) -> Iterator[str]:
        shares = self.given_shares
        if shares is None:
            yield from _choice_problems(
                "parallel.batch_split", str(self.batch_split), (AUTO, UNIFORM)
            )
            return
        shown = f"parallel.batch_split={list(shares)}"
        if not all(_is_count(share, least=0) for share in shares):
            yield f"{shown} must list whole numbers of at least 0, one for each device."
        elif sum(shares) != self.global_batch_size:
            yield (
                f"{shown} sums to {sum(shares)}; "
                f"it must sum to data.global_batch_size={self.global_batch_size}."
            )


def _is_count(value: object, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count_problems(key: str, value: object) -> Iterator[str]:
    if not _is_count(value):
        yield f"{key}={value} must be a whole number of at least 1."


def _choice_problems(key: str, value: str, choices: Sequence[str]) -> Iterator[str]:
    if value not in choices:
        names = [str(choice) for choice in choices]
        hint = did_you_mean(str(value), names)
        yield f"{key}={value} is not known.{hint} Choose from: {', '.join(names)}."
