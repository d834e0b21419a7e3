"""The directories in which the files of one checkpoint lie, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetero_fw.checkpoint.object_store import ObjectStore
from hetero_fw.checkpoint.retrying import retry_storage
from hetero_fw.checkpoint.storage import StorageError, StoragePath, is_object_store
from hetero_fw.checkpoint.storage_error import kind_of
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetryRule, StorageErrorKind

T = TypeVar("T")

# How long one request is tried again that a storage does not answer properly. All the ranks wait
# for one that tries, in a collective that gives up by itself after a few times this.
PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A directory of a checkpoint, as one rank knows it.

    Attributes:
        tier: name of the tier, for people.
        node: whose directory it is; None where all ranks see the same files, so that rank 0 can
            look for all of them.
        distance: of the tier; smaller is nearer.
        patience_s: how long to try again what the storage does not answer properly; 0 where other
            sources stand in for one that is lost.
    """

    tier: str
    directory: StoragePath
    node: str | None
    distance: tuple[int, int]
    patience_s: float

    @property
    def is_shared(self) -> bool:
        return self.node is None


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A directory that did not serve, and why; the reason names the file.

    Attributes:
        step: None if the directory is not that of a step.
    """

    step: int | None
    path: str
    reason: str


class DamagedCheckpointError(CheckpointError):
    """Bytes of a checkpoint are nowhere as they were written. Tensors may be filled in part.

    Args:
        rejections: the directories that did not serve.
        bytes_read: bytes that all ranks together read in vain.
        read_s: time that it took.
    """

    def __init__(
        self, rejections: Sequence[Rejection], *, bytes_read: int = 0, read_s: float = 0.0
    ) -> None:
        super().__init__("; ".join(dict.fromkeys(item.reason for item in rejections)))
        self.bytes_read = bytes_read
        self.read_s = read_s


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One rank's source, as the other ranks need to know it.

    Attributes:
        files: names of those that are there with their size.
        problems: what is wrong with others, by name; those that are just not there count where
            the source is shared, because then it should hold all of them.
        silence: why the storage did not say what it holds, which means nothing for the files; ""
            if it did.
    """

    tier: str
    directory: str
    node: str | None
    distance: tuple[int, int]
    files: frozenset[str]
    problems: Mapping[str, str]
    silence: str = ""


def look_at(source: Source, sizes: Mapping[str, int]) -> SourceFacts:
    """Which of the files are there with their size; none is read."""
    problems: dict[str, str] = {}
    silence = ""
    try:
        found = _sizes_in(source, sizes, problems)
    except Exception as error:  # noqa: BLE001  # stores raise what they like
        found, silence = {}, unreadable(source.directory, error)
    for name, size in found.items():
        if size != sizes[name]:
            problems[name] = (
                f"{source.directory / name}: has {size} bytes, {sizes[name]} were written"
            )
    return SourceFacts(
        tier=source.tier,
        directory=str(source.directory),
        node=source.node,
        distance=source.distance,
        files=frozenset(name for name in found if name not in problems),
        problems=problems,
        silence=silence,
    )


def _sizes_in(source: Source, names: Collection[str], problems: dict[str, str]) -> dict[str, int]:
    """The size of each file that is there; raises only where that is not known."""
    directory = source.directory
    sizes: dict[str, int] = {}
    if is_object_store(directory):  # one request, however many files there are
        stored = patiently(directory, ObjectStore(directory).list, source.patience_s)
        sizes = {name: stored[name].size for name in names if name in stored}
        problems |= {n: f"{directory / n}: is missing" for n in names if n not in sizes}
        return sizes
    for name in names:
        path = directory / name
        try:
            sizes[name] = patiently(path, path.stat, source.patience_s).st_size
        except Exception as error:
            if source.is_shared and may_be_intact(path, error):
                raise
            if source.is_shared or not isinstance(error, FileNotFoundError):
                problems[name] = unreadable(path, error)
    return sizes


def patiently(
    path: StoragePath, work: Callable[[], T], patience_s: float, rule: RetryRule | None = None
) -> T:
    """The result of `work` at `path`, done again while the storage does not answer properly.

    Raises:
        CheckpointError: it went on like that for `patience_s`, or the storage denies access; names
            the storage. A StorageError where `work` raised one.
        Exception: what `work` raises for another reason.
    """
    failures: list[Exception] = []

    def tried() -> T:
        try:
            return work()
        except Exception as error:
            failures.append(error)
            raise

    try:
        return retry_storage(tried, time_left_s=patience_s, rule=rule)
    except CheckpointError as error:
        if may_be_intact(path, error):
            last = failures[-1]
            if isinstance(last, StorageError) and last is not error:
                raise StorageError(str(error), is_transient=last.is_transient) from error
            raise
    raise failures[-1]


def may_be_intact(path: StoragePath, error: BaseException) -> bool:
    """Whether an error tells about the storage, and nothing about what it holds at `path`.

    A directory of the operating system denies a file, a remote storage whoever asks.
    """
    kinds = {StorageErrorKind.TRANSIENT}
    if is_object_store(path):
        kinds.add(StorageErrorKind.DENIED)
    return kind_of(error) in kinds


def unreadable(path: StoragePath, error: BaseException) -> str:
    """That a file cannot be read, and why."""
    reason = error.strerror if isinstance(error, OSError) else None
    text = reason or str(error) or repr(error)
    return text if str(path) in text else f"{path}: cannot be read ({text})"
