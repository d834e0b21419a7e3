"""The run directory: where each file of a run lies, and how the directory comes to be."""

from __future__ import annotations

import errno
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from hetero_fw.errors import ConfigError
from hetero_fw.monitoring.runlock import RunLock

_MAX_NAME_BYTES = 200
_REMEDY = (
    "Set paths.root to a directory that this user can write to, for example paths.root=/tmp/runs."
)


@dataclass(frozen=True)
class RunDirectory:
    """Names of everything a run writes. Creates nothing by itself.

    Attributes:
        path: the directory, shared by all attempts of the run.
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def lost_metrics_path(self) -> Path:
        """Rows of steps that were computed and then lost by going back to a checkpoint."""
        return self.path / "metrics_lost.csv"

    @property
    def validation_path(self) -> Path:
        return self.path / "validation.csv"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def plan_text_path(self) -> Path:
        return self.path / "plan.txt"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hydra_path(self) -> Path:
        return self.path / ".hydra"

    @property
    def lock_path(self) -> Path:
        return self.path / ".lock"

    @property
    def attempts_path(self) -> Path:
        return self.path / "attempts"

    def attempt_path(self, attempt: int) -> Path:
        return self.attempts_path / str(attempt)

    def attempt_plan_path(self, attempt: int) -> Path:
        return self.attempt_path(attempt) / "plan.json"

    def attempt_numbers(self) -> list[int]:
        """Attempts that have left a directory, in order; empty before the first."""
        return attempt_numbers(self.attempts_path)

    def lock(self) -> RunLock:
        """Keep other supervisors out of this directory.

        Raises:
            ConfigError: another process holds it.
        """
        return RunLock(self.lock_path)


def create_run_directory(root: str | Path, run_name: str | None) -> RunDirectory:
    """Create or reopen `root/run_name` and prove that it can be written.

    Args:
        root: `paths.root`; created with its parents if missing.
        run_name: None: a new directory named by time stamp and a random tail. A name: created, or
            reused with what is in it.

    Raises:
        ConfigError: the name is no plain directory name, or the directory cannot be created or
            written; names the key, the path and the operating system's reason.
    """
    root = Path(root).expanduser().absolute()
    if run_name is not None:
        _check_name(run_name)
    _make_root(root)
    path, is_new = _make_run_path(root, run_name)
    try:
        _prove_writable(path)
    except OSError as error:
        if is_new:
            _remove_if_empty(path)
        raise _unwritable(path, error) from error
    return RunDirectory(path)


def _check_name(run_name: str) -> None:
    separators = {os.sep, os.altsep, "\0"} - {None}
    has_separator = any(separator in run_name for separator in separators if separator)
    is_reserved = not run_name.strip() or run_name in {".", ".."}
    if has_separator or is_reserved or len(run_name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(
            f"run_name={run_name!r} is not the name of a directory. Give one name without '/', of "
            f"at most {_MAX_NAME_BYTES} bytes; paths.root says where it is created."
        )


def _make_root(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(root, error) from error


def _make_run_path(root: Path, run_name: str | None) -> tuple[Path, bool]:
    """The directory and whether this call made it."""
    is_named = run_name is not None
    while True:
        path = root / (run_name if run_name is not None else _fresh_name())
        try:
            path.mkdir()
            return path, True
        except FileExistsError as error:
            if is_named and path.is_dir():
                return path, False
            if is_named:
                raise _unwritable(path, error) from error
        except OSError as error:
            raise _unwritable(path, error) from error


def _fresh_name() -> str:
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"


def _prove_writable(path: Path) -> None:
    """Do once what the run will do. Permission bits prove nothing: root ignores them."""
    written = path / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    renamed = written.with_suffix(".renamed")
    try:
        with written.open("xb") as file:
            file.write(b"probe\n")
            file.flush()
            os.fsync(file.fileno())
        written.replace(renamed)
        renamed.unlink()
    except OSError:
        for leftover in (written, renamed):
            _remove_quietly(leftover)
        raise


def _remove_quietly(path: Path) -> None:
    # Only cleans up after a failure that is about to be reported; a second one adds nothing.
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return


def _unwritable(path: Path, error: OSError) -> ConfigError:
    in_the_way = {
        errno.EEXIST: "a file of that name is in the way",
        errno.ENOTDIR: "a file is in the way",
    }
    reason = in_the_way.get(error.errno or 0) or error.strerror or str(error)
    return ConfigError(
        f"paths.root: the output directory {path} cannot be written: {reason}. {_REMEDY}"
    )


def attempt_numbers(attempts: Path) -> list[int]:
    """As `RunDirectory.attempt_numbers`, of a directory with an entry for each attempt."""
    if not attempts.is_dir():
        return []
    return sorted(int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit())
