"""What an error of storage means: full, read-only, denied, gone, or gone by itself in a moment.

Disks, network file systems and object-store clients say the same thing in many ways, often wrapped
in an error that says something else. No client library is imported here: their errors are known by
what they carry (an errno, a response, a status) and by the name of their type.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero_fw.monitoring import format_bytes
from hetero_fw.policies import PERMANENT_STORAGE_ERRORS, StorageErrorKind

Kind = StorageErrorKind

_ERRNOS = {
    Kind.FULL: "ENOSPC EDQUOT EFBIG",
    Kind.READ_ONLY: "EROFS",
    Kind.DENIED: "EACCES EPERM EKEYEXPIRED EKEYREJECTED ENOKEY",
    Kind.MISSING: "ENOENT ENOTDIR ENODEV ENXIO",
    Kind.EXISTS: "EEXIST ENOTEMPTY EISDIR",
    Kind.TRANSIENT: (
        "ESTALE ETIMEDOUT ETIME EAGAIN EBUSY EINTR EPIPE ENOBUFS ENOLCK ECOMM EPROTO "
        "ECONNRESET ECONNREFUSED ECONNABORTED ENOTCONN ESHUTDOWN ENETUNREACH ENETDOWN ENETRESET "
        "EHOSTUNREACH EHOSTDOWN EADDRNOTAVAIL"
    ),
}
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and MinIO's and Ceph's own.
_CODES = {
    Kind.FULL: (
        "QuotaExceeded InsufficientStorage InsufficientStorageSpace InsufficientCapacity "
        "StorageFull XMinioStorageFull XMinioAdminBucketQuotaExceeded EntityTooLarge"
    ),
    Kind.READ_ONLY: "MethodNotAllowed ReadOnly InvalidBucketState XMinioReadOnly",
    Kind.DENIED: (
        "AccessDenied AccountProblem AllAccessDisabled AuthorizationHeaderMalformed ExpiredToken "
        "Forbidden InvalidAccessKeyId InvalidObjectState InvalidSecurity InvalidToken NotSignedUp "
        "RequestTimeTooSkewed SignatureDoesNotMatch Unauthorized UnauthorizedAccess"
    ),
    Kind.MISSING: "NoSuchBucket NoSuchKey NoSuchVersion NotFound",
    Kind.EXISTS: "PreconditionFailed ObjectAlreadyExists BucketAlreadyExists",
    # Digests that do not match tell of bytes damaged on the way; an upload that is gone, of a
    # server that was restarted.
    Kind.TRANSIENT: (
        "BadDigest ConditionalRequestConflict IncompleteBody InternalError InternalFailure "
        "NoSuchUpload OperationAborted RequestTimeout RequestTimeoutException ServiceUnavailable "
        "SlowDown Throttling ThrottlingException TooManyRequests TooManyRequestsException "
        "TransientError XAmzContentSHA256Mismatch XMinioServerNotInitialized"
    ),
}
_STATUSES = {
    Kind.FULL: (413, 507),
    Kind.READ_ONLY: (405,),
    Kind.DENIED: (401, 403),
    Kind.MISSING: (404, 410),
    Kind.EXISTS: (412,),
    Kind.TRANSIENT: (408, 409, 425, 429, 500, 502, 503, 504, 509, 529),
}
_TEXTS = {
    Kind.FULL: (
        "no space left on device|quota exceeded|file too large|disk is full|storage (is )?full|"
        "out of (disk )?space|insufficient (storage|space)|not enough (free |disk )?space"
    ),
    Kind.READ_ONLY: "read-only file system|in safe mode",
    Kind.DENIED: (
        "permission denied|operation not permitted|access denied|no credentials|^forbidden: "
    ),
    Kind.MISSING: "no such file or directory|no such bucket",
    Kind.EXISTS: "file exists|directory not empty",
    Kind.TRANSIENT: (
        "stale (nfs )?file handle|timed? ?out|connection (reset|refused|closed|"
        "aborted|lost)|temporarily unavailable|try again|slow ?down|service unavailable|"
        "broken pipe|transport endpoint is not connected|unreachable"
    ),
}
# All that torch.save says when a write fell short; nearly always the disk is full.
_TORCH_SHORT_WRITE = re.compile(r"unexpected pos \d+ vs \d+|file write failed", re.IGNORECASE)
_CODE_IN_TEXT = re.compile(r"An error occurred \((\w+)\)")  # botocore's wording
_DENIED_TYPES = re.compile(
    r"NoCredentials|PartialCredentials|DefaultCredentials|TokenRetrieval|RefreshError|UnauthorizedSSO"
)
_TRANSIENT_TYPES = re.compile(
    r"Timeout|Connect|Disconnected|IncompleteRead|ResponseStreaming|Payload|HTTPClientError|"
    r"gaierror|ProtocolError|Retryable|TransportError|ChecksumError"
)

_KIND_OF_ERRNO = {
    getattr(errno, name): kind
    for kind, names in _ERRNOS.items()
    for name in names.split()
    if hasattr(errno, name)
}
_KIND_OF_CODE = {code.lower(): kind for kind, codes in _CODES.items() for code in codes.split()}
_KIND_OF_STATUS = {status: kind for kind, values in _STATUSES.items() for status in values}
_KIND_OF_TEXT = tuple((re.compile(text, re.IGNORECASE), kind) for kind, text in _TEXTS.items())

PLACE_IS_GONE = "the place of the checkpoints is gone"

_STORAGE_IS_FULL = "the storage is full"
# A limit on one file or object, which is of the same kind.
_TOO_LARGE = re.compile("too ?large", re.IGNORECASE)

_MEANING = {
    Kind.FULL: _STORAGE_IS_FULL,
    Kind.READ_ONLY: "the storage is read-only",
    Kind.DENIED: "the storage denies access",
    Kind.MISSING: PLACE_IS_GONE,
    Kind.EXISTS: "somebody else has written this already",
    Kind.TRANSIENT: "the storage does not answer properly",
    Kind.UNKNOWN: "writing failed",
}


@dataclass(frozen=True, kw_only=True)
class StorageFailure:
    """What an error means, and a text for people that keeps the words of the storage."""

    kind: StorageErrorKind
    text: str

    @property
    def is_permanent(self) -> bool:
        """Whether trying again at once is hopeless."""
        return self.kind in PERMANENT_STORAGE_ERRORS


def classify(
    error: BaseException,
    *,
    needed_bytes: int | None = None,
    free_bytes: int | None = None,
    where: str | None = None,
) -> StorageFailure:
    """What `error`, or the error that it hides, says about the storage.

    Args:
        needed_bytes: what was to be written, if known; `free_bytes` what `where` can still hold.
    """
    kind = kind_of(error)
    meaning = _MEANING[kind]
    if kind is Kind.FULL:
        meaning = _fullness(needed_bytes, free_bytes, f" in {where}" if where else "")
    return StorageFailure(kind=kind, text=f"{meaning}: {_words_of(error)}")


def lacks_room(text: str) -> bool:
    """Whether deleting something helps against a failure of this text, as `classify` writes it."""
    return _STORAGE_IS_FULL in text and not _TOO_LARGE.search(text)


def _fullness(needed_bytes: int | None, free_bytes: int | None, where: str) -> str:
    needed = f"{format_bytes(needed_bytes)} are needed" if needed_bytes is not None else ""
    free = f"{format_bytes(free_bytes)} are free{where}" if free_bytes is not None else ""
    if needed_bytes is not None and free_bytes is not None and free_bytes >= needed_bytes:
        why = "a quota, a lack of inodes, or room that was made only since"
        # "storage is full": as text alone, from another rank, it means the same.
        return f"the storage is full by its own account, though {free} and {needed} ({why})"
    return ", ".join(filter(None, [_MEANING[Kind.FULL], needed, free]))


def kind_of(error: BaseException) -> StorageErrorKind:
    """The kind of `error`; the errors it was raised from count for more, being closer to it.

    Errors that were being handled when it came up say something only if it says nothing itself.
    """
    seen: list[BaseException] = []
    pending = [error]
    while pending:
        causes = [cause for cause in _causes(pending.pop(0)) if cause not in seen]
        seen += causes
        kinds = (_own_kind(cause) for cause in reversed(causes))
        kind = next((kind for kind in kinds if kind is not Kind.UNKNOWN), None)
        if kind is not None:
            return kind
        pending += [cause.__context__ for cause in causes if cause.__context__ is not None]
    is_short_write = any(_TORCH_SHORT_WRITE.search(str(one)) for one in seen)
    return Kind.FULL if is_short_write else Kind.UNKNOWN


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on; of a group its first member."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            current = current.exceptions[0]
        else:
            current = current.__cause__


def _own_kind(error: BaseException) -> StorageErrorKind:
    """What this error alone says: by its response, its errno, its type, its words."""
    found = _kind_of_response(error) or _kind_of_os_error(error) or _kind_of_type(error)
    if found is not None:
        return found
    text = str(error)
    number = re.search(r"\[Errno (\d+)\]", text)
    if number is not None and int(number[1]) in _KIND_OF_ERRNO:
        return _KIND_OF_ERRNO[int(number[1])]
    return next((kind for word, kind in _KIND_OF_TEXT if word.search(text)), _declared_kind(error))


def _declared_kind(error: BaseException) -> StorageErrorKind:
    """By what an error says of itself, where its maker has judged it."""
    if getattr(error, "is_absent", False) is True:
        return Kind.MISSING
    return Kind.TRANSIENT if getattr(error, "is_transient", False) is True else Kind.UNKNOWN


def _kind_of_response(error: BaseException) -> StorageErrorKind | None:
    """By botocore's `response`, or by the HTTP status that other clients put on their errors."""
    response: Any = getattr(error, "response", None)
    status: Any = None
    told = _CODE_IN_TEXT.search(str(error))
    code = told[1] if told is not None else ""
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", code))
    if code.lower() in _KIND_OF_CODE:
        return _KIND_OF_CODE[code.lower()]
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", code)
    else:
        holders = (error, response)
        names = ("status", "status_code", "code")
        status = next((getattr(h, n) for h in holders for n in names if hasattr(h, n)), None)
    return _KIND_OF_STATUS.get(int(status)) if str(status).isdigit() else None


def _kind_of_os_error(error: BaseException) -> StorageErrorKind | None:
    if not isinstance(error, OSError):
        return None
    if error.errno in _KIND_OF_ERRNO:
        return _KIND_OF_ERRNO[error.errno]
    by_type = (
        (PermissionError, Kind.DENIED),
        (FileNotFoundError, Kind.MISSING),
        (FileExistsError, Kind.EXISTS),
        (TimeoutError, Kind.TRANSIENT),
        (ConnectionError, Kind.TRANSIENT),
    )
    return next((kind for family, kind in by_type if isinstance(error, family)), None)


def _kind_of_type(error: BaseException) -> StorageErrorKind | None:
    for family in type(error).__mro__:
        if _DENIED_TYPES.search(family.__name__):
            return Kind.DENIED
        if _TRANSIENT_TYPES.search(family.__name__):
            return Kind.TRANSIENT
    return None


def _words_of(error: BaseException) -> str:
    """The error's own words, with those of the innermost cause if they add something."""
    causes = list(_causes(error))
    outer, inner = (str(cause) or repr(cause) for cause in (causes[0], causes[-1]))
    return outer if inner in outer else f"{outer} ({inner})"
