from __future__ import annotations

import io

import pytest

from hetero_fw.monitoring import Progress, StepPrinter, StepRecord, format_banner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, *, loss_scale: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5,
        grad_norm=0.75,
        lr=1e-3,
        num_samples=100,
        num_targets=100,
        step_time_s=0.5,
        memory_bytes=3 * 2**29,
        loss_scale=loss_scale,
    )


def printed(mode: Progress | str, steps: range, stream: io.StringIO) -> str:
    printer = StepPrinter(mode, 25, 10, stream)
    for step in steps:
        printer.update(record(step))
    printer.close()
    printer.close()
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["auto", "bar", "lines"])
def test_lines_where_there_is_no_terminal(mode: str) -> None:
    text = printed(mode, range(1, 26), io.StringIO())
    lines = text.splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == (
        "step 10/25  loss 2.5000  grad norm 0.75  lr 1.00e-03  200 samples/s  memory 1.50 GiB"
        "  left 7.5 s"
    )
    assert "\x1b" not in text


def test_the_first_step_after_a_restart_has_a_line() -> None:
    lines = printed("lines", range(14, 17), io.StringIO()).splitlines()
    assert [line.split()[1] for line in lines] == ["14/25"]


def test_lines_on_a_terminal_when_asked_for() -> None:
    assert "\x1b" not in printed("lines", range(1, 3), Terminal())


def test_none_prints_messages_only() -> None:
    stream = io.StringIO()
    printer = StepPrinter("none", 25, 10, stream)
    printer.update(record(1))
    printer.message("resumed from step 3")
    printer.close()
    assert stream.getvalue() == "resumed from step 3\n"


def test_a_terminal_gets_a_bar_and_keeps_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    printer = StepPrinter("auto", 25, 10, stream)
    printer.update(record(1))
    shown = stream.getvalue()
    assert "1/25" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    printer.message("[bold] is not markup")
    printer.update(record(25))
    printer.close()
    assert "25/25" in stream.getvalue()
    assert "[bold] is not markup" in stream.getvalue()
    assert "loss 2.5000" in stream.getvalue()


def test_a_loss_scale_is_shown() -> None:
    stream = io.StringIO()
    printer = StepPrinter("lines", 5, 1, stream)
    printer.update(record(1, loss_scale=65536.0))
    assert "loss scale 65536" in stream.getvalue()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="fancy"):
        StepPrinter("fancy", 1)


def test_the_banner_says_emulated() -> None:
    assert format_banner("the plan\n") == "the plan"
    text = format_banner("the plan\n", {"dilation": 2500.0})
    assert "EMULATED" in text
    assert "2,500 s here" in text
    assert text.endswith("\nthe plan")
    stream = io.StringIO()
    StepPrinter("none", 1, 1, stream).banner("the plan", {"dilation": 2500.0})
    assert stream.getvalue() == text + "\n"
