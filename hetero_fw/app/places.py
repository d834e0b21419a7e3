"""Where a run keeps its checkpoints: which place its attempts save to, which root is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from omegaconf import DictConfig

from hetero_fw.app.storage_settings import StoredRun, storage_location, storage_options
from hetero_fw.checkpoint import (
    AttemptDirectories,
    DirectoryPlace,
    ObjectPlace,
    Place,
    StoragePath,
    is_object_store,
    leave_attempt,
    num_attempts,
    open_root,
    published_paths,
)
from hetero_fw.errors import CheckpointError, ConfigError
from hetero_fw.monitoring import RunDirectory

LOOK_TIMEOUT_S = 60.0

T = TypeVar("T")


def checkpoint_root(cfg: DictConfig, run_dir: RunDirectory) -> StoragePath:
    """The directory that holds the run's checkpoints, for reading.

    Raises:
        ConfigError: its client is not installed or cannot be set up.
    """
    if cfg.ckpt.get("storage") is None:
        return run_dir.checkpoints_path
    return storage_root(cfg, run_dir.name)


def storage_root(cfg: DictConfig, run_name: str) -> StoragePath:
    """The same for a run of which only the name is known, where `ckpt.storage` is set.

    Raises:
        ConfigError: its client is not installed or cannot be set up.
    """
    location = storage_location(cfg, run_name)
    assert location is not None
    return open_root(location, storage_options(cfg))


def build_place(cfg: DictConfig, run_dir: RunDirectory, attempt: int) -> Place:
    """Where `attempt` saves; plain data that works in any process. Begins nothing yet.

    Raises:
        ConfigError: its client is not installed or cannot be set up.
    """
    root = checkpoint_root(cfg, run_dir)
    if not is_object_store(root):
        return DirectoryPlace(
            directories=AttemptDirectories(root=root, attempt=attempt),
            attempts=run_dir.attempts_path,
        )
    location = storage_location(cfg, run_dir.name)
    assert location is not None
    return ObjectPlace(url=location, attempt=attempt, options=storage_options(cfg))


def leave_place(cfg: DictConfig, run_dir: RunDirectory, attempt: int) -> None:
    """End the last attempt of a run that is done; all saves have ended. Never raises."""
    root = checkpoint_root(cfg, run_dir)
    if not is_object_store(root):
        # Attempts of the same checkpoints that this directory does not know were of another one,
        # under another paths.root; its command may still run.
        others = set(range(attempt)).difference(run_dir.attempt_numbers())
        leave_attempt(
            AttemptDirectories(root=root, attempt=attempt),
            leaves_trace=cfg.ckpt.storage is not None and bool(others),
        )


def look_at(root: StoragePath, prefix: str, timeout_s: float = LOOK_TIMEOUT_S) -> StoredRun:
    """What is at `root`, within `timeout_s`.

    Raises:
        ConfigError: the storage refuses or does not answer.
    """

    def look() -> StoredRun:
        names = [path.name for path in published_paths(root, prefix)]
        return StoredRun(checkpoints=tuple(reversed(names)), num_attempts=num_attempts(root))

    try:
        return within(timeout_s, look)
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"ckpt.storage: cannot look for checkpoints: {error}. Nothing was started."
        ) from error


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """The result of `work`; a client or a file system may hang without end.

    Raises:
        TimeoutError: it did not end in `timeout_s`; it goes on in a thread that nobody waits for.
        Exception: what `work` raises.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name="storage-look", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return results[0]
