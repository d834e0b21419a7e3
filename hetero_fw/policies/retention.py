"""Which checkpoints may be deleted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetero_fw.errors import ConfigError

# The newest checkpoint can turn out to be unreadable; the one before it must then be there.
MIN_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """Steps to delete, oldest first, and why these."""

    delete_steps: tuple[int, ...]
    reason: str


def decide_retention(
    committed_steps: Collection[int], *, verified_steps: Collection[int], keep_latest_k: int
) -> RetentionDecision:
    """Delete what is older than the newest `keep_latest_k`, as far as that is safe.

    Never deleted: the two newest verified checkpoints, and anything that no verified checkpoint
    is newer than.

    Args:
        committed_steps: steps of all published checkpoints.
        verified_steps: those of them whose bytes were checked against their manifest.
        keep_latest_k: at least 2.

    Raises:
        ConfigError: `keep_latest_k` is below 2.
    """
    if keep_latest_k < MIN_KEPT:
        raise ConfigError(
            f"ckpt.keep_latest_k={keep_latest_k} must be at least {MIN_KEPT}: "
            "the newest checkpoint can turn out to be unreadable."
        )
    newest_first = sorted(set(committed_steps), reverse=True)
    verified = sorted(set(verified_steps) & set(newest_first), reverse=True)
    if len(verified) == 0:
        return RetentionDecision(delete_steps=(), reason="nothing is verified, so nothing goes")
    protected = set(newest_first[:keep_latest_k]) | set(verified[:MIN_KEPT])
    delete = tuple(
        step for step in reversed(newest_first) if step < verified[0] and step not in protected
    )
    kept = [step for step in newest_first if step not in delete]
    return RetentionDecision(
        delete_steps=delete,
        reason=f"keep_latest_k={keep_latest_k}, steps {verified[:MIN_KEPT]} verified: keep {kept}",
    )
