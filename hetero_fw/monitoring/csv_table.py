"""A CSV file of numbers that several attempts of one run append to, in the order of steps."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_fw.monitoring.atomic_file import write_text_atomically

Cell = float | int | None


class CsvTable:
    """Append-only rows whose first column is the step.

    Args:
        path: the file; created with its header if missing.
        columns: names of the columns, `step` first. Columns that the file has already stay, before
            new ones; rows that lack a column leave it empty.
        resume_step: rows of later steps are dropped, and so is a line that a killed writer left
            torn. None keeps all whole rows.
        lost_path: where dropped rows go, None for nowhere. Where the run goes on from a step after
            all whose rows were dropped, they come back from there.

    One process writes a table at a time. A row is one write, so it is in the file whole, or torn
    at the very end when the writer is killed.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        *,
        resume_step: int | None,
        lost_path: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self._descriptor = -1
        self._last_step = 0
        header = self._drop_after(resume_step, lost_path)
        self.columns = header
        if not set(columns) <= set(header):
            self._add_columns(columns)
        self._open()
        if lost_path is not None and self._last_step < (resume_step or 0):
            self._take_back(range(self._last_step + 1, (resume_step or 0) + 1), lost_path)

    def append(self, row: Mapping[str, Cell]) -> None:
        """Write one row at once. Columns that the row lacks stay empty; new ones are added."""
        if not row.keys() <= self._names:
            self._add_columns(list(row))
            self._open()
        cells = ["" if (cell := row.get(name)) is None else f"{cell}" for name in self.columns]
        os.write(self._descriptor, (",".join(cells) + "\n").encode())

    def extend(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Write rows of another table in one write; columns that are not here are left out."""
        os.write(self._descriptor, _rows_text(self.columns, rows).encode())

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self.close()
        self._names = set(self.columns)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _drop_after(self, resume_step: int | None, lost_path: Path | None) -> tuple[str, ...]:
        """Cut the file behind the last row to keep; returns its header."""
        data = self.path.read_bytes() if self.path.exists() else b""
        header_end = data.find(b"\n") + 1
        if header_end == 0:
            return ()
        header = tuple(next(csv.reader([data[: header_end - 1].decode()])))
        whole_end = data.rfind(b"\n") + 1
        kept_end = whole_end
        if resume_step is not None:
            kept_end = _end_of_step(data, header_end, whole_end, resume_step)
        self._last_step = _last_step(data[header_end:kept_end])
        if lost_path is not None and kept_end < whole_end:
            lost = csv.DictReader(io.StringIO(data[kept_end:whole_end].decode()), header)
            table = CsvTable(lost_path, header, resume_step=None)
            table.extend(list(lost))
            table.close()
        if kept_end < len(data):
            # One call, so a reader or a kill finds either the old end or the new one.
            os.truncate(self.path, kept_end)
        return header

    def _take_back(self, steps: range, lost_path: Path) -> None:
        """Of each step the row that was dropped last."""
        header, rows = read_table(lost_path)
        places = {int(row["step"]): place for place, row in enumerate(rows)}
        back = {step: places[step] for step in steps if step in places}
        if not back:
            return
        self.extend([rows[place] for place in back.values()])
        taken = set(back.values())
        left = [row for place, row in enumerate(rows) if place not in taken]
        write_text_atomically(lost_path, _header_line(header) + _rows_text(header, left))

    def _add_columns(self, columns: Sequence[str]) -> None:
        rows = read_table(self.path)[1]
        self.columns = (*self.columns, *(name for name in columns if name not in self.columns))
        write_text_atomically(
            self.path, _header_line(self.columns) + _rows_text(self.columns, rows)
        )


def read_table(path: Path) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Header and whole rows as text; both empty if the file is missing or has no whole line."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return (), []
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))
    header = tuple(next(reader, ()))
    rows = [dict(zip(header, cells, strict=True)) for cells in reader if len(cells) == len(header)]
    return header, [row for row in rows if row.get("step", "").isdecimal()]


def _end_of_step(data: bytes, header_end: int, whole_end: int, resume_step: int) -> int:
    """Position behind the last row of a step up to `resume_step`.

    Looks from the end: a restart must not take longer the longer the run is.
    """
    end = whole_end
    while end > header_end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        step = data[start:end].split(b",", 1)[0]
        if step.isdigit() and int(step) <= resume_step:
            break
        end = start
    return end


def _last_step(rows: bytes) -> int:
    """Step of the last of whole rows; 0 if there is none."""
    step = rows[rows.rfind(b"\n", 0, len(rows) - 1) + 1 :].split(b",", 1)[0]
    return int(step) if step.isdigit() else 0


def _header_line(columns: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(columns)
    return out.getvalue()


def _rows_text(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    return "".join(",".join(row.get(name, "") for name in columns) + "\n" for row in rows)
