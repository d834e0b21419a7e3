"""What a continued run says about a configuration that is not the one it was started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_fw.app.changes import tell_changes


def test_changes_of_the_configuration_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    tell_changes(path, "seed: 1\n", has_trained=True)
    assert capsys.readouterr().out == ""
    path.write_text("seed: 1\nckpt:\n  policy: fixed\n")
    tell_changes(path, "seed: 2\nckpt:\n  policy: fixed\n", has_trained=False)
    assert capsys.readouterr().out.splitlines() == [
        "configuration changed, was: seed: 1",
        "configuration changed, now: seed: 2",
    ]
    path.write_bytes(b"\xff\xfe")
    tell_changes(path, "seed: 2\n", has_trained=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("seed: 2\ndata:\n  global_batch_size: 8\n", "seed"),
        ("seed: 1\ndata:\n  global_batch_size: 9\n", "data.global_batch_size"),
        ("seed: 2\ndata:\n  train: {}\n", "seed and data.global_batch_size and data.train"),
        ("seed: 1\ndata:\n  global_batch_size: 8\n  val_batch_size: 2\n", ""),
    ],
)
def test_what_the_order_of_samples_depends_on_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, keys: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\ndata:\n  global_batch_size: 8\n")
    tell_changes(path, text, has_trained=True)
    told = [line for line in capsys.readouterr().out.splitlines() if "epoch under way" in line]
    assert told == [
        f"{keys} changed, on which the order of the samples depends: those of the epoch under way "
        "may come twice or not at all"
    ] * bool(keys)
    tell_changes(path, text, has_trained=False)
    assert "epoch" not in capsys.readouterr().out
