"""What a run prints while it trains: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol, TextIO

from hetero_fw.monitoring.quantities import format_bytes, format_duration, format_rate
from hetero_fw.monitoring.step_record import StepRecord

_WINDOW_STEPS = 50
_REFRESH_INTERVAL_S = 0.2


class Progress(StrEnum):
    """How progress is shown. `AUTO`: a bar on a terminal, lines otherwise."""

    AUTO = "auto"
    BAR = "bar"
    LINES = "lines"
    NONE = "none"


class _Display(Protocol):
    def update(self, record: StepRecord, pace: _Pace) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class StepPrinter:
    """Prints steps and messages of one process (rank 0). Starts no thread.

    Args:
        mode: a bar is drawn only where `stream` is a terminal, whatever the mode.
        max_steps: the last step of the run.
        line_interval_steps: plain lines come at the first and last step and at its multiples.
        stream: standard output by default.
    """

    def __init__(
        self,
        mode: Progress | str,
        max_steps: int,
        line_interval_steps: int = 10,
        stream: TextIO | None = None,
    ) -> None:
        stream = stream if stream is not None else sys.stdout
        self._pace = _Pace(max_steps)
        self._display = _choose_display(Progress(mode), max_steps, line_interval_steps, stream)

    def update(self, record: StepRecord) -> None:
        """Show a completed step."""
        self._pace.add(record)
        self._display.update(record, self._pace)

    def message(self, text: str) -> None:
        """Print lines above the bar, in every mode."""
        self._display.message(text)

    def banner(self, plan_text: str, emulation: Mapping[str, Any] | None = None) -> None:
        """Print the plan, under a banner if devices are emulated; see `format_banner`."""
        self.message(format_banner(plan_text, emulation))

    def close(self) -> None:
        """Leave the terminal as it was. Harmless when called twice."""
        self._display.close()


def format_banner(plan_text: str, emulation: Mapping[str, Any] | None = None) -> str:
    """The plan as text, with a banner before it if devices are emulated.

    Args:
        plan_text: the plan as a table.
        emulation: the `emulation` part of a plan as a dict, None on real devices.
    """
    if emulation is None:
        return plan_text.rstrip("\n")
    dilation = emulation.get("dilation")
    lines = [
        "EMULATED: the devices of this plan are not present. CPU processes stand in for",
        "them, paced to their relative speeds. Losses are real, times are not the devices' own.",
    ]
    if dilation is not None:
        lines.append(
            f"One second on the declared devices takes {format_rate(float(dilation))} s here."
        )
    width = max(map(len, lines))
    rule = "=" * (width + 4)
    box = [rule, *(f"| {line:<{width}} |" for line in lines), rule]
    return "\n".join([*box, plan_text.rstrip("\n")])


class _Pace:
    """Speed over the last steps, and from it the time that is left."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW_STEPS)
        self._last_step = 0

    def add(self, record: StepRecord) -> None:
        self._recent.append((record.num_samples, record.step_time_s))
        self._last_step = record.step

    @property
    def samples_per_s(self) -> float:
        seconds = sum(step_time_s for _, step_time_s in self._recent)
        return sum(num_samples for num_samples, _ in self._recent) / seconds if seconds else 0.0

    @property
    def left_s(self) -> float:
        seconds = sum(step_time_s for _, step_time_s in self._recent)
        return (self.max_steps - self._last_step) * seconds / max(1, len(self._recent))


def _describe(record: StepRecord, pace: _Pace) -> str:
    parts = [f"loss {record.loss:.4f}"]
    if record.grad_norm is not None:
        parts.append(f"grad norm {record.grad_norm:.3g}")
    parts.append(f"lr {record.lr:.2e}")
    if record.loss_scale is not None:
        parts.append(f"loss scale {record.loss_scale:g}")
    parts.append(f"{format_rate(pace.samples_per_s)} samples/s")
    parts.append(f"memory {format_bytes(record.memory_bytes)}")
    parts.append(f"left {format_duration(pace.left_s)}")
    return "  ".join(parts)


class _Lines:
    """Plain lines, each flushed when it is complete."""

    def __init__(self, max_steps: int, interval_steps: int, stream: TextIO) -> None:
        self._max_steps = max_steps
        self._interval_steps = max(1, interval_steps)
        self._stream = stream
        self._is_first = True

    def update(self, record: StepRecord, pace: _Pace) -> None:
        is_due = record.step % self._interval_steps == 0 or record.step >= self._max_steps
        if is_due or self._is_first:
            width = len(str(self._max_steps))
            step = f"step {record.step:>{width}}/{self._max_steps}"
            self.message(f"{step}  {_describe(record, pace)}")
        self._is_first = False

    def message(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        return


class _Silent(_Lines):
    """Messages only."""

    def update(self, record: StepRecord, pace: _Pace) -> None:
        return


class _Bar:
    """A rich progress bar, drawn by `update` itself at most a few times a second."""

    def __init__(self, max_steps: int, stream: TextIO) -> None:
        # rich costs 0.1 s to import, which a run without a terminal need not pay.
        from rich import progress
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, markup=False)
        self._progress = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[facts]}"),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=max_steps, facts="")
        self._max_steps = max_steps
        self._refreshed_s = float("-inf")

    def update(self, record: StepRecord, pace: _Pace) -> None:
        self._progress.update(self._task, completed=record.step, facts=_describe(record, pace))
        now_s = time.monotonic()
        if now_s - self._refreshed_s < _REFRESH_INTERVAL_S and record.step < self._max_steps:
            return
        self._refreshed_s = now_s
        if not self._progress.live.is_started:
            self._progress.start()
            # A killed process could not bring a hidden cursor back.
            self._console.show_cursor(True)
        self._progress.refresh()

    def message(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def _choose_display(
    mode: Progress, max_steps: int, line_interval_steps: int, stream: TextIO
) -> _Display:
    if mode is Progress.NONE:
        return _Silent(max_steps, line_interval_steps, stream)
    if mode is not Progress.LINES and stream.isatty():
        return _Bar(max_steps, stream)
    return _Lines(max_steps, line_interval_steps, stream)
