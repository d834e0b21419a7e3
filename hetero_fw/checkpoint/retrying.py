"""Do something with storage again and again until it works, is hopeless, or takes too long."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from hetero_fw.checkpoint.storage import StorageError
from hetero_fw.checkpoint.storage_error import classify
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetryObservation, RetryRule, decide_retry

T = TypeVar("T")

logger = logging.getLogger(__name__)


def retry_storage(
    operation: Callable[[], T],
    *,
    time_left_s: float,
    rule: RetryRule | None = None,
    needed_bytes: int | None = None,
    free_bytes: Callable[[], int | None] = lambda: None,
    where: str | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Call `operation` until it returns, with pauses between the calls.

    Every call must start from nothing: after a failed fsync the kernel forgets which pages were
    not written, so that only a new file can be trusted.

    Args:
        time_left_s: until it must have returned; bounds the pauses, not a call that hangs.
        needed_bytes: what it writes, for the message about a full storage; `free_bytes` says what
            `where` can still hold then.
        pause: waits for some seconds.

    Raises:
        CheckpointError: what the last call met and why there was no other, raised from its error;
            or what the operation says of itself.
    """
    rule = rule or RetryRule()
    began_s = time.monotonic()
    num_tries = 0
    while True:
        num_tries += 1
        try:
            return operation()
        except Exception as error:  # whatever a client raises is classified
            if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
                raise  # it says what is wrong with the save, not with the storage
            found = classify(
                error, needed_bytes=needed_bytes, free_bytes=_known(free_bytes), where=where
            )
            decision = decide_retry(
                rule,
                RetryObservation(
                    num_tries=num_tries,
                    elapsed_s=time.monotonic() - began_s,
                    deadline_s=time_left_s,
                    kind=found.kind,
                    jitter=random.random(),
                ),
            )
            if not decision.retry:
                tries = "" if found.is_permanent else f" ({decision.reason})"
                raise CheckpointError(f"{found.text}{tries}") from error
            logger.warning("%s; %s", found.text, decision.reason)
        pause(decision.pause_s)


def _known(free_bytes: Callable[[], int | None]) -> int | None:
    try:
        return free_bytes()
    except Exception:  # noqa: BLE001  # a storage that failed may fail here as well
        return None
