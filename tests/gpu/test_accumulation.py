"""The device is given a whole step's micro-batches before the host asks it for anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetero_fw.data import MicroBatch
from hetero_fw.parallel import Exchange
from hetero_fw.strategies.accumulation import accumulate

pytestmark = pytest.mark.gpu

NUM_PARTS = 3


def test_no_micro_batch_waits_for_the_one_before() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    batch = torch.ones(2, 4, device="cuda")

    def backward(loss: Tensor, is_last: bool) -> None:
        loss.backward()
        # From the first part to the last, whatever waits for the device raises.
        torch.cuda.set_sync_debug_mode("default" if is_last else "error")

    try:
        result = accumulate(
            [MicroBatch(num_samples=2, batch=batch)] * NUM_PARTS,
            exchange=Exchange(None),
            count_targets=lambda item: item.num_samples,
            forward=lambda part: (part * weight).mean(),
            backward=backward,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.local == pytest.approx(1.0, rel=1e-6)
