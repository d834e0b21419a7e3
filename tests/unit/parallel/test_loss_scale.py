"""GradScaler's rule: halve on overflow, double after enough clean steps."""

from __future__ import annotations

from hetero_fw.parallel import DynamicLossScale


def test_halves_on_overflow_and_never_below_one() -> None:
    scale = DynamicLossScale(scale=4.0)
    seen = []
    for _ in range(4):
        scale.update(is_finite=False)
        seen.append(scale.scale)
    assert seen == [2.0, 1.0, 1.0, 1.0]


def test_doubles_after_enough_clean_steps_in_a_row() -> None:
    scale = DynamicLossScale(scale=8.0, growth_interval_steps=3)
    for is_finite in (True, True, False, True, True):
        scale.update(is_finite=is_finite)
    assert scale.scale == 4.0
    scale.update(is_finite=True)
    assert scale.scale == 8.0
    assert scale.clean_steps == 0


def test_state_continues_the_count() -> None:
    first = DynamicLossScale(scale=8.0, growth_interval_steps=3)
    first.update(is_finite=True)
    first.update(is_finite=True)
    second = DynamicLossScale(growth_interval_steps=3)
    second.load_state_dict(first.state_dict())
    second.update(is_finite=True)
    assert second.scale == 16.0


def test_off_is_the_identity_for_ever() -> None:
    scale = DynamicLossScale.off()
    scale.update(is_finite=False)
    scale.load_state_dict({"scale": 1024.0, "clean_steps": 5})
    assert scale.scale == 1.0
    assert not scale.is_dynamic
