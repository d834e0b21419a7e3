"""Unequal shares give the gradient of the global batch, whatever the split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetero_fw.data import MicroBatch
from hetero_fw.parallel import (
    Exchange,
    apply_fsdp,
    build_mesh,
    local_gradients,
    set_gradient_sync,
    squared_norm,
)
from hetero_fw.strategies.accumulation import AccumulatedLoss, accumulate
from tests.distributed.ranks import run_ranks

BATCH, TOKENS, WIDTH = 14, 5, 8


class Model(nn.Module):
    """A few blocks, an odd number of parameters, a loss over the valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = batch["x"]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden).flatten(0, 1)
        labels = batch["y"].flatten()
        total = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return total / (labels != -100).sum().clamp(min=1)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 7, (BATCH, TOKENS), generator=generator)
    y[torch.rand(BATCH, TOKENS, generator=generator) < 0.3] = -100
    y[3] = -100  # a sample without any valid token
    return {"x": x, "y": y}


def take(batch: dict[str, Tensor], start: int, size: int) -> MicroBatch:
    rows = slice(start, start + max(size, 1))
    return MicroBatch(num_samples=size, batch={key: value[rows] for key, value in batch.items()})


def num_targets(item: MicroBatch) -> int:
    return int((item.batch["y"] != -100).sum())


def run_step(
    model: nn.Module, parts: list[MicroBatch], exchange: Exchange, zero_stage: int
) -> AccumulatedLoss:
    def backward(loss: Tensor, is_last: bool) -> None:
        set_gradient_sync(model, is_last=is_last, zero_stage=zero_stage)
        loss.backward()

    return accumulate(
        parts, exchange=exchange, count_targets=num_targets, forward=model, backward=backward
    )


def sharded_gradients(
    rank: int, group: dist.ProcessGroup, microbatches: list[list[int]], zero_stage: int
) -> tuple[dict[str, Any], float, float]:
    model, batch = make_model(), make_batch()
    apply_fsdp(model, mesh=build_mesh("cpu"), zero_stage=zero_stage)
    start = sum(sum(sizes) for sizes in microbatches[:rank])
    parts = []
    for size in microbatches[rank]:
        parts.append(take(batch, min(start, BATCH - 1), size))
        start += size
    loss = run_step(model, parts, Exchange(group), zero_stage)
    norm = torch.tensor(squared_norm(local_gradients(model.parameters())), dtype=torch.float64)
    total = torch.tensor(loss.local, dtype=torch.float64)
    dist.all_reduce(norm)
    dist.all_reduce(total)
    gradients: dict[str, Any] = {
        name: parameter.grad.full_tensor().numpy()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
    }
    return gradients, float(norm.sqrt()), float(total)


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize(
    "microbatches",
    [
        [[7], [7]],
        [[10], [3], [1]],
        [[4, 3], [2, 1], [2, 2]],
        [[6, 5], [1, 0], [1, 1]],
        [[3, 3, 3], [2, 2, 0], [1, 0, 0], [0, 0, 0]],
    ],
    ids=str,
)
def test_gradient_is_that_of_the_global_batch(
    microbatches: list[list[int]], zero_stage: int
) -> None:
    reference = make_model()
    alone = run_step(reference, [take(make_batch(), 0, BATCH)], Exchange(None), 0)

    results = run_ranks(sharded_gradients, len(microbatches), microbatches, zero_stage)

    expected_norm = squared_norm(local_gradients(reference.parameters())) ** 0.5
    for gradients, norm, loss in results:
        assert loss == pytest.approx(alone.local, rel=1e-12)
        assert norm == pytest.approx(expected_norm, rel=1e-12)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            scale = float(parameter.grad.abs().max())
            error = float(abs(gradients[name] - parameter.grad.numpy()).max())
            assert error <= 1e-12 * scale, f"{name}: {error / scale:.1e}"


def test_mean_of_means_would_be_wrong() -> None:
    """The test above can fail: weighting each rank's mean alike misses by far more than 1e-12."""
    batch, reference = make_batch(), make_model()
    run_step(reference, [take(batch, 0, BATCH)], Exchange(None), 0)
    biased = make_model()
    for start, size in ((0, 10), (10, 3), (13, 1)):
        (biased(take(batch, start, size).batch) / 3).backward()
    wanted, got = reference.head.weight.grad, biased.head.weight.grad
    assert wanted is not None
    assert got is not None
    assert float((wanted - got).abs().max() / wanted.abs().max()) > 0.01
