"""How long the end of a run waits for its last save."""

from __future__ import annotations

import pytest

from hetero_fw.app.compose import compose_checked
from hetero_fw.app.saving import longest_save_s
from hetero_fw.checkpoint.writer import VERDICT_GRACE, clear_up_s


@pytest.mark.parametrize("timeout_s", [1, 300, 7200])
@pytest.mark.parametrize("num_tiers", [1, 2])
def test_the_last_save_has_all_the_time_that_its_timeout_grants(
    timeout_s: int, num_tiers: int
) -> None:
    local = ["ckpt.tiers.local=/dev/shm/x"] if num_tiers == 2 else []
    cfg = compose_checked([f"ckpt.timeout_s={timeout_s}", "hardware=a100_v100_mix", *local])
    # Written, decided, pruned and cleared up in each tier; before the second a turn to wait for.
    of_tier_s = VERDICT_GRACE * timeout_s + timeout_s + 3 * clear_up_s(timeout_s)
    turn_s = (num_tiers - 1) * VERDICT_GRACE * timeout_s
    assert longest_save_s(cfg.ckpt) >= num_tiers * of_tier_s + turn_s
