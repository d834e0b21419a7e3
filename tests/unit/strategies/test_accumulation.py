"""Micro-batches of any size add up to the mean over the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetero_fw.data import MicroBatch
from hetero_fw.parallel import Exchange
from hetero_fw.strategies.accumulation import AccumulatedLoss, accumulate

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
Y = torch.tensor([0, 1, -100, 1, -100, -100, 0, 1])


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def part(start: int, size: int, *, is_padding: bool = False) -> MicroBatch:
    rows = slice(start, start + size)
    return MicroBatch(num_samples=0 if is_padding else size, batch=(X[rows], Y[rows]))


def run(model: nn.Linear, parts: list[MicroBatch]) -> tuple[AccumulatedLoss, list[bool]]:
    lasts: list[bool] = []

    def forward(batch: tuple[Tensor, Tensor]) -> Tensor:
        # The plain mean, which is nan where no label is valid.
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100)

    def backward(loss: Tensor, is_last: bool) -> None:
        loss.backward()
        lasts.append(is_last)

    result = accumulate(
        parts,
        exchange=Exchange(None),
        count_targets=lambda item: int((item.batch[1] != -100).sum()),
        forward=forward,
        backward=backward,
    )
    return result, lasts


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, 8)],
        [part(0, 5), part(5, 3)],
        [part(0, 4), part(4, 2), part(6, 2)],
        [part(0, 8), part(0, 1, is_padding=True)],
        [part(4, 1, is_padding=True), part(0, 8)],
    ],
    ids=["whole", "two", "one without targets", "padding", "padding without targets"],
)
def test_any_split_gives_the_mean_of_the_whole(parts: list[MicroBatch]) -> None:
    whole, split = make_model(), make_model()
    expected = F.cross_entropy(whole(X), Y, ignore_index=-100)
    expected.backward()
    result, lasts = run(split, parts)
    assert result.num_targets == 5
    assert result.local == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(split.weight.grad, whole.weight.grad, rtol=1e-12, atol=1e-14)
    assert lasts == [False] * (len(parts) - 1) + [True]


def test_batch_without_any_target() -> None:
    model = make_model()
    result, _ = run(model, [part(4, 2)])
    assert result.local == 0.0
    assert model.weight.grad is not None
    assert float(model.weight.grad.abs().sum()) == 0.0
