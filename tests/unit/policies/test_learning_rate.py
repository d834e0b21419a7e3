from __future__ import annotations

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.policies import linear_scaled_lr


def test_scales_with_the_batch() -> None:
    assert linear_scaled_lr(0.1, 1024, 256) == pytest.approx(0.4)
    assert linear_scaled_lr(0.1, 64, 256) == pytest.approx(0.025)


def test_no_base_leaves_it_alone() -> None:
    assert linear_scaled_lr(0.1, 1024, None) == 0.1


def test_refuses_a_base_that_is_no_size() -> None:
    with pytest.raises(ConfigError, match=r"optim\.base_batch_size=0 must be at least 1"):
        linear_scaled_lr(0.1, 8, 0)
