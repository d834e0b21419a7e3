from __future__ import annotations

import pytest

from hetero_fw.errors import ConfigError
from hetero_fw.hardware import Precision, device
from hetero_fw.planning import choose_precision


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a100-80gb", "h100-80gb"], Precision.BF16_MIXED),
        (["a100-80gb", "v100-32gb"], Precision.FP16_MIXED),
        (["tpu-v4", "v100-32gb"], Precision.FP32),
        (["tpu-v4", "a100-80gb"], Precision.BF16_MIXED),
        (["cpu"], Precision.FP32),
        (["cpu", "a100-80gb"], Precision.BF16_MIXED),
        (["cpu", "t4"], Precision.FP32),
    ],
)
def test_auto_takes_what_all_devices_compute(names: list[str], expected: Precision) -> None:
    precision, reason = choose_precision([device(name) for name in names])
    assert precision is expected
    assert str(expected) in reason


def test_the_reason_names_who_lacks_what() -> None:
    reason = choose_precision([device("a100-80gb"), device("v100-32gb")]).reason
    assert "v100-32gb without native bf16" in reason


def test_an_explicit_precision_is_checked() -> None:
    devices = [device("a100-80gb"), device("v100-32gb")]
    assert choose_precision(devices, "16-mixed").precision is Precision.FP16_MIXED
    with pytest.raises(
        ConfigError,
        match=r"parallel\.precision=bf16-mixed: v100-32gb .* auto, 32-true, 16-mixed\.",
    ):
        choose_precision(devices, "bf16-mixed")
    with pytest.raises(ConfigError, match=r"cpu cannot compute fp16"):
        choose_precision([device("cpu")], "16-mixed")
    assert choose_precision([device("cpu")], "bf16-mixed").precision is Precision.BF16_MIXED
