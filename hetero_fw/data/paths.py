"""Text files by path, directory or glob, in a fixed order. Needs no torch."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hetero_fw.errors import ConfigError

# Not part of what a reader would call the library's source text.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_DIRECTORY_SKIPPED = frozenset({"__pycache__"})


def check_paths(paths: str | Sequence[str] | None, *, min_bytes: int = 1) -> tuple[Path, ...]:
    """The text files that `paths` names, sorted; the same on every rank that sees the same files.

    Args:
        paths: a file, a directory (all files below it but hidden ones), a glob (`**` crosses
            directories) or a list of them, relative to the current directory; None for the source
            text of the Python standard library.
        min_bytes: bytes that the files must have together.

    Raises:
        ConfigError: an entry matches nothing or cannot be read, or the text is too short; names
            every such entry.
    """
    files = _stdlib_files() if paths is None else _user_files(paths)
    ConfigError.collect(
        f"data.paths: no permission to read {path}; allow it or name other files."
        for path in files
        if not os.access(path, os.R_OK)
    )
    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes < min_bytes:
        raise ConfigError(
            f"data.paths={_shown(paths)}: the text has {num_bytes} bytes, {min_bytes} or more are "
            "needed. Name more text or lower data.sequence_length."
        )
    return files


def _user_files(paths: str | Sequence[str]) -> tuple[Path, ...]:
    entries = [paths] if isinstance(paths, str) else list(paths)
    if not entries:
        raise ConfigError(
            "data.paths=[]: the list is empty. Name files, directories or globs; null stands for "
            "the source text of the Python standard library."
        )
    matches = {entry: _matches(entry) for entry in entries}
    ConfigError.collect(
        f"data.paths: '{entry}' matches no file (looked in {Path.cwd()}). Name a file, a directory "
        "or a glob such as 'corpus/**/*.txt'."
        for entry, files in matches.items()
        if not files
    )
    return tuple(sorted({file for files in matches.values() for file in files}))


def _matches(entry: str) -> list[Path]:
    path = Path(entry).expanduser().absolute()
    # A name that exists is taken literally, even where it looks like a glob.
    found = [path]
    if not path.exists():
        # Path.glob takes no absolute pattern.
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207
    files = [file for file in found if file.is_file()]
    # The files below directories that `**` also matches are matched themselves.
    directories = [path for path in found if path.is_dir()] if "**" not in entry else []
    return files + [
        file for directory in directories for file in _walk(directory, "", _DIRECTORY_SKIPPED)
    ]


def _stdlib_files() -> tuple[Path, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(sorted(_walk(root, ".py", _STDLIB_SKIPPED)))
    if not files:
        raise ConfigError(
            f"data.paths=null: this Python has no source text of its standard library in {root}. "
            "Name your own files in data.paths."
        )
    return files


def _walk(root: Path, suffix: str, skipped: frozenset[str]) -> list[Path]:
    """Regular files below `root` that end in `suffix`, without hidden and skipped directories."""
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name for name in subdirectories if name not in skipped and not name.startswith(".")
        ]
        files += [
            path
            for name in names
            if name.endswith(suffix)
            and not name.startswith(".")
            and (path := Path(directory, name)).is_file()
        ]
    return files


def _shown(paths: str | Sequence[str] | None) -> str:
    if paths is None:
        return "null"
    return paths if isinstance(paths, str) else f"[{', '.join(paths)}]"
