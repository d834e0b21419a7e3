"""Try again where the storage only hiccups, and say in words what it refuses for good."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from hetero_fw.checkpoint.storage import StorageError
from hetero_fw.checkpoint.storage_error import classify
from hetero_fw.errors import CheckpointError
from hetero_fw.policies import RetryObservation, RetryRule, decide_retry

T = TypeVar("T")

_RULE = RetryRule()


def retried(
    work: Callable[[], T],
    *,
    time_left_s: float,
    needed_bytes: int | None = None,
    free_bytes: Callable[[], int | None] = lambda: None,
) -> T:
    """The result of `work`, which is done again after errors that may pass.

    Args:
        work: may be done any number of times.
        time_left_s: when to stop trying; the caller has a deadline of its own for work that hangs.
        needed_bytes: what is to be written, for the message; `free_bytes` asks what there is.

    Raises:
        CheckpointError: what the storage says, in words, or what `work` says of itself.
    """
    began_s = time.monotonic()
    num_tries = 0
    while True:
        try:
            return work()
        except (OSError, CheckpointError) as error:
            if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
                raise  # it has judged already
            num_tries += 1
            failure = classify(error, needed_bytes=needed_bytes, free_bytes=free_bytes())
            decision = decide_retry(
                _RULE,
                RetryObservation(
                    num_tries=num_tries,
                    elapsed_s=time.monotonic() - began_s,
                    deadline_s=time_left_s,
                    kind=failure.kind,
                    jitter=random.random(),  # ranks that failed together part ways
                ),
            )
            if not decision.retry:
                tries = f" (tried {num_tries} times)" if num_tries > 1 else ""
                raise CheckpointError(f"{failure.text}{tries}") from error
            time.sleep(decision.pause_s)
