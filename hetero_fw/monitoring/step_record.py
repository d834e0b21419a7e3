"""What is known about one optimizer step when it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed optimizer step, as rank 0 knows it.

    Attributes:
        step: number of completed steps, from 1.
        loss: mean loss over the loss terms of the global batch.
        grad_norm: global gradient norm before clipping, None if it was not computed.
        lr: learning rate of the first parameter group.
        num_samples: samples of the global batch; `num_targets` its loss terms.
        step_time_s: wall-clock time of the step.
        memory_bytes: peak memory, the largest over all ranks.
        compute_s_by_group: time spent computing in each hardware group, the slowest of its ranks.
        loss_scale: of the fp16 scaler, None without one.
        emulation_stretch: how many times longer than planned emulated compute took, None without
            emulation.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    num_samples: int
    num_targets: int
    step_time_s: float
    memory_bytes: int
    compute_s_by_group: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    emulation_stretch: float | None = None

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_time_s if self.step_time_s > 0 else 0.0
