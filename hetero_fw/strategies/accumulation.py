"""One optimizer step of one rank: its micro-batches forward and backward, exactly weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_fw.data import MicroBatch
from hetero_fw.parallel import Exchange


@dataclass(frozen=True, kw_only=True)
class AccumulatedLoss:
    """What a rank's micro-batches gave.

    Attributes:
        local: this rank's part of the global mean loss; the sum over ranks is that mean.
        num_targets: loss terms in the whole global batch.
    """

    local: float
    num_targets: int


def accumulate(
    microbatches: Sequence[MicroBatch],
    *,
    exchange: Exchange,
    count_targets: Callable[[MicroBatch], int],
    forward: Callable[[Any], Tensor],
    backward: Callable[[Tensor, bool], None],
) -> AccumulatedLoss:
    """Run all micro-batches so that gradients sum, over ranks, to that of the global mean loss.

    Each micro-batch's mean loss is weighted by its share of all loss terms of the global batch:
    w = n / N. With means of unequal n, anything else is biased
    (https://github.com/pytorch/pytorch/issues/67253).

    Args:
        count_targets: loss terms that `forward` takes the mean over; 0 for padding.
        forward: mean loss of one micro-batch.
        backward: called with the weighted loss and whether it is the step's last.
    """
    counts = [count_targets(item) if item.num_samples else 0 for item in microbatches]
    pending = exchange.start_sum(sum(counts))
    total = 0
    loss_sum: Tensor | float = 0.0
    for index, (item, count) in enumerate(zip(microbatches, counts, strict=True)):
        loss = forward(item.batch)
        if index == 0:
            total = max(1, pending.wait())
        weighted = loss * (count / total) if count else torch.nan_to_num(loss) * 0.0
        backward(weighted, index == len(microbatches) - 1)
        # Stays on the device: to read it here would wait for it before the next part is queued.
        loss_sum = loss_sum + weighted.detach().double()
    return AccumulatedLoss(local=float(loss_sum), num_targets=total)
